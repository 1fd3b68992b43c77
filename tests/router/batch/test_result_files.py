"""Result files: written by a thread of their own, a page of each job in turn."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from batch_fixtures import sqlite_harness
from batch_jobs import BatchHarness, all_results, pieces, request, requests

from tramontane.proto.errors import JobRefusedError, JobStoreError
from tramontane.proto.jobs import JobOptions, JobState
from tramontane.router.batch import outcomes
from tramontane.router.batch.outcomes import _ResultFiles
from tramontane.router.batch.service import BatchService
from tramontane.router.batch.storage import StorageFile

NUM_LARGE = 4


harness = sqlite_harness


@asynccontextmanager
async def _set_at_exit(event: threading.Event) -> AsyncIterator[None]:
    """So that a test that fails leaves no thread that waits."""
    try:
        yield
    finally:
        event.set()


async def _submit(service: BatchService, text: bytes) -> str:
    return (await service.submit(pieces(text), JobOptions())).job_id


async def _wait_until_done(service: BatchService, *jobs: str) -> None:
    for job in jobs:
        while (await service.get(job)).num_done < (await service.get(job)).num_lines:
            await asyncio.sleep(0)


def test_large_jobs_that_end_together_hold_up_no_line(harness: BatchHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their files are not written before another job has run all of its lines."""
    real, go_on = StorageFile.write, threading.Event()

    def write(file: StorageFile, piece: bytes) -> None:
        go_on.wait()
        real(file, piece)

    monkeypatch.setattr(StorageFile, "write", write)

    async def scenario() -> None:
        service = harness.service()
        large = [await _submit(service, requests(30)) for _ in range(NUM_LARGE)]
        async with harness.running(harness.runner()), _set_at_exit(go_on):
            await _wait_until_done(service, *large)
            other = await _submit(service, requests(600))
            async with asyncio.timeout(60):
                await _wait_until_done(service, other)
            states = [(await service.get(job)).state for job in [*large, other]]
            assert states == [JobState.RUNNING] * (NUM_LARGE + 1), "no file was written"
            go_on.set()
            assert [len(await all_results(service, job)) for job in [*large, other]] == [30] * NUM_LARGE + [600]

    asyncio.run(scenario())


def test_a_small_job_does_not_wait_for_the_files_of_large_ones(harness: BatchHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """All ask for the thread before its first page is written; then each has a page in turn."""
    monkeypatch.setattr(outcomes, "RESULTS_AT_ONCE", 1)
    real, go_on, log = _ResultFiles.write_page, threading.Event(), list[tuple[str, bool]]()

    def write_page(files: _ResultFiles) -> bool:
        go_on.wait()
        has_more = real(files)
        log.append((files._claim.job_id, has_more))
        return has_more

    monkeypatch.setattr(_ResultFiles, "write_page", write_page)

    async def scenario() -> None:
        service, runner, asked = harness.service(), harness.runner(), set[object]()
        run = runner._file_thread.run

        async def counted(call: Any, *arguments: Any) -> Any:  # noqa: ANN401
            asked.add(call.__self__)
            if len(asked) == NUM_LARGE + 1:
                go_on.set()
            return await run(call, *arguments)

        runner._file_thread.run = counted  # type: ignore[method-assign, assignment]
        large = [await _submit(service, requests(20)) for _ in range(NUM_LARGE)]
        small = await _submit(service, requests(2))
        async with harness.running(runner), _set_at_exit(go_on), asyncio.timeout(60):
            for job in [*large, small]:
                async for _ in service.watch(job):
                    pass
        assert len(log) == NUM_LARGE * 21 + 3
        assert log.index((small, False)) <= 3 * (NUM_LARGE + 1)

    asyncio.run(scenario())


def test_pages_make_whole_files(harness: BatchHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers in one, errors in the other, in order; and the store that fails between pages leaves nothing of an attempt."""
    monkeypatch.setattr(outcomes, "RESULTS_AT_ONCE", 3)
    real, num_failed = StorageFile.write, 0

    def write(file: StorageFile, piece: bytes) -> None:
        nonlocal num_failed
        if num_failed < 3 and b'"r7"' in piece:
            num_failed += 1
            raise JobStoreError("no space left on device")
        real(file, piece)

    monkeypatch.setattr(StorageFile, "write", write)

    async def scenario() -> None:
        service = harness.service()
        lines = b"".join(request(f"r{i}", i) if i % 3 else b"nonsense\n" for i in range(20))
        job = await _submit(service, lines)
        async with harness.running(harness.runner()):
            async for _ in service.watch(job):
                pass
        ended = await service.get_stored(job)
        for file_id, numbers in (
            (ended.output_file, [i for i in range(20) if i % 3]),
            (ended.error_file, [i for i in range(20) if not i % 3]),
        ):
            assert file_id is not None
            content = b"".join([piece async for piece in await service.content(file_id)])
            assert (await service.file(file_id)).num_bytes == len(content)
            found = [json.loads(line) for line in content.splitlines()]
            assert [int(line["id"].rpartition("_")[2]) - 1 for line in found] == numbers
        assert num_failed == 3
        assert len(list(Path(harness.storage).rglob("*.jsonl"))) == 2
        with service._database.reading() as connection:
            assert connection.exec_driver_sql("SELECT count(*) FROM tramontane_files").scalar() == 2

    asyncio.run(scenario())


def test_results_are_no_input_of_another_job(harness: BatchHarness) -> None:
    async def scenario() -> None:
        service = harness.service()
        output = await service.upload("out.jsonl", "batch_output", iter([requests(1)]))
        with pytest.raises(JobRefusedError, match=f"{output.file_id} was not uploaded with purpose batch"):
            await service.submit_file(output.file_id, JobOptions())
        assert await service.list(9) == []

    asyncio.run(scenario())


def test_a_runner_that_stops_does_not_finish_a_file_first(harness: BatchHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends after the page at hand, and what it has written is deleted."""
    monkeypatch.setattr(outcomes, "RESULTS_AT_ONCE", 1)
    real, num_pages = _ResultFiles.write_page, 0
    begun = asyncio.Event()

    async def scenario() -> None:
        loop = asyncio.get_running_loop()

        def write_page(files: _ResultFiles) -> bool:
            nonlocal num_pages
            num_pages += 1
            loop.call_soon_threadsafe(begun.set)
            return real(files)

        monkeypatch.setattr(_ResultFiles, "write_page", write_page)
        service = harness.service()
        job = await _submit(service, requests(1000))
        async with harness.running(harness.runner(concurrency=64)):
            await begun.wait()
        assert num_pages < 1000
        assert (await service.get(job)).state == JobState.RUNNING
        assert list(Path(harness.storage).rglob("*.jsonl")) == []
        monkeypatch.setattr(outcomes, "RESULTS_AT_ONCE", 1000)
        async with harness.running(harness.runner()):
            async for _ in service.watch(job):
                pass
        assert len(await service.list_files(9)) == 1

    asyncio.run(scenario())
