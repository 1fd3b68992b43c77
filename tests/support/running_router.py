"""A router over a chain of the test, with a small scheduler by default."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

from tramontane.proto.plan import CachePlan, WindowClass
from tramontane.router.engine.router import Router
from tramontane.router.scheduling.policy import FixedInFlightPolicy
from tramontane.router.scheduling.scheduler import Scheduler
from tramontane.router.scheduling.waiting_queue import SchedulerLimits

CACHE = CachePlan(16, (WindowClass(64, 5, 10),))


def new_scheduler(
    cache: CachePlan = CACHE,
    *,
    num_seqs: int = 8,
    budget: int = 64,
    max_len: int = 256,
    vocab_size: int = 1000,
    in_flight: int = 3,
    **limits: Any,
) -> Scheduler:
    """``limits`` are other fields of ``SchedulerLimits``."""
    return Scheduler(
        cache,
        SchedulerLimits(num_seqs, budget, max_len, vocab_size, **limits),
        FixedInFlightPolicy(in_flight, budget),
    )


@asynccontextmanager
async def running(router: Router) -> AsyncIterator[Router]:
    """Run a router within the context. An error that ends it is raised when the context ends."""
    task = asyncio.create_task(router.run())
    try:
        yield router
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
