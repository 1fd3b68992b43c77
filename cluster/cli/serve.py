"""``tramontane serve`` and ``tramontane drain``: start a server, and let a deployed one finish its
requests.
"""

import logging
import signal
import time
from typing import Annotated

import typer
from ray import serve as ray_serve

from tramontane.cluster.config.engine_keys import BatchingKeys, ExpertKeys, PipelineKeys
from tramontane.cluster.config.serving_keys import JobKeys, LoggingKeys, ScalingKeys, ServingKeys
from tramontane.cluster.console.display import Display
from tramontane.cluster.console.options import (
    flag,
    flags_of,
    key_option,
    load_config,
    option,
    with_options,
)
from tramontane.cluster.pipeline import ray_cluster
from tramontane.cluster.serving import draining
from tramontane.cluster.serving.app import APPLICATION
from tramontane.cluster.serving.server import run_server
from tramontane.proto.errors import ConfigError, PipelineError
from tramontane.proto.timing import DRAIN_S


@with_options(
    *flags_of(
        PipelineKeys, ExpertKeys, BatchingKeys, ServingKeys, ScalingKeys, JobKeys, LoggingKeys
    )
)
def serve(
    context: typer.Context,
    json: Annotated[
        bool | None, flag("--json", help="Print the line that reports readiness as JSON.")
    ] = None,
    # refused, and --no-local overrides a file
    local: Annotated[bool | None, key_option("local", hidden=True)] = None,
) -> None:
    """Serve an OpenAI-compatible HTTP API, and gRPC, until interrupted."""
    display = Display(live=False)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    try:
        with load_config(context) as settings:
            run_server(
                settings,
                display.report,
                display.loading,
                lambda served: _print_ready(display, served.to_line()),
            )
    finally:
        display.stop()


def _print_ready(display: Display, line: str) -> None:
    display.stop()
    print(line, flush=True)


def drain(
    address: Annotated[
        str,
        option(
            "--address", help="The Ray cluster that serves: host:port, or auto for this machine's."
        ),
    ],
    timeout: Annotated[
        float, option("--drain-timeout", help="Seconds to wait for running requests.")
    ] = DRAIN_S,
    undo: Annotated[bool, flag("--undo", help="Accept new requests again.")] = False,
) -> None:
    """Let the application on a running cluster finish its requests and refuse new ones."""
    if not 0 <= timeout < float("inf"):
        raise ConfigError(
            f"--drain-timeout is {timeout}; it must be a number of seconds, 0 or more"
        )
    logging.getLogger("ray.serve").setLevel(logging.WARNING)  # the command reports itself
    display = Display(live=False)
    try:
        with ray_cluster.join_ray_cluster(address, compare_gpus=False, required=True):
            if APPLICATION not in ray_serve.status().applications:
                raise ConfigError(
                    f"no application named {APPLICATION} is on this cluster, so there is nothing to"
                    " drain"
                )
            if undo:
                draining.resume()
            num_left = 0 if undo else draining.drain(timeout, display.report, _sleep)
    finally:
        display.stop()
    if num_left:
        running = "1 request still runs" if num_left == 1 else f"{num_left} requests still run"
        raise PipelineError(f"{running} after {timeout:g} s; new requests are refused")
    typer.echo(
        "new requests are accepted again"
        if undo
        else "drained: no request is running, and new ones are refused"
    )


def _sleep(seconds: float) -> bool:
    time.sleep(seconds)
    return False
