"""Deprecated alias of ``tramontane.cluster.serving.autoscaling`` for configurations of version 0.1.0; removed in 0.3.0."""

import warnings

from tramontane.cluster.serving.autoscaling import POLICY, PipelineAutoscalingPolicy

WantedPipelines = PipelineAutoscalingPolicy

warnings.warn(f"{__name__} is removed in 0.3.0; use {POLICY}", DeprecationWarning, stacklevel=2)
