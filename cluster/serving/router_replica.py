"""The Router deployment: each replica drives one pipeline, adopted or made."""

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, suppress
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import psutil
from ray import serve

from tramontane.cluster.actors.pipeline_spec import OwnerApplication, PipelineSpec
from tramontane.cluster.actors.worker_actor import EXPORT_EVERY_S, annotate_node
from tramontane.cluster.common.deployments import is_superseded, record_deployment
from tramontane.cluster.common.periodic import start_periodic_thread
from tramontane.cluster.config.engine_config import EngineConfig
from tramontane.cluster.config.expert_load import ExpertLoad, per_expert
from tramontane.cluster.observability.exporters import PipelineMetrics
from tramontane.cluster.observability.logging import use_serve_log
from tramontane.cluster.observability.metrics import RayMetrics
from tramontane.cluster.pipeline.adoption import adopt_or_create_pipeline, pipeline_prefix
from tramontane.cluster.pipeline.engine import make_scheduler, pipeline_spec, validate_model
from tramontane.cluster.pipeline.stage_chain import ObjectStoreStageChain
from tramontane.cluster.planning.expert_planner import replan
from tramontane.cluster.planning.hardware import probe_cluster
from tramontane.cluster.serve_patches.ports import bind_internal_port_to_node
from tramontane.cluster.serving.autoscaling import to_metrics
from tramontane.cluster.serving.token_channel import IngressStreams
from tramontane.proto.errors import LeaseError, PipelineError, PipelineSupersededError, UserError
from tramontane.router.engine.activity_log import ActivityLog
from tramontane.router.engine.health import HealthTracker
from tramontane.router.engine.router import Router
from tramontane.workers.weights.fingerprint import Fingerprint, check_fingerprint, short_digest

logger = logging.getLogger(__name__)

RETRY_S = 0.2
MAX_FAILED_STARTS = 3  # in a row; each has tried for some time


class RouterReplica:
    """One pipeline behind Ray Serve. Ray Serve calls ``__del__`` when it stops the replica, not when it is killed.

    ``deployed_at``: when the application was built, in nanoseconds. A router of a later one takes the pipeline of an earlier one.
    """

    async def __init__(  # type: ignore[misc]
        self, config: EngineConfig, fingerprint: Fingerprint, launched: bool, owns_serve: bool, deployed_at: int
    ) -> None:
        use_serve_log(config.logs, "router")
        bind_internal_port_to_node()
        self._config = config
        self._name = serve.get_replica_context().replica_id.unique_id
        self._channels = IngressStreams(self._name, short_digest(fingerprint))
        self._exit = AsyncExitStack()
        self._num_failed_starts = 0
        self._is_given_up = False
        self._health_check: asyncio.Task[bool] | None = None
        self._driving: asyncio.Task[None] | None = None
        self._taking: asyncio.Task[tuple[PipelineSpec, ObjectStoreStageChain]] | None = None
        application = OwnerApplication(serve.get_replica_context().app_name, launched, owns_serve)
        self._application, self._deployed_at = application.name, deployed_at
        record_deployment(application.name, deployed_at)  # before anything is taken from those who will look it up
        prefix = pipeline_prefix(application.name, config, fingerprint)
        new_spec = partial(_new_spec, config, fingerprint, application)
        pipeline = adopt_or_create_pipeline(prefix, new_spec, deployed_at, config.placement_timeout)
        self._taking = asyncio.create_task(self._exit.enter_async_context(pipeline))
        self._spec, self._chain = await self._taking
        use_serve_log(config.logs, "router", pipeline=self._spec.name)
        self._activity = ActivityLog()
        self._router = self._new_router()
        self._metrics = PipelineMetrics(RayMetrics(), self._spec.name)
        start_periodic_thread(EXPORT_EVERY_S, self._tell_metrics)
        self._driving = asyncio.create_task(self._drive())
        while not self._router.is_ready:
            if self._router.failure is not None:
                failure = self._router.failure
                await self.__del__()  # nobody else calls it for a replica that was never ready
                raise failure
            await asyncio.sleep(0.01)

    async def __del__(self) -> None:
        if self._driving is None:  # there is no pipeline: the constructor has failed, or still waits for one
            if self._taking is not None:
                self._taking.cancel()
                await asyncio.wait([self._taking])  # what it was making is removed
            return
        self._driving.cancel()
        with suppress(asyncio.CancelledError):
            await self._driving
        if not self._is_given_up:  # else the next replica adopts the pipeline, with its weights
            await self._exit.aclose()

    def _tell_metrics(self) -> None:
        self._metrics.export(self._router)

    async def subscribe(self, ingress: str, replica: str) -> AsyncIterator[bytes]:
        """The stream of tokens to one ingress; see ``IngressStreams``."""
        async for message in self._channels.subscribe(ingress, replica):
            yield message

    async def generate(self, ingress: str, number: int, specs: bytes, model: str) -> bytes:
        """One request, from its arrival to its end; see ``IngressStreams``."""
        if not self._router.is_attached and await self._is_superseded():
            return self._channels.refusal(
                PipelineSupersededError("the pipeline was given to a newer version, which is not ready yet")
            )
        return await self._channels.generate(self._router, ingress, number, specs, model)

    async def _is_superseded(self) -> bool:
        """Whether routers of a later deployment are on their way, or here."""
        return await asyncio.to_thread(is_superseded, self._application, self._deployed_at)

    async def is_ready(self) -> tuple[bool, str]:
        """Whether this router makes progress; and which replica says so. However many ask, the stages are asked once."""
        if self._health_check is None or self._health_check.done():
            self._health_check = asyncio.create_task(self._check_progress())
        return await asyncio.shield(self._health_check), self._name

    async def _check_progress(self) -> bool:
        """Where nothing runs nothing would tell that a stage has died: the stages are asked, and fenced anew."""
        router = self._router
        if router.is_ready and router.scheduler.is_idle:
            epoch = router.scheduler.epoch
            try:
                obeyed = all(stage.epoch == epoch for stage in await self._chain.health())
            except PipelineError:
                obeyed = False
            still_idle = router.is_ready and router.scheduler.is_idle and router.scheduler.epoch == epoch
            if not obeyed and still_idle:  # what has begun meanwhile will tell by itself
                router.request_recovery(PipelineError("a stage has lost its sequences"))
        return router.is_healthy

    async def expert_load(self) -> tuple[ExpertLoad | None, str]:
        """Of all layers, or None while a stage cannot tell; and which replica says so. Without experts there are no layers."""
        args = self._spec.plan.args
        if args.moe is None:
            return (), self._name
        try:
            by_layer = {layer: tokens for stage in await self._chain.health() for layer, tokens in stage.expert_load.items()}
        except PipelineError:
            return None, self._name
        whole = len(by_layer) == args.n_layers  # a stage that is loading has none
        return (tuple(tokens for _, tokens in sorted(by_layer.items())) if whole else None), self._name

    async def activity(self, after: Mapping[str, int]) -> tuple[dict[str, Any] | None, str]:
        """What ``GET /activity`` tells of this pipeline, or None if it is not driven now; and which replica says so.

        ``after``: by pipeline, see ``ActivityLog.as_data``.
        """
        if not self._router.is_attached:
            return None, self._name
        scheduler, plan, name = self._router.scheduler, self._spec.plan, self._spec.name
        told = {
            "name": name,
            "stages": [{"label": stage.label, "stage": stage.stage_id} for stage in plan.stages],
            "running": scheduler.num_running,
            "waiting": scheduler.num_waiting,
            "pages_held": scheduler.allocator.num_held,
            "pages": scheduler.allocator.num_pages,
            "epoch": scheduler.epoch,
            "recoveries": self._router.health.num_recoveries,
        }
        return told | self._activity.as_data(len(plan.stages), after.get(name)), self._name

    async def move_experts(self, load: ExpertLoad) -> tuple[tuple[int, str], str]:
        """Follow a plan for this load: how many experts were loaded for that, or why not; and which replica says so."""
        return await self._move_experts(load), self._name

    async def _move_experts(self, load: ExpertLoad) -> tuple[int, str]:
        experts = self._spec.expert_actors
        if experts is None:
            return 0, "experts are inside the stages of this server; start it with --expert-actors to move them"
        try:
            plan = await asyncio.to_thread(lambda: replan(experts.current_plan(), per_expert(load)))
            return await self._chain.move_experts(plan), ""
        except (UserError, PipelineError) as error:  # in our words: Ray would send a traceback
            return 0, str(error)

    async def check_health(self) -> None:
        """For Ray Serve: only a new replica helps if another router has taken the pipeline, or nothing happens any more.

        Where a later deployment has taken it this replica stays, and says so to whoever asks, until the next one is ready.
        """
        assert self._driving is not None
        self._is_given_up = False
        router = self._router
        gave_up = isinstance(router.failure, LeaseError) or self._num_failed_starts >= MAX_FAILED_STARTS
        is_well = router.is_ready and not router.health.is_failing
        if self._driving.done() or (gave_up and not is_well and not await self._is_superseded()):
            raise PipelineError(f"this router drives no pipeline any more: {router.failure}")
        if router.is_ready and not router.is_healthy:  # while stages are loading again nobody else could do better
            self._is_given_up = True
            raise PipelineError("this router has had something to do for long, and nothing was done")

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """For Ray Serve, where the number of pipelines changes: see ``PipelineAutoscalingPolicy``."""
        return to_metrics(self._router.scheduler.measure_load())

    async def stats(self, stages: bool = True) -> dict[str, Any]:
        """What is held at this moment, and by whom. Without ``stages`` they need not answer."""
        scheduler = self._router.scheduler
        scheduler.check_integrity()
        return {
            "pipeline": self._spec.name,
            "epoch": scheduler.epoch,
            "requests": self._router.num_requests,
            "sequences": scheduler.num_running,
            "waiting": scheduler.num_waiting,
            "pages_held": scheduler.allocator.num_held,
            "steps": scheduler.num_steps,
            "preempted": scheduler.num_preempted,
            "recoveries": self._router.health.num_recoveries,
            "last_recovery": self._router.health.last_recovery and asdict(self._router.health.last_recovery),
            "step_limit_s": self._router.step_limit_s,
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
            ended = self._router
            had_begun = bool(ended.scheduler.epoch) and not ended.health.is_failing
            self._num_failed_starts = 0 if had_begun else self._num_failed_starts + 1
            await asyncio.sleep(RETRY_S)
            self._router = self._new_router(ended.health)

    def _new_router(self, before: HealthTracker | None = None) -> Router:
        scheduler = make_scheduler(self._config, self._spec.plan, bounded=True)
        return Router(scheduler, self._chain, step_timeout_s=self._config.step_timeout, activity=self._activity, previous=before)


def _new_spec(config: EngineConfig, fingerprint: Fingerprint, application: OwnerApplication) -> PipelineSpec:
    """A pipeline for the cluster as it is now, not yet named."""
    with annotate_node():
        check_fingerprint(config.model, fingerprint)
        args = validate_model(config)
    return replace(
        pipeline_spec(config, args, probe_cluster(config.gpu_speed is None), "unnamed", fingerprint), application=application
    )
