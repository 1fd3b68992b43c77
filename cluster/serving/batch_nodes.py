"""Batch jobs on several machines: what is kept on the disk of one of them cannot be met from another."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator

import ray
from ray.exceptions import RayError

from tramontane.proto.errors import PipelineError
from tramontane.router.batch.files import FileRecord, Purpose
from tramontane.router.batch.jobs import Job, JobOptions
from tramontane.router.batch.service import BatchService, JobSettings
from tramontane.router.batch.store import StoredJob

LOOK_EVERY_S = 10.0  # nodes may join at any time


def num_machines() -> int:
    """Of the cluster that this process is connected to. Nodes at one address share a disk. Blocks; raises PipelineError."""
    try:
        return len({node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]})  # type: ignore[no-untyped-call]
    except (RayError, RuntimeError) as error:
        raise PipelineError(f"Ray does not tell its nodes now: {error!s:.200}") from error


class OneMachineService(BatchService):
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
        await self._check_alone()
        return await super().submit(lines, options, request_key)

    async def submit_url(self, url: str, options: JobOptions, request_key: str | None = None) -> Job:
        await self._check_alone()
        return await super().submit_url(url, options, request_key)

    async def submit_file(self, file_id: str, options: JobOptions, request_key: str | None = None) -> StoredJob:
        await self._check_alone()
        return await super().submit_file(file_id, options, request_key)

    async def upload(self, filename: str, purpose: Purpose, pieces: Iterator[bytes]) -> FileRecord:
        await self._check_alone()
        return await super().upload(filename, purpose, pieces)

    async def _check_alone(self) -> None:
        if self._now() >= self._look_at:
            self._num_machines = await asyncio.to_thread(self._machines)
            self._look_at = self._now() + LOOK_EVERY_S
        if self._num_machines > 1:
            raise PipelineError(
                f"batch jobs are off: this cluster has {self._num_machines} machines, and their store is on the disk of one; "
                "serve with --jobs-database postgresql://HOST/NAME and a --jobs-storage that all of them see"
            )
