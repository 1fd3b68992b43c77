"""The times that a stage reports, while the wall clock of its process is set."""

import time

import pytest

from tramontane.proto.timing import steady_time
from tramontane.workers.stage.step_record import StepTimer

HOUR = 3600.0


class _Event:
    def wait(self) -> None:
        pass

    def seconds_since(self, _first: object) -> float:
        return 0.25


@pytest.mark.parametrize("jump_s", [-HOUR, HOUR])
@pytest.mark.parametrize("make_event", [None, _Event], ids=["host", "device"])
def test_the_start_of_a_step_does_not_follow_the_wall_clock(
    monkeypatch: pytest.MonkeyPatch, jump_s: float, make_event: type[_Event] | None
) -> None:
    """Between two readings of the monotonic clock, which nothing sets."""
    real = time.time

    def timed() -> float:
        timer = StepTimer(make_event)
        timer.start()
        timer.stop()
        return timer.timing(0, 1).ended_at

    before, first = steady_time(), timed()
    monkeypatch.setattr(time, "time", lambda: real() + jump_s)
    second, after = timed(), steady_time()
    assert before <= first <= second <= after


def test_times_are_those_of_the_wall_clock_when_the_process_began() -> None:
    """Within a day: the machine of this test may have set its clock since."""
    assert abs(steady_time() - time.time()) < 24 * HOUR
