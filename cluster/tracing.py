"""Deprecated alias of ``tramontane.cluster.observability.tracing`` for configurations of version 0.1.0; removed in 0.3.0."""

import warnings

from tramontane.cluster.observability.tracing import otlp as otlp

warnings.warn(f"{__name__} is removed in 0.3.0; use tramontane.cluster.observability.tracing", DeprecationWarning, stacklevel=2)
