"""Deprecated alias of ``tramontane.router.grpc.handlers`` for configurations of version 0.1.0; removed in 0.3.0."""

import warnings

from tramontane.router.grpc.handlers import add_batch_jobs as add_batch_jobs
from tramontane.router.grpc.handlers import add_inference as add_inference

warnings.warn(f"{__name__} is removed in 0.3.0; use tramontane.router.grpc.handlers", DeprecationWarning, stacklevel=2)
