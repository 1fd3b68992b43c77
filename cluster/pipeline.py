"""Ray around a pipeline: a cluster to run in, and the pipeline's coming and going."""

import logging
import os
import secrets
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from tramontane.cluster.hardware import Hardware, joined_cluster
from tramontane.cluster.ray_chain import RayStageChain, last_line
from tramontane.cluster.supervisor import PipelineSpec, create_supervisor
from tramontane.proto.errors import ConfigError, PipelineError, PlanError

PLACEMENT_TIMEOUT_S = 60.0
CONNECT_TIMEOUT_S = 5.0
OBJECT_STORE_BYTES = 512 * 2**20  # of a local Ray: a few micro-batches of hidden states


@contextmanager
def running_pipeline(spec: PipelineSpec, report: Callable[[str], None] = lambda _: None) -> Iterator[RayStageChain]:
    """Place and load the stages; remove them, their supervisor and the placement group at the end."""
    report(f"loading {len(spec.plan.stages)} stages")
    supervisor = create_supervisor(spec)
    try:
        yield RayStageChain(_start(supervisor, spec))
    finally:
        report("removing the stages")
        with suppress(RayError):
            ray.get(supervisor.stop.remote())
        ray.kill(supervisor)


@contextmanager
def joined_ray(address: str) -> Iterator[Hardware]:
    """A cluster that is already running."""
    _check_reachable(address)
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise ConfigError(f"no Ray cluster answers at --address {address}: {str(error).splitlines()[0]}") from error
    try:
        yield joined_cluster()
    finally:
        ray.shutdown()


@contextmanager
def own_ray(num_cpus: int) -> Iterator[None]:
    """A cluster on this machine that lives as long as this process needs it."""
    # Ray asks for a token in clusters that ray.init starts, and would leave one in the user's home.
    # Ours dies with the cluster. Whoever sets RAY_AUTH_MODE has decided otherwise.
    if "RAY_AUTH_MODE" not in os.environ:
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    try:
        ray.init(
            address="local",
            num_cpus=num_cpus,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            object_store_memory=OBJECT_STORE_BYTES,
            _node_ip_address="127.0.0.1",
            _system_config={
                "max_direct_call_object_size": 2**20,  # hidden states up to 1 MiB ride inline
                "timeout_ms_task_wait_for_death_info": 0,  # a dead stage is seen at once
            },
        )
    except (RuntimeError, OSError) as error:
        raise PipelineError(f"Ray could not be started: {str(error).splitlines()[0]}") from error
    try:
        yield
    finally:
        ray.shutdown()


def _check_reachable(address: str) -> None:
    """Ray itself would try for minutes, and say so in many lines."""
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    if "://" in address or not host or not port.isdigit():
        raise ConfigError(f"--address is {address!r}; it must be auto or host:port")
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_TIMEOUT_S).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(f"no Ray cluster answers at --address {address}: {error}") from error


def _start(supervisor: ActorHandle[Any], spec: PipelineSpec) -> list[ActorHandle[Any]]:
    try:
        stages: list[ActorHandle[Any]] | None = ray.get(supervisor.start.remote(PLACEMENT_TIMEOUT_S))
    except RayError as error:
        raise PipelineError(f"the stages could not be started: {last_line(error)}") from error
    if stages is None:
        free = {name: ray.available_resources().get(name, 0) for name in spec.bundles[0]}
        raise PlanError(
            f"the cluster has no room for {len(spec.bundles)} stages of {spec.bundles[0]}: free are {free}; "
            "use fewer --stages or --threads-per-stage"
        )
    return stages
