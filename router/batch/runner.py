"""Runs batch jobs: keeps lines in progress and writes the outcome of each.

Tenants share the slots for lines equally (``LineSlots``), and the jobs of a tenant take turns, line
by line: each job has a task that waits for a slot, and a tenant's slots are granted in the order of
waiting. A job of three lines is therefore done in three turns, however long the job before it is. A
line that waits to be retried releases its slot in the meantime; a job has at most as many started
and unfinished lines as there are slots.
"""

import asyncio
import json
import logging
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any, TypeVar

from tramontane.proto.errors import (
    DEFECT,
    JobStoreError,
    OverloadedError,
    PipelineError,
    PipelineUnavailableError,
    TramontaneError,
    UserError,
)
from tramontane.proto.jobs import Endpoint, JobState
from tramontane.router.batch.claims import Claim, JobClaimStore, JobLostError, Outcome, PendingLine
from tramontane.router.batch.database import JobThreadPool
from tramontane.router.batch.files import JobStorage
from tramontane.router.batch.input_lines import by_prefix, extract_body
from tramontane.router.batch.outcomes import (
    OutcomeWriter,
    Sleep,
    retry_while_store_down,
    write_result_files,
)
from tramontane.router.batch.store import error_text
from tramontane.router.openai.errors import UNAVAILABLE, http_error_for

# Slots for lines of batch jobs, which tenants share equally.


class LineSlots:
    """Bounds the number of lines in progress. A free slot is granted to the waiting tenant that
    holds the fewest.

    Between tenants that hold equally many, the slot is granted to the tenant whose last turn is
    longest ago; within a tenant slots are granted in the order in which they were requested. With 4
    slots, one tenant that waits with a thousand jobs and another one with a single job hold 2 each;
    with one slot they alternate.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_free = num_slots
        self._held: Counter[str] = Counter()  # by tenant
        self._turns = count(1)
        self._last_turn: Counter[str] = Counter()  # by tenant; 0 without an earlier turn
        # by tenant; empty while a slot is free
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    async def acquire(self, tenant: str) -> "LineSlot":
        """Wait for a slot."""
        granted = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(granted)
        self._grant()
        try:
            await granted
        except asyncio.CancelledError:
            if granted.cancelled():
                self._withdraw(tenant, granted)
            else:
                self.release(tenant)  # it was granted just before
            raise
        return LineSlot(self, tenant)

    def release(self, tenant: str) -> None:
        """Take a slot back."""
        self._held[tenant] -= 1
        self.num_free += 1
        self._grant()

    def _grant(self) -> None:
        while self.num_free and self._waiting:
            tenant = min(self._waiting, key=lambda each: (self._held[each], self._last_turn[each]))
            granted = self._waiting[tenant].popleft()
            if not self._waiting[tenant]:
                del self._waiting[tenant]
            if not granted.cancelled():
                self.num_free -= 1
                self._held[tenant] += 1
                self._last_turn[tenant] = next(self._turns)
                granted.set_result(None)

    def _withdraw(self, tenant: str, granted: "asyncio.Future[None]") -> None:
        waiting = self._waiting.get(tenant, deque())
        if granted in waiting:
            waiting.remove(granted)
        if not waiting:
            self._waiting.pop(tenant, None)


class LineSlot:
    """A slot that was acquired for a line."""

    def __init__(self, slots: LineSlots, tenant: str) -> None:
        self._slots, self._tenant, self._is_held = slots, tenant, True

    async def yield_during(self, seconds: float, sleep: Sleep, unless: asyncio.Event) -> None:
        """Release the slot for this time, then acquire it again. If ``unless`` is set, return at
        once without the slot.
        """
        self.release()
        waiting = [
            asyncio.ensure_future(each) for each in (self._reacquire(seconds, sleep), unless.wait())
        ]
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in waiting:
                each.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)

    async def _reacquire(self, seconds: float, sleep: Sleep) -> None:
        await sleep(seconds)
        await self._slots.acquire(self._tenant)
        self._is_held = True

    def release(self) -> None:
        """Release the slot if it is held."""
        if self._is_held:
            self._is_held = False
            self._slots.release(self._tenant)


logger = logging.getLogger(__name__)


T = TypeVar("T")
# to the body of a line of a tenant's job
Answer = Callable[[Endpoint, dict[str, Any], str], Awaitable[dict[str, Any]]]

POLL_S = 1.0
THREADS = 4
PAGE_SIZE = 256  # lines of a job that are fetched at once
MAX_JOBS = 64  # that take turns, shared by the tenants; each tenant has at least one
MAX_TRIES = 10  # failed attempts while the line ran
MIN_WAIT_S, MAX_WAIT_S = 0.5, 30.0


@dataclass(slots=True)
class _Run:
    """A job in progress."""

    claim: Claim
    task: asyncio.Task[None] = field(init=False)  # set as soon as there is one
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def is_cancelled(self) -> bool:
        return self.cancelled.is_set()


class BatchRunner:
    """Claims jobs and runs their lines.

    ``answer`` returns a line's answer, or raises RequestError, OverloadedError or PipelineError.
    ``concurrency`` lines are in progress at once, over all jobs. Each job has one page of
    ``PAGE_SIZE`` lines in memory; lines of a page whose prompts share a prefix are started after
    one another.
    """

    def __init__(
        self,
        claims: JobClaimStore,
        storage: JobStorage,
        answer: Answer,
        concurrency: int,
        poll_s: float = POLL_S,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        self._claims, self._storage, self._answer = claims, storage, answer
        self._poll_s, self._sleep = poll_s, sleep
        self._concurrency, self._slots = concurrency, LineSlots(concurrency)
        self._threads = JobThreadPool(THREADS)
        self._lease_thread = JobThreadPool(1)  # a lease must not wait for lines
        self._file_thread = JobThreadPool(1)  # nor a line for result files
        self._writer = OutcomeWriter(claims, sleep, self._threads)
        self._runs: dict[int, _Run] = {}  # by the job's number
        self._renewed_at = float("-inf")

    async def run(self) -> None:
        """Run jobs until cancelled. The next runner continues unfinished jobs."""
        writing = asyncio.create_task(self._writer.run())
        try:
            while not writing.done():
                try:
                    await self._poll()
                except JobStoreError as error:
                    logger.warning("batch jobs wait for their store: %s", error)
                await self._sleep(self._poll_s)
            writing.result()
        finally:
            tasks = [run.task for run in self._runs.values()]
            for task in [*tasks, writing]:
                task.cancel()
            await asyncio.gather(*tasks, writing, return_exceptions=True)
            for pool in (self._threads, self._lease_thread, self._file_thread):
                await asyncio.to_thread(pool.close)

    async def _retry(self, call: Callable[[], T]) -> T:
        return await retry_while_store_down(lambda: self._threads.run(call), self._sleep)

    async def _poll(self) -> None:
        """Renew leases, notice cancelled jobs, and start others."""
        if not self._claims.exist:
            return
        if self._runs:
            await self._renew_claims()
        for claim in await self._lease_thread.run(self._claims.claim, MAX_JOBS, tuple(self._runs)):
            run = self._runs[claim.number] = _Run(claim)
            if claim.is_cancelled:
                run.cancelled.set()
            run.task = asyncio.create_task(self._run_job(run))

    async def _renew_claims(self) -> None:
        now = self._claims.steady_clock()
        renew = now - self._renewed_at > self._claims.lease_s / 3
        held = await self._lease_thread.run(self._claims.claimed, tuple(self._runs), renew)
        if renew:
            self._renewed_at = now
        for number, run in list(self._runs.items()):
            epoch, state = held.get(number, (None, None))
            if state == JobState.CANCELLING:
                run.cancelled.set()
            if epoch != run.claim.epoch:
                run.task.cancel()  # another runner holds it, or it has just ended

    async def _run_job(self, run: _Run) -> None:
        claim = run.claim
        try:
            async with asyncio.TaskGroup() as in_progress:
                await self._start_lines(run, in_progress)
            await self._end(run)
        except* JobLostError as lost:
            logger.warning("another runner continues a batch job: %s", lost.exceptions[0])
        except* Exception:
            logger.exception(
                "the batch job %s failed with a defect and will be restarted", claim.job_id
            )
        finally:
            await self._release(claim)

    async def _release(self, claim: Claim) -> None:
        del self._runs[claim.number]
        try:
            await asyncio.shield(self._lease_thread.run(self._claims.release, claim))
        except JobStoreError as error:
            logger.warning(
                "a batch job could not be released and stays until its lease expires: %s", error
            )

    async def _start_lines(self, run: _Run, in_progress: asyncio.TaskGroup) -> None:
        after = -1
        unfinished = asyncio.Semaphore(self._concurrency)
        while page := await self._retry(
            partial(self._claims.next_lines, run.claim, after, PAGE_SIZE)
        ):
            for line in by_prefix(page):  # the first of each group caches the prefix for the others
                await unfinished.acquire()
                if run.is_cancelled:  # no need to wait for a slot
                    return
                slot = await self._slots.acquire(run.claim.tenant)
                if run.is_cancelled:
                    slot.release()
                    return
                running = in_progress.create_task(self._run_line(run, line, slot))
                # a cancelled task may never have started
                running.add_done_callback(partial(_release_line, slot, unfinished))
            after = page[-1].place

    async def _run_line(self, run: _Run, line: PendingLine, slot: LineSlot) -> None:
        outcome = await self._outcome(run, line, slot)
        if outcome is not None:
            await self._writer.write(run.claim, outcome)

    async def _outcome(self, run: _Run, line: PendingLine, slot: LineSlot) -> Outcome | None:
        """Run a line, with retries. Returns None if its job is cancelled before the line succeeded.

        The pauses have no jitter: together with the number of failures they define how long a line
        is retried.
        """
        num_failed, pause = 0, MIN_WAIT_S
        while not run.is_cancelled:
            try:
                answer = await self._answer(
                    run.claim.endpoint, extract_body(line.text), run.claim.tenant
                )
                return Outcome(line.place, False, 200, json.dumps(answer))
            except UserError as error:
                shape = http_error_for(error)  # as for an interactive request
                return Outcome(line.place, True, shape.status, error_text(shape.body(str(error))))
            except (OverloadedError, PipelineUnavailableError) as error:  # the line has not started
                wait = error.retry_after_s if isinstance(error, OverloadedError) else 0
            except Exception as error:  # the job continues regardless
                if not isinstance(error, TramontaneError):
                    logger.exception("a line of %s failed with a defect", run.claim.job_id)
                wait, num_failed = 0, num_failed + 1
                if num_failed == MAX_TRIES:
                    why = str(error) if isinstance(error, PipelineError) else DEFECT
                    return Outcome(
                        line.place, True, UNAVAILABLE.status, error_text(UNAVAILABLE.body(why))
                    )
            await slot.yield_during(min(max(wait, pause), MAX_WAIT_S), self._sleep, run.cancelled)
            pause *= 2
        return None

    async def _end(self, run: _Run) -> None:
        claim = run.claim
        if run.is_cancelled:
            last: int | None = -1
            while last is not None:
                last = await self._retry(partial(self._claims.cancel_some, claim, last))
        output, errors = await write_result_files(
            self._claims, self._storage, claim, self._sleep, self._file_thread
        )
        state = JobState.CANCELLED if run.is_cancelled else JobState.COMPLETED
        await self._retry(lambda: self._claims.end(claim, state, output, errors))


def _release_line(
    slot: LineSlot, unfinished: asyncio.Semaphore, _line: "asyncio.Task[None]"
) -> None:
    slot.release()
    unfinished.release()
