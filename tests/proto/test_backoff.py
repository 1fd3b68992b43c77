"""The delays between attempts."""

from itertools import islice

from tramontane.proto.units import backoff_delays


def test_delays_double_up_to_a_bound_and_are_drawn_from_zero_on() -> None:
    bounds: list[tuple[float, float]] = []

    def uniform(low: float, high: float) -> float:
        bounds.append((low, high))
        return high / 2

    assert list(islice(backoff_delays(0.2, 1.0, uniform), 5)) == [0.1, 0.2, 0.4, 0.5, 0.5]
    assert bounds == [(0.0, 0.2), (0.0, 0.4), (0.0, 0.8), (0.0, 1.0), (0.0, 1.0)]
    assert next(islice(backoff_delays(0.2, 1.0, uniform), 10**5, None)) == 0.5
    assert len({list(islice(backoff_delays(0.2, 1.0), 3))[2] for _ in range(20)}) == 20, (
        "no two callers come back together"
    )
