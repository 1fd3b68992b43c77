"""Delays between the attempts of one caller."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

MAX_DOUBLINGS = 30


@dataclass(frozen=True, slots=True)
class Backoff:
    """Exponential back-off with full jitter: callers that failed together do not come back together.

    The delay after failed attempt n is drawn evenly from 0 to ``first_s * 2**(n - 1)``, or to ``max_s`` if that is less.
    """

    first_s: float
    max_s: float
    uniform: Callable[[float, float], float] = random.uniform
    sleep: Callable[[float], Awaitable[object]] = asyncio.sleep

    def delay_s(self, attempt: int) -> float:
        """Return the delay after a failed attempt; the first one is number 1."""
        return self.uniform(0.0, min(self.first_s * 2 ** min(attempt - 1, MAX_DOUBLINGS), self.max_s))

    async def wait(self, attempt: int) -> None:
        """Wait after a failed attempt."""
        await self.sleep(self.delay_s(attempt))
