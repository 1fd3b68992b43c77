"""Run, adopt and remove one pipeline: its supervisor, its stages and its lease."""

import asyncio
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from tramontane.cluster.actors.lease import driver_holder_name
from tramontane.cluster.actors.pipeline_spec import SUPERVISOR_SUFFIX, PipelineSpec
from tramontane.cluster.actors.supervisor import create_supervisor, remove_pipeline
from tramontane.cluster.actors.supervisor_client import (
    call_or_restart,
    call_with_retry,
    renew_lease,
    renew_lease_forever,
)
from tramontane.cluster.actors.worker_actor import NAMESPACE
from tramontane.cluster.common.node_watch import NodeLossDetector
from tramontane.cluster.common.ray_api import list_dead_nodes, list_used_nodes, ray_error_message
from tramontane.cluster.pipeline.load_progress import ShowLoading, show_progress
from tramontane.cluster.pipeline.resources import (
    describe_shortage,
    describe_wait,
    no_room_error,
    read_resources,
)
from tramontane.cluster.pipeline.stage_chain import DirectStageChain, ObjectStoreStageChain
from tramontane.proto.errors import CheckpointError, LeaseError, PipelineError

Report = Callable[[str], None]
EvictCallback = Callable[[], Awaitable[bool]]  # whether it has removed another pipeline

PLACEMENT_ATTEMPT_S = 5.0  # after which another pipeline may be evicted
REMOVAL_TIMEOUT_S = 10.0
# Covers a supervisor that is restarting: otherwise its pipeline would be removed although another
# router drives it.
SUPERVISOR_TIMEOUT_S = 20.0


async def never_evict() -> bool:
    """Return False: no other pipeline is removed."""
    return False


@asynccontextmanager
async def running_pipeline(
    spec: PipelineSpec,
    report: Report | None = None,
    holder: str | None = None,
    show_loading: ShowLoading | None = None,
    evict: EvictCallback = never_evict,
) -> AsyncIterator[ObjectStoreStageChain]:
    """Drive a pipeline: place and load its stages, or find them loaded, and remove them at the end.

    Raises LeaseError, having touched nothing, if another router drives it. ``report`` is called
    with what is waited for, ``evict`` repeatedly while the cluster has no free resources; it may
    raise LeaseError if this pipeline is not needed any more. This process removes the pipeline
    itself, because the supervisor may be restarting or still be loading.
    """
    holder, say = holder or driver_holder_name(), report or (lambda _: None)
    supervisor = await asyncio.to_thread(create_supervisor, spec)
    try:
        await call_or_restart(
            supervisor, lambda: supervisor.claim.options(concurrency_group="claim").remote(holder)
        )
    except RayError as error:  # also if the supervisor is about to remove the pipeline, and itself
        raise LeaseError(
            f"the pipeline {spec.name} cannot be claimed: {ray_error_message(error)}"
        ) from error
    renewing = asyncio.create_task(renew_lease_forever(supervisor, holder))
    try:
        say(f"loading {spec.describe_workers()}, {spec.plan.describe_memory()}")
        with show_progress(re.escape(spec.name), spec.plan, show_loading):
            stages = await _start(supervisor, spec, evict, report)
        chain = DirectStageChain if spec.link == "direct" else ObjectStoreStageChain
        nodes = NodeLossDetector(partial(list_used_nodes, spec.name), list_dead_nodes)
        yield chain(stages, supervisor, holder, nodes, spec)
    finally:
        renewing.cancel()
        if await _still_holds_lease(spec.supervisor_name, holder):
            say("removing the stages")
            await asyncio.to_thread(shut_down_pipeline, spec.name)


async def _start(
    supervisor: ActorHandle[Any], spec: PipelineSpec, evict: EvictCallback, report: Report | None
) -> list[ActorHandle[Any]]:
    """Place and load the stages. Raises CheckpointError, PipelineError, or PlanError if resources
    are missing.
    """
    begun_at, shortage = time.monotonic(), ""
    deadline = begun_at + PLACEMENT_ATTEMPT_S + spec.placement_timeout_s
    try:
        stages: list[ActorHandle[Any]] | None = None
        has_evicted = True
        while stages is None and (has_evicted or time.monotonic() < deadline):
            shortage = await _report_shortage(spec, report, deadline - time.monotonic(), shortage)
            stages = await call_with_retry(lambda: supervisor.start.remote(PLACEMENT_ATTEMPT_S))
            has_evicted = stages is None and await evict()
    except RayError as error:
        kind = CheckpointError if isinstance(error, CheckpointError) else PipelineError
        raise kind(f"the stages could not be started: {ray_error_message(error)}") from error
    if stages is None:
        raise no_room_error(
            spec, await asyncio.to_thread(read_resources), waited_s=time.monotonic() - begun_at
        )
    return stages


async def _report_shortage(
    spec: PipelineSpec, report: Report | None, left_s: float, known: str
) -> str:
    """Report what the pipeline waits for, if that is not known yet; return it, or "" if there is
    room.
    """
    if report is None:
        return ""
    shortage = describe_shortage(spec, await asyncio.to_thread(read_resources))
    if shortage not in ("", known):
        report(describe_wait(spec, left_s, shortage))
    return shortage


async def _still_holds_lease(supervisor_name: str, holder: str) -> bool:
    """Return False if another router has taken the pipeline over, or has made one of the same name
    since.

    A supervisor that is gone, or does not answer within SUPERVISOR_TIMEOUT_S, counts as True.
    """
    try:
        supervisor = await asyncio.to_thread(ray.get_actor, supervisor_name, NAMESPACE)
        async with asyncio.timeout(SUPERVISOR_TIMEOUT_S):
            return await renew_lease(supervisor, holder)
    except (RayError, TimeoutError, ValueError):
        return True


def shut_down_pipeline(name: str) -> None:
    """Remove a pipeline, even one that another router drives: first its supervisor, which could
    still create stages.

    It blocks.
    """
    deadline = time.monotonic() + REMOVAL_TIMEOUT_S
    with suppress(ValueError):  # it is gone
        ray.kill(ray.get_actor(name + SUPERVISOR_SUFFIX, NAMESPACE))
        while time.monotonic() < deadline:
            ray.get_actor(name + SUPERVISOR_SUFFIX, NAMESPACE)
            time.sleep(0.02)
    remove_pipeline(name)
