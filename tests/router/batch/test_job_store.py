"""The store of batch jobs, on SQLite and on PostgreSQL: leases, fences, and lines that end once."""

import asyncio
import json
import multiprocessing
import os
import random
import stat
import threading
import time
import traceback
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import psycopg
import pytest
from batch_jobs import (
    LIMITS,
    BatchHarness,
    all_results,
    echo,
    new_batch_harness,
    pieces,
    request,
    requests,
    run_until_killed,
)
from event_loops import in_event_loop
from postgres import new_database
from sqlalchemy import event, select, text
from sqlalchemy.exc import SQLAlchemyError

from tramontane.proto.errors import ConfigError, JobStoreError, RequestError, UnknownJobError
from tramontane.proto.jobs import Job, JobOptions, JobState
from tramontane.router.batch import database as batch_database
from tramontane.router.batch.claims import JOB_LEASE_S, JobClaimStore, JobLostError, Outcome
from tramontane.router.batch.database import Database, lines
from tramontane.router.batch.input_lines import ParsedLine
from tramontane.router.batch.service import BatchService
from tramontane.router.batch.urls import UrlReader


@pytest.fixture(params=["sqlite", "postgresql"])
def harness(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[BatchHarness]:
    """Results are on disk, or in the memory of this process."""
    harness = new_batch_harness(tmp_path) if request.param == "sqlite" else _on_postgres(request)
    yield harness
    harness.close()


def _on_postgres(request: pytest.FixtureRequest) -> BatchHarness:
    """In a database of its own."""
    url = new_database(request.getfixturevalue("postgres_url"))
    return BatchHarness(url, f"memory://jobs-{uuid.uuid4().hex}")


_PRAGMAS = {"journal_mode": "wal", "synchronous": 2, "journal_size_limit": 64 * 2**20}


def _submitted(
    harness: BatchHarness, count: int, keeps_order: bool = True
) -> tuple[BatchService, Job]:
    service = harness.service()
    return service, asyncio.run(
        service.submit(pieces(requests(count)), JobOptions(keeps_order=keeps_order))
    )


def _stored_results(service: BatchService, job: Job) -> list[tuple[int, int, str]]:
    stored = service._jobs.get(job.job_id)
    return [
        (each.line.offset, each.line.line, each.line.body)
        for each in service._jobs.results(stored, 0, 100)
    ]


def _done(*places: int, said: str = "{}") -> list[Outcome]:
    return [Outcome(place, False, 200, said) for place in places]


@pytest.mark.parametrize("keeps_order", [True, False])
def test_a_line_ends_by_its_first_outcome(harness: BatchHarness, keeps_order: bool) -> None:
    service, job = _submitted(harness, 4, keeps_order)
    claims = harness.claims()
    (claim,) = claims.claim(5)
    assert [line.place for line in claims.next_lines(claim, 0, 2)] == [1, 2]
    claims.finish(claim, _done(2, 0))
    claims.finish(claim, [*_done(0, 2, 3, said='"another"'), Outcome(1, True, 400, "{}")])
    now = service._jobs.get(job.job_id).job
    assert (now.num_done, now.num_failed) == (3, 1)
    assert claims.next_lines(claim, -1, 5) == []
    by_line = {line: body for _, line, body in _stored_results(service, job)}
    assert by_line == {1: "{}", 2: "{}", 3: "{}", 4: '"another"'}
    assert [offset for offset, *_ in _stored_results(service, job)] == [0, 1, 2, 3]
    assert [line for _, line, _ in _stored_results(service, job)] == (
        [1, 2, 3, 4] if keeps_order else [3, 1, 4, 2]
    )


def test_a_lease_is_anothers_once_it_has_lapsed_and_fences_the_first(harness: BatchHarness) -> None:
    service, job = _submitted(harness, 3)
    first, second = harness.claims(), harness.claims()
    (old,) = first.claim(5)
    assert second.claim(5) == first.claim(5) == []
    harness.clock.now += 0.9 * JOB_LEASE_S
    assert first.claimed([old.number], renew=True) == {old.number: (old.epoch, JobState.RUNNING)}
    assert second.claim(5) == [], "it was renewed"
    harness.clock.now += 0.9 * JOB_LEASE_S
    assert second.claim(5) == []
    harness.clock.now += 0.1 * JOB_LEASE_S
    assert second.claim(5) == [], "it ends now"
    harness.clock.now += 0.1 * JOB_LEASE_S
    (new,) = second.claim(5)
    assert new.epoch == old.epoch + 1
    assert service._jobs.get(job.job_id).job.started_at == job.created_at, "by the first"
    assert first.claimed([old.number], renew=True) == {}
    for write in (
        lambda: first.finish(old, _done(0)),
        lambda: first.cancel_some(old, -1),
        lambda: first.end(old, JobState.FAILED, None, None),
    ):
        with pytest.raises(JobLostError):
            write()
    first.release(old)
    assert second.claimed([new.number], renew=False) == {new.number: (new.epoch, JobState.RUNNING)}
    assert len(second.next_lines(new, -1, 5)) == 3
    second.release(new)
    (again,) = first.claim(5)
    assert again.epoch == new.epoch + 1
    with pytest.raises(JobLostError):  # of the same runner, but of another time
        first.finish(old, _done(0))
    assert service._jobs.get(job.job_id).job.num_done == 0


def test_jobs_are_claimed_and_listed_by_age(harness: BatchHarness) -> None:
    async def submitted() -> list[str]:
        service = harness.service()
        return [
            (
                await service.submit(pieces(request("a", 1)), JobOptions(metadata={"n": str(n)}))
            ).job_id
            for n in range(5)
        ]

    ids = asyncio.run(submitted())
    assert [claim.job_id for claim in harness.claims().claim(2)] == ids[:2]
    assert [claim.job_id for claim in harness.claims().claim(9)] == ids[2:]
    service = harness.service()
    listed = asyncio.run(service.list(3))
    assert [job.job_id for job in listed] == ids[:1:-1]
    assert [job.options.metadata for job in asyncio.run(service.list(9, ids[2]))] == [
        {"n": "1"},
        {"n": "0"},
    ]
    with pytest.raises(UnknownJobError):
        asyncio.run(service.list(3, "batch_unknown"))


def _rows(service: BatchService) -> tuple[int, int]:
    """How many jobs and lines there are, those included that no client sees."""
    with service._database.reading() as connection:
        jobs, lines = [
            connection.exec_driver_sql(f"SELECT count(*) FROM tramontane_{t}").scalar_one()
            for t in ("jobs", "lines")
        ]
    return jobs, lines


@pytest.mark.parametrize(
    ("step", "is_late", "left"),
    [
        ("create", True, (0, 0)),
        ("create", False, (0, 0)),
        ("accept", True, (0, 0)),
        ("accept", False, (1, 5)),
    ],
)
@in_event_loop
async def test_a_client_that_leaves_while_the_database_works(
    harness: BatchHarness, step: str, is_late: bool, left: tuple[int, int]
) -> None:
    """The thread continues, and writes before that is noticed or after. A job has all of its lines
    or is not there.
    """
    service = harness.service()
    work, there, go_on = (getattr(service._submissions, step), threading.Event(), threading.Event())

    def defer_signals(*arguments: Any) -> Any:
        done = None if is_late else work(*arguments)
        there.set()
        go_on.wait()
        return work(*arguments) if is_late else done

    setattr(service._submissions, step, defer_signals)
    client = asyncio.create_task(service.submit(pieces(requests(5)), JobOptions()))
    await asyncio.to_thread(there.wait)
    client.cancel()
    if step == "accept":  # what it left is removed at the same time
        await asyncio.wait([client])
    else:
        await asyncio.wait([client], timeout=0)
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await client
    await asyncio.to_thread(service._threads.close)
    assert _rows(service) == left
    assert [claim.epoch for claim in harness.claims().claim(5)] == [1] * left[0]


def test_a_submission_that_is_discarded_half_way_is_removed_and_one_that_continued_stays(
    harness: BatchHarness,
) -> None:
    service = harness.service()
    store = service._submissions
    line = ParsedLine(1, "a", "{}", None)
    slow, half = (
        store.create(JobOptions(), request_key="slow"),
        store.create(JobOptions(), request_key="half"),
    )
    store.add_lines(half, 0, [line])
    harness.clock.now += 10
    store.add_lines(slow, 0, [line])
    for job in (slow, half):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(store, "_delete", lambda _number: None)  # as if killed there
            store.delete(job.number, touched_at=harness.clock.now - 10)
    for change in (lambda: store.accept(half), lambda: store.add_lines(half, 1, [line])):
        with pytest.raises(RequestError, match="made no progress"):
            change()
    assert (service._jobs.list(5), store.find_by_request_key("half")) == ([], None)
    assert _rows(service) == (2, 2)
    store.delete_abandoned()
    assert _rows(service) == (1, 1)
    assert store.accept(slow).job.num_lines == 1


def test_numbers_of_jobs_are_not_used_again(harness: BatchHarness) -> None:
    """A process may still add lines to a job that was deleted."""
    store = harness.service()._submissions
    first = store.create(JobOptions())
    store.delete(first.number)
    second = store.create(JobOptions())
    assert second.number > first.number
    with pytest.raises(RequestError, match="made no progress"):
        store.add_lines(first, 0, [ParsedLine(1, "a", "{}", None)])


@in_event_loop
async def test_a_client_that_leaves_twice_leaves_nothing(harness: BatchHarness) -> None:
    """Its request is cancelled again while what it left is being deleted, as by a server that
    stops.
    """
    service, there, go_on, gone = (
        harness.service(),
        threading.Event(),
        threading.Event(),
        threading.Event(),
    )
    create, delete = service._submissions.create, service._submissions.delete

    def slow_create(*arguments: Any) -> Any:
        there.set()
        go_on.wait()
        return create(*arguments)

    def noted_delete(*arguments: Any) -> None:
        delete(*arguments)
        gone.set()

    service._submissions.create = slow_create  # type: ignore[method-assign]
    service._submissions.delete = noted_delete  # type: ignore[method-assign]
    client = asyncio.create_task(service.submit(pieces(requests(5)), JobOptions()))
    await asyncio.to_thread(there.wait)
    for _ in range(2):
        client.cancel()
        await asyncio.wait([client], timeout=0)
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await client
    assert await asyncio.to_thread(gone.wait, 20), "it is deleted all the same"
    assert _rows(service) == (0, 0)


@pytest.mark.parametrize("keeps_order", [True, False])
@pytest.mark.parametrize("num_between", [0, 1100], ids=["in one transaction", "in two"])
def test_the_first_line_that_is_valid_has_the_custom_id(
    harness: BatchHarness, keeps_order: bool, num_between: int
) -> None:
    """Invalid ones before it do not take it away, and valid ones behind it do not get it."""
    between = b"".join(request(f"b{i}", i) for i in range(num_between))
    bad, good = request("a", 1, method="GET"), request("a", 2)
    text = between.join([bad + bad + good + bad, good + good + bad])

    async def scenario() -> None:
        service = harness.service()
        job = await service.submit(pieces(text), JobOptions(keeps_order=keeps_order))
        assert (job.num_lines, job.num_invalid, job.num_failed) == (7 + num_between, 6, 6)
        harness.clock.now += 1
        async with harness.running(harness.runner()):
            results = await all_results(service, job.job_id)
        last = num_between + 5
        bad = {line.line: json.loads(line.body)["message"] for line in results if line.is_error}
        assert sorted(bad) == [1, 2, 4, last, last + 1, last + 2]
        assert [line.line for line in results if line.custom_id == "a" and not line.is_error] == [3]
        for line in (last, last + 1):
            assert bad[line] == f"line {line}: its custom_id is that of an earlier line"
        assert {line.custom_id for line in results if line.is_error} == {"a"}
        assert [line.offset for line in results] == list(range(7 + num_between))

    asyncio.run(scenario())


def test_a_page_of_results_is_bounded_in_characters(harness: BatchHarness) -> None:
    """It has one result at least, however long that is."""
    service, job = _submitted(harness, 4)
    claims = harness.claims()
    (claim,) = claims.claim(1)
    claims.finish(claim, _done(0, 1, 2, 3, said=json.dumps("x" * 98)))
    stored = service._jobs.get(job.job_id)
    for max_chars, num_results in ((1, 1), (100, 1), (199, 1), (200, 2), (399, 3), (400, 4)):
        assert len(service._jobs.results(stored, 0, 100, max_chars)) == num_results
    assert [result.line.offset for result in service._jobs.results(stored, 1, 100, 200)] == [1, 2]
    assert len(service._jobs.results(stored, 0, 100)) == 4, (
        "where no bound is given there is room for short ones"
    )


def test_a_page_of_lines_is_bounded_in_bytes(harness: BatchHarness) -> None:
    """It has one line at least, however long that is."""
    service = harness.service()
    text = b"".join(request(str(i), "x" * 500 * (i + 1)) for i in range(3)) + requests(5)
    asyncio.run(service.submit(pieces(text), JobOptions()))
    claims = harness.claims()
    (claim,) = claims.claim(1)
    sizes = [len(line) for line in text.splitlines()]
    for most, num_lines in (
        (1, 1),
        (sizes[0], 1),
        (sum(sizes[:2]), 2),
        (sum(sizes[:2]) + 1, 2),
        (sum(sizes), 8),
    ):
        assert len(claims.next_lines(claim, -1, 100, most)) == num_lines
    assert [line.place for line in claims.next_lines(claim, 1, 100, sizes[2] + sizes[3])] == [2, 3]


def _large(harness: BatchHarness, count: int, num_bytes: int) -> BatchService:
    """Return the service of a job with lines of this size."""
    size = num_bytes - len(request("0", "").strip())
    text = b"".join(request(str(number), "x" * size) for number in range(count))
    service = harness.service(limits=replace(LIMITS, max_line_bytes=2**20, max_bytes=2**24))
    asyncio.run(service.submit(pieces(text, 2**20), JobOptions()))
    return service


def test_pages_have_4_mebibytes_of_lines_and_8_of_results(harness: BatchHarness) -> None:
    """Where their readers give no other bound."""
    _large(harness, 9, 2**20)
    claims = harness.claims()
    (claim,) = claims.claim(1)
    assert len(claims.next_lines(claim, -1, 100)) == 4
    claims.finish(claim, [Outcome(place, False, 200, "x" * 2**20) for place in range(9)])
    assert len(claims.results(claim, 0, 100)) == 8


def test_5000_lines_are_cancelled_at_once(harness: BatchHarness) -> None:
    """In one transaction, for which other writers wait; those behind a line if it is given."""
    service = harness.service(limits=replace(LIMITS, max_lines=5002))
    asyncio.run(service.submit(pieces(requests(5002)), JobOptions()))
    claims = harness.claims()
    (claim,) = claims.claim(1)
    assert [claims.cancel_some(claim, after) for after in (5000, -1, 4999, 5001)] == [
        5001,
        4999,
        5000,
        None,
    ]


def test_10000_lines_are_deleted_at_once(harness: BatchHarness) -> None:
    """In one transaction, and others write in between."""
    service, num_deleted = harness.service(), list[int]()
    job = service._submissions.create(JobOptions())
    for first in range(0, 10_001, 1000):
        new = [ParsedLine(1, None, None, "invalid") for _ in range(min(1000, 10_001 - first))]
        service._submissions.add_lines(job, first, new)

    def note(_connection: object, cursor: Any, statement: str, *_: object) -> None:
        if statement.startswith("DELETE FROM tramontane_lines"):
            num_deleted.append(cursor.rowcount)

    event.listen(service._database._get_engine(), "after_cursor_execute", note)
    service._submissions.delete(job.number)
    assert num_deleted == [10_000, 1, 0]
    assert _rows(service) == (0, 0)


def test_a_runner_does_not_wait_for_jobs_that_others_hold_up(
    request: pytest.FixtureRequest,
) -> None:
    """As PostgreSQL's row locks do."""
    harness = _on_postgres(request)
    _submitted(harness, 1)
    _, free = _submitted(harness, 1)
    claims = JobClaimStore(
        Database(f"{harness.database}&options=-c lock_timeout=1"), "tiny", harness.clock
    )
    with psycopg.connect(harness.database) as connection:
        connection.execute("SELECT * FROM tramontane_jobs WHERE number = 1 FOR UPDATE")
        assert [claim.job_id for claim in claims.claim(5)] == [free.job_id]
    claims._database.close()
    harness.close()


def test_rows_of_postgresql_are_fetched_64_at_a_time(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row may have megabytes, and most readers do not need all."""
    harness = _on_postgres(request)
    service, _ = _submitted(harness, 200)
    real, sizes = psycopg.ServerCursor.fetchmany, list[int]()

    def fetchmany(cursor: Any, size: int = 0) -> Any:
        sizes.append(size)
        return real(cursor, size)

    monkeypatch.setattr(psycopg.ServerCursor, "fetchmany", fetchmany)
    with service._database.stream_rows(select(lines)) as rows:
        assert len(list(rows)) == 200
    assert max(sizes) == 64
    harness.close()


def test_servers_of_all_versions_create_the_tables_one_at_a_time(
    request: pytest.FixtureRequest,
) -> None:
    """They wait for the same lock of PostgreSQL, whose number therefore stays."""
    harness = _on_postgres(request)
    database, waiting = Database(harness.database), 0
    with psycopg.connect(harness.database, autocommit=True) as connection:
        connection.execute("SELECT pg_advisory_lock(7408224)")
        thread = threading.Thread(target=database.read, args=(select(lines),))
        thread.start()
        while thread.is_alive() and not waiting:
            found = connection.execute(
                "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
            ).fetchone()
            assert found is not None
            (waiting,) = found
    thread.join()
    assert waiting == 1
    database.close()


def test_only_the_user_can_read_the_folder_of_the_database(tmp_path: Path) -> None:
    """Which is made with those above it; prompts are private."""
    before = os.umask(0)
    try:
        for _ in range(2):
            with (
                closing(Database(f"sqlite:///{tmp_path}/a/b/jobs.sqlite")) as database,
                database.writing(),
            ):
                pass
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a" / "b").stat().st_mode) == 0o700


def test_sqlite_has_one_writer_from_its_begin_and_readers_hold_it_up_in_no_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_database, "SQLITE_BUSY_TIMEOUT_S", 0.0)
    url = f"sqlite:///{tmp_path}/jobs.sqlite"
    with closing(Database(url)) as first, closing(Database(url)) as second:
        with first.writing(), first.stream_rows(select(lines)):
            pass
        with (
            first.writing(),
            pytest.raises(JobStoreError, match="database is locked"),
            second.writing(),
        ):
            pass
        with first.stream_rows(select(lines)), second.writing():
            pass


def test_what_sqlite_has_committed_survives_a_loss_of_power(tmp_path: Path) -> None:
    """And its log does not stay large."""
    with (
        closing(Database(f"sqlite:///{tmp_path}/jobs.sqlite")) as database,
        database.reading() as connection,
    ):
        found = [connection.exec_driver_sql(f"PRAGMA {name}").scalar() for name in _PRAGMAS]
    assert dict(zip(_PRAGMAS, found, strict=True)) == _PRAGMAS


@in_event_loop
async def test_two_runners_at_once_end_every_line_once(harness: BatchHarness) -> None:
    """Leases lapse all the time, so both believe that each other's jobs are theirs to take."""
    runs: Counter[int] = Counter()

    async def answer(_endpoint: str, body: dict[str, Any], _tenant: str = "") -> dict[str, Any]:
        runs[body["prompt"]] += 1
        if random.random() < 0.05:
            harness.clock.now += 2 * JOB_LEASE_S
        return {"said": body["prompt"], "run": runs[body["prompt"]]}

    service = harness.service()
    job = await service.submit(pieces(requests(40)), JobOptions(keeps_order=False))
    async with harness.running(harness.runner(answer)), harness.running(harness.runner(answer)):
        results = await all_results(service, job.job_id)
    assert [line.offset for line in results] == list(range(40))
    assert sorted(line.line for line in results) == list(range(1, 41))
    assert all(json.loads(line.body)["said"] == line.line - 1 for line in results)
    ended = await service.get_stored(job.job_id)
    assert (ended.job.state, ended.job.num_done, ended.job.num_failed) == (
        JobState.COMPLETED,
        40,
        0,
    )
    assert ended.error_file is None
    assert ended.output_file is not None
    output = b"".join([piece async for piece in await service.content(ended.output_file)])
    assert sorted(json.loads(line)["custom_id"] for line in output.splitlines()) == sorted(
        f"r{i}" for i in range(40)
    )


@in_event_loop
async def test_files_are_kept_bounded_and_listed(harness: BatchHarness) -> None:
    service = harness.service()
    made = [await service.upload(f"{n}.jsonl", "batch", iter([b"a" * n, b"b"])) for n in range(4)]
    assert [file.num_bytes for file in made] == [1, 2, 3, 4]
    with pytest.raises(RequestError, match="larger"):
        await service.upload("x", "batch", iter([b"x" * 2**20, b"x"]))
    largest = await service.upload("x", "batch", iter([b"x" * 2**20]))
    await service.delete_file(largest.file_id)
    ids = [file.file_id for file in made]
    assert [file.file_id for file in await service.list_files(9)] == ids[::-1]
    assert [
        file.file_id for file in await service.list_files(2, ids[1], newest_first=False)
    ] == ids[2:]
    assert [file.file_id for file in await service.list_files(9, ids[2])] == ids[1::-1]
    assert await service.list_files(9, purpose="batch_output") == []
    assert b"".join([piece async for piece in await service.content(ids[2])]) == b"aab"
    await service.delete_file(ids[2])
    for removed in (service.file(ids[2]), service.content(ids[2]), service.delete_file(ids[2])):
        with pytest.raises(RequestError):
            await removed


@in_event_loop
async def test_what_ended_long_ago_is_removed_with_its_lines_and_files(
    harness: BatchHarness,
) -> None:
    """And what has not ended stays, however old it is."""
    service = harness.service(keep_s=1000.0)
    upload = await service.upload("in.jsonl", "batch", iter([requests(3)]))
    done = await service.submit_file(upload.file_id, JobOptions(), "k")
    async with harness.running(harness.runner()):
        await all_results(service, done.job.job_id)
        async for _ in service.watch(done.job.job_id):
            pass
    bad = await service.submit(pieces(b"x\n"), JobOptions())
    ended = await service.get_stored(done.job.job_id)
    assert ended.output_file is not None
    harness.clock.now += 1000
    waiting = await service.submit(pieces(requests(2)), JobOptions())
    await service.collect_garbage()
    assert len(await service.list(9)) == 3, "it is not late yet"
    assert len(await service.list_files(9)) == 2
    harness.clock.now += 1
    await service.collect_garbage()
    assert [job.job_id for job in await service.list(9)] == [waiting.job_id]
    assert _rows(service) == (1, 2)
    assert await service.list_files(9) == []
    for removed in (
        service.get(done.job.job_id),
        service.get(bad.job_id),
        service.content(ended.output_file),
    ):
        with pytest.raises(RequestError):
            await removed
    keeping_all = harness.service()
    harness.clock.now += 1e9
    await keeping_all.collect_garbage()
    async with harness.running(harness.runner()):
        assert len(await all_results(service, waiting.job_id)) == 2
    again = await service.upload("in.jsonl", "batch", iter([requests(3)]))
    assert (
        await service.submit_file(again.file_id, JobOptions(), "k")
    ).job.job_id != done.job.job_id


def test_a_removal_that_was_killed_half_way_is_finished(harness: BatchHarness) -> None:
    service, job = _submitted(harness, 3)
    asyncio.run(service.cancel(job.job_id))
    claims = harness.claims()
    (claim,) = claims.claim(1)
    claims.end(claim, JobState.CANCELLED, None, None)
    harness.clock.now += 10
    late = harness.service(keep_s=5.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(late._submissions, "_delete", lambda _number: None)  # as if killed there
        asyncio.run(late.collect_garbage())
    assert asyncio.run(service.list(5)) == []
    assert _rows(service) == (1, 3)
    asyncio.run(service.collect_garbage())
    assert _rows(service) == (0, 0)


def test_only_allowed_urls_are_read(tmp_path: Path) -> None:
    allowed, secret = tmp_path / "in", tmp_path / "inner-secret"
    allowed.mkdir()
    (allowed / "a.jsonl").write_bytes(b"hello")
    secret.write_text("secret")
    (allowed / "link").symlink_to(secret)

    async def read(url: str, *prefixes: str) -> bytes:
        return b"".join([piece async for piece in UrlReader(prefixes).read(url)])

    good, prefix = f"file://{allowed}/a.jsonl", f"file://{allowed}"
    assert (
        asyncio.run(read(good, prefix))
        == asyncio.run(read(good, "memory://b/", f"file://{allowed}/../in/"))
        == b"hello"
    )
    for url, prefixes in [
        (good, ()),
        (f"{allowed}/a.jsonl", (prefix,)),
        (f"file://{secret}", (prefix,)),
        (f"file://{allowed}/../inner-secret", (prefix,)),
        (f"file://{allowed}/link", (prefix,)),
        (f"file://{allowed}/missing", (prefix,)),
        (f"file://{allowed}/", (prefix,)),
        (f"simplecache::file://{secret}", (prefix, "simplecache::file://")),
        (f"memory://x/../{secret}", ("memory://x",)),
        ("memory://xy", ("memory://x",)),
        ("http://127.0.0.1:1/x", (prefix,)),
        ("\0", (prefix,)),
        ("file:///\0", ("file:///",)),
    ]:
        with pytest.raises(RequestError):
            asyncio.run(read(url, *prefixes))


@in_event_loop
async def test_a_job_of_a_url(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_bytes(requests(3))
    harness = new_batch_harness(tmp_path)

    service = harness.service(url_prefixes=(f"file://{tmp_path}",))
    job = await service.submit_url(f"file://{tmp_path}/in.jsonl", JobOptions())
    assert job.num_lines == 3


@pytest.mark.parametrize("url", ["", "nonsense", "mysql://h/d", "sqlite://", "sqlite:///:memory:"])
def test_a_database_that_cannot_hold_jobs_is_refused(url: str) -> None:
    with pytest.raises(ConfigError):
        Database(url)


def test_a_database_that_cannot_be_reached_is_said_so(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for url, reason in (
        (f"sqlite:///{tmp_path}/file/jobs.sqlite", "cannot be created: "),
        (f"sqlite:///{tmp_path}", "cannot be used now: unable to open database file"),
        ("postgresql://u:secret@/none?host=/nowhere", "cannot be used now: "),
    ):
        with (
            pytest.raises(JobStoreError, match=f"the jobs' database {reason}") as reported,
            Database(url).writing(),
        ):
            pass
        assert "secret" not in str(reported.value)


def test_an_error_of_the_database_shows_no_values(harness: BatchHarness) -> None:
    """They may be prompts, and errors are logged with those that they come from."""
    # so that the lines of the traceback do not contain it
    value = " ".join(("a", "private", "prompt"))
    with (
        closing(Database(harness.database)) as database,
        pytest.raises((JobStoreError, SQLAlchemyError)) as raised,
        database.writing() as connection,
    ):
        connection.execute(
            text("SELECT place FROM no_such_table WHERE place = :value"), {"value": value}
        )
    logged = "".join(traceback.format_exception(raised.value))
    assert "no_such_table" in logged
    assert value not in logged


def test_a_connection_that_the_server_has_closed_while_it_was_idle_is_replaced(
    request: pytest.FixtureRequest,
) -> None:
    """As by a restart of PostgreSQL: the next call works."""
    harness = _on_postgres(request)
    service, job = _submitted(harness, 1)
    with psycopg.connect(harness.database, autocommit=True) as connection:
        others = "datname = current_database() AND pid != pg_backend_pid()"
        closed = connection.execute(
            f"SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity WHERE {others}"
        ).fetchall()
        assert set(closed) == {(True,)}
    assert service._jobs.get(job.job_id).job.num_lines == 1
    harness.close()


def test_a_value_that_the_database_cannot_hold_is_refused(request: pytest.FixtureRequest) -> None:
    """PostgreSQL has no NUL, and means the lengths of its columns."""
    harness = _on_postgres(request)
    service = harness.service()
    submissions = service._submissions
    for call in (
        lambda: submissions.find_by_request_key("a\0"),
        lambda: submissions.create(JobOptions(), request_key="k" * 300),
    ):
        with pytest.raises(RequestError, match="the database cannot hold"):
            call()
    assert _rows(service) == (0, 0)
    harness.close()


def test_a_runner_that_is_killed_again_and_again(tmp_path: Path) -> None:
    """kill -9 at random moments while lines are unfinished; then every line once, in the results
    and in the file.
    """
    harness = new_batch_harness(tmp_path)
    service, job = _submitted(harness, 400)
    rng = random.Random(7)
    start = multiprocessing.get_context("forkserver")
    start.set_forkserver_preload(["jobs"])
    done_before = num_killed = 0
    while num_killed < 8:
        # the one that was killed holds the lease
        later = harness.clock.now + 2 * JOB_LEASE_S * num_killed
        arguments = (harness.database, harness.storage, later, 400 // 8 - 1)
        process = start.Process(target=run_until_killed, args=arguments, daemon=True)
        process.start()
        # it is at work, however slow the machine is
        while service._jobs.get(job.job_id).job.num_done == done_before:
            assert process.is_alive(), f"it has ended by itself: {process.exitcode}"
            time.sleep(0.002)
        time.sleep(rng.random() / 50)
        process.kill()
        process.join()
        now = service._jobs.get(job.job_id).job
        assert not now.state.has_ended, "there was nothing left to kill for"
        done_before, num_killed = now.num_done, num_killed + 1
    harness.clock.now += 100 * JOB_LEASE_S

    async def finished() -> list[Any]:
        async with harness.running(harness.runner(echo)):
            return list(await all_results(service, job.job_id))

    results = asyncio.run(finished())
    harness.close()
    assert [line.line for line in results] == list(range(1, 401))
    assert [json.loads(line.body)["said"] for line in results] == list(range(400))
