"""Jobs that a runner holds without knowing it, and those that it must leave at once."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from batch_jobs import Place, all_results, echo, pieces, place_in, request, requests

from tramontane.proto.errors import JobStoreError, OverloadedError
from tramontane.proto.jobs import JobOptions, JobState
from tramontane.router.batch.claims import LEASE_S, Claim, JobClaimStore
from tramontane.router.batch.runner import MAX_WAIT_S, BatchRunner
from tramontane.router.batch.storage import JobStorage


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    place = place_in(tmp_path)
    yield place
    place.close()


def _loses_the_answer(claims: JobClaimStore) -> None:
    """Of the first claim that takes anything: the database has it, and the runner hears of an error."""
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

    def end(*arguments: Any) -> None:  # noqa: ANN401
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
def test_a_job_that_its_runner_does_not_know_of_goes_on(place: Place, goes_wrong: Callable[[JobClaimStore], None]) -> None:
    """With the same runner, which has another job all the while."""

    async def scenario() -> None:
        service, claims, go_on = place.service(), place.claims(), asyncio.Event()

        async def answer(endpoint: str, body: dict[str, Any]) -> dict[str, Any]:
            if body["prompt"] == "waits":
                await go_on.wait()
            return await echo(endpoint, body)

        goes_wrong(claims)
        job = await service.submit(pieces(requests(3)), JobOptions())
        async with place.running(place.runner(answer, claims=claims)):
            while (await service.get(job.job_id)).state != JobState.RUNNING:
                await asyncio.sleep(0)
            other = await service.submit(pieces(request("w", "waits")), JobOptions())
            async with asyncio.timeout(20):
                while not (now := await service.get(job.job_id)).state.has_ended:
                    place.clock.now += LEASE_S / 10
                    await asyncio.sleep(0.005)
            assert (now.state, now.num_done) == (JobState.COMPLETED, 3)
            go_on.set()
            assert len(await all_results(service, other.job_id)) == 1

    asyncio.run(scenario())


def test_a_runner_renews_and_claims_by_what_it_runs(place: Place) -> None:
    service, claims = place.service(), place.claims()
    for _ in range(2):
        asyncio.run(service.submit(pieces(requests(1)), JobOptions()))
    known, lost = claims.claim(5)
    place.clock.now += 0.9 * LEASE_S
    assert list(claims.claimed([known.number], renew=True)) == [known.number]
    assert claims.claim(5, [known.number]) == []
    place.clock.now += 0.2 * LEASE_S
    (again,) = claims.claim(5, [known.number])
    assert (again.number, again.epoch) == (lost.number, lost.epoch + 1)
    place.clock.now += 2 * LEASE_S
    assert claims.claim(5, [known.number, again.number]) == [], "what it runs it does not begin again, however late it is"
    claims.release(known)
    assert claims.claim(5, [known.number, again.number]) == []


def test_a_cancelled_job_does_not_wait_for_lines_that_wait(place: Place) -> None:
    """Neither for their time, nor for slots: another job has them all."""

    async def scenario() -> None:
        asleep, has_slot = asyncio.Event(), asyncio.Event()

        async def sleep(seconds: float) -> None:
            if seconds == MAX_WAIT_S:
                asleep.set()
                await asyncio.Event().wait()
            await asyncio.sleep(0.005)

        async def answer(_endpoint: str, body: dict[str, Any]) -> dict[str, Any]:
            if body["prompt"] == "keeps":
                has_slot.set()
                await asyncio.Event().wait()
            raise OverloadedError("later", MAX_WAIT_S)

        service = place.service()
        job = await service.submit(pieces(requests(3)), JobOptions())
        runner = BatchRunner(place.claims(), JobStorage(place.storage), answer, 1, sleep=sleep)
        async with place.running(runner):
            await asleep.wait()
            await service.submit(pieces(request("k", "keeps")), JobOptions())
            await has_slot.wait()
            await service.cancel(job.job_id)
            results = await asyncio.wait_for(all_results(service, job.job_id), 20)
        assert [line.is_error for line in results] == [True] * 3
        assert runner._slots._value == 1

    asyncio.run(scenario())
