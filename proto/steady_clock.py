"""Seconds since 1970 that never go back: what a process reports as the time, whatever happens to
its machine's clock.
"""

import time

# Taken once, when the process first imports this. The wall clock may be set at any time, by an hour
# too: it is read here and nowhere else where times are compared. Differences within a process are
# exact, as they are those of the monotonic clock; between processes they are as good as their wall
# clocks agreed when they began. A process that begins later on a machine whose clock was set has
# another offset, so times of two processes are for display, and what decides clips their
# differences.
_OFFSET_S = time.time() - time.monotonic()


def steady_time() -> float:
    """Return the seconds since 1970, by the wall clock as it was when the process began."""
    return _OFFSET_S + time.monotonic()
