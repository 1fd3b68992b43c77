"""``tramontane chat``."""

import asyncio
import sys
from typing import Annotated, TextIO

import typer

from tramontane.cluster.display import Display
from tramontane.cluster.options import (
    Address,
    Config,
    Dtype,
    GpuMemory,
    GpuSpeed,
    Json,
    KvCacheMemory,
    Link,
    LoadFormat,
    Local,
    MaxModelLen,
    Model,
    PageSize,
    Quantize,
    Seed,
    Stages,
    Temperature,
    ThreadsPerStage,
    TopK,
    TopP,
    configured,
    option,
)
from tramontane.proto.request import SamplingParams


def chat(
    context: typer.Context,
    system: Annotated[str | None, option("--system", help="What the model is told before the conversation.")] = None,
    max_tokens: Annotated[int, option("--max-tokens", help="New tokens per answer.")] = 1024,
    temperature: Temperature = 0.7,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    model: Model = None,
    load_format: LoadFormat = None,
    stages: Stages = None,
    local: Local = None,
    address: Address = None,
    dtype: Dtype = None,
    quantize: Quantize = None,
    max_model_len: MaxModelLen = None,
    page_size: PageSize = None,
    kv_cache_memory: KvCacheMemory = None,
    threads_per_stage: ThreadsPerStage = None,
    gpu_memory: GpuMemory = None,
    gpu_speed: GpuSpeed = None,
    link: Link = None,
    seed: Seed = None,
    config: Config = None,
    json: Json = None,
) -> None:
    """Talk with a model: each line of standard input is what you say, in a terminal with history and editing."""
    from tramontane.cluster.chat import Terminal, lines_of_stdin, run_chat

    with configured(context) as settings:
        sampling = SamplingParams(max_tokens, temperature, top_p, top_k, seed=settings.seed)
        display = Display(live=False)
        in_terminal = _is_terminal(sys.stdin) and _is_terminal(sys.stdout) and not settings.json_output
        said = Terminal() if in_terminal else lines_of_stdin()
        try:
            asyncio.run(run_chat(settings, system, sampling, said, display))
        finally:
            display.stop()


def _is_terminal(stream: TextIO | None) -> bool:
    """A closed one is None."""
    return stream is not None and stream.isatty()
