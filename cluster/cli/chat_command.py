"""``tramontane chat``."""

import asyncio
import sys
from typing import Annotated, TextIO

import typer

from tramontane.cluster.console.display import Display
from tramontane.cluster.console.options import (
    PIPELINE,
    RUN,
    Temperature,
    TopK,
    TopP,
    configured,
    option,
    takes,
)
from tramontane.proto.request import SamplingParams


@takes(PIPELINE, RUN)
def chat(
    context: typer.Context,
    system: Annotated[str | None, option("--system", help="What the model is told before the conversation.")] = None,
    max_tokens: Annotated[int, option("--max-tokens", help="New tokens per answer.")] = 1024,
    temperature: Temperature = 0.7,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
) -> None:
    """Talk with a model: each line of standard input is what you say, in a terminal with history and editing."""
    from tramontane.cluster.cli.chat import Terminal, lines_of_stdin, run_chat

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
