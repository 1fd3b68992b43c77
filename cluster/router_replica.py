"""The Router deployment: each replica drives one pipeline, adopted or made."""

import asyncio
import hashlib
import itertools
import logging
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import asdict, replace
from typing import Any

import psutil
import ray
from ray import serve

from tramontane.cluster.actors import NAMESPACE
from tramontane.cluster.config import EngineConfig
from tramontane.cluster.hardware import joined_cluster
from tramontane.cluster.launch import checked_model, pipeline_spec, scheduler_for
from tramontane.cluster.pipeline import running_pipeline
from tramontane.cluster.ray_chain import RayStageChain
from tramontane.cluster.serve_ports import keep_internal_port_on_node_address
from tramontane.cluster.supervisor import Application, PipelineSpec, actor_as_holder
from tramontane.cluster.token_channel import TokenChannels
from tramontane.proto.errors import LeaseError, PipelineError
from tramontane.router.router import Router

logger = logging.getLogger(__name__)

RETRY_S = 0.2


class RouterReplica:
    """One pipeline behind Ray Serve. Ray Serve calls ``__del__`` when it stops the replica, not when it is killed."""

    async def __init__(self, config: EngineConfig, launched: bool, owns_serve: bool) -> None:  # type: ignore[misc]
        keep_internal_port_on_node_address()
        self._config = config
        self._channels = TokenChannels(serve.get_replica_context().replica_id.unique_id)
        self._exit = AsyncExitStack()
        application = Application(serve.get_replica_context().app_name, launched, owns_serve)
        spec = await asyncio.to_thread(_spec_for, config, application)
        self._spec, self._chain = await self._exit.enter_async_context(any_pipeline(spec))
        self._router = self._new_router()
        self._driving = asyncio.create_task(self._drive())
        while not self._router.is_running:
            if self._router.failure is not None:
                raise self._router.failure
            await asyncio.sleep(0.01)

    async def __del__(self) -> None:
        self._driving.cancel()
        with suppress(asyncio.CancelledError):
            await self._driving
        await self._exit.aclose()

    async def subscribe(self, ingress: str) -> AsyncIterator[bytes]:
        """The stream of tokens to one ingress; see ``TokenChannels``."""
        async for message in self._channels.subscribe(ingress):
            yield message

    async def generate(self, ingress: str, number: int, specs: bytes) -> bytes:
        """One request, from its arrival to its end; see ``TokenChannels``."""
        return await self._channels.generate(self._router, ingress, number, specs)

    async def is_ready(self) -> bool:
        """Whether every stage answers and obeys this router, so that the next step can run."""
        if not self._router.is_running:
            return False
        try:
            stages = await self._chain.health()
        except PipelineError:
            return False
        obeyed = all(stage.epoch == self._router.scheduler.epoch for stage in stages)
        if not obeyed and self._router.is_running:  # a stage died while nothing ran on it, and nothing else would tell
            self._router.fail(PipelineError("a stage has lost its sequences"))
        return obeyed

    async def check_health(self) -> None:
        """For Ray Serve: only a new replica helps if another router has taken the pipeline, or the loop has died."""
        if self._driving.done() or isinstance(self._router.failure, LeaseError):
            raise PipelineError(f"this router drives no pipeline any more: {self._router.failure}")

    async def stats(self, stages: bool = True) -> dict[str, Any]:
        """What is held at this moment, and by whom. Without ``stages`` they need not answer."""
        scheduler = self._router.scheduler
        scheduler.check_integrity()
        pages = [c.num_pages for c in scheduler.ledger.cache.classes]
        return {
            "pipeline": self._spec.name,
            "epoch": scheduler.epoch,
            "requests": self._router.num_requests,
            "sequences": scheduler.num_running,
            "waiting": scheduler.num_waiting,
            "pages_held": sum(pages) - sum(scheduler.ledger.num_free),
            "steps": scheduler.num_steps,
            "streams": self._channels.num_open,
            "tasks": len(asyncio.all_tasks()),
            "rss": psutil.Process().memory_info().rss,
            "pid": os.getpid(),
            "stages": [asdict(health) for health in await self._chain.health()] if stages else [],
        }

    async def _drive(self) -> None:
        """Requests of a failed pipeline end with the reason; the pipeline itself is fenced anew and goes on."""
        while True:
            await self._router.run()
            logger.warning("the pipeline failed, and is being started again: %s", self._router.failure)
            await asyncio.sleep(RETRY_S)
            self._router = self._new_router()

    def _new_router(self) -> Router:
        return Router(scheduler_for(self._config, self._spec.plan, bounded=True), self._chain)


def _spec_for(config: EngineConfig, application: Application) -> PipelineSpec:
    spec = pipeline_spec(config, checked_model(config), joined_cluster(), application.name)
    return replace(spec, application=application)


@asynccontextmanager
async def any_pipeline(spec: PipelineSpec) -> AsyncIterator[tuple[PipelineSpec, RayStageChain]]:
    """Drive a pipeline of this application that nobody drives, or else a new one.

    Pipelines are named ``application-version-number``; the version is that of ``spec``, so
    that only pipelines with the same model, plan and settings are adopted.
    """
    version = hashlib.sha256(repr(replace(spec, application=None)).encode()).hexdigest()[:8]
    prefix = f"{spec.name}-{version}-"
    while True:
        for name in _candidates(prefix):
            async with AsyncExitStack() as stack:
                mine = replace(spec, name=name)
                try:
                    chain = await stack.enter_async_context(running_pipeline(mine, holder=actor_as_holder()))
                except LeaseError:
                    continue
                yield mine, chain
                return
        await asyncio.sleep(RETRY_S)  # somebody was quicker


def _candidates(prefix: str) -> list[str]:
    """Names of pipelines that exist, and the first that does not."""
    suffix = "-supervisor"
    actors = [actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True) if actor["namespace"] == NAMESPACE]
    existing = sorted(name.removesuffix(suffix) for name in actors if name.startswith(prefix) and name.endswith(suffix))
    fresh = next(name for number in itertools.count() if (name := f"{prefix}{number}") not in existing)
    return [*existing, fresh]
