"""Clocks of runners and ingresses that are wrong, or set: who holds a job, and what counts as
abandoned.
"""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from batch_jobs import BatchHarness, new_batch_harness, pieces, requests

from tramontane.proto.errors import OverloadedError, RequestError
from tramontane.proto.jobs import JobOptions
from tramontane.router.batch.claims import JOB_LEASE_S, JobClaimStore
from tramontane.router.batch.service import BatchService
from tramontane.router.batch.submissions import (
    ABANDONED_TIMEOUT_S,
    TAKEOVER_TIMEOUT_S,
    JobSubmissions,
)

HOUR, DAY = 3600.0, 86_400.0


class Machine:
    """A wall clock that is off, and a monotonic one."""

    def __init__(self, harness: BatchHarness, off_s: float = 0.0) -> None:
        self.harness, self.off_s = harness, off_s

    def wall(self) -> float:
        return self.harness.clock.now + self.off_s

    def steady(self) -> float:
        return self.harness.clock.now - 1e6

    def claims(self, service: BatchService) -> JobClaimStore:
        return JobClaimStore(
            service._database, service._settings.queue, self.wall, steady_clock=self.steady
        )

    def submissions(self, service: BatchService) -> JobSubmissions:
        return JobSubmissions(service._database, service._quota, self.wall, self.steady)


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[BatchHarness]:
    harness = new_batch_harness(tmp_path)
    yield harness
    harness.close()


def _submitted(harness: BatchHarness) -> tuple[BatchService, int]:
    service = harness.service()
    job = asyncio.run(service.submit(pieces(requests(2)), JobOptions()))
    return service, service._jobs.get(job.job_id).number


@pytest.mark.parametrize("ahead_s", [DAY, HOUR])
def test_a_lease_of_a_clock_that_was_ahead_has_expired(
    harness: BatchHarness, ahead_s: float
) -> None:
    service, number = _submitted(harness)
    assert len(Machine(harness, ahead_s).claims(service).claim(5)) == 1
    harness.clock.now += 20
    assert [claim.number for claim in Machine(harness).claims(service).claim(5)] == [number]


@pytest.mark.parametrize("off_s", [-0.9 * JOB_LEASE_S, 0.9 * JOB_LEASE_S])
def test_clocks_within_one_lease_of_each_other_agree_on_a_living_one(
    harness: BatchHarness, off_s: float
) -> None:
    service, number = _submitted(harness)
    holder = Machine(harness).claims(service)
    assert len(holder.claim(5)) == 1
    for _ in range(20):
        assert Machine(harness, off_s).claims(service).claim(5) == [], "one that has only begun"
        assert holder.claimed([number], renew=True)


@pytest.mark.parametrize("jump_s", [-DAY, -HOUR, HOUR, DAY])
@pytest.mark.parametrize("whose", ["holder", "other"])
def test_a_clock_that_is_set_takes_no_job_from_a_living_runner(
    harness: BatchHarness, whose: str, jump_s: float
) -> None:
    """The other runner has seen the lease being renewed."""
    service, number = _submitted(harness)
    machines = {"holder": Machine(harness), "other": Machine(harness)}
    holder, other = machines["holder"].claims(service), machines["other"].claims(service)
    (claim,) = holder.claim(5)
    for step in range(40):
        machines[whose].off_s = jump_s if step > 5 else 0.0
        assert other.claim(5) == []
        harness.clock.now += JOB_LEASE_S / 3
        assert [epoch for epoch, _ in holder.claimed([number], renew=True).values()] == [
            claim.epoch
        ]
    harness.clock.now += JOB_LEASE_S / 2  # the holder dies
    assert other.claim(5) == [], "the last renewal is seen"
    harness.clock.now += JOB_LEASE_S
    assert other.claim(5) == []
    harness.clock.now += 0.1
    assert [claim.number for claim in other.claim(5)] == [number]


@pytest.mark.parametrize("whose", ["its own", "another's"])
def test_a_runner_that_has_dropped_a_job_claims_it_again_when_its_lease_ends(
    harness: BatchHarness, whose: str
) -> None:
    """It has seen its own renewals, which prove that another runner lives and not that it works on
    the job itself.
    """
    service, number = _submitted(harness)
    holder, other = Machine(harness).claims(service), Machine(harness).claims(service)
    looks = holder if whose == "its own" else other
    assert len(holder.claim(5)) == 1
    assert looks.claim(5, [number]) == []
    harness.clock.now += 1
    assert holder.claimed([number], renew=True)
    harness.clock.now += 5
    assert looks.claim(5, [number]) == [], "it sees the renewal"
    harness.clock.now += JOB_LEASE_S - 4
    assert [claim.number for claim in looks.claim(5)] == ([number] if whose == "its own" else [])


def test_a_lease_that_is_renewed_while_it_is_claimed_stays(
    harness: BatchHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    service, number = _submitted(harness)
    holder, other = Machine(harness).claims(service), Machine(harness).claims(service)
    (claim,) = holder.claim(5)
    harness.clock.now += JOB_LEASE_S + 1
    look = other._expired

    def renewed_after(*args: object) -> object:
        expired = look(*args)  # type: ignore[arg-type]
        assert list(expired) == [number]
        holder.claimed([number], renew=True)
        return expired

    monkeypatch.setattr(other, "_expired", renewed_after)
    assert other.claim(5) == []
    assert holder.claimed([number], renew=False)[number][0] == claim.epoch


@pytest.mark.parametrize("jump_s", [-HOUR, HOUR, DAY])
def test_a_submission_that_makes_progress_is_not_abandoned_whatever_the_clock_says(
    harness: BatchHarness, jump_s: float
) -> None:
    service = harness.service()
    ours, collector = Machine(harness), Machine(harness)
    store = ours.submissions(service)
    job = store.create(JobOptions())
    collecting = collector.submissions(service)
    for step in range(30):
        collector.off_s = jump_s if step > 5 else 0.0
        collecting.delete_abandoned()
        harness.clock.now += 60
        store.add_lines(job, 0, [])
    store.delete(job.number)


@pytest.mark.parametrize("off_s", [-HOUR, 0.0, HOUR])
def test_a_submission_without_progress_is_deleted_however_wrong_its_clock_was(
    harness: BatchHarness, off_s: float
) -> None:
    service = harness.service()
    store = Machine(harness, off_s).submissions(service)
    job = store.create(JobOptions(), request_key="k")
    collecting = Machine(harness).submissions(service)
    for wait_s in (0.0, TAKEOVER_TIMEOUT_S, ABANDONED_TIMEOUT_S):
        collecting.delete_abandoned()
        harness.clock.now += wait_s + 1
    collecting.delete_abandoned()
    with pytest.raises(RequestError, match="made no progress"):
        store.accept(job)


def test_a_submission_of_a_clock_that_was_ahead_gives_way_to_its_repetition(
    harness: BatchHarness,
) -> None:
    service = harness.service()
    dead = Machine(harness, HOUR).submissions(service).create(JobOptions(), request_key="k")
    again = Machine(harness).submissions(service)
    assert again.create(JobOptions(), request_key="k").number != dead.number
    with pytest.raises(OverloadedError, match="being submitted"):
        again.create(JobOptions(), request_key="k")


@pytest.mark.parametrize("off_s", [HOUR, -HOUR, 25.0])
def test_two_living_runners_do_not_take_a_job_from_each_other_again_and_again(
    harness: BatchHarness, off_s: float
) -> None:
    """Each believes the time in the other's lease once, as it may be of a runner that is gone; then
    it sees the lease change.
    """
    service, _ = _submitted(harness)
    runners = [Machine(harness, off).claims(service) for off in (0.0, off_s)]
    held: list[set[int]] = [set(), set()]
    num_claims = 0
    for tick in range(240):
        harness.clock.now += 0.5
        for store, mine in zip(runners, held, strict=True):
            # also while it does not know yet that it has lost one
            claimed = {claim.number for claim in store.claim(5, mine)}
            mine.intersection_update(store.claimed(mine, renew=tick % 10 == 0))
            mine.update(claimed)
            num_claims += len(claimed)
    assert 1 <= num_claims <= 3
    assert sum(map(len, held)) == 1
