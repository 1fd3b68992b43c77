"""Deprecated alias of ``tramontane.cluster.serving.app`` for configurations of version 0.1.0; removed in 0.3.0."""

import warnings

from tramontane.cluster.serving.app import build as build

warnings.warn(f"{__name__} is removed in 0.3.0; use tramontane.cluster.serving.app", DeprecationWarning, stacklevel=2)
