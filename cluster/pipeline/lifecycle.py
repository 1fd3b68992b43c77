"""Ray around a pipeline: a cluster to run in, and the pipeline's coming and going."""

import asyncio
import logging
import os
import re
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from tramontane.cluster.actors.lease import driver_as_holder
from tramontane.cluster.actors.pipeline_spec import SUPERVISOR_SUFFIX, PipelineSpec
from tramontane.cluster.actors.supervisor import create_supervisor, remove_pipeline
from tramontane.cluster.actors.supervisor_client import call_or_restart, call_with_retry, renew_lease, renew_lease_forever
from tramontane.cluster.actors.worker_actor import NAMESPACE
from tramontane.cluster.common.ray_errors import ray_error_message
from tramontane.cluster.common.signals import defer_signals
from tramontane.cluster.config.ray_settings import RAY_SETTINGS, SERVE_SETTINGS
from tramontane.cluster.pipeline.load_progress import ShowLoading, show_progress
from tramontane.cluster.pipeline.stage_chain import DirectStageChain, ObjectStoreStageChain
from tramontane.cluster.planning.hardware import CORES, Hardware, probe_cluster, usable_cpus
from tramontane.cluster.ray_internals.core import keep_loopback_address, keep_sigterm_handler, mute_worker_logs
from tramontane.cluster.ray_internals.symbols import assert_supported
from tramontane.cluster.ray_internals.table import JOIN_SYMBOLS, RAY_SYMBOLS
from tramontane.proto.errors import CheckpointError, ConfigError, LeaseError, PipelineError, PlanError

ROOM_TIMEOUT_S = 5.0  # until others may have to make room
REMOVAL_TIMEOUT_S = 10.0
SUPERVISOR_ANSWERS_S = 20.0  # also where it is starting again: else its pipeline would be removed although another router has it
OBJECT_STORE_BYTES = 512 * 2**20  # of a local Ray: a few micro-batches of hidden states
EvictCallback = Callable[[], Awaitable[bool]]


async def never_evict() -> bool:
    """Nobody makes room."""
    return False


@asynccontextmanager
async def running_pipeline(
    spec: PipelineSpec,
    report: Callable[[str], None] = lambda _: None,
    holder: str | None = None,
    show_loading: ShowLoading | None = None,
    make_room: EvictCallback = never_evict,
) -> AsyncIterator[ObjectStoreStageChain]:
    """Drive a pipeline: place and load its stages, or find them loaded, and remove them at the end.

    Raises LeaseError, having touched nothing, if another router drives it. ``make_room`` is asked again and again while there
    is no room; it may raise LeaseError, where none is needed any more. Removing is done from here: the supervisor may be
    restarting, or still be busy with loading.
    """
    holder = holder or driver_as_holder()
    supervisor = create_supervisor(spec)
    try:
        await call_or_restart(supervisor, lambda: supervisor.claim.options(concurrency_group="lease").remote(holder))
    except RayError as error:  # also if the supervisor is about to remove the pipeline, and itself
        raise LeaseError(f"the pipeline is not to be had: {ray_error_message(error)}") from error
    renewing = asyncio.create_task(renew_lease_forever(supervisor, holder))
    try:
        report(f"loading {spec.describe_workers()}")
        with show_progress(re.escape(spec.name), spec.plan, show_loading):
            stages = await _start(supervisor, spec, make_room)
        chain = DirectStageChain if spec.link == "direct" else ObjectStoreStageChain
        yield chain(stages, supervisor, holder)
    finally:
        renewing.cancel()
        if await _still_holds_lease(spec.supervisor_name, holder):
            report("removing the stages")
            shut_down_pipeline(spec.name)


async def _still_holds_lease(supervisor_name: str, holder: str) -> bool:
    """False if another router has taken the pipeline over, or has made one of the same name since.

    A supervisor that is gone, or does not answer for long, denies nothing.
    """
    try:
        supervisor = ray.get_actor(supervisor_name, NAMESPACE)
        async with asyncio.timeout(SUPERVISOR_ANSWERS_S):
            return await renew_lease(supervisor, holder)
    except (RayError, TimeoutError, ValueError):
        return True


@contextmanager
def join_ray_cluster(address: str, measured: bool = True, needed: bool = False) -> Iterator[Hardware]:
    """A cluster that is already running; ``measured`` is that of ``probe_cluster``. ``needed``: the command has no other way."""
    from tramontane.cluster.pipeline.ray_cluster import (  # brings gRPC, which a Ray of our own does not need
        ADVICE,
        JOIN,
        check_ray_address,
    )

    assert_supported(RAY_SYMBOLS, JOIN_SYMBOLS)
    check_ray_address(address, JOIN if needed else ADVICE)
    try:
        with py():
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, ValueError, RuntimeError, RayError) as error:
        raise ConfigError(
            f"the Ray cluster at --address {address} cannot be joined: {str(error).splitlines()[0]}; "
            "this machine must be one of its nodes, with the same Python and Ray"
        ) from error
    with mute_worker_logs():
        try:
            yield probe_cluster(measured)
        finally:
            ray.shutdown()


@contextmanager
def local_ray_cluster(num_cpus: int) -> Iterator[None]:
    """A cluster on this machine that lives as long as this process needs it; ``num_cpus`` may be more than there are."""
    assert_supported(RAY_SYMBOLS)
    # Ray asks for a token in clusters that ray.init starts, and would leave one in the user's home.
    # Ours dies with the cluster. Whoever sets RAY_AUTH_MODE has decided otherwise.
    if "RAY_AUTH_MODE" not in os.environ:
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    for name, value in SERVE_SETTINGS.items():
        os.environ.setdefault(name, value)  # inherited by everything that Ray starts
    try:
        with py(), keep_loopback_address():
            ray.init(
                address="local",
                num_cpus=num_cpus,
                resources={CORES: usable_cpus()},
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
                object_store_memory=OBJECT_STORE_BYTES,
                _node_ip_address="127.0.0.1",
                _system_config=dict(RAY_SETTINGS),
            )
    except (RuntimeError, OSError) as error:
        raise PipelineError(f"Ray could not be started: {str(error).splitlines()[0]}") from error
    with mute_worker_logs():
        try:
            yield
        finally:
            ray.shutdown()


@contextmanager
def py() -> Iterator[None]:
    """Ray is not left half started, with which Python ends in a crash; nor does it take SIGTERM for itself.

    It would end the process by it before anything is removed.
    """
    try:
        with keep_sigterm_handler(), defer_signals():
            yield
    except KeyboardInterrupt:
        ray.shutdown()
        raise


def shut_down_pipeline(name: str) -> None:
    """Remove a pipeline from outside, whoever drives it: its supervisor first, which could still be making stages."""
    deadline = time.monotonic() + REMOVAL_TIMEOUT_S
    with suppress(ValueError):  # it is gone
        ray.kill(ray.get_actor(name + SUPERVISOR_SUFFIX, NAMESPACE))
        while time.monotonic() < deadline:
            ray.get_actor(name + SUPERVISOR_SUFFIX, NAMESPACE)
            time.sleep(0.02)
    remove_pipeline(name)


async def _start(supervisor: ActorHandle[Any], spec: PipelineSpec, make_room: EvictCallback) -> list[ActorHandle[Any]]:
    try:
        stages: list[ActorHandle[Any]] | None = None
        deadline = time.monotonic() + ROOM_TIMEOUT_S + spec.placement_timeout_s
        is_made = True
        while stages is None and (is_made or time.monotonic() < deadline):
            stages = await call_with_retry(lambda: supervisor.start.remote(ROOM_TIMEOUT_S))
            is_made = stages is None and await make_room()
    except RayError as error:
        kind = CheckpointError if isinstance(error, CheckpointError) else PipelineError
        raise kind(f"the stages could not be started: {ray_error_message(error)}") from error
    if stages is None:
        available: dict[str, float] = ray.available_resources()  # type: ignore[no-untyped-call]
        free = {name: available.get(name, 0) for name in spec.bundles[0]}
        of = "of" if spec.stages_per_gpu == 1 else "in bundles of"
        raise PlanError(
            f"the cluster has no room for {spec.describe_workers()} {of} {spec.bundles[0]}"
            f"{' on the nodes that they are planned for' if any(spec.nodes) else ''}: free are {free}; "
            f"use fewer --stages{', --expert-actors' if spec.plan.experts else ''} or --threads-per-stage"
        )
    return stages
