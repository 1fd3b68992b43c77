"""Adoption of an existing pipeline by a router, or creation of a new one."""

import asyncio
import hashlib
import itertools
import logging
import re
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from importlib.metadata import version
from typing import Any

import ray
from ray.exceptions import RayError

from tramontane.cluster.actors.lease import actor_holder_name
from tramontane.cluster.actors.pipeline_spec import SUPERVISOR_SUFFIX, PipelineSpec
from tramontane.cluster.actors.supervisor_client import call_or_restart
from tramontane.cluster.actors.worker_actor import NAMESPACE, actor_names
from tramontane.cluster.common.ray_api import ray_error_message
from tramontane.cluster.config.engine_config import PIPELINE_KEYS, EngineConfig
from tramontane.cluster.pipeline.lifecycle import EvictCallback, running_pipeline, shut_down_pipeline
from tramontane.cluster.pipeline.stage_chain import ObjectStoreStageChain
from tramontane.cluster.planning.hardware import TooFewNodesError
from tramontane.proto.errors import LeaseError
from tramontane.workers.weights.checkpoint import Fingerprint

logger = logging.getLogger(__name__)

RETRY_S = 0.2
NODES_POLL_S = 2.0  # while nodes may still join
VERSION = "[0-9a-f]{8}"


def pipeline_prefix(application: str, config: EngineConfig, fingerprint: Fingerprint) -> str:
    """Return the prefix ``application-version`` of pipelines that may be adopted: of the same code, model and settings.

    A number follows it in their names.
    """
    parts = (version("tramontane"), config.model_dump(include=PIPELINE_KEYS), fingerprint)
    return f"{application}-{hashlib.sha256(repr(parts).encode()).hexdigest()[:8]}"


@asynccontextmanager
async def adopt_or_create_pipeline(
    prefix: str, new_spec: Callable[[], PipelineSpec], deployed_at: int = 0, nodes_timeout_s: float = 0.0
) -> AsyncIterator[tuple[PipelineSpec, ObjectStoreStageChain]]:
    """Drive a pipeline with this prefix that no router of this deployment drives, unchanged, or else a new one.

    The cluster may have changed since a pipeline was created, or have no free resources to plan with, so
    nothing is planned before it is clear that a new one is needed. If resources for it are missing, pipelines that
    earlier deployments drive are removed. Nodes may still be joining: for ``nodes_timeout_s`` a cluster that is too small
    for the plan is probed again. Raises what ``new_spec`` and ``running_pipeline`` raise.
    """
    deadline = time.monotonic() + nodes_timeout_s
    holder = actor_holder_name(deployed_at)
    while True:
        existing = _pipelines(re.escape(prefix))
        for name in existing:
            async with AsyncExitStack() as stack:
                try:
                    spec = await _specification(name)
                    running = running_pipeline(spec, holder=holder, evict=_evict_older(name, holder))
                    chain = await stack.enter_async_context(running)
                except LeaseError as error:
                    is_driven = isinstance(
                        error.__cause__, LeaseError
                    )  # the normal case: all existing pipelines are, if another one is needed
                    logger.log(logging.INFO if is_driven else logging.WARNING, "%s", error)
                    continue
                yield spec, chain
                return
        new_name = next(name for number in itertools.count() if (name := f"{prefix}-{number}") not in existing)
        async with AsyncExitStack() as stack:
            try:
                spec = replace(await asyncio.to_thread(new_spec), name=new_name)
            except TooFewNodesError as error:
                if time.monotonic() >= deadline:
                    raise
                logger.info("waiting up to %.0f s more for nodes: %s", deadline - time.monotonic(), error)
                await asyncio.sleep(NODES_POLL_S)
                continue
            try:
                running = running_pipeline(spec, holder=holder, evict=_evict_older(new_name, holder))
                chain = await stack.enter_async_context(running)
            except LeaseError:  # another router was faster, or an existing pipeline is free now
                await asyncio.sleep(RETRY_S)
                continue
            yield spec, chain
            return


def _evict_older(own_name: str, holder: str) -> EvictCallback:
    """Return a callback that removes one pipeline which an earlier deployment of the same application drives.

    It raises LeaseError if one of the same version has become free, as its router died: that one can be adopted.
    """
    application = own_name.rsplit("-", 2)[0]

    async def evict_one() -> bool:
        for name in _pipelines(f"{re.escape(application)}-{VERSION}"):
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
    """Claim a pipeline's lease and return True if that succeeds; its former router learns that when it renews."""
    try:
        supervisor = ray.get_actor(name + SUPERVISOR_SUFFIX, NAMESPACE)
        await call_or_restart(supervisor, lambda: supervisor.claim.options(concurrency_group="claim").remote(holder))
    except (ValueError, RayError):
        return False
    return True


def _pipelines(prefix: str) -> list[str]:
    """Return the names of existing pipelines; ``prefix`` is a regular expression."""
    return [name.removesuffix(SUPERVISOR_SUFFIX) for name in actor_names(rf"{prefix}-\d+{SUPERVISOR_SUFFIX}")]


async def _specification(name: str) -> PipelineSpec:
    """Ask a pipeline's supervisor for its specification. Raises LeaseError if the supervisor is gone."""
    try:
        supervisor = ray.get_actor(name + SUPERVISOR_SUFFIX, NAMESPACE)
        call: Any = supervisor.specification.options(concurrency_group="lease").remote
        spec: PipelineSpec = await call_or_restart(supervisor, call)
    except (ValueError, RayError) as error:
        raise LeaseError(f"the pipeline {name} cannot be adopted: {ray_error_message(error)}") from error
    return spec
