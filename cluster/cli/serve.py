"""``tramontane serve`` and ``tramontane drain``: start a server, and let a deployed one finish its
requests.
"""

import logging
import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from ray import serve as ray_serve

from tramontane.cluster.config.api_keys import take_environment_keys
from tramontane.cluster.config.engine_config import EngineConfig
from tramontane.cluster.config.engine_keys import BatchingKeys, ExpertKeys, PipelineKeys
from tramontane.cluster.config.serving_keys import JobKeys, LoggingKeys, ScalingKeys, ServingKeys
from tramontane.cluster.config.vllm_flags import FLAGS, OFF, ON, VllmFlag, note_on
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

# variables with which an image says what suits a container, and the keys whose defaults they are
VARIABLES = {"TRAMONTANE_HOST": "host", "TRAMONTANE_DRAIN_TIMEOUT": "drain_timeout"}


def _vllm_option(flag: VllmFlag) -> Any:
    """Return the annotation of a flag of vLLM, which ``--help`` does not show."""
    if flag.is_switch:
        both = f"{flag.name}/--no-{flag.name.removeprefix('--')}"
        return Annotated[bool | None, typer.Option(both, hidden=True, metavar="")]
    names = filter(None, (flag.name, flag.short))
    return Annotated[str | None, typer.Option(*names, hidden=True)]


@with_options(
    *flags_of(
        PipelineKeys, ExpertKeys, BatchingKeys, ServingKeys, ScalingKeys, JobKeys, LoggingKeys
    ),
    others={flag.parameter: _vllm_option(flag) for flag in FLAGS if not flag.key},
)
def serve(
    context: typer.Context,
    folder: Annotated[
        Path | None, typer.Argument(metavar="MODEL", help="Checkpoint folder, as --model.")
    ] = None,
    json: Annotated[
        bool | None, flag("--json", help="Print the line that reports readiness as JSON.")
    ] = None,
    # refused, and --no-local overrides a file
    local: Annotated[bool | None, key_option("local", hidden=True)] = None,
) -> None:
    """Serve an OpenAI-compatible HTTP API, and gRPC, until interrupted."""
    _take_model(context, folder)
    _take_vllm_flags(context)
    display = Display(live=False)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    try:
        with load_config(context, _defaults_of_environment(os.environ)) as settings:
            run_server(
                _with_keys_of_environment(settings),
                display.report,
                display.loading,
                lambda served: _print_ready(display, served.to_line()),
            )
    finally:
        display.stop()


def _take_model(context: typer.Context, folder: Path | None) -> None:
    """Make the argument the option ``--model``. Raises ConfigError if both are given and differ."""
    if folder is None:
        return
    option_value = context.params["model"]
    if option_value is not None and Path(option_value) != folder:
        raise ConfigError(f"MODEL is {folder} and --model is {option_value}; give one of them")
    context.params["model"] = folder


def _take_vllm_flags(context: typer.Context) -> None:
    """Print a line about each flag of vLLM without effect. Raises ConfigError for others that are
    given, before any line.
    """
    notes: list[str] = []
    for of_vllm in FLAGS:
        value = context.params.get(of_vllm.parameter)
        if value is None or (of_vllm.key and not of_vllm.accepts(str(value))):
            continue
        text = str(value)
        if of_vllm.is_switch:
            text = ON if value else OFF
        notes.append(note_on(of_vllm, text))
        context.params[of_vllm.parameter] = None  # as if it were not given
    for note in notes:
        print(f"note: {note}", file=sys.stderr)


def _defaults_of_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    """Return the keys whose defaults the environment sets. Raises ConfigError for a wrong value."""
    values: dict[str, Any] = {}
    for variable, key in VARIABLES.items():
        if variable in environ:
            try:
                given = EngineConfig.build(None, {key: environ[variable]})
            except ConfigError as error:
                flag_name = f"--{key.replace('_', '-')}"
                raise ConfigError(str(error).replace(flag_name, variable)) from None
            values[key] = getattr(given, key)
    return values


def _with_keys_of_environment(settings: EngineConfig) -> EngineConfig:
    """Return the configuration with the keys of the environment where it has none. They are removed
    from the environment, which the processes of a local Ray inherit.
    """
    keys = take_environment_keys(os.environ)
    if settings.api_key or settings.api_key_file is not None:
        return settings
    return settings.model_copy(update={"api_key": keys})


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
