"""Writes outcomes of lines to the database, all that are ready in one transaction; and the threads in which jobs block.

Calls of the jobs' database and storage have threads of their own, so that tokenizing prompts does not wait for them.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, wait_fixed

from tramontane.proto.errors import JobStoreError
from tramontane.router.batch.claims import Claim, JobClaimStore, Outcome

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")


class JobThreadPool:
    """``count`` threads. A call waits while all are busy; only jobs are delayed by that."""

    def __init__(self, count: int) -> None:
        self._pool = ThreadPoolExecutor(count, thread_name_prefix="jobs")

    async def run(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a blocking call in a thread."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, lambda: call(*args, **kwargs))

    def close(self) -> None:
        """Wait for running calls, so that no connection stays open, and drop the others."""
        self._pool.shutdown(cancel_futures=True)


MAX_OUTCOMES = 500  # of one transaction, for which other writers wait
RETRY_S = 1.0
Sleep = Callable[[float], Awaitable[None]]


async def retry_while_store_down(call: Callable[[], T], sleep: Sleep, threads: JobThreadPool) -> T:
    """Run a blocking call in a thread, again every ``RETRY_S`` while the database or the storage cannot be used."""
    retrying = AsyncRetrying(
        retry=retry_if_exception_type(JobStoreError), wait=wait_fixed(RETRY_S), before_sleep=_warn, sleep=sleep
    )
    return await retrying(threads.run, call)


def _warn(attempt: RetryCallState) -> None:
    logger.warning("batch jobs wait for their store: %s", attempt.outcome and attempt.outcome.exception())


class OutcomeWriter:
    """Writes outcomes while ``run`` runs."""

    def __init__(self, claims: JobClaimStore, sleep: Sleep, threads: JobThreadPool) -> None:
        self._claims, self._sleep, self._threads = claims, sleep, threads
        self._ready: list[tuple[Claim, Outcome, asyncio.Future[None]]] = []
        self._wakeup = asyncio.Event()

    async def write(self, claim: Claim, outcome: Outcome) -> None:
        """Return when the outcome is on disk. Raises JobLostError."""
        written: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._ready.append((claim, outcome, written))
        self._wakeup.set()
        await written

    async def run(self) -> None:
        """Write outcomes until cancelled."""
        while True:
            await self._wakeup.wait()
            batch, self._ready = self._ready[:MAX_OUTCOMES], self._ready[MAX_OUTCOMES:]
            if not self._ready:
                self._wakeup.clear()
            for claim in {each: None for each, _, _ in batch}:
                of_claim = [(outcome, written) for each, outcome, written in batch if each is claim or each == claim]
                await self._finish(claim, of_claim)

    async def _finish(self, claim: Claim, ready: list[tuple[Outcome, asyncio.Future[None]]]) -> None:
        outcomes = [outcome for outcome, _ in ready]
        failure: Exception | None = None
        try:
            await retry_while_store_down(lambda: self._claims.finish(claim, outcomes), self._sleep, self._threads)
        except Exception as error:  # usually JobLostError; a defect must not keep outcomes of other jobs from being written
            failure = error
        for _, written in ready:
            if written.done():  # the waiting task was cancelled
                continue
            if failure is None:
                written.set_result(None)
            else:
                written.set_exception(failure)
