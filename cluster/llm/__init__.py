"""Offline generation: ``from tramontane.llm import LLM, SamplingParams, EngineConfig``."""

from tramontane.cluster.config.engine_config import EngineConfig
from tramontane.cluster.llm.inputs import SamplingParams
from tramontane.cluster.llm.offline import LLM, CompletionOutput, GenerationOutput
from tramontane.proto.request import FinishReason
from tramontane.router.openai.logprobs import TokenLogprobs as TokenLogprob

__all__ = [
    "LLM",
    "CompletionOutput",
    "EngineConfig",
    "FinishReason",
    "GenerationOutput",
    "SamplingParams",
    "TokenLogprob",
]
