"""The Python client of the gRPC API: ``from tramontane.client import Client, AsyncClient``.

It needs gRPC and ``tramontane.proto`` only: neither torch nor Ray.
"""

from tramontane.proto.jobs import Job, JobOptions, JobState, ResultLine
from tramontane.router.client.client import AsyncClient, Client
from tramontane.router.client.messages import (
    Chunk,
    CompletionTokensDetails,
    ModelInfo,
    Prompt,
    PromptTokensDetails,
    RetryPolicy,
    Score,
    Timings,
    TokenLogprob,
    Usage,
)

__all__ = [
    "AsyncClient",
    "Chunk",
    "Client",
    "CompletionTokensDetails",
    "Job",
    "JobOptions",
    "JobState",
    "ModelInfo",
    "Prompt",
    "PromptTokensDetails",
    "ResultLine",
    "RetryPolicy",
    "Score",
    "Timings",
    "TokenLogprob",
    "Usage",
]
