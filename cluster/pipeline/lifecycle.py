"""Run, adopt and remove one pipeline: its supervisor, its stages and its lease."""

import asyncio
import hashlib
import itertools
import logging
import random
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from tramontane.cluster.actors.lease import actor_holder_name, driver_holder_name
from tramontane.cluster.actors.pipeline_spec import SUPERVISOR_SUFFIX, PipelineSpec
from tramontane.cluster.actors.supervisor import create_supervisor, remove_pipeline
from tramontane.cluster.actors.supervisor_client import (
    call_or_restart,
    call_with_retry,
    renew_lease,
    renew_lease_forever,
)
from tramontane.cluster.actors.worker_actor import NAMESPACE, actor_names
from tramontane.cluster.common.node_watch import NodeLossDetector
from tramontane.cluster.common.ray_api import list_dead_nodes, list_used_nodes, ray_error_message
from tramontane.cluster.config.engine_config import PIPELINE_KEYS, EngineConfig
from tramontane.cluster.pipeline.load_progress import ShowLoading, show_progress
from tramontane.cluster.pipeline.resources import (
    describe_shortage,
    describe_wait,
    no_room_error,
    read_resources,
    report_waits,
)
from tramontane.cluster.pipeline.stage_chain import DirectStageChain, ObjectStoreStageChain
from tramontane.cluster.planning.hardware import TooFewNodesError
from tramontane.proto.errors import CheckpointError, LeaseError, PipelineError
from tramontane.proto.units import backoff_delays
from tramontane.workers.weights.checkpoint import CheckpointDigest

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

    Raises LeaseError, without side effects, if another router drives it. ``report`` is called with
    descriptions of waits, ``evict`` repeatedly while the cluster has no free resources; it may
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
    """Report the missing resources, if they differ from the last report; return them, or "" if
    there is room.
    """
    if report is None:
        return ""
    shortage = describe_shortage(spec, await asyncio.to_thread(read_resources))
    if shortage not in ("", known):
        report(describe_wait(spec, left_s, shortage))
    return shortage


async def _still_holds_lease(supervisor_name: str, holder: str) -> bool:
    """Return False if another router has taken the pipeline over, or has since created one of the
    same name.

    A missing supervisor, or one that does not answer within SUPERVISOR_TIMEOUT_S, counts as True.
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
    with suppress(ValueError):  # it has been removed
        ray.kill(ray.get_actor(name + SUPERVISOR_SUFFIX, NAMESPACE))
        while time.monotonic() < deadline:
            ray.get_actor(name + SUPERVISOR_SUFFIX, NAMESPACE)
            time.sleep(0.02)
    remove_pipeline(name)


# Adoption of an existing pipeline by a router, or creation of a new one.

logger = logging.getLogger(__name__)

RETRY_S, MAX_RETRY_S = 0.2, 2.0
MAX_DOUBLINGS = 16
NODES_POLL_S = 2.0  # while nodes may still join
VERSION = "[0-9a-f]{8}"

Driven = tuple[PipelineSpec, ObjectStoreStageChain]


def pipeline_prefix(
    application: str, config: EngineConfig, checkpoint_digest: CheckpointDigest
) -> str:
    """Return the prefix ``application-version`` of pipelines that may be adopted: of the same code,
    model and settings.

    A number follows it in their names.
    """
    parts = (version("tramontane"), config.model_dump(include=PIPELINE_KEYS), checkpoint_digest)
    return f"{application}-{hashlib.sha256(repr(parts).encode()).hexdigest()[:8]}"


@asynccontextmanager
async def adopt_or_create_pipeline(
    prefix: str,
    new_spec: Callable[[], PipelineSpec],
    deployed_at: int = 0,
    nodes_timeout_s: float = 0.0,
    first_number: int = 0,
    report: Report = lambda _: None,
) -> AsyncIterator[Driven]:
    """Drive a pipeline with this prefix that no router of this deployment drives, unchanged; create
    one if there is none.

    The cluster may have changed since a pipeline was created, or have no free resources to plan
    with, so no plan is made before it is clear that a new pipeline is needed. If resources for it
    are missing, pipelines that earlier deployments drive are removed. Nodes may still be joining:
    for ``nodes_timeout_s`` a cluster that is too small for the plan is probed again.
    ``first_number``: the number of the pipeline that is claimed first; where routers that start
    together have different ones, each first claim succeeds. ``report`` is called again and again
    with what is waited for, and may block. Raises the errors of ``new_spec`` and
    ``running_pipeline``.
    """
    async with AsyncExitStack() as stack:
        claims = _Claims(stack, actor_holder_name(deployed_at), first_number, report)
        yield await claims.adopt_or_create(prefix, new_spec, time.monotonic() + nodes_timeout_s)


@dataclass(frozen=True, slots=True)
class _Claims:
    """Claims pipelines for the router ``holder``; the claimed one is driven until ``stack`` is
    closed.
    """

    stack: AsyncExitStack
    holder: str
    first_number: int
    report: Report

    async def adopt_or_create(
        self, prefix: str, new_spec: Callable[[], PipelineSpec], nodes_deadline: float
    ) -> Driven:
        delays = backoff_delays(RETRY_S, MAX_RETRY_S)
        while True:
            existing = await asyncio.to_thread(_pipelines, re.escape(prefix))
            if (driven := await self._adopt(existing)) is not None:
                return driven
            try:
                new = await asyncio.to_thread(new_spec)
            except TooFewNodesError as error:
                if (left_s := nodes_deadline - time.monotonic()) <= 0:
                    raise
                logger.info("waiting up to %.0f s more for nodes: %s", left_s, error)
                await asyncio.to_thread(self.report, f"waiting for nodes: {error}")
                await asyncio.sleep(NODES_POLL_S)
                continue
            if (
                driven := await self._create(new, _new_names(prefix, existing, self.first_number))
            ) is not None:
                return driven
            await asyncio.sleep(next(delays))

    async def _adopt(self, names: list[str]) -> Driven | None:
        """Drive one of these pipelines; None if all are driven, which is the normal case when a new
        one is needed.
        """
        for name in _rotate(names, self.first_number):
            try:
                return await self._claim(await _specification(name))
            except LeaseError as error:
                logger.log(logging.INFO if _is_driven(error) else logging.WARNING, "%s", error)
        return None

    async def _create(self, new: PipelineSpec, names: Iterator[str]) -> Driven | None:
        """Drive a new pipeline with one of these names; None if an existing pipeline is free
        now.
        """
        for name in names:
            try:
                return await self._claim(replace(new, name=name))
            except LeaseError as error:
                # else another router was faster; its pipeline cannot be adopted either
                if not _is_driven(error):
                    break
        return None

    async def _claim(self, spec: PipelineSpec) -> Driven:
        evict = _evict_older(spec.name, self.holder, self.first_number)
        reporting = asyncio.create_task(report_waits(spec, self.report))
        try:
            return spec, await self.stack.enter_async_context(
                running_pipeline(spec, holder=self.holder, evict=evict)
            )
        finally:
            reporting.cancel()


def _is_driven(error: LeaseError) -> bool:
    """Return True if a claim was refused because another router drives the pipeline."""
    return isinstance(error.__cause__, LeaseError)


def _rotate(names: list[str], first_number: int) -> list[str]:
    """Return the names from this index on, followed by the names before it: number 4 of three names
    starts with the second.
    """
    start = first_number % max(len(names), 1)
    return names[start:] + names[:start]


def _new_names(
    prefix: str,
    existing: Collection[str],
    first_number: int,
    randrange: Callable[[int], int] = random.randrange,
) -> Iterator[str]:
    """Yield unused names of pipelines, without end: the first from ``first_number`` on, then each
    from a wider range.

    With first_number 5: 5; 5 or 6; 5 to 8; 5 to 12; the next higher one if it exists or was
    yielded. So also routers with the same first number soon claim different names.
    """
    tried = set(existing)
    for attempt in itertools.count():
        number = first_number + randrange(2 ** min(attempt, MAX_DOUBLINGS))
        while (name := f"{prefix}-{number}") in tried:
            number += 1
        tried.add(name)
        yield name


def _evict_older(own_name: str, holder: str, first_number: int) -> EvictCallback:
    """Return a callback that removes one pipeline that an earlier deployment of the same
    application drives.

    The callback raises LeaseError if a pipeline of the same version has become free because its
    router died: it can be adopted.
    """
    application = own_name.rsplit("-", 2)[0]

    async def evict_one() -> bool:
        names = await asyncio.to_thread(_pipelines, f"{re.escape(application)}-{VERSION}")
        for name in _rotate(names, first_number):
            if name == own_name or not await _try_claim(name, holder):
                continue
            if _version_of(name) == _version_of(own_name):
                raise LeaseError(f"the pipeline {name} is free now, so {own_name} is not needed")
            await asyncio.to_thread(shut_down_pipeline, name)
            return True
        return False

    return evict_one


def _version_of(name: str) -> str:
    """Return the name without its number: ``app-0123abcd-2`` gives ``app-0123abcd``."""
    return name.rpartition("-")[0]


async def _try_claim(name: str, holder: str) -> bool:
    """Claim a pipeline's lease and return True if that succeeds; its former router notices when it
    renews.
    """
    try:
        supervisor = await asyncio.to_thread(ray.get_actor, name + SUPERVISOR_SUFFIX, NAMESPACE)
        await call_or_restart(
            supervisor, lambda: supervisor.claim.options(concurrency_group="claim").remote(holder)
        )
    except (ValueError, RayError):
        return False
    return True


def _pipelines(prefix: str) -> list[str]:
    """Return the names of existing pipelines, by version and number; ``prefix`` is a regular
    expression. It blocks.
    """
    names = [
        name.removesuffix(SUPERVISOR_SUFFIX)
        for name in actor_names(rf"{prefix}-\d+{SUPERVISOR_SUFFIX}")
    ]
    return sorted(names, key=lambda name: (_version_of(name), int(name.rpartition("-")[2])))


async def _specification(name: str) -> PipelineSpec:
    """Query a pipeline's supervisor for its specification. Raises LeaseError if the supervisor is
    lost.
    """
    try:
        supervisor = await asyncio.to_thread(ray.get_actor, name + SUPERVISOR_SUFFIX, NAMESPACE)
        call: Any = supervisor.specification.options(concurrency_group="lease").remote
        spec: PipelineSpec = await call_or_restart(supervisor, call)
    except (ValueError, RayError) as error:
        raise LeaseError(
            f"the pipeline {name} cannot be adopted: {ray_error_message(error)}"
        ) from error
    return spec
