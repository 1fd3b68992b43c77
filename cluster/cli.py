"""The ``tramontane`` command."""

import asyncio
import io
import os
import signal
import sys
from collections.abc import Coroutine
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer

from tramontane.cluster.config import EngineConfig
from tramontane.cluster.display import Display, as_json, summary
from tramontane.cluster.generate import Outcome
from tramontane.cluster.generate import generate as run_generate
from tramontane.proto.errors import RequestError, TramontaneError, UserError
from tramontane.proto.request import SamplingParams

INTERRUPTED = 130

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.callback(invoke_without_command=True)
def tramontane(
    context: typer.Context,
    show_version: Annotated[bool, typer.Option("--version", help="Print the version and exit.", is_eager=True)] = False,
) -> None:
    """Serve Mistral-family models as a pipeline of Ray actors."""
    if show_version:
        typer.echo(version("tramontane"))
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())


def _option(*names: str, help: str) -> Any:  # noqa: ANN401
    return typer.Option(*names, help=help)


@app.command()
def generate(
    prompts: Annotated[list[str] | None, typer.Argument(help="Prompts; without any, lines of standard input.")] = None,
    max_tokens: Annotated[int, _option("--max-tokens", help="New tokens per prompt.")] = 128,
    temperature: Annotated[float, _option("--temperature", help="0 is greedy.")] = 0.8,
    top_p: Annotated[float, _option("--top-p", help="Keep the likeliest tokens up to this much probability.")] = 1.0,
    top_k: Annotated[int, _option("--top-k", help="Keep this many likeliest tokens; 0 keeps all.")] = 0,
    model: Annotated[Path | None, _option("--model", help="Checkpoint folder. Default: the built-in demo model.")] = None,
    stages: Annotated[int | None, _option("--stages", help="Pipeline depth. Default: one per GPU, or 2.")] = None,
    local: Annotated[bool | None, _option("--local", help="Stages as plain objects in this process, no Ray.")] = None,
    address: Annotated[str | None, _option("--address", help="Join a running Ray cluster: auto or host:port.")] = None,
    dtype: Annotated[str | None, _option("--dtype", help="auto, bfloat16, float16 or float32.")] = None,
    max_model_len: Annotated[int | None, _option("--max-model-len", help="Positions per sequence.")] = None,
    max_num_seqs: Annotated[int | None, _option("--max-num-seqs", help="Sequences admitted at once. Default 64.")] = None,
    max_num_batched_tokens: Annotated[
        int | None, _option("--max-num-batched-tokens", help="Tokens in one micro-batch. Default 512.")
    ] = None,
    page_size: Annotated[int | None, _option("--page-size", help="Positions per cache page. Default 16.")] = None,
    kv_cache_memory: Annotated[str | None, _option("--kv-cache-memory", help="Page pool per stage, such as 512MiB.")] = None,
    threads_per_stage: Annotated[
        int | None, _option("--threads-per-stage", help="CPU threads of a stage. Default: cores / stages.")
    ] = None,
    link: Annotated[str | None, _option("--link", help="How activations travel: object-store.")] = None,
    seed: Annotated[int | None, _option("--seed", help="Seed of sampling. Default 0.")] = None,
    config: Annotated[Path | None, _option("--config", help="YAML file of these options.")] = None,
    json: Annotated[bool | None, _option("--json", help="Machine-readable output on standard output.")] = None,
) -> None:
    """Continue prompts, all of them at once, and print how busy the stages were."""
    flags = {
        name: value
        for name, value in locals().items()
        if name not in ("prompts", "max_tokens", "temperature", "top_p", "top_k", "config")
    }
    settings = EngineConfig.build(config, flags)
    sampling = SamplingParams(max_tokens, temperature, top_p, top_k, seed=settings.seed)
    display = Display(live=sys.stdout.isatty(), silent=settings.json_output)
    try:
        outcome = asyncio.run(_stoppable(run_generate(settings, prompts or _lines_of_stdin(), sampling, display)))
    finally:
        display.stop()
    if settings.json_output:
        print(as_json(outcome))
    else:
        display.stderr.print(summary(outcome))


async def _stoppable(work: Coroutine[Any, Any, Outcome]) -> Outcome:
    """SIGTERM and a closed terminal end the work as Ctrl-C does: everything is removed first."""
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    return await work


def _lines_of_stdin() -> list[str]:
    if sys.stdin is None or sys.stdin.isatty():
        return []
    try:
        return sys.stdin.buffer.read().decode("utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise RequestError(f"standard input is not valid UTF-8 (byte {error.start})") from None


def main() -> None:
    """Entry point: a user's mistake is one line and exit code 2, a failed pipeline one line and exit code 1."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that lacks a character must not end the run
    try:
        code = app(standalone_mode=False)
    except typer.TyperException as error:
        code = _complain(error.format_message(), 2)
    except TramontaneError as error:
        code = _complain(str(error), 2 if isinstance(error, UserError) else 1)
    except (typer.Abort, KeyboardInterrupt, asyncio.CancelledError):
        code = INTERRUPTED
    except BrokenPipeError:  # whoever read our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    if code == INTERRUPTED:  # typer's answer to Ctrl-C
        _complain("interrupted", code)
    sys.exit(code or 0)


def _complain(message: str, code: int) -> int:
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    return code
