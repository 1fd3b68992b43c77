"""The ``tramontane`` command."""

import asyncio
import io
import os
import signal
import sys
from importlib.metadata import version
from typing import Annotated

import typer

from tramontane.cluster.cli.batch import batch
from tramontane.cluster.cli.bench import bench
from tramontane.cluster.cli.chat import chat
from tramontane.cluster.cli.cluster_yaml import cluster_yaml
from tramontane.cluster.cli.config import config
from tramontane.cluster.cli.drain import drain
from tramontane.cluster.cli.experts import experts
from tramontane.cluster.cli.k8s import k8s
from tramontane.cluster.cli.make_random import make_random
from tramontane.cluster.cli.plan import plan
from tramontane.cluster.cli.simulate import simulate
from tramontane.cluster.cli.top import top
from tramontane.cluster.cli.trace import trace
from tramontane.cluster.common.signals import INTERRUPTED, cancel_on_signal
from tramontane.cluster.console.display import Display
from tramontane.cluster.console.options import (
    BATCHING,
    PIPELINE,
    RUN_OPTIONS,
    SERVING,
    Temperature,
    TopK,
    TopP,
    flag,
    load_config,
    option,
    with_options,
)
from tramontane.cluster.console.prompts import read_prompts
from tramontane.cluster.console.run_summary import as_json, render_summary, truncation_note
from tramontane.cluster.console.secrets import hide_secrets_in_title
from tramontane.proto.errors import TramontaneError, UserError
from tramontane.proto.request import SamplingParams

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.callback(invoke_without_command=True)
def tramontane(
    context: typer.Context,
    show_version: Annotated[bool, flag("--version", help="Print the version and exit.", is_eager=True)] = False,
) -> None:
    """Serve Mistral-family models as a pipeline of Ray actors."""
    if show_version:
        typer.echo(version("tramontane"))
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command()
@with_options(PIPELINE, BATCHING, RUN_OPTIONS)
def generate(
    context: typer.Context,
    prompts: Annotated[
        list[str] | None,
        typer.Argument(
            help="Prompts. Without any, each line of standard input is one, blank lines aside; with any, it is not read."
        ),
    ] = None,
    max_tokens: Annotated[int, option("--max-tokens", help="New tokens per prompt.")] = 128,
    temperature: Temperature = 0.8,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    show_experts: Annotated[
        int | None, option("--show-experts", help="Colour each token by the heaviest of its experts in this layer.")
    ] = None,
) -> None:
    """Continue prompts, all of them at once, and print how busy the stages were."""
    from tramontane.cluster.cli.generate import generate as run_generate  # brings Ray, which other commands do not need

    with load_config(context) as settings:
        sampling = SamplingParams(max_tokens, temperature, top_p, top_k, seed=settings.seed)
        display = Display(live=sys.stdout.isatty(), silent=settings.json_output)
        try:
            run = run_generate(settings, read_prompts(prompts), sampling, display, show_experts)
            outcome = asyncio.run(cancel_on_signal(run))
        finally:
            display.stop()
    if (note := truncation_note(outcome, max_tokens)) is not None:
        display.note(note)
    if settings.json_output:
        print(as_json(outcome))
    else:
        display.stderr.print(render_summary(outcome))


@app.command()
@with_options(PIPELINE, BATCHING, SERVING)
def serve(
    context: typer.Context,
    json: Annotated[bool | None, flag("--json", help="The line that says it is ready as JSON.")] = None,
) -> None:
    """Serve an OpenAI-compatible HTTP API, and gRPC, until interrupted."""
    from tramontane.cluster.serving.server import run_server  # brings Ray Serve, which generate does not need

    display = Display(live=False)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    try:
        with load_config(context) as settings:
            run_server(settings, display.report, display.loading, lambda served: _print_ready(display, served.to_line()))
    finally:
        display.stop()


app.command()(chat)
app.command()(bench)
app.command()(config)
app.command()(drain)
app.add_typer(batch)
app.command()(plan)
app.command()(k8s)
app.command()(cluster_yaml)
app.command()(experts)
app.command()(top)
app.command()(trace)
app.command()(make_random)
app.command()(simulate)


def _print_ready(display: Display, line: str) -> None:
    display.stop()
    print(line, flush=True)


def main() -> None:
    """Entry point: a user's mistake is one line and exit code 2, a failed pipeline one line and exit code 1."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that lacks a character must not end the run
    hide_secrets_in_title(sys.argv)
    try:
        code = app(standalone_mode=False)
    except typer.TyperException as error:
        code = _print_error(error.format_message().replace("Value error, ", ""), 2)  # pydantic's, in typer
    except TramontaneError as error:
        code = _print_error(str(error), 2 if isinstance(error, UserError) else 1)
    except (typer.Abort, KeyboardInterrupt, asyncio.CancelledError):
        code = INTERRUPTED
    except BrokenPipeError:  # whoever read our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    if code == INTERRUPTED:  # typer's answer to Ctrl-C
        _print_error("interrupted", code)
    sys.exit(code or 0)


def _print_error(message: str, code: int) -> int:
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    return code
