"""Batch jobs in the Ray Serve application: one replica runs them, on the routers that also run
interactive requests.
"""

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.serve.handle import DeploymentHandle

from tramontane.cluster.actors.worker_actor import EXPORT_EVERY_S
from tramontane.cluster.common.ray_api import start_periodic_thread
from tramontane.cluster.config.engine_config import EngineConfig
from tramontane.cluster.http.line_executor import HANDLERS, LineExecutor
from tramontane.cluster.observability.exporters import RequestMetrics
from tramontane.cluster.observability.logging import use_serve_log
from tramontane.cluster.observability.metrics import MetricFactory
from tramontane.cluster.serve_patches.proxy import bind_internal_port_to_node
from tramontane.cluster.serving.pipeline_client import PipelineClient
from tramontane.cluster.serving.router_queries import prefix_aware_routing
from tramontane.cluster.serving.served_model import (
    load_chat_format,
    load_checked_model,
    max_running,
)
from tramontane.proto.errors import PipelineError
from tramontane.proto.jobs import Endpoint
from tramontane.proto.request import Identity
from tramontane.router.batch.claims import JobClaimStore
from tramontane.router.batch.database import Database
from tramontane.router.batch.files import JobStorage
from tramontane.router.batch.input_lines import JobLimits
from tramontane.router.batch.runner import BatchRunner
from tramontane.router.batch.service import BatchService, JobSettings
from tramontane.router.openai.request_context import RequestTokenSource
from tramontane.workers.weights.checkpoint import CheckpointDigest, short_digest

NODE_CHECK_INTERVAL_S = 10.0  # nodes may join at any time
HOME_FOLDER = ".tramontane"  # in the user's home, created for the first job
GARBAGE_INTERVAL_S, MAX_GARBAGE_INTERVAL_S = 60.0, 3600.0
BATCH_PRIORITY = 1  # of lines; interactive requests have 0
SECONDS_PER_DAY = 86_400

logger = logging.getLogger(__name__)


def num_machines() -> int:
    """Count the machines of the cluster; nodes at one address share a disk. It blocks, and raises
    PipelineError.
    """
    try:
        return len({node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]})  # type: ignore[no-untyped-call]
    except (RayError, RuntimeError) as error:
        raise PipelineError(f"Ray cannot list its nodes now: {error!s:.200}") from error


class MachineCount:
    """The number of the cluster's machines, counted at most every ``NODE_CHECK_INTERVAL_S``."""

    def __init__(self, count: Callable[[], int], now: Callable[[], float]) -> None:
        self._count, self._now = count, now
        self._counted, self._count_at = 0, now()

    async def get(self) -> int:
        """Return the number. Raises PipelineError."""
        if self._now() >= self._count_at:
            self._counted = await asyncio.to_thread(self._count)
            self._count_at = self._now() + NODE_CHECK_INTERVAL_S
        return self._counted


class SingleNodeBatchService(BatchService):
    """A service whose store is on one machine's disk: it accepts no job and no file while the
    cluster has other machines.

    Ingresses and the runner may be on different machines, and then accepted jobs would never run.
    All other operations work, so that existing jobs and files can be read and cancelled.
    """

    def __init__(
        self,
        settings: JobSettings,
        machines: Callable[[], int] = num_machines,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(settings)
        self._machines = MachineCount(machines, now)

    async def require_accepting(self) -> None:
        """Raise PipelineError if there are several machines."""
        if (num_machines := await self._machines.get()) > 1:
            raise PipelineError(
                f"batch jobs are off: this cluster has {num_machines} machines, and their store is"
                " on the disk of one; serve with --jobs-database postgresql://HOST/NAME and a"
                " --jobs-storage that all of them see"
            )


def job_settings(config: EngineConfig) -> JobSettings:
    """Return the settings that ingresses and the runner share. Each model has its own queue, so
    servers may share a store.
    """
    home = Path.home() / HOME_FOLDER
    return JobSettings(
        (
            config.jobs_database.get_secret_value()
            if config.jobs_database
            else f"sqlite:///{home / 'jobs.sqlite'}"
        ),
        config.jobs_storage.get_secret_value() if config.jobs_storage else str(home / "jobs"),
        config.model_name,
        tuple(HANDLERS),
        config.jobs_url_prefixes,
        job_limits(config),
    )


def job_limits(config: EngineConfig) -> JobLimits:
    """Return the limits of jobs. A single job may be as large as the total of an API key."""
    default = JobLimits()
    return JobLimits(
        max_lines=min(default.max_lines, config.jobs_max_lines),
        max_bytes=min(default.max_bytes, config.jobs_max_bytes),
        max_open_jobs=config.jobs_max_open,
        max_open_lines=config.jobs_max_lines,
        max_stored_bytes=config.jobs_max_bytes,
        keep_s=config.jobs_retention * SECONDS_PER_DAY or None,
    )


def batch_service(config: EngineConfig) -> BatchService:
    """Make an ingress's service. A storage folder that is given with PostgreSQL is assumed to be
    shared by all machines.
    """
    settings = job_settings(config)
    is_on_one_machine = settings.database.startswith("sqlite") or config.jobs_storage is None
    return SingleNodeBatchService(settings) if is_on_one_machine else BatchService(settings)


class BatchReplica:
    """The Batch deployment: runs the jobs of its model. If it is killed, the next one continues
    them when its lease expires.
    """

    def __init__(
        self,
        config: EngineConfig,
        checkpoint_digest: CheckpointDigest,
        router: "DeploymentHandle[Any]",
    ) -> None:
        bind_internal_port_to_node()
        use_serve_log(config.logs, "batch")
        model = load_checked_model(config, checkpoint_digest)
        num_running = max_running(config) * config.max_pipelines
        # some always wait, so that no slot stays empty
        concurrency = config.jobs_concurrency or num_running + num_running // 4
        node = ray.get_runtime_context().get_node_id()
        max_unaccepted, mark = (
            model.max_sequences * config.max_pipelines,
            short_digest(checkpoint_digest),
        )
        routing = prefix_aware_routing(config, mark)
        self._routers = PipelineClient(
            router, max_unaccepted, model=mark, node=node, routing=routing
        )
        start_periodic_thread(
            EXPORT_EVERY_S, RequestMetrics(MetricFactory(), model.counts, "batch").export
        )
        self._model, self._chat = model, load_chat_format(config, model)
        self._refuses_unknown = config.strict_requests
        settings = job_settings(config)
        self._service = BatchService(settings)
        self._database = Database(settings.database)
        claims = JobClaimStore(self._database, settings.queue)
        runner = BatchRunner(claims, JobStorage(settings.storage), self._answer, concurrency)
        loop = asyncio.get_running_loop()
        self._tasks = [
            loop.create_task(runner.run()),
            loop.create_task(self._collect_garbage_forever()),
        ]

    async def __del__(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._routers.close()
        await asyncio.to_thread(self._service.close)  # it waits for running calls
        await asyncio.to_thread(self._database.close)

    async def check_health(self) -> None:
        """Raise PipelineError if a task has ended, and log its error; Ray Serve starts another
        replica.
        """
        for task, name in zip(
            self._tasks,
            ("the runner of batch jobs", "the collector of old jobs and files"),
            strict=True,
        ):
            if task.done():
                error = None if task.cancelled() else task.exception()
                logger.error("%s has ended, and the replica with it", name, exc_info=error)
                raise PipelineError(f"{name} has ended")

    async def _answer(
        self, endpoint: Endpoint, body: dict[str, Any], tenant: str
    ) -> dict[str, Any]:
        executor = LineExecutor(
            self._model,
            self._chat,
            RequestTokenSource(self._routers, Identity(0, tenant), priority=BATCH_PRIORITY),
            self._refuses_unknown,
        )
        return await HANDLERS[endpoint](executor, json.dumps(body).encode())

    async def _collect_garbage_forever(self) -> None:
        await repeat_forever(self._service.collect_garbage, "old jobs and files were not deleted")


async def repeat_forever(
    work: Callable[[], Awaitable[None]],
    complaint: str,
    sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
) -> None:
    """Call ``work`` every ``GARBAGE_INTERVAL_S``, and less often while it fails with any error.

    An error is logged the first time, and again if the work has succeeded in between; defects are
    logged with a traceback.
    """
    pause_s, known = GARBAGE_INTERVAL_S, set[type[Exception]]()
    while True:
        try:
            await work()
            pause_s = GARBAGE_INTERVAL_S
            known.clear()
        except Exception as error:
            pause_s = min(2 * pause_s, MAX_GARBAGE_INTERVAL_S)
            if type(error) not in known:
                is_defect = not isinstance(error, PipelineError)
                logger.warning(
                    "%s; the next attempt is in %.0f s: %s",
                    complaint,
                    pause_s,
                    error,
                    exc_info=is_defect,
                )
                known.add(type(error))
        await sleep(pause_s)
