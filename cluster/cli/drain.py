"""``tramontane drain``."""

import logging
import time
from typing import Annotated

import typer

from tramontane.cluster.console.display import Display
from tramontane.cluster.console.options import flag, option
from tramontane.proto.errors import ConfigError, PipelineError

DRAIN_S = 600.0


def drain(
    address: Annotated[str, option("--address", help="The Ray cluster that serves: host:port, or auto for this machine's.")],
    timeout: Annotated[float, option("--drain-timeout", help="Seconds to wait for what runs. Default 600.")] = DRAIN_S,
    undo: Annotated[bool, flag("--undo", help="Have it take new requests again.")] = False,
) -> None:
    """Have the application on a running cluster finish what it has begun, and take nothing new."""
    if not 0 <= timeout < float("inf"):
        raise ConfigError(f"--drain-timeout is {timeout}; it must be a number of seconds, 0 or more")
    from ray import serve  # which other commands do not need

    from tramontane.cluster.pipeline.ray_cluster import join_ray_cluster
    from tramontane.cluster.serving import draining
    from tramontane.cluster.serving.app import APPLICATION

    logging.getLogger("ray.serve").setLevel(logging.WARNING)  # the command reports itself
    display = Display(live=False)
    try:
        with join_ray_cluster(address, compare_gpus=False, required=True):
            if APPLICATION not in serve.status().applications:
                raise ConfigError(f"no application named {APPLICATION} is on this cluster, so there is nothing to drain")
            if undo:
                draining.resume()
            num_left = 0 if undo else draining.drain(timeout, display.report, _sleep)
    finally:
        display.stop()
    if num_left:
        those = "1 request still runs" if num_left == 1 else f"{num_left} requests still run"
        raise PipelineError(f"{those} after {timeout:g} s; nothing new is taken")
    typer.echo("new requests are taken again" if undo else "drained: nothing runs, and nothing new is taken")


def _sleep(seconds: float) -> bool:
    time.sleep(seconds)
    return False
