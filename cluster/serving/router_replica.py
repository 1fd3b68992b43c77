"""The Router deployment: each replica drives one pipeline, which it adopts or creates."""

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import psutil
from ray import serve

from tramontane.cluster.actors.draft_actor import draft_port
from tramontane.cluster.actors.pipeline_spec import OwnerApplication, PipelineSpec
from tramontane.cluster.actors.worker_actor import EXPORT_EVERY_S, annotate_node
from tramontane.cluster.common.load_meter import LoadMeter
from tramontane.cluster.common.ray_api import (
    DeploymentWatch,
    StartWait,
    number_deployment,
    start_periodic_thread,
)
from tramontane.cluster.config.engine_config import EngineConfig
from tramontane.cluster.config.measurements import ExpertLoad, per_expert
from tramontane.cluster.observability.exporters import PipelineMetrics
from tramontane.cluster.observability.logging import use_serve_log
from tramontane.cluster.observability.metrics import MetricFactory
from tramontane.cluster.pipeline.engine import make_scheduler, pipeline_spec, validate_model
from tramontane.cluster.pipeline.lifecycle import Driven, adopt_or_create_pipeline, pipeline_prefix
from tramontane.cluster.planning.expert_planner import replan
from tramontane.cluster.planning.hardware import probe_cluster
from tramontane.cluster.serve_patches.proxy import bind_internal_port_to_node
from tramontane.cluster.serving.autoscaling import to_metrics
from tramontane.cluster.serving.token_stream import TokenStreams
from tramontane.proto.errors import LeaseError, PipelineError, PipelineSupersededError, UserError
from tramontane.router.engine.activity_log import ActivityLog, PipelineActivity, StageInfo
from tramontane.router.engine.health import HealthTracker, PipelineHealth
from tramontane.router.engine.prefix_aware_routing import Known, PrefixDigest, make_digest
from tramontane.router.engine.router import Router, run_with_drafts
from tramontane.workers.weights.checkpoint import (
    CheckpointDigest,
    check_checkpoint_digest,
    short_digest,
)

LOST_SEQUENCES = "a stage has lost its sequences"
RETRY_INTERVAL_S = 0.2
FINGERPRINT_INTERVAL_S = 2.0
MAX_FAILED_STARTS = 3  # in a row; each has retried for some time by itself

logger = logging.getLogger(__name__)


class RouterReplica:
    """Drives one pipeline behind Ray Serve, which calls ``__del__`` when it stops the replica, but
    not when it is killed.

    ``build_id``: of the application's build. Routers of a later build take over its pipelines.
    """

    async def __init__(  # type: ignore[misc]
        self,
        config: EngineConfig,
        checkpoint_digest: CheckpointDigest,
        launched: bool,
        owns_serve: bool,
        build_id: str,
    ) -> None:
        use_serve_log(config.logs, "router")
        bind_internal_port_to_node()
        self._config = config
        self._name = serve.get_replica_context().replica_id.unique_id
        self._model, self._num_routers = short_digest(checkpoint_digest), 0
        self._streams = TokenStreams(self._name, self._model, load=LoadMeter())
        self._exit = AsyncExitStack()
        self._num_failed_starts = 0
        self._is_given_up = False
        self._health_check: asyncio.Task[PipelineHealth] | None = None
        self._driving: asyncio.Task[None] | None = None
        self._acquiring: asyncio.Task[Driven] | None = None
        application = OwnerApplication(serve.get_replica_context().app_name, launched, owns_serve)
        starting = StartWait(application.name)
        # before routers of an older one lose their pipelines
        deployed_at = number_deployment(application.name, build_id)
        self._deployments, self._deployed_at = DeploymentWatch(application.name), deployed_at
        self._acquiring = asyncio.create_task(
            self._exit.enter_async_context(
                self._pipeline(checkpoint_digest, application, starting.report)
            )
        )
        self._spec, self._chain = await self._acquiring
        await asyncio.to_thread(starting.end)
        use_serve_log(config.logs, "router", pipeline=self._spec.name)
        self._activity = ActivityLog()
        self._router = self._new_router()
        self._metrics = PipelineMetrics(MetricFactory(), self._spec.name)
        start_periodic_thread(EXPORT_EVERY_S, self._export_metrics)
        self._driving = asyncio.create_task(self._drive())
        await self._wait_until_ready()

    def _pipeline(
        self,
        checkpoint_digest: CheckpointDigest,
        application: OwnerApplication,
        report: Callable[[str], None],
    ) -> AbstractAsyncContextManager[Driven]:
        config = self._config
        prefix = pipeline_prefix(application.name, config, checkpoint_digest)
        new_spec = partial(_new_spec, config, checkpoint_digest, application)
        # only the first to be claimed; Ray Serve may give None
        rank = getattr(serve.get_replica_context().rank, "rank", 0)
        return adopt_or_create_pipeline(
            prefix,
            new_spec,
            self._deployed_at,
            config.placement_timeout,
            first_number=rank,
            report=report,
        )

    async def _wait_until_ready(self) -> None:
        while not self._router.is_ready:
            if self._router.failure is not None:
                failure = self._router.failure
                # Ray Serve does not call it for a replica that was never ready
                await self.__del__()
                raise failure
            await asyncio.sleep(0.01)

    async def __del__(self) -> None:
        # there is no pipeline: the constructor has failed, or still waits for one
        if self._driving is None:
            if self._acquiring is not None:
                self._acquiring.cancel()
                await asyncio.wait([self._acquiring])  # removes a partly created pipeline
            return
        self._driving.cancel()
        # a defect that has ended it does not keep the pipeline from being removed
        await asyncio.wait([self._driving])
        # else the next replica adopts the pipeline with its loaded weights
        if not self._is_given_up:
            await self._exit.aclose()

    def _export_metrics(self) -> None:
        self._metrics.export(self._router)

    async def subscribe(self, ingress: str, replica: str) -> AsyncIterator[bytes]:
        """Stream tokens to one ingress; see ``TokenStreams``."""
        async with aclosing(self._streams.subscribe(ingress, replica)) as messages:
            async for message in messages:
                yield message

    async def generate(
        self,
        ingress: str,
        number: int,
        encoded: bytes,
        model: str,
        may_wait: bool = True,
        write_interval_s: float = 0.0,
    ) -> bytes:
        """Run one request from its arrival to its end; see ``TokenStreams``."""
        if not self._router.is_attached and await self._is_superseded():
            return self._streams.refusal(
                PipelineSupersededError(
                    "the pipeline was given to a newer version, which is not ready yet"
                )
            )
        return await self._streams.generate(
            self._router, ingress, number, encoded, model, may_wait, write_interval_s
        )

    async def _is_superseded(self) -> bool:
        """Return whether routers of a later deployment are starting or running."""
        return await asyncio.to_thread(self._deployments.is_superseded, self._deployed_at)

    async def health(self) -> tuple[PipelineHealth, str]:
        """Return the pipeline's health and this router's name. Concurrent calls share one check of
        the stages.
        """
        if self._health_check is None or self._health_check.done():
            self._health_check = asyncio.create_task(self._check_progress())
        return await asyncio.shield(self._health_check), self._name

    async def _check_progress(self) -> PipelineHealth:
        """Check the stages of an idle pipeline, which no step would do; fence them if one has died
        or lost its epoch.
        """
        router = self._router
        if router.is_ready and router.scheduler.is_idle:
            epoch = router.scheduler.epoch
            try:
                is_fenced = all(stage.epoch == epoch for stage in await self._chain.health())
            except PipelineError:
                is_fenced = False
            still_idle = (
                router.is_ready and router.scheduler.is_idle and router.scheduler.epoch == epoch
            )
            if not is_fenced and still_idle:  # steps that have begun since will fail by themselves
                router.request_recovery(PipelineError(LOST_SEQUENCES))
                return PipelineHealth("degraded", LOST_SEQUENCES)
        health = router.pipeline_health()
        is_replacing = health.status == "degraded" or health.since_s
        if not is_replacing or not (awaited := await self._chain.describe_wait()):
            return health
        if not health.is_serving:  # an error has no field for the time
            awaited = f"{awaited}, for {health.since_s:.0f} s"
        return replace(health, reason=awaited)

    async def expert_load(self) -> tuple[ExpertLoad | None, str]:
        """Return the tokens of each expert by layer and this router's name; None while a stage
        cannot answer.

        There are no layers if the model has no experts.
        """
        args = self._spec.plan.args
        if args.moe is None:
            return (), self._name
        try:
            by_layer = {
                layer: tokens
                for stage in await self._chain.health()
                for layer, tokens in stage.expert_load.items()
            }
        except PipelineError:
            return None, self._name
        is_complete = by_layer.keys() == set(args.moe_layers)  # a loading stage has no layers
        return (
            tuple(by_layer.get(layer, ()) for layer in range(args.n_layers))
            if is_complete
            else None
        ), self._name

    async def activity(self, after: Mapping[str, int]) -> tuple[PipelineActivity | None, str]:
        """Return this pipeline's part of ``GET /activity``, None if it is not driven now, and this
        router's name.

        ``after``: by pipeline, see ``ActivityLog.as_data``.
        """
        if not self._router.is_attached:
            return None, self._name
        now, plan, name = self._router.snapshot(), self._spec.plan, self._spec.name
        activity = PipelineActivity(
            name=name,
            stages=[StageInfo(label=stage.label, stage=stage.stage_id) for stage in plan.stages],
            running=now.num_running,
            waiting=now.num_waiting,
            pages_held=now.num_pages_held,
            pages=now.num_pages,
            pages_cached=now.num_pages_cached,
            prefix_cache_queries=now.num_prefix_queries,
            prefix_cache_hits=now.num_prefix_hits,
            draft_tokens=now.num_draft_tokens,
            accepted_tokens=now.num_accepted_draft_tokens,
            epoch=now.epoch,
            recoveries=now.num_recoveries,
            **self._activity.as_data(len(plan.stages), after.get(name)),
        )
        return activity, self._name

    async def prefix_digest(self, known: Mapping[str, Known]) -> tuple[PrefixDigest | None, str]:
        """Return the digest of the cache, None if the pipeline is not driven now, and this router's
        name. ``known``: by replica.
        """
        if not self._router.is_attached:
            return None, self._name
        return (
            make_digest(
                self._name, self._num_routers, self._router.scheduler, known.get(self._name)
            ),
            self._name,
        )

    async def move_experts(self, load: ExpertLoad) -> tuple[tuple[int, str], str]:
        """Rebalance experts for this load; return how many experts were loaded or the reason for
        none, and this router's name.
        """
        return await self._move_experts(load), self._name

    async def _move_experts(self, load: ExpertLoad) -> tuple[int, str]:
        experts = self._spec.expert_actors
        if experts is None:
            return (
                0,
                (
                    "experts are inside the stages of this server; start it with --expert-actors to"
                    " move them"
                ),
            )
        try:
            plan = await asyncio.to_thread(lambda: replan(experts.current_plan(), per_expert(load)))
            return await self._chain.move_experts(plan), ""
        except (UserError, PipelineError) as error:  # as text: Ray would send a traceback
            return 0, str(error)

    async def check_health(self) -> None:
        """Raise PipelineError if only a new replica helps: another router has the pipeline, or it
        makes no progress.

        If a later deployment has the pipeline this replica stays, and refuses requests, until the
        next one is ready.
        """
        assert self._driving is not None
        self._is_given_up = False
        router = self._router
        has_lost = (
            isinstance(router.failure, LeaseError) or self._num_failed_starts >= MAX_FAILED_STARTS
        )
        is_healthy = router.is_ready and not router.health.is_failing
        if self._driving.done() or (
            has_lost and not is_healthy and not await self._is_superseded()
        ):
            raise PipelineError(f"this router drives no pipeline any more: {router.failure}")
        # not while stages reload, when no other router could do better
        if router.is_ready and not router.is_healthy:
            self._is_given_up = True
            raise PipelineError("this router has had requests for long, and nothing was done")

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the metrics of autoscaling for Ray Serve: see ``PipelineAutoscalingPolicy``."""
        return to_metrics(self._router.scheduler.measure_load())

    async def stats(self, stages: bool = True) -> dict[str, Any]:
        """Return the pipeline's current state, for tests and diagnosis. Without ``stages``, stages
        are not called.
        """
        self._router.scheduler.check_integrity()
        now = self._router.snapshot()
        return {
            "pipeline": self._spec.name,
            "epoch": now.epoch,
            "requests": self._router.num_requests,
            "sequences": now.num_running,
            "waiting": now.num_waiting,
            "pages_held": now.num_pages_held,
            "steps": now.num_steps,
            "preempted": now.num_preempted,
            "policy_failure": now.policy_failure,
            "recoveries": now.num_recoveries,
            "last_recovery": (
                self._router.health.last_recovery and asdict(self._router.health.last_recovery)
            ),
            "step_limit_s": self._router.step_limit_s,
            "streams": self._streams.num_open,
            "tasks": len(asyncio.all_tasks()),
            "rss": psutil.Process().memory_info().rss,
            "pid": os.getpid(),
            "stages": [asdict(health) for health in await self._chain.health()] if stages else [],
        }

    async def _drive(self) -> None:
        """Run the pipeline, and restart it whenever it fails; its requests then end with the
        reason.
        """
        watching = asyncio.create_task(self._watch_fingerprint())
        try:
            await self._run_routers()
        finally:
            watching.cancel()

    async def _watch_fingerprint(self) -> None:
        """Read the fingerprint again while it is unknown, or if experts are on actors, which
        restart without a fence.
        """
        while True:
            await asyncio.sleep(FINGERPRINT_INTERVAL_S)
            if self._router.is_ready and (
                self._spec.plan.experts is not None or not self._router.fingerprint
            ):
                await self._router.refresh_fingerprint()

    async def _run_routers(self) -> None:
        while True:
            await run_with_drafts(self._router, draft_port(self._spec))
            logger.warning(
                "the pipeline failed, and is being started again: %s", self._router.failure
            )
            failed = self._router
            has_started = bool(failed.scheduler.epoch) and not failed.health.is_failing
            self._num_failed_starts = 0 if has_started else self._num_failed_starts + 1
            await asyncio.sleep(RETRY_INTERVAL_S)
            self._router = self._new_router(failed.health)

    def _new_router(self, before: HealthTracker | None = None) -> Router:
        self._num_routers += 1
        scheduler = make_scheduler(self._config, self._spec.plan, bounded=True, model=self._model)
        return Router(
            scheduler,
            self._chain,
            step_timeout_s=self._config.step_timeout,
            activity=self._activity,
            previous=before,
            read_fingerprint=self._chain.fingerprint,
        )


def _new_spec(
    config: EngineConfig, checkpoint_digest: CheckpointDigest, application: OwnerApplication
) -> PipelineSpec:
    """Plan a pipeline for the current cluster; it gets its name later."""
    with annotate_node():
        check_checkpoint_digest(config.model, checkpoint_digest)
        args = validate_model(config)
    spec = pipeline_spec(
        config, args, probe_cluster(config.gpu_speed is None), "unnamed", checkpoint_digest
    )
    for choice in spec.plan.chosen:
        logger.info("%s", choice.describe())
    return replace(spec, application=application)
