"""Deprecated alias of ``tramontane.cluster.serve_patches.proxy`` for configurations of version 0.1.0; removed in 0.3.0."""

import warnings

from tramontane.cluster.serve_patches.proxy import proxy_middlewares as proxy_middlewares

warnings.warn(f"{__name__} is removed in 0.3.0; use tramontane.cluster.serve_patches.proxy", DeprecationWarning, stacklevel=2)
