"""A pipeline for a router: one that it may take, or a new one."""

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
from tramontane.cluster.common.ray_errors import ray_error_message
from tramontane.cluster.config.engine_config import PIPELINE_KEYS, EngineConfig
from tramontane.cluster.pipeline.lifecycle import EvictCallback, running_pipeline, shut_down_pipeline
from tramontane.cluster.pipeline.stage_chain import ObjectStoreStageChain
from tramontane.cluster.planning.hardware import TooFewNodesError
from tramontane.proto.errors import LeaseError
from tramontane.workers.weights.fingerprint import Fingerprint

logger = logging.getLogger(__name__)

RETRY_S = 0.2
NODES_POLL_S = 2.0  # while nodes are still to join
VERSION = "[0-9a-f]{8}"


def pipeline_prefix(application: str, config: EngineConfig, fingerprint: Fingerprint) -> str:
    """Pipelines are named ``application-version-number``: only those of the same code, model and settings are adopted."""
    made_of = (version("tramontane"), config.model_dump(include=PIPELINE_KEYS), fingerprint)
    return f"{application}-{hashlib.sha256(repr(made_of).encode()).hexdigest()[:8]}"


@asynccontextmanager
async def adopt_or_create_pipeline(
    prefix: str, new_spec: Callable[[], PipelineSpec], deployed_at: int = 0, nodes_timeout_s: float = 0.0
) -> AsyncIterator[tuple[PipelineSpec, ObjectStoreStageChain]]:
    """Drive a pipeline with this prefix that nobody of this deployment drives, as it was made, or else a new one.

    The cluster may have changed since a pipeline was made, or have nothing left to plan with, so
    nothing is planned before it is known that a new one is needed. Where there is no room for it, one that
    an earlier deployment drives goes. Nodes may still be joining: a cluster that is too small for the plan is looked
    at again for ``nodes_timeout_s``.
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
                    is_driven = isinstance(error.__cause__, LeaseError)  # as all are, where another one is to be made
                    logger.log(logging.INFO if is_driven else logging.WARNING, "%s", error)
                    continue
                yield spec, chain
                return
        fresh = next(name for number in itertools.count() if (name := f"{prefix}-{number}") not in existing)
        async with AsyncExitStack() as stack:
            try:
                spec = replace(await asyncio.to_thread(new_spec), name=fresh)
            except TooFewNodesError as error:
                if time.monotonic() >= deadline:
                    raise
                logger.info("waiting for nodes: %s", error)
                await asyncio.sleep(NODES_POLL_S)
                continue
            try:
                running = running_pipeline(spec, holder=holder, evict=_evict_older(fresh, holder))
                chain = await stack.enter_async_context(running)
            except LeaseError:  # somebody was quicker, or another one is free now
                await asyncio.sleep(RETRY_S)
                continue
            yield spec, chain
            return


def _evict_older(own: str, holder: str) -> EvictCallback:
    """Ends one pipeline after the other that only an earlier deployment of our application drives.

    One of our own version may have become free meanwhile, as its router died: then LeaseError says that, as it is to be adopted.
    """
    application = own.rsplit("-", 2)[0]

    async def end_one() -> bool:
        for name in _pipelines(f"{re.escape(application)}-{VERSION}"):
            if name == own or not await _try_claim(name, holder):
                continue
            if _version_of(name) == _version_of(own):
                raise LeaseError(f"{name} is free now, and {own} is not needed")
            await asyncio.to_thread(shut_down_pipeline, name)
            return True
        return False

    return end_one


def _version_of(name: str) -> str:
    """``app-0123abcd-2`` gives ``app-0123abcd``."""
    return name.rpartition("-")[0]


async def _try_claim(name: str, holder: str) -> bool:
    """Whether the pipeline's lease is the holder's now. Its router hears of it from the supervisor, if it asks in time."""
    try:
        supervisor = ray.get_actor(name + SUPERVISOR_SUFFIX, NAMESPACE)
        await call_or_restart(supervisor, lambda: supervisor.claim.options(concurrency_group="lease").remote(holder))
    except (ValueError, RayError):
        return False
    return True


def _pipelines(prefix: str) -> list[str]:
    """By name; ``prefix`` is a pattern."""
    return [name.removesuffix(SUPERVISOR_SUFFIX) for name in actor_names(rf"{prefix}-\d+{SUPERVISOR_SUFFIX}")]


async def _specification(name: str) -> PipelineSpec:
    """Raises LeaseError if the supervisor has just gone."""
    try:
        supervisor = ray.get_actor(name + SUPERVISOR_SUFFIX, NAMESPACE)
        ask: Any = supervisor.specification.options(concurrency_group="lease").remote
        spec: PipelineSpec = await call_or_restart(supervisor, ask)
    except (ValueError, RayError) as error:
        raise LeaseError(f"the pipeline {name} is not to be had: {ray_error_message(error)}") from error
    return spec
