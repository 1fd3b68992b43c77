"""Tenants of batch jobs: what belongs to one is not there for another, bounds count by tenant, and
they take turns.
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from batch_jobs import LIMITS, BatchHarness, all_results, pieces, request, requests
from event_loops import in_event_loop

from tramontane.proto.errors import (
    JobRefusedError,
    OverloadedError,
    QuotaExceededError,
    RequestError,
    UnknownFileError,
    UnknownJobError,
)
from tramontane.proto.jobs import JobOptions, JobState
from tramontane.router.batch import files as batch_files
from tramontane.router.batch import runner as batch_runner
from tramontane.router.batch import service as batch_service
from tramontane.router.batch.claims import Claim
from tramontane.router.batch.service import BatchService

GOOD = request("a", 1)


async def _endless(part: bytes) -> AsyncIterator[bytes]:
    while True:
        yield part


# ---- who sees what


@in_event_loop
async def test_what_belongs_to_another_tenant_is_not_there(harness: BatchHarness) -> None:
    keyless = harness.service()
    own, other = keyless.for_tenant("own"), keyless.for_tenant("other")
    file = await own.upload("in.jsonl", "batch", iter([requests(2)]))
    job = (await own.submit_file(file.file_id, JobOptions())).job.job_id
    for other_key in (other, keyless):
        calls: list[Callable[[], Any]] = [
            lambda other_key=other_key: other_key.get(job),
            lambda other_key=other_key: other_key.cancel(job),
            lambda other_key=other_key: other_key.list(9, job),
            lambda other_key=other_key: anext(other_key.watch(job)),
            lambda other_key=other_key: anext(other_key.results(job)),
        ]
        for call in calls:
            with pytest.raises(UnknownJobError):
                await call()
        calls = [
            lambda other_key=other_key: other_key.file(file.file_id),
            lambda other_key=other_key: other_key.content(file.file_id),
            lambda other_key=other_key: other_key.delete_file(file.file_id),
            lambda other_key=other_key: other_key.list_files(9, file.file_id),
            lambda other_key=other_key: other_key.submit_file(file.file_id, JobOptions()),
        ]
        for call in calls:
            with pytest.raises(UnknownFileError):
                await call()
        assert (await other_key.list(9), await other_key.list_files(9)) == ([], [])
    async with harness.running(harness.runner()):
        assert len(await all_results(own, job)) == 2
        async for _ in own.watch(job):
            pass
    ended = await own.get_stored(job)
    assert ended.job.state == JobState.COMPLETED, "another key has not cancelled it"
    assert {each.file_id for each in await own.list_files(9)} == {file.file_id, ended.output_file}
    assert ended.output_file is not None
    for other_key in (other, keyless):
        with pytest.raises(UnknownFileError):
            await other_key.content(ended.output_file)


@in_event_loop
async def test_tenants_may_use_the_same_request_key(harness: BatchHarness) -> None:
    keyless = harness.service()
    services = [keyless, keyless.for_tenant("own"), keyless.for_tenant("other")]
    begun = services[1]._submissions.create(JobOptions(), request_key="half")
    made = {
        (await each.submit(pieces(GOOD), JobOptions(), "nightly-1")).job_id for each in services
    }
    assert len(made) == 3
    await services[2].submit(pieces(GOOD), JobOptions(), "half")
    with pytest.raises(OverloadedError, match="being submitted"):
        await services[1].submit(pieces(GOOD), JobOptions(), "half")
    services[1]._submissions.delete(begun.number)


@in_event_loop
async def test_a_used_request_key_with_other_lines_or_another_url_is_refused(
    harness: BatchHarness, tmp_path: Path
) -> None:
    (tmp_path / "a.jsonl").write_bytes(requests(2))
    (tmp_path / "b.jsonl").write_bytes(requests(2))

    service = harness.service(url_prefixes=(f"file://{tmp_path}",)).for_tenant("own")
    job = await service.submit(pieces(requests(300)), JobOptions(), "text")
    assert await service.submit(pieces(requests(300), 100_000), JobOptions(), "text") == job, (
        "however it is cut"
    )
    for other in (requests(299), requests(299) + request("r299", 300), b"", requests(301)):
        with pytest.raises(JobRefusedError, match="other lines"):
            await service.submit(pieces(other), JobOptions(), "text")
    with pytest.raises(RequestError, match="larger than"):
        await service.submit(_endless(b"x" * 1000), JobOptions(), "text")
    of_url = await service.submit_url(f"file://{tmp_path}/a.jsonl", JobOptions(), "url")
    assert await service.submit_url(f"file://{tmp_path}/a.jsonl", JobOptions(), "url") == of_url
    for call in (
        service.submit_url(f"file://{tmp_path}/b.jsonl", JobOptions(), "url"),
        service.submit_url(f"file://{tmp_path}/a.jsonl", JobOptions(), "text"),
        service.submit(pieces(requests(2)), JobOptions(), "url"),
    ):
        with pytest.raises(JobRefusedError, match="use a new key"):
            await call
    assert len(await service.list(9)) == 2


# ---- bounds


@in_event_loop
async def test_open_jobs_are_bounded_by_tenant(harness: BatchHarness) -> None:
    keyless = harness.service(limits=replace(LIMITS, max_open_jobs=3))
    own, other = keyless.for_tenant("own"), keyless.for_tenant("other")
    made = [await own.submit(pieces(GOOD), JobOptions()) for _ in range(3)]
    with pytest.raises(
        OverloadedError, match=r"^3 of your batch jobs have not ended, and at most 3 may be open"
    ) as refused:
        await own.submit(pieces(GOOD), JobOptions())
    assert refused.value.retry_after_s == 30
    for service in (other, keyless):
        await service.submit(pieces(GOOD), JobOptions())
    async with harness.running(harness.runner()):
        await all_results(own, made[0].job_id)
        async for _ in own.watch(made[0].job_id):
            pass
        await own.submit(pieces(GOOD), JobOptions())


@in_event_loop
async def test_lines_of_open_jobs_are_bounded_by_tenant(harness: BatchHarness) -> None:
    """Also when they come one page after the other, and in several jobs."""
    keyless = harness.service(limits=replace(LIMITS, max_open_lines=2500))
    own, other = keyless.for_tenant("own"), keyless.for_tenant("other")
    first = await own.submit(pieces(requests(1500)), JobOptions())
    with pytest.raises(
        OverloadedError,
        match=r"have 2501 lines with this one, and at most 2500 may be open \(--jobs-max",
    ):
        await own.submit(pieces(requests(1001)), JobOptions())
    assert [job.job_id for job in await own.list(9)] == [first.job_id], "nothing is left of it"
    await own.submit(pieces(requests(1000)), JobOptions())
    with pytest.raises(OverloadedError, match="2501 lines"):
        await own.submit(pieces(GOOD), JobOptions())
    await other.submit(pieces(requests(2500)), JobOptions())
    await own.cancel(first.job_id)
    async with harness.running(harness.runner()):
        async for _ in own.watch(first.job_id):
            pass
    await own.submit(pieces(GOOD), JobOptions())


@in_event_loop
async def test_stored_bytes_are_bounded_by_tenant(harness: BatchHarness) -> None:
    """Those of files, lines and results."""
    keyless = harness.service(limits=replace(LIMITS, max_stored_bytes=10_000), keep_s=1000.0)
    own, other = keyless.for_tenant("own"), keyless.for_tenant("other")
    assert own._quota.usage() == (0, 0), "before there is a database"
    full = await own.upload("in", "batch", iter([b"x" * 10_000]))
    await own.delete_file(full.file_id)
    file = await own.upload("in", "batch", iter([b"x" * 6000]))
    with pytest.raises(
        QuotaExceededError,
        match=r"would hold 10\.7 KiB with this one, and at most 9\.77 KiB may be stored",
    ):
        await own.upload("in", "batch", iter([b"x" * 2500] * 2))
    assert len(await own.list_files(9)) == 1
    assert own._quota.usage().num_bytes == 6000, "nothing is left of it"
    text = request("a", "x" * 1800) + request("b", "x" * 1800)
    with pytest.raises(QuotaExceededError, match="may be stored") as refused:
        await own.submit(pieces(text + request("c", "x" * 1800)), JobOptions())
    assert refused.value.retry_after_s == 3600
    await own.check_upload(4000)
    with pytest.raises(QuotaExceededError, match=r"would hold 9\.77 KiB with this one"):
        await own.check_upload(4001)
    job = await own.submit(pieces(text), JobOptions())
    num_bytes = own._quota.usage().num_bytes
    assert num_bytes == 6000 + len(text) - 2, "without line ends"
    await other.upload("in", "batch", iter([b"x" * 9000]))

    async def answer(_endpoint: str, _body: dict[str, Any], _tenant: str = "") -> dict[str, Any]:
        return {"said": "y" * 10_000}

    async with harness.running(harness.runner(answer)):
        assert len(await all_results(own, job.job_id)) == 2, "what was accepted is finished"
        async for _ in own.watch(job.job_id):
            pass
    (output,) = await own.list_files(9, purpose="batch_output")
    results = 2 * len('{"said": ""}') + 20_000
    assert own._quota.usage().num_bytes == num_bytes + results + output.num_bytes
    for call in (own.submit(pieces(GOOD), JobOptions()), own.upload("in", "batch", iter([b"x"]))):
        with pytest.raises(QuotaExceededError):
            await call
    for each in (file, output):
        await own.delete_file(each.file_id)
    assert own._quota.usage().num_bytes == num_bytes + results - 6000
    harness.clock.now += 1001
    await keyless.collect_garbage()
    assert own._quota.usage() == (0, 0), "of all tenants"
    assert list(Path(harness.storage).rglob("*.jsonl")) == []
    assert await other.list_files(9) == []
    await own.submit(pieces(GOOD), JobOptions())


def test_uploads_at_the_same_time_are_counted_while_they_grow(
    harness: BatchHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_files, "RECORD_BYTES", 1000)
    service = harness.service(limits=replace(LIMITS, max_stored_bytes=10_000)).for_tenant("own")
    read = [0, 0]

    def part(which: int) -> Iterator[bytes]:
        while True:
            read[which] += 1000
            yield b"x" * 1000
            if which == 0 and read[0] == 8000:  # then the other one comes
                with pytest.raises(QuotaExceededError):
                    service._files.write("second", "batch", part(1))

    with pytest.raises(QuotaExceededError, match=r"10\.7 KiB"):
        service._files.write("first", "batch", part(0))
    assert read == [11_000, 3000]
    assert service._quota.usage().num_bytes == 0


def test_the_size_of_an_upload_is_recorded_every_64_mebibytes(
    sqlite_harness: BatchHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So much may be stored beyond what a tenant may have, by each of its uploads."""

    class Large(bytes):
        """A piece of 4 MiB, without its bytes."""

        def __len__(self) -> int:
            return 2**22

    recorded: list[int] = []
    monkeypatch.setattr(
        batch_files.FileStore,
        "_record_size",
        lambda _files, _record, num_bytes: recorded.append(num_bytes),
    )
    service = sqlite_harness.service(
        limits=replace(LIMITS, max_bytes=2**30, max_stored_bytes=2**30)
    )
    service._files.write("large", "batch", iter([Large()] * 40))
    assert recorded == [2**26, 2**27, 40 * 2**22], "and when it is complete"


def test_an_upload_of_which_nothing_has_come_counts_nothing(sqlite_harness: BatchHarness) -> None:
    service = sqlite_harness.service()
    counted: list[int] = []

    def part() -> Iterator[bytes]:
        counted.append(service._quota.usage().num_bytes)
        yield b"x"

    file = service._files.write("n" * 300, "batch", part())
    assert counted == [0]
    assert (file.filename, file.num_bytes) == ("n" * 255, 1)


def test_an_upload_that_has_not_grown_for_a_day_is_deleted(sqlite_harness: BatchHarness) -> None:
    """Its process has died; one that is still complete after that time stays."""
    service = sqlite_harness.service()
    files = service._files
    complete = files.write("complete", "batch", iter([b"x"]))

    def part() -> Iterator[bytes]:
        yield b"x"
        service._clock.now += 86_400  # type: ignore[attr-defined]
        asyncio.run(service.collect_garbage())
        assert count() == 2
        service._clock.now += 1  # type: ignore[attr-defined]
        asyncio.run(service.collect_garbage())
        assert count() == 1

    def count() -> int:
        with service._database.reading() as connection:
            return int(
                connection.exec_driver_sql("SELECT count(*) FROM tramontane_files").scalar_one()
            )

    with pytest.raises(UnknownFileError):
        files.write("incomplete", "batch", part())
    assert files.get(complete.file_id) == complete


@in_event_loop
async def test_large_uploads_hold_up_nothing_else(sqlite_harness: BatchHarness) -> None:
    go_on = threading.Event()

    def endless() -> Iterator[bytes]:
        go_on.wait()
        yield b"x"

    keyless = sqlite_harness.service()
    own, other = keyless.for_tenant("own"), keyless.for_tenant("other")
    uploads = [
        asyncio.create_task(own.upload("in", "batch", endless()))
        for _ in range(2 * batch_service.THREADS)
    ]
    try:
        await asyncio.sleep(0)
        async with asyncio.timeout(20):
            job = await other.submit(pieces(GOOD), JobOptions())
            assert await other.list(9) == [job]
    finally:
        go_on.set()
    assert len({file.file_id for file in await asyncio.gather(*uploads)}) == len(uploads)


@in_event_loop
async def test_streams_of_a_tenant_leave_room_for_others(
    sqlite_harness: BatchHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One may have half of what the others leave of eight."""
    monkeypatch.setattr(batch_service, "MAX_STREAMS", 8)

    keyless = sqlite_harness.service()
    jobs = {}
    for tenant in ("one", "two", "three", "four"):
        jobs[tenant] = (await keyless.for_tenant(tenant).submit(pieces(GOOD), JobOptions())).job_id

    async def open_streams(tenant: str, most: int) -> list[Any]:
        service = keyless.for_tenant(tenant)  # another object for every request
        opened = [service.watch(jobs[tenant]) for _ in range(most)]
        for stream in opened:
            await anext(stream)
        with pytest.raises(
            OverloadedError, match=f"^{most} of your streams of batch jobs are open"
        ):
            await anext(keyless.for_tenant(tenant).watch(jobs[tenant]))
        return opened

    opened = [
        await open_streams(*each) for each in (("one", 4), ("two", 2), ("three", 1), ("four", 1))
    ]
    for stream in opened[0]:
        await stream.aclose()
    await open_streams("one", 2)


# ---- turns


def _submit_jobs(service: BatchService, tenant: str, count: int, num_lines: int = 1) -> list[str]:
    async def submitted() -> list[str]:
        own = service.for_tenant(tenant)
        return [
            (await own.submit(pieces(requests(num_lines)), JobOptions())).job_id
            for _ in range(count)
        ]

    return asyncio.run(submitted())


def test_a_runner_claims_by_tenant_and_not_by_age_alone(harness: BatchHarness) -> None:
    service = harness.service()
    first = _submit_jobs(service, "first", 12)
    second = _submit_jobs(service, "second", 3)
    claims = harness.claims()
    held = list(claims.claim(8))
    assert [claim.job_id for claim in held] == first[:4] + second
    assert {claim.tenant for claim in held} == {"first", "second"}
    assert claims.claim(8, [claim.number for claim in held]) == [], "its share is in use"
    third = _submit_jobs(service, "third", 5)
    held += claims.claim(8, [claim.number for claim in held])
    assert [claim.job_id for claim in held[7:]] == third[:2], "2 of 8, although 7 run"
    for tenant in range(20):
        _submit_jobs(service, f"t{tenant}", 2)
    held += claims.claim(8, [claim.number for claim in held])
    assert [claim.tenant for claim in held[9:]] == [f"t{tenant}" for tenant in range(20)], (
        "each has one at least"
    )
    running = [claim.number for claim in held if claim.tenant == "first"][:2]
    others = harness.claims()
    others.clock = lambda: harness.clock.now + 1000
    assert {claim.tenant for claim in others.claim(8, running)} == {
        claim.tenant for claim in held
    } - {"first"}


def test_a_tenant_alone_has_all_places(harness: BatchHarness) -> None:
    service = harness.service()
    made = _submit_jobs(service, "own", 6)
    claims = harness.claims()
    held = list(claims.claim(4))
    assert [claim.job_id for claim in held] == made[:4]
    held = held[1:] + list(claims.claim(4, [claim.number for claim in held[1:]]))
    assert [claim.job_id for claim in held] == made[1:5]


def test_a_runner_claims_64_jobs_at_once(
    sqlite_harness: BatchHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And more when some of these have ended."""
    made = _submit_jobs(sqlite_harness.service(limits=replace(LIMITS, max_open_jobs=66)), "own", 66)
    claims, held = sqlite_harness.claims(), list[list[str]]()
    claim, claimed_all = claims.claim, asyncio.Event()

    def claim_and_note(limit: int, running: Collection[int]) -> Sequence[Claim]:
        found = claim(limit, running)
        held.append([each.job_id for each in found])
        return found

    async def answer(_endpoint: str, _body: dict[str, Any], _tenant: str = "") -> dict[str, Any]:
        if sum(map(len, held)) == 66:
            claimed_all.set()
        return {}

    async def scenario() -> None:
        async with sqlite_harness.running(sqlite_harness.runner(answer, claims=claims)):
            await claimed_all.wait()

    monkeypatch.setattr(claims, "claim", claim_and_note)
    asyncio.run(scenario())
    assert held[0] == made[:64]
    assert list(chain.from_iterable(held)) == made


@pytest.mark.parametrize("concurrency", [1, 4])
def test_lines_of_a_tenant_do_not_wait_for_the_many_jobs_of_another(
    sqlite_harness: BatchHarness, monkeypatch: pytest.MonkeyPatch, concurrency: int
) -> None:
    """One has more open jobs than a runner takes at once; of the lines that begin every second one
    is the other tenant's.
    """
    monkeypatch.setattr(batch_runner, "MAX_JOBS", 10)
    service, begun = sqlite_harness.service(), list[str]()
    _submit_jobs(service, "many", 18, num_lines=20)

    async def answer(_endpoint: str, body: dict[str, Any], _tenant: str = "") -> dict[str, Any]:
        begun.append(body["prompt"])
        await asyncio.sleep(0)
        return {}

    async def scenario() -> None:
        few = service.for_tenant("few")
        job = await few.submit(
            pieces(b"".join(request(f"f{i}", "few") for i in range(40))), JobOptions()
        )
        async with sqlite_harness.running(sqlite_harness.runner(answer, concurrency)):
            assert len(await all_results(few, job.job_id)) == 40

    asyncio.run(scenario())
    last = max(place for place, prompt in enumerate(begun) if prompt == "few")
    assert last <= 2 * 40 + 2 * concurrency, begun[:last]
