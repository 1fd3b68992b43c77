"""An event loop whose clock moves by itself: where nothing is ready, it jumps to the next timer."""

import asyncio
import math
import selectors
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
LIMIT_S = 3600.0
MAX_TURNS = 20_000  # of the loop without a jump of the clock; tests of 64 routers take 1,300


class _InstantSelector(selectors.SelectSelector):
    """Waits for no file; what the loop would have slept is added to ``now``."""

    def __init__(self) -> None:
        super().__init__()
        self.now, self.limit_s = 0.0, LIMIT_S
        self.num_turns: float = 0  # since the last jump

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        assert timeout is not None, (
            "nothing is ready and no timer is set: the test would wait forever"
        )
        if not (ready := super().select(0)):
            self.now += timeout
        self.num_turns = 0 if timeout else self.num_turns + 1
        if self.num_turns > MAX_TURNS:
            self.num_turns = -math.inf  # the tasks can still be cancelled
            raise AssertionError(
                f"the event loop has run {MAX_TURNS} turns without a jump of its clock: tasks run"
                " in circles"
            )
        if self.now > self.limit_s:
            self.limit_s = math.inf  # the tasks can still be cancelled
            raise TimeoutError(f"the test has not ended after {LIMIT_S:g} s of virtual time")
        return ready


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """For coroutines that use timers, and neither threads nor connections."""

    def __init__(self) -> None:
        self._instant = _InstantSelector()
        super().__init__(self._instant)

    def time(self) -> float:
        return self._instant.now

    def block(self, seconds: float) -> None:
        """Let time pass in which the loop runs nothing, as a callback does that computes for so
        long.
        """
        self._instant.now += seconds


def run_in_virtual_time(scenario: Coroutine[Any, Any, T]) -> T:
    """Run a scenario as ``asyncio.run`` does; its sleeps take no time."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(scenario)


def in_virtual_time(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Let pytest call an asynchronous test, whose sleeps take no time."""

    @wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        run_in_virtual_time(test(*args, **kwargs))

    return run


def block_loop(seconds: float) -> None:
    """Let the running loop, which has to be a ``VirtualTimeLoop``, do nothing for so long."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualTimeLoop)
    loop.block(seconds)
