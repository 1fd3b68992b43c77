"""Batch jobs in the Ray Serve application: one replica runs them, on the routers that interactive requests have too.

Batch jobs on several machines: what is kept on the disk of one of them cannot be met from another.
"""

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import ray
from ray.exceptions import RayError
from ray.serve.handle import DeploymentHandle

from tramontane.cluster.actors.worker_actor import EXPORT_EVERY_S, annotate_node
from tramontane.cluster.common.periodic import start_periodic_thread
from tramontane.cluster.config.engine_config import EngineConfig
from tramontane.cluster.observability.exporters import RequestMetrics
from tramontane.cluster.observability.logging import use_serve_log
from tramontane.cluster.observability.metrics import RayMetrics
from tramontane.cluster.serve_patches.ports import bind_internal_port_to_node
from tramontane.cluster.serving.remote_routers import RouterClient
from tramontane.cluster.serving.served_model import load_chat_format, load_served_model
from tramontane.proto.errors import ParameterError, PipelineError
from tramontane.proto.jobs import Endpoint, Job, JobOptions
from tramontane.proto.ports import TokenSource
from tramontane.proto.request import RequestOutput, SequenceRequest
from tramontane.router.batch.claims import JobClaimStore
from tramontane.router.batch.database import Database
from tramontane.router.batch.files import FileRecord, Purpose
from tramontane.router.batch.input_lines import JobLimits
from tramontane.router.batch.runner import BatchRunner
from tramontane.router.batch.service import BatchService, JobSettings
from tramontane.router.batch.storage import JobStorage
from tramontane.router.batch.store import StoredJob
from tramontane.router.openai.chat_completion import ChatCompletion
from tramontane.router.openai.chat_request import ChatRequest, parse_chat
from tramontane.router.openai.completion import Completion
from tramontane.router.openai.completion_request import CompletionRequest, parse_completion
from tramontane.router.openai.served_model import ServedModel, check_model_name
from tramontane.router.tokenization.chat import ChatTemplate
from tramontane.workers.weights.fingerprint import Fingerprint, check_fingerprint, short_digest

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 10.0  # nodes may join at any time


def num_machines() -> int:
    """Of the cluster that this process is connected to. Nodes at one address share a disk. Blocks; raises PipelineError."""
    try:
        return len({node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]})  # type: ignore[no-untyped-call]
    except (RayError, RuntimeError) as error:
        raise PipelineError(f"Ray does not tell its nodes now: {error!s:.200}") from error


class SingleNodeBatchService(BatchService):
    """For a store on one machine: takes no job and no file while there are others. Doors and the runner may be on different
    ones, and then nobody would ever run what was accepted. All else works, so that what is there can be read and cancelled.
    """

    def __init__(
        self, settings: JobSettings, machines: Callable[[], int] = num_machines, now: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(settings)
        self._machines, self._now = machines, now
        self._num_machines, self._look_at = 0, now()

    async def submit(self, lines: AsyncIterator[bytes], options: JobOptions, request_key: str | None = None) -> Job:
        await self._require_single_node()
        return await super().submit(lines, options, request_key)

    async def submit_url(self, url: str, options: JobOptions, request_key: str | None = None) -> Job:
        await self._require_single_node()
        return await super().submit_url(url, options, request_key)

    async def submit_file(self, file_id: str, options: JobOptions, request_key: str | None = None) -> StoredJob:
        await self._require_single_node()
        return await super().submit_file(file_id, options, request_key)

    async def upload(self, filename: str, purpose: Purpose, pieces: Iterator[bytes]) -> FileRecord:
        await self._require_single_node()
        return await super().upload(filename, purpose, pieces)

    async def _require_single_node(self) -> None:
        if self._now() >= self._look_at:
            self._num_machines = await asyncio.to_thread(self._machines)
            self._look_at = self._now() + LOOK_EVERY_S
        if self._num_machines > 1:
            raise PipelineError(
                f"batch jobs are off: this cluster has {self._num_machines} machines, and their store is on the disk of one; "
                "serve with --jobs-database postgresql://HOST/NAME and a --jobs-storage that all of them see"
            )


FOLDER = ".tramontane"  # of the user, made when the first job comes
TIDY_EVERY_S = 60.0
PRIORITY = 1  # of lines; interactive requests have 0
WEIGHTS = ".safetensors"
SECONDS_PER_DAY = 86_400


@dataclass(frozen=True, slots=True)
class LineExecutor:
    """What lines are answered with: the model, how it has conversations, and who makes tokens."""

    model: ServedModel
    chat: ChatTemplate
    source: TokenSource

    async def completion(self, body: bytes) -> dict[str, Any]:
        request = parse_completion(body)
        self._check(request)
        return await (await Completion.prepare(self.model, request, time.monotonic())).run(self.source)

    async def chat_completion(self, body: bytes) -> dict[str, Any]:
        request = parse_chat(body)
        self._check(request)
        return await (await ChatCompletion.prepare(self.model, self.chat, request, time.monotonic())).run(self.source)

    def _check(self, request: CompletionRequest | ChatRequest) -> None:
        if request.stream:
            raise ParameterError("stream is not for lines of a batch job; leave it out", "stream")
        check_model_name(self.model, request.model)


# What a line of a batch job is answered by. Whoever adds an endpoint adds it here and to ``router.jobs.Endpoint``.
HANDLERS: Mapping[Endpoint, Callable[[LineExecutor, bytes], Awaitable[dict[str, Any]]]] = MappingProxyType(
    {"/v1/completions": LineExecutor.completion, "/v1/chat/completions": LineExecutor.chat_completion}
)


def job_settings(config: EngineConfig) -> JobSettings:
    """Where doors and runner meet. Models have queues of their own, so that servers of several may share a store."""
    home = Path.home() / FOLDER
    return JobSettings(
        config.jobs_database.get_secret_value() if config.jobs_database else f"sqlite:///{home / 'jobs.sqlite'}",
        config.jobs_storage.get_secret_value() if config.jobs_storage else str(home / "jobs"),
        config.model_name,
        tuple(HANDLERS),
        config.jobs_url_prefixes,
        JobLimits(keep_s=config.jobs_retention * SECONDS_PER_DAY or None),
    )


def batch_service(config: EngineConfig) -> BatchService:
    """For doors. A folder that is given along with PostgreSQL is taken for one that every machine sees."""
    settings = job_settings(config)
    on_one_machine = settings.database.startswith("sqlite") or config.jobs_storage is None
    return SingleNodeBatchService(settings) if on_one_machine else BatchService(settings)


class LowPriorityTokenSource:
    """A ``TokenSource`` whose sequences wait for those of interactive requests."""

    def __init__(self, source: TokenSource) -> None:
        self._source = source

    def generate(self, specs: Sequence[SequenceRequest]) -> AsyncGenerator[RequestOutput, None]:
        return self._source.generate([_of_batch(spec) for spec in specs])

    def check_capacity(self, num_sequences: int, owner: int = 0) -> None:
        self._source.check_capacity(num_sequences, owner)


def _of_batch(spec: SequenceRequest) -> SequenceRequest:
    """The one place where the priority of batch work is set."""
    return replace(spec, priority=PRIORITY)


class BatchReplica:
    """Runs the jobs of its model. If it is killed, its jobs go on in the next one, when its lease has lapsed."""

    def __init__(
        self,
        config: EngineConfig,
        fingerprint: Fingerprint,
        router: "DeploymentHandle[Any]",
    ) -> None:
        bind_internal_port_to_node()
        use_serve_log(config.logs, "batch")
        with annotate_node():
            check_fingerprint(config.model, tuple(entry for entry in fingerprint if not entry[0].endswith(WEIGHTS)))
            model = load_served_model(config)
        at_once = config.max_num_seqs * config.max_pipelines
        concurrency = config.jobs_concurrency or at_once + at_once // 4  # some always wait, so that no place stays empty
        node = ray.get_runtime_context().get_node_id()
        self._routers = RouterClient(
            router, model.max_sequences * config.max_pipelines, model=short_digest(fingerprint), node=node
        )
        start_periodic_thread(EXPORT_EVERY_S, RequestMetrics(RayMetrics(), model.counts, "batch").export)
        self._answerer = LineExecutor(model, load_chat_format(config, model), LowPriorityTokenSource(self._routers))
        settings = job_settings(config)
        self._service = BatchService(settings)
        self._database = Database(settings.database)
        claims = JobClaimStore(self._database, settings.queue)
        runner = BatchRunner(claims, JobStorage(settings.storage), self._answer, concurrency)
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(runner.run()), loop.create_task(self._collect_garbage_forever())]

    async def __del__(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._routers.close()
        self._service.close()
        self._database.close()

    async def check_health(self) -> None:
        """For Ray Serve, which starts another replica if the runner has ended."""
        if self._tasks[0].done():
            raise PipelineError("the runner of batch jobs has ended")

    async def _answer(self, endpoint: Endpoint, body: dict[str, Any]) -> dict[str, Any]:
        return await HANDLERS[endpoint](self._answerer, json.dumps(body).encode())

    async def _collect_garbage_forever(self) -> None:
        while True:
            with suppress(PipelineError):  # the store cannot be used now, and the runner says so
                await self._service.collect_garbage()
            await asyncio.sleep(TIDY_EVERY_S)
