"""Outcomes of lines on their way into the database: all that are ready travel in one transaction.

Threads for what the jobs' database and storage make one wait for; prompts are tokenized in others, and do not wait.
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
    """At most ``count``; whoever comes when all are taken waits, without holding anything up but jobs."""

    def __init__(self, count: int) -> None:
        self._pool = ThreadPoolExecutor(count, thread_name_prefix="jobs")

    async def run(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, lambda: call(*args, **kwargs))

    def close(self) -> None:
        """Waits for what is running, so that no connection stays open behind it."""
        self._pool.shutdown(cancel_futures=True)


MAX_AT_ONCE = 500  # outcomes of one transaction; other writers wait for it
RETRY_S = 1.0
Sleep = Callable[[float], Awaitable[None]]


async def retry_while_store_down(call: Callable[[], T], sleep: Sleep, threads: JobThreadPool) -> T:
    """Run a blocking call in a thread, again every ``RETRY_S`` while the database or the storage cannot be used."""
    retrying = AsyncRetrying(
        retry=retry_if_exception_type(JobStoreError), wait=wait_fixed(RETRY_S), before_sleep=_warn, sleep=sleep
    )
    return await retrying(threads.run, call)


def _warn(attempt: RetryCallState) -> None:
    logger.warning("batch jobs wait: %s", attempt.outcome and attempt.outcome.exception())


class OutcomeWriter:
    """``run`` is its life; whoever writes waits until the outcome is on disk, or raises JobLostError."""

    def __init__(self, claims: JobClaimStore, sleep: Sleep, threads: JobThreadPool) -> None:
        self._claims, self._sleep, self._threads = claims, sleep, threads
        self._ready: list[tuple[Claim, Outcome, asyncio.Future[None]]] = []
        self._something = asyncio.Event()

    async def write(self, claim: Claim, outcome: Outcome) -> None:
        written: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._ready.append((claim, outcome, written))
        self._something.set()
        await written

    async def run(self) -> None:
        while True:
            await self._something.wait()
            batch, self._ready = self._ready[:MAX_AT_ONCE], self._ready[MAX_AT_ONCE:]
            if not self._ready:
                self._something.clear()
            for claim in {each: None for each, _, _ in batch}:
                mine = [(outcome, written) for each, outcome, written in batch if each is claim or each == claim]
                await self._finish(claim, mine)

    async def _finish(self, claim: Claim, mine: list[tuple[Outcome, asyncio.Future[None]]]) -> None:
        outcomes = [outcome for outcome, _ in mine]
        lost: Exception | None = None
        try:
            await retry_while_store_down(lambda: self._claims.finish(claim, outcomes), self._sleep, self._threads)
        except Exception as error:  # most likely JobLostError; a defect must not keep other jobs from being written
            lost = error
        for _, written in mine:
            if written.done():  # whoever waited was cancelled
                continue
            if lost is None:
                written.set_result(None)
            else:
                written.set_exception(lost)
