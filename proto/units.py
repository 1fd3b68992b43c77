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


# Numbers of bytes as text.

GIB = 2**30
UNITS = ((GIB, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B"))


def format_bytes(num_bytes: float) -> str:
    """Format with three significant digits: 13.5 GiB, 512 MiB, 1,048,576 GiB."""
    unit, name = next((unit, name) for unit, name in UNITS if num_bytes >= unit or unit == 1)
    number = num_bytes / unit
    return f"{number:,.0f} {name}" if number >= 100 else f"{number:.3g} {name}"


def format_bytes_flag(num_bytes: int) -> str:
    """Format as ``--kv-cache-memory`` accepts it, rounded up: 100 is 100B, 20481 is 21KiB."""
    unit, name = next((unit, name) for unit, name in UNITS if num_bytes >= 10 * unit or unit == 1)
    return f"{-(-num_bytes // unit)}{name}"
