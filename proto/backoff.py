"""Delays between the attempts of one caller."""

import random
from collections.abc import Callable, Iterator


def backoff_delays(
    first_s: float, max_s: float, uniform: Callable[[float, float], float] = random.uniform
) -> Iterator[float]:
    """Yield the delay after each failed attempt, without end: exponential back-off with full
    jitter.

    A delay is drawn evenly from 0 to a bound, so that callers that failed together do not come back
    together. The bound begins with ``first_s`` and doubles up to ``max_s``.
    """
    bound_s = first_s
    while True:
        yield uniform(0.0, bound_s)
        bound_s = min(2 * bound_s, max_s)
