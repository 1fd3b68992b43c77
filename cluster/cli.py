"""The ``tramontane`` command."""

import asyncio
import io
import os
import signal
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer

from tramontane.cluster.batch_command import batch
from tramontane.cluster.bench_command import bench
from tramontane.cluster.chat_command import chat
from tramontane.cluster.cluster_yaml_command import cluster_yaml
from tramontane.cluster.display import Display
from tramontane.cluster.drain_command import drain
from tramontane.cluster.entry import INTERRUPTED
from tramontane.cluster.experts_command import experts
from tramontane.cluster.hidden_keys import hide_keys
from tramontane.cluster.interrupts import stoppable
from tramontane.cluster.k8s_command import k8s
from tramontane.cluster.model_commands import make_random
from tramontane.cluster.options import (
    BATCHING,
    PIPELINE,
    RUN,
    Temperature,
    TopK,
    TopP,
    configured,
    flag,
    option,
    takes,
)
from tramontane.cluster.plan_command import plan
from tramontane.cluster.prompts import given_prompts
from tramontane.cluster.run_summary import as_json, cut_short, summary
from tramontane.cluster.simulate_command import simulate
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
@takes(PIPELINE, BATCHING, RUN)
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
    from tramontane.cluster.generate import generate as run_generate  # brings Ray, which other commands do not need

    with configured(context) as settings:
        sampling = SamplingParams(max_tokens, temperature, top_p, top_k, seed=settings.seed)
        display = Display(live=sys.stdout.isatty(), silent=settings.json_output)
        try:
            run = run_generate(settings, given_prompts(prompts), sampling, display, show_experts)
            outcome = asyncio.run(stoppable(run))
        finally:
            display.stop()
    if (note := cut_short(outcome, max_tokens)) is not None:
        display.note(note)
    if settings.json_output:
        print(as_json(outcome))
    else:
        display.stderr.print(summary(outcome))


@app.command()
@takes(PIPELINE, BATCHING)
def serve(
    context: typer.Context,
    served_model_name: Annotated[
        str | None, option("--served-model-name", help="What clients call the model. Default: the folder's name.")
    ] = None,
    host: Annotated[str | None, option("--host", help="Address to listen on. Default 127.0.0.1.")] = None,
    port: Annotated[int | None, option("--port", help="HTTP port. Default 8000.")] = None,
    grpc_port: Annotated[int | None, option("--grpc-port", help="gRPC port; 0 for none. Default 9000.")] = None,
    replicas: Annotated[int | None, option("--replicas", help="Pipelines behind the door. Default 1.")] = None,
    max_queued_requests: Annotated[
        int | None, option("--max-queued-requests", help="Sequences that may wait, per pipeline. Default 256.")
    ] = None,
    max_queued_tokens: Annotated[
        int | None, option("--max-queued-tokens", help="Prompt tokens that may wait, per pipeline. Default 131072.")
    ] = None,
    drain_timeout: Annotated[
        float | None, option("--drain-timeout", help="Seconds to finish what runs, once it is to stop. Default 30.")
    ] = None,
    slow_reader_timeout: Annotated[
        float | None, option("--slow-reader-timeout", help="Seconds for which a client may leave its stream unread. Default 60.")
    ] = None,
    move_experts: Annotated[
        bool | None, flag("--move-experts", help="Let clients have experts spread by another load, by POST /experts.")
    ] = None,
    api_key: Annotated[
        list[str] | None, option("--api-key", help="Clients must have this key, or another of those given.")
    ] = None,
    api_key_file: Annotated[
        Path | None, option("--api-key-file", help="Keys, one per line; read again whenever the file changes.")
    ] = None,
    jobs_database: Annotated[
        str | None, option("--jobs-database", help="Of batch jobs: sqlite:////FILE or postgresql://HOST/NAME.")
    ] = None,
    jobs_storage: Annotated[
        str | None, option("--jobs-storage", help="Of batch jobs' files: a folder or any URL of fsspec.")
    ] = None,
    jobs_concurrency: Annotated[
        int | None, option("--jobs-concurrency", help="Lines of batch jobs in progress at once. Default: a bit more than fit.")
    ] = None,
    jobs_retention: Annotated[
        int | None, option("--jobs-retention", help="Days for which ended jobs and files are kept; 0: for ever. Default 30.")
    ] = None,
    jobs_url_prefixes: Annotated[
        str | None,
        option("--jobs-url-prefixes", help="What batch jobs may be read from: file:///in,s3://bucket. Default: nothing."),
    ] = None,
    json: Annotated[bool | None, flag("--json", help="The line that says it is ready as JSON.")] = None,
) -> None:
    """Serve an OpenAI-compatible HTTP API, and gRPC, until interrupted."""
    from tramontane.cluster.serving import run_server  # brings Ray Serve, which generate does not need

    display = Display(live=False)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    try:
        with configured(context) as settings:
            run_server(settings, display.report, display.loading, lambda served: _announce(display, served.line()))
    finally:
        display.stop()


app.command()(chat)
app.command()(bench)
app.command()(drain)
app.add_typer(batch)
app.command()(plan)
app.command()(k8s)
app.command()(cluster_yaml)
app.command()(experts)
app.command()(make_random)
app.command()(simulate)


def _announce(display: Display, line: str) -> None:
    display.stop()
    print(line, flush=True)


def main() -> None:
    """Entry point: a user's mistake is one line and exit code 2, a failed pipeline one line and exit code 1."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that lacks a character must not end the run
    hide_keys(sys.argv)
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
