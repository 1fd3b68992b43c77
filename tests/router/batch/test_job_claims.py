"""Jobs that a runner holds without knowing it, and those that it must leave at once."""

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence
from typing import Any

import pytest
from batch_fixtures import sqlite_harness
from batch_jobs import BatchHarness, all_results, echo, pieces, request, requests
from event_loops import in_event_loop

from tramontane.proto.errors import JobStoreError, OverloadedError
from tramontane.proto.jobs import JobOptions, JobState
from tramontane.router.batch.claims import JOB_LEASE_S, Claim, JobClaimStore, PendingLine
from tramontane.router.batch.files import JobStorage
from tramontane.router.batch.runner import MAX_WAIT_S, BatchRunner

harness = sqlite_harness


def _loses_the_answer(claims: JobClaimStore) -> None:
    """Of the first claim that takes anything: the database has it, and the runner gets an error."""
    real = claims.claim
    lost: list[Claim] = []

    def claim(limit: int, running: Sequence[int] = ()) -> Sequence[Claim]:
        found = real(limit, running)
        if found and not lost:
            lost.extend(found)
            raise JobStoreError("the connection was lost while the answer came")
        return found

    claims.claim = claim  # type: ignore[method-assign, assignment]


def _cannot_release(claims: JobClaimStore) -> None:
    """A job stops by a defect, once, just when the database cannot be used."""
    real_end, real_release = claims.end, claims.release
    ended: list[Any] = []

    def end(*arguments: Any) -> None:
        ended.append(arguments)
        if len(ended) == 1:
            raise ValueError("a defect")
        real_end(*arguments)

    def release(claim: Claim) -> None:
        if len(ended) == 1:
            raise JobStoreError("the database is locked")
        real_release(claim)

    claims.end, claims.release = end, release  # type: ignore[method-assign]


@pytest.mark.parametrize("goes_wrong", [_loses_the_answer, _cannot_release])
@in_event_loop
async def test_a_job_that_its_runner_does_not_know_of_continues(
    harness: BatchHarness, goes_wrong: Callable[[JobClaimStore], None]
) -> None:
    """With the same runner, which has another job all the while."""
    service, claims, go_on = harness.service(), harness.claims(), asyncio.Event()

    async def answer(endpoint: str, body: dict[str, Any], _tenant: str = "") -> dict[str, Any]:
        if body["prompt"] == "waits":
            await go_on.wait()
        return await echo(endpoint, body)

    goes_wrong(claims)
    job = await service.submit(pieces(requests(3)), JobOptions())
    async with harness.running(harness.runner(answer, claims=claims)):
        while (await service.get(job.job_id)).state != JobState.RUNNING:
            await asyncio.sleep(0)
        other = await service.submit(pieces(request("w", "waits")), JobOptions())
        async with asyncio.timeout(20):
            while not (now := await service.get(job.job_id)).state.has_ended:
                harness.clock.now += JOB_LEASE_S / 10
                await asyncio.sleep(0.005)
        assert (now.state, now.num_done) == (JobState.COMPLETED, 3)
        go_on.set()
        assert len(await all_results(service, other.job_id)) == 1


def test_a_runner_renews_and_claims_by_what_it_runs(harness: BatchHarness) -> None:
    service, claims = harness.service(), harness.claims()
    for _ in range(2):
        asyncio.run(service.submit(pieces(requests(1)), JobOptions()))
    known, lost = claims.claim(5)
    harness.clock.now += 0.9 * JOB_LEASE_S
    assert list(claims.claimed([known.number], renew=True)) == [known.number]
    assert claims.claim(5, [known.number]) == []
    harness.clock.now += 0.2 * JOB_LEASE_S
    (again,) = claims.claim(5, [known.number])
    assert (again.number, again.epoch) == (lost.number, lost.epoch + 1)
    harness.clock.now += 2 * JOB_LEASE_S
    assert claims.claim(5, [known.number, again.number]) == [], (
        "what it runs it does not begin again, however late it is"
    )
    claims.release(known)
    assert claims.claim(5, [known.number, again.number]) == []


@in_event_loop
async def test_a_cancelled_job_does_not_wait_for_lines_that_wait(harness: BatchHarness) -> None:
    """Neither for their time, nor for slots: another job has them all."""
    asleep, has_slot = asyncio.Event(), asyncio.Event()

    async def sleep(seconds: float) -> None:
        if seconds == MAX_WAIT_S:
            asleep.set()
            await asyncio.Event().wait()
        await asyncio.sleep(0.005)

    async def answer(_endpoint: str, body: dict[str, Any], _tenant: str = "") -> dict[str, Any]:
        if body["prompt"] == "keeps":
            has_slot.set()
            await asyncio.Event().wait()
        raise OverloadedError("later", MAX_WAIT_S)

    service = harness.service()
    job = await service.submit(pieces(requests(3)), JobOptions())
    runner = BatchRunner(harness.claims(), JobStorage(harness.storage), answer, 1, sleep=sleep)
    async with harness.running(runner):
        await asleep.wait()
        await service.submit(pieces(request("k", "keeps")), JobOptions())
        await has_slot.wait()
        await service.cancel(job.job_id)
        results = await asyncio.wait_for(all_results(service, job.job_id), 20)
    assert [line.is_error for line in results] == [True] * 3
    assert runner._slots.num_free == 1


@in_event_loop
async def test_a_lease_does_not_lapse_during_a_long_answer(harness: BatchHarness) -> None:
    """More than a lease passes while a line is answered, and the runner looks at the clock in
    between.
    """
    service, claims, elsewhere = harness.service(), harness.claims(), harness.claims()
    go_on, has_begun, num_polls, real = asyncio.Event(), asyncio.Event(), 0, claims.claimed

    async def answer(endpoint: str, body: dict[str, Any], _tenant: str = "") -> dict[str, Any]:
        has_begun.set()
        await go_on.wait()
        return await echo(endpoint, body)

    def claimed(running: Collection[int], renew: bool) -> dict[int, tuple[int, JobState]]:
        nonlocal num_polls
        found = real(running, renew)
        num_polls += 1
        return found

    claims.claimed = claimed  # type: ignore[method-assign]
    job = await service.submit(pieces(requests(1)), JobOptions())
    async with harness.running(harness.runner(answer, claims=claims)):
        await has_begun.wait()
        for _ in range(4):
            before = num_polls
            while num_polls < before + 2:  # one may have read the clock before it moves
                await asyncio.sleep(0)
            assert elsewhere.claim(5) == []
            harness.clock.now += 0.6 * JOB_LEASE_S
        go_on.set()
        assert len(await all_results(service, job.job_id)) == 1


@in_event_loop
async def test_a_job_that_another_runner_holds_is_left_at_once(harness: BatchHarness) -> None:
    """Its lines are not computed twice for longer than the runner needs to notice."""
    service, elsewhere, has_begun, has_left = (
        harness.service(),
        harness.claims(),
        asyncio.Event(),
        asyncio.Event(),
    )

    async def answer(_endpoint: str, _body: dict[str, Any], _tenant: str = "") -> dict[str, Any]:
        has_begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            has_left.set()
        return {}

    job = await service.submit(pieces(requests(1)), JobOptions())
    async with harness.running(harness.runner(answer)):
        await has_begun.wait()
        elsewhere.clock = lambda: harness.clock.now + 2 * JOB_LEASE_S
        assert [claim.job_id for claim in elsewhere.claim(1)] == [job.job_id]
        await asyncio.wait_for(has_left.wait(), 20)


@in_event_loop
async def test_a_lease_is_renewed_after_a_third_of_its_time(harness: BatchHarness) -> None:
    """So that two attempts may fail."""
    service, claims, renewals, lapses = (
        harness.service(),
        harness.claims(),
        list[bool](),
        (0, 5.0, 0.5, 5.0, 0.5),
    )
    go_on, real = asyncio.Event(), claims.claimed

    def claimed(running: Collection[int], renew: bool) -> dict[int, tuple[int, JobState]]:
        renewals.append(renew)
        if len(renewals) < len(lapses):
            harness.clock.now += lapses[len(renewals)]
        else:
            loop.call_soon_threadsafe(go_on.set)
        return real(running, renew)

    async def answer(endpoint: str, body: dict[str, Any], _tenant: str = "") -> dict[str, Any]:
        await go_on.wait()
        return await echo(endpoint, body)

    loop = asyncio.get_running_loop()
    claims.claimed = claimed  # type: ignore[method-assign]
    job = await service.submit(pieces(requests(1)), JobOptions())
    async with harness.running(harness.runner(answer, claims=claims)):
        assert len(await all_results(service, job.job_id)) == 1
    assert renewals[: len(lapses)] == [True, False, True, False, True]


@in_event_loop
async def test_a_runner_holds_256_lines_of_a_job(harness: BatchHarness) -> None:
    service, claims, fetched = harness.service(), harness.claims(), list[int]()
    real = claims.next_lines

    def next_lines(*arguments: Any) -> Sequence[PendingLine]:
        found = real(*arguments)
        fetched.append(len(found))
        return found

    claims.next_lines = next_lines  # type: ignore[method-assign]
    job = await service.submit(pieces(requests(257)), JobOptions())
    async with harness.running(harness.runner(claims=claims)):
        assert len(await all_results(service, job.job_id)) == 257
    assert fetched == [256, 1, 0]


@in_event_loop
async def test_a_job_that_is_cancelled_while_it_waits_for_a_slot_takes_none(
    harness: BatchHarness,
) -> None:
    go_on, has_slots = asyncio.Event(), 0

    async def answer(endpoint: str, body: dict[str, Any], _tenant: str = "") -> dict[str, Any]:
        nonlocal has_slots
        has_slots += 1
        await go_on.wait()
        return await echo(endpoint, body)

    service, runner = harness.service(), harness.runner(answer, concurrency=2)
    await service.submit(pieces(requests(2)), JobOptions())
    async with harness.running(runner):
        while has_slots < 2:
            await asyncio.sleep(0)
        waits = await service.submit(pieces(requests(3)), JobOptions())
        while not runner._slots._waiting:
            await asyncio.sleep(0)
        await service.cancel(waits.job_id)
        while not any(run.is_cancelled for run in runner._runs.values()):
            await asyncio.sleep(0)
        go_on.set()
        assert [line.is_error for line in await all_results(service, waits.job_id)] == [True] * 3
        while runner._runs:
            await asyncio.sleep(0)
    assert (has_slots, runner._slots.num_free) == (2, 2)


def test_a_job_that_cannot_be_released_is_a_warning(
    harness: BatchHarness, caplog: pytest.LogCaptureFixture
) -> None:
    """And not the end of a task with an error that nothing handles."""

    async def scenario() -> list[Any]:
        unhandled: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(
            lambda _loop, context: unhandled.append(context)
        )
        service, claims = harness.service(), harness.claims()
        job = await service.submit(pieces(requests(1)), JobOptions())
        tried = asyncio.Event()
        loop = asyncio.get_running_loop()

        def release(_claim: Claim) -> None:
            loop.call_soon_threadsafe(tried.set)
            raise JobStoreError("the database is locked")

        claims.release = release  # type: ignore[method-assign]
        async with harness.running(harness.runner(claims=claims)):
            assert len(await all_results(service, job.job_id)) == 1
            await tried.wait()
            await asyncio.sleep(0.01)
            other = await service.submit(pieces(requests(2)), JobOptions())
            assert len(await all_results(service, other.job_id)) == 2
        return unhandled

    with caplog.at_level(logging.WARNING):
        assert asyncio.run(scenario()) == []
    assert any(
        "could not be released and stays until its lease expires" in message
        for message in caplog.messages
    )
