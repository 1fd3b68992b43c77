"""Result files: written by a thread of their own, a page of each job in turn."""

import asyncio
import json
import os
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from batch_fixtures import sqlite_harness
from batch_jobs import LIMITS, BatchHarness, all_results, pieces, request, requests
from event_loops import in_event_loop

from tramontane.proto.errors import JobRefusedError, JobStoreError
from tramontane.proto.jobs import JobOptions, JobState
from tramontane.router.batch import outcomes
from tramontane.router.batch import service as batch_service
from tramontane.router.batch.claims import Claim, Outcome
from tramontane.router.batch.database import JobThreadPool
from tramontane.router.batch.files import FileRecord, JobStorage, StorageFile
from tramontane.router.batch.outcomes import OutcomeWriter, _ResultFiles
from tramontane.router.batch.service import BatchService
from tramontane.router.batch.store import StoredJob, StoredResult

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


@in_event_loop
async def test_large_jobs_that_end_together_hold_up_no_line(
    harness: BatchHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their files are not written before another job has run all of its lines."""
    real, go_on = StorageFile.write, threading.Event()

    def write(file: StorageFile, piece: bytes) -> None:
        go_on.wait()
        real(file, piece)

    monkeypatch.setattr(StorageFile, "write", write)

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
        assert [len(await all_results(service, job)) for job in [*large, other]] == [
            30
        ] * NUM_LARGE + [600]


@in_event_loop
async def test_a_small_job_does_not_wait_for_the_files_of_large_ones(
    harness: BatchHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ask for the thread before its first page is written; then each has a page in turn."""
    monkeypatch.setattr(outcomes, "RESULTS_AT_ONCE", 1)
    real, go_on, log = _ResultFiles.write_page, threading.Event(), list[tuple[str, bool]]()

    def write_page(files: _ResultFiles) -> bool:
        go_on.wait()
        has_more = real(files)
        log.append((files._claim.job_id, has_more))
        return has_more

    monkeypatch.setattr(_ResultFiles, "write_page", write_page)

    service, runner, asked = harness.service(), harness.runner(), set[object]()
    run = runner._file_thread.run

    async def counted(call: Any, *arguments: Any) -> Any:
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


@in_event_loop
async def test_pages_make_whole_files(
    harness: BatchHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers in one, errors in the other, in order; and the store that fails between pages leaves
    nothing of an attempt.
    """
    monkeypatch.setattr(outcomes, "RESULTS_AT_ONCE", 3)
    real, num_failed = StorageFile.write, 0

    def write(file: StorageFile, piece: bytes) -> None:
        nonlocal num_failed
        if num_failed < 3 and b'"r7"' in piece:
            num_failed += 1
            raise JobStoreError("no space left on device")
        real(file, piece)

    monkeypatch.setattr(StorageFile, "write", write)

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


@pytest.mark.parametrize(
    ("num_lines", "size", "pages"), [(1001, 2, [1000, 1, 0]), (9, 2**20, [8, 1, 0])]
)
@in_event_loop
async def test_a_page_has_1000_results_or_8_mebibytes(
    harness: BatchHarness, num_lines: int, size: int, pages: list[int]
) -> None:
    service, claims, threads, read = (
        harness.service(),
        harness.claims(),
        JobThreadPool(1),
        list[int](),
    )
    await _submit(service, requests(num_lines))
    (claim,) = claims.claim(1)
    body = json.dumps("x" * (size - 2))
    claims.finish(claim, [Outcome(place, False, 200, body) for place in range(num_lines)])
    real = claims.results

    def results(claim: Claim, offset: int, limit: int) -> Sequence[StoredResult]:
        found = real(claim, offset, limit)
        read.append(len(found))
        return found

    claims.results = results  # type: ignore[method-assign]
    storage = JobStorage(harness.storage)
    output, errors = await outcomes.write_result_files(
        claims, storage, claim, asyncio.sleep, threads
    )
    threads.close()
    assert (output is None, errors) == (False, None)
    assert read == pages


@in_event_loop
async def test_500_outcomes_are_written_at_once(harness: BatchHarness) -> None:
    """In one transaction, for which other writers wait."""
    service, claims, threads, written = (
        harness.service(),
        harness.claims(),
        JobThreadPool(1),
        list[int](),
    )
    job = await _submit(service, requests(501))
    (claim,) = claims.claim(1)
    real = claims.finish

    def finish(claim: Claim, ready: Sequence[Outcome]) -> None:
        written.append(len(ready))
        real(claim, ready)

    claims.finish = finish  # type: ignore[method-assign]
    writer = OutcomeWriter(claims, asyncio.sleep, threads)
    writes = [
        asyncio.ensure_future(writer.write(claim, Outcome(place, False, 200, "{}")))
        for place in range(501)
    ]
    await asyncio.sleep(0)
    running = asyncio.create_task(writer.run())
    await asyncio.gather(*writes)
    running.cancel()
    threads.close()
    assert written == [500, 1]
    assert (await service.get(job)).num_done == 501


@in_event_loop
async def test_outcomes_of_several_jobs_that_are_ready_at_once_are_written_to_each(
    harness: BatchHarness,
) -> None:
    service, claims, threads = harness.service(), harness.claims(), JobThreadPool(1)
    jobs = [await _submit(service, requests(2)) for _ in range(2)]
    writer, held = OutcomeWriter(claims, asyncio.sleep, threads), claims.claim(2)
    outcomes = [
        (claim, Outcome(place, False, 200, json.dumps(claim.job_id)))
        for place in range(2)
        for claim in held
    ]
    writes = [asyncio.ensure_future(writer.write(*each)) for each in outcomes]
    await asyncio.sleep(0)
    running = asyncio.create_task(writer.run())
    await asyncio.gather(*writes)
    running.cancel()
    threads.close()
    for job in jobs:
        results = service._jobs.results(service._jobs.get(job), 0, 9)
        assert [json.loads(result.line.body) for result in results] == [job, job]


@pytest.mark.parametrize(
    ("num_lines", "size", "pages"), [(501, 2, [500, 1, 0]), (5, 2**17, [2, 2, 1, 0])]
)
@in_event_loop
async def test_a_stream_holds_500_results_or_256_kibibytes(
    harness: BatchHarness, num_lines: int, size: int, pages: list[int]
) -> None:
    """While its reader is slow."""
    service, claims, read = harness.service(), harness.claims(), list[int]()
    job = await _submit(service, requests(num_lines))
    (claim,) = claims.claim(1)
    body = json.dumps("x" * (size - 2))
    claims.finish(claim, [Outcome(place, False, 200, body) for place in range(num_lines)])
    claims.end(claim, JobState.COMPLETED, None, None)
    real = service._jobs.results

    def results(job: StoredJob, *arguments: int) -> Sequence[StoredResult]:
        found = real(job, *arguments)
        read.append(len(found))
        return found

    service._jobs.results = results  # type: ignore[method-assign, assignment]
    assert [line.offset for line in await all_results(service, job)] == list(range(num_lines))
    assert read == pages


@in_event_loop
async def test_a_stream_waits_only_when_there_are_no_results(
    harness: BatchHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each time for half a second: it queries the database."""
    service, claims, slept, real = (
        harness.service(),
        harness.claims(),
        list[float](),
        asyncio.sleep,
    )
    service._poll_s = batch_service.POLL_INTERVAL_S
    job = await _submit(service, requests(2))
    (claim,) = claims.claim(1)
    claims.finish(claim, [Outcome(0, False, 200, "{}")])

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        claims.finish(claim, [Outcome(1, False, 200, "{}")])
        claims.end(claim, JobState.COMPLETED, None, None)
        await real(0)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    assert len(await all_results(service, job)) == 2
    assert slept == [0.5]


@in_event_loop
async def test_a_file_that_is_withdrawn_takes_no_other_with_it(harness: BatchHarness) -> None:
    service, claims = harness.service(), harness.claims()
    upload = await service.upload("in.jsonl", "batch", iter([requests(1)]))
    await _submit(service, requests(1))
    (claim,) = claims.claim(1)
    result = FileRecord.new("out.jsonl", "batch_output", 0.0)
    claims.announce_file(claim, result)
    claims.withdraw_file(result)
    with service._database.reading() as connection:
        assert connection.exec_driver_sql(
            "SELECT file_id FROM tramontane_files"
        ).scalars().all() == [upload.file_id]


@in_event_loop
async def test_a_file_is_read_a_mebibyte_at_a_time(harness: BatchHarness) -> None:
    service = harness.service(limits=replace(LIMITS, max_bytes=2**22))
    file = await service.upload("in.jsonl", "batch", iter([b"x" * (2**21 + 1)]))
    assert [len(piece) async for piece in await service.content(file.file_id)] == [2**20, 2**20, 1]


def test_a_local_file_that_is_complete_survives_a_loss_of_power(
    harness: BatchHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of its bytes are with the disk before anyone knows of them. A storage elsewhere has no
    disk here.
    """
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_size))
    assert JobStorage(harness.storage).write("batch/a", iter([b"x" * 3000, b"y"])) == 3001
    assert synced == [3001]
    JobStorage("memory://elsewhere").write("batch/a", iter([b"x"]))
    assert len(synced) == 1


@in_event_loop
async def test_results_are_no_input_of_another_job(harness: BatchHarness) -> None:
    service = harness.service()
    output = await service.upload("out.jsonl", "batch_output", iter([requests(1)]))
    with pytest.raises(
        JobRefusedError, match=f"{output.file_id} was not uploaded with purpose batch"
    ):
        await service.submit_file(output.file_id, JobOptions())
    assert await service.list(9) == []


@in_event_loop
async def test_a_runner_that_stops_does_not_finish_a_file_first(
    harness: BatchHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends after the page at hand, and what it has written is deleted."""
    monkeypatch.setattr(outcomes, "RESULTS_AT_ONCE", 1)
    real, num_pages = _ResultFiles.write_page, 0
    begun = asyncio.Event()

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
