"""The ``tramontane`` command."""

import asyncio
import io
import os
import signal
import sys
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer

from tramontane.cluster.config import ConfigFile, EngineConfig
from tramontane.cluster.display import Display, as_json, cut_short, summary
from tramontane.cluster.entry import INTERRUPTED
from tramontane.cluster.generate import Outcome
from tramontane.cluster.generate import generate as run_generate
from tramontane.cluster.model_commands import make_random
from tramontane.cluster.plan_command import plan
from tramontane.cluster.prompts import given_prompts
from tramontane.proto.errors import TramontaneError, UserError
from tramontane.proto.request import SamplingParams

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


Model = Annotated[Path | None, _option("--model", help="Checkpoint folder. Default: the built-in demo model.")]
Stages = Annotated[int | None, _option("--stages", help="Pipeline depth. Default: one per GPU, or 2.")]
Address = Annotated[str | None, _option("--address", help="Join a running Ray cluster: auto or host:port.")]
Dtype = Annotated[str | None, _option("--dtype", help="auto, bfloat16, float16 or float32.")]
MaxModelLen = Annotated[int | None, _option("--max-model-len", help="Positions per sequence.")]
MaxNumSeqs = Annotated[int | None, _option("--max-num-seqs", help="Sequences admitted at once. Default 64.")]
MaxNumBatchedTokens = Annotated[int | None, _option("--max-num-batched-tokens", help="Tokens in one micro-batch. Default 512.")]
PageSize = Annotated[int | None, _option("--page-size", help="Positions per cache page. Default 16.")]
KvCacheMemory = Annotated[str | None, _option("--kv-cache-memory", help="Page pool per stage, such as 512MiB.")]
ThreadsPerStage = Annotated[int | None, _option("--threads-per-stage", help="CPU threads of a stage. Default: cores / stages.")]
Link = Annotated[str | None, _option("--link", help="How activations travel: object-store.")]
Config = Annotated[Path | None, _option("--config", help="YAML file of these options.")]
Json = Annotated[bool | None, _option("--json", help="Machine-readable output on standard output.")]


@app.command()
def generate(
    context: typer.Context,
    prompts: Annotated[
        list[str] | None,
        typer.Argument(
            help="Prompts. Without any, each line of standard input is one, blank lines aside; with any, it is not read."
        ),
    ] = None,
    max_tokens: Annotated[int, _option("--max-tokens", help="New tokens per prompt.")] = 128,
    temperature: Annotated[float, _option("--temperature", help="0 is greedy.")] = 0.8,
    top_p: Annotated[float, _option("--top-p", help="Keep the likeliest tokens up to this much probability.")] = 1.0,
    top_k: Annotated[int, _option("--top-k", help="Keep this many likeliest tokens; 0 keeps all.")] = 0,
    model: Model = None,
    stages: Stages = None,
    local: Annotated[bool | None, _option("--local", help="Stages as plain objects in this process, no Ray.")] = None,
    address: Address = None,
    dtype: Dtype = None,
    max_model_len: MaxModelLen = None,
    max_num_seqs: MaxNumSeqs = None,
    max_num_batched_tokens: MaxNumBatchedTokens = None,
    page_size: PageSize = None,
    kv_cache_memory: KvCacheMemory = None,
    threads_per_stage: ThreadsPerStage = None,
    link: Link = None,
    seed: Annotated[int | None, _option("--seed", help="Seed of sampling. Default 0.")] = None,
    config: Config = None,
    json: Json = None,
) -> None:
    """Continue prompts, all of them at once, and print how busy the stages were."""
    with _settings(context) as settings:
        sampling = SamplingParams(max_tokens, temperature, top_p, top_k, seed=settings.seed)
        display = Display(live=sys.stdout.isatty(), silent=settings.json_output)
        try:
            outcome = asyncio.run(_stoppable(run_generate(settings, given_prompts(prompts), sampling, display)))
        finally:
            display.stop()
    if (note := cut_short(outcome, max_tokens)) is not None:
        display.note(note)
    if settings.json_output:
        print(as_json(outcome))
    else:
        display.stderr.print(summary(outcome))


@app.command()
def serve(
    context: typer.Context,
    model: Model = None,
    served_model_name: Annotated[
        str | None, _option("--served-model-name", help="What clients call the model. Default: the folder's name.")
    ] = None,
    host: Annotated[str | None, _option("--host", help="Address to listen on. Default 127.0.0.1.")] = None,
    port: Annotated[int | None, _option("--port", help="HTTP port. Default 8000.")] = None,
    stages: Stages = None,
    replicas: Annotated[int | None, _option("--replicas", help="Pipelines behind the door. Default 1.")] = None,
    address: Address = None,
    dtype: Dtype = None,
    max_model_len: MaxModelLen = None,
    max_num_seqs: MaxNumSeqs = None,
    max_num_batched_tokens: MaxNumBatchedTokens = None,
    max_queued_requests: Annotated[
        int | None, _option("--max-queued-requests", help="Sequences that may wait, per pipeline. Default 256.")
    ] = None,
    max_queued_tokens: Annotated[
        int | None, _option("--max-queued-tokens", help="Prompt tokens that may wait, per pipeline. Default 131072.")
    ] = None,
    page_size: PageSize = None,
    kv_cache_memory: KvCacheMemory = None,
    threads_per_stage: ThreadsPerStage = None,
    link: Link = None,
    config: Config = None,
    json: Annotated[bool | None, _option("--json", help="The line that says it is ready as JSON.")] = None,
) -> None:
    """Serve an OpenAI-compatible HTTP API until interrupted."""
    from tramontane.cluster.serving import run_server  # brings Ray Serve, which generate does not need

    display = Display(live=False)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    try:
        with _settings(context) as settings:
            run_server(settings, display.report, lambda served: _announce(display, served.line()))
    finally:
        display.stop()


app.command()(plan)
app.command()(make_random)


def _announce(display: Display, line: str) -> None:
    display.stop()
    print(line, flush=True)


@contextmanager
def _settings(context: typer.Context) -> Iterator[EngineConfig]:
    """The flags that are keys of the configuration, over those of ``--config``; errors name each where it was given."""
    flags = {name: value for name, value in context.params.items() if name in EngineConfig.key_names()}
    path = context.params["config"]
    file = ConfigFile.read(path) if path else None
    try:
        yield EngineConfig.build(file, flags)
    except UserError as error:
        if file is None:
            raise
        raise type(error)(file.named_in(str(error), flags)) from error


async def _stoppable(work: Coroutine[Any, Any, Outcome]) -> Outcome:
    """Ctrl-C, SIGTERM and a closed terminal end the work; everything is removed first, also if one presses again."""
    task = asyncio.current_task()
    assert task is not None
    stopping = False

    def stop() -> None:
        nonlocal stopping
        if not stopping:
            stopping = True
            task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, stop)
    return await work


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
