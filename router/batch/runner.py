"""Runs batch jobs: keeps lines in progress, and writes what became of each.

Several jobs take turns, line by line: each has a task that waits for a free slot, and slots are given in the order in which
they were asked for. A job of three lines is therefore done in three turns, however long the one before it is. A line that
waits to be tried again lends its slot; of one job no more lines are begun and not done than there are slots.

How many lines are in progress at once, over all jobs.
"""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from tramontane.proto.errors import (
    JobStoreError,
    OverloadedError,
    PipelineError,
    PipelineUnavailableError,
    TramontaneError,
    UserError,
)
from tramontane.proto.jobs import Endpoint, JobState
from tramontane.router.batch.claims import Claim, JobClaimStore, JobLostError, Outcome, PendingLine
from tramontane.router.batch.input_lines import body_of
from tramontane.router.batch.outcome_writer import JobThreadPool, OutcomeWriter, Sleep, retry_while_store_down
from tramontane.router.batch.result_files import write_result_files
from tramontane.router.batch.storage import JobStorage
from tramontane.router.batch.store import error_text
from tramontane.router.openai.errors import HttpErrorSpec, http_error_for

logger = logging.getLogger(__name__)


class LineSlot:
    """One of ``slots``, which its owner has acquired for a line. Whoever asked first gets the next that is free."""

    def __init__(self, slots: asyncio.Semaphore) -> None:
        self._slots, self._is_held = slots, True

    async def yield_during(self, seconds: float, sleep: Sleep, unless: asyncio.Event) -> None:
        """Others have it meanwhile; afterwards it is waited for. ``unless`` ends that at once, and the slot is not had then."""
        self.release()
        waiting = [asyncio.ensure_future(each) for each in (self._again(seconds, sleep), unless.wait())]
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in waiting:
                each.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)

    async def _again(self, seconds: float, sleep: Sleep) -> None:
        await sleep(seconds)
        await self._slots.acquire()
        self._is_held = True

    def release(self) -> None:
        """Once, however often it is called."""
        if self._is_held:
            self._is_held = False
            self._slots.release()


T = TypeVar("T")
Answer = Callable[[Endpoint, dict[str, Any]], Awaitable[dict[str, Any]]]

POLL_S = 1.0
THREADS = 4
PAGE = 256  # lines of a job that are fetched at once
MAX_JOBS = 64  # that take turns
MAX_TRIES = 10  # that failed while the line ran
FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 30.0
UNAVAILABLE = HttpErrorSpec(503, "server_error", code="unavailable")


@dataclass(slots=True)
class _Run:
    claim: Claim
    task: asyncio.Task[None] | None = None
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def is_cancelled(self) -> bool:
        return self.cancelled.is_set()


class BatchRunner:
    """``answer`` makes a line's answer, and raises RequestError, OverloadedError or PipelineError.

    ``concurrency`` lines are in progress at once, and as many pages of ``REF_TEMPLATE`` lines in memory as there are jobs.
    """

    def __init__(
        self,
        claims: JobClaimStore,
        storage: JobStorage,
        answer: Answer,
        concurrency: int = 64,
        poll_s: float = POLL_S,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        self._claims, self._storage, self._answer = claims, storage, answer
        self._poll_s, self._sleep = poll_s, sleep
        self._concurrency, self._slots = concurrency, asyncio.Semaphore(concurrency)
        self._threads, self._lease_thread = JobThreadPool(THREADS), JobThreadPool(1)  # a lease must not wait for lines
        self._writer = OutcomeWriter(claims, sleep, self._threads)
        self._runs: dict[int, _Run] = {}  # by the job's number
        self._renewed_at = float("-inf")

    async def run(self) -> None:
        """Until it is cancelled. Jobs that it leaves go on in the next runner."""
        writing = asyncio.create_task(self._writer.run())
        try:
            while not writing.done():
                try:
                    await self._poll()
                except JobStoreError as error:
                    logger.warning("batch jobs wait: %s", error)
                await self._sleep(self._poll_s)
            writing.result()
        finally:
            tasks = [run.task for run in self._runs.values() if run.task is not None]
            for task in [*tasks, writing]:
                task.cancel()
            await asyncio.gather(*tasks, writing, return_exceptions=True)
            await asyncio.to_thread(self._threads.close)
            await asyncio.to_thread(self._lease_thread.close)

    async def _retry(self, call: Callable[[], T]) -> T:
        return await retry_while_store_down(call, self._sleep, self._threads)

    async def _poll(self) -> None:
        """Keep the leases, hear of cancelled jobs, and begin others."""
        if not self._claims.exist:
            return
        if self._runs:
            await self._renew_claims()
        if (room := MAX_JOBS - len(self._runs)) > 0:
            for claim in await self._lease_thread.run(self._claims.claim, room, tuple(self._runs)):
                run = self._runs[claim.number] = _Run(claim)
                if claim.is_cancelled:
                    run.cancelled.set()
                run.task = asyncio.create_task(self._run_job(run))

    async def _renew_claims(self) -> None:
        now = self._claims.clock()
        renew = now - self._renewed_at > self._claims.lease_s / 3
        held = await self._lease_thread.run(self._claims.claimed, tuple(self._runs), renew)
        if renew:
            self._renewed_at = now
        for number, run in list(self._runs.items()):
            epoch, state = held.get(number, (None, None))
            if state == JobState.CANCELLING:
                run.cancelled.set()
            if epoch != run.claim.epoch and run.task is not None:
                run.task.cancel()  # another runner has it, or it has just ended

    async def _run_job(self, run: _Run) -> None:
        claim = run.claim
        try:
            async with asyncio.TaskGroup() as in_progress:
                await self._start_lines(run, in_progress)
            await self._end(run)
        except* JobLostError as lost:
            logger.warning("a batch job goes on elsewhere: %s", lost.exceptions[0])
        except* Exception:
            logger.exception("the batch job %s stopped, and will be begun again", claim.job_id)
        finally:
            await self._release(claim)

    async def _release(self, claim: Claim) -> None:
        del self._runs[claim.number]
        try:
            await asyncio.shield(self._lease_thread.run(self._claims.release, claim))
        except JobStoreError as error:
            logger.warning("a batch job's lease has to lapse: %s", error)

    async def _start_lines(self, run: _Run, in_progress: asyncio.TaskGroup) -> None:
        after = -1
        begun = asyncio.Semaphore(self._concurrency)
        while page := await self._retry(partial(self._claims.next_lines, run.claim, after, PAGE)):
            for line in page:
                await begun.acquire()
                if run.is_cancelled:  # by now; it need not wait for a slot
                    return
                await self._slots.acquire()
                slot = LineSlot(self._slots)
                if run.is_cancelled:
                    slot.release()
                    return
                running = in_progress.create_task(self._run_line(run, line, slot))
                running.add_done_callback(partial(_done, slot, begun))  # one that is cancelled may never have begun
            after = page[-1].place

    async def _run_line(self, run: _Run, line: PendingLine, slot: LineSlot) -> None:
        outcome = await self._outcome(run, line, slot)
        if outcome is not None:
            await self._writer.write(run.claim, outcome)

    async def _outcome(self, run: _Run, line: PendingLine, slot: LineSlot) -> Outcome | None:
        """What became of a line; None if its job is cancelled before it ran well."""
        tries = num_failed = 0
        while not run.is_cancelled:
            try:
                answer = await self._answer(run.claim.endpoint, body_of(line.text))
                return Outcome(line.place, False, 200, json.dumps(answer))
            except UserError as error:
                shape = http_error_for(error)  # as a request of its own would have been refused
                return Outcome(line.place, True, shape.status, error_text(str(error), shape))
            except (OverloadedError, PipelineUnavailableError) as error:  # it has not begun
                wait = getattr(error, "retry_after_s", 0)
            except Exception as error:  # whatever it is, the job goes on
                if not isinstance(error, TramontaneError):
                    logger.exception("a defect: a line of %s could not be run", run.claim.job_id)
                wait, num_failed = 0, num_failed + 1
                if num_failed == MAX_TRIES:
                    why = str(error) if isinstance(error, PipelineError) else "the server has a defect; its log says more"
                    return Outcome(line.place, True, UNAVAILABLE.status, error_text(why, UNAVAILABLE))
            if run.is_cancelled:
                break
            await slot.yield_during(min(max(wait, FIRST_WAIT_S * 2**tries), LONGEST_WAIT_S), self._sleep, run.cancelled)
            tries = min(tries + 1, 10)
        return None

    async def _end(self, run: _Run) -> None:
        claim = run.claim
        if run.is_cancelled:
            last: int | None = -1
            while last is not None:
                last = await self._retry(partial(self._claims.cancel_some, claim, last))
        output, errors = await self._retry(lambda: write_result_files(self._claims, self._storage, claim))
        state = JobState.CANCELLED if run.is_cancelled else JobState.COMPLETED
        await self._retry(lambda: self._claims.end(claim, state, output, errors))


def _done(slot: LineSlot, begun: asyncio.Semaphore, _line: "asyncio.Task[None]") -> None:
    slot.release()
    begun.release()
