"""Counters for Prometheus, with a stand-in for Ray's: what they are given, and under which tags."""

from collections import Counter
from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st

from tramontane.cluster.metrics import ExpertTokens, ExpertWork, Follower


class StandIn:
    """As Ray's counter, which refuses what is not positive."""

    def __init__(self) -> None:
        self.totals: Counter[tuple[tuple[str, str], ...]] = Counter()
        self.num_calls = 0

    def inc(self, value: float, tags: Mapping[str, str]) -> None:
        assert value > 0
        assert all(isinstance(tag, str) for tag in tags.values())
        self.num_calls += 1
        self.totals[tuple(sorted(tags.items()))] += value  # type: ignore[assignment]


@given(st.lists(st.integers(0, 5)))
def test_a_counter_follows_what_was_counted(added: list[int]) -> None:
    """However often it is told, and without a call where nothing was added."""
    counter, total = StandIn(), 0
    follower = Follower(counter)
    for number in added:
        total += number
        follower.tell(total, {"of": "a"})
        follower.tell(2 * total, {"of": "b"})
        assert counter.totals[("of", "a"),] == total
        assert counter.totals[("of", "b"),] == 2 * total
    assert counter.num_calls == 2 * sum(number > 0 for number in added)


def test_every_expert_of_a_stage_has_a_series() -> None:
    counter = StandIn()
    tokens = ExpertTokens(counter, "app-0", 1)
    tokens.tell({4: (1, 0), 5: (2, 3)})
    tokens.tell({4: (1, 7), 5: (2, 4)})
    tags = {"pipeline": "app-0", "stage": "1"}
    expected = {("4", "0"): 1, ("4", "1"): 7, ("5", "0"): 2, ("5", "1"): 4}
    assert counter.totals == {
        tuple(sorted((tags | {"layer": layer, "expert": expert}).items())): n for (layer, expert), n in expected.items()
    }
    assert counter.num_calls == 5


def test_an_expert_actors_work_has_two_counters() -> None:
    busy_s, rows = StandIn(), StandIn()
    work = ExpertWork(busy_s, rows, "app-0", 3)
    for seconds, number in ((0.0, 0), (0.5, 10), (0.5, 10), (2.0, 30)):
        work.tell(seconds, number)
    series = (("actor", "3"), ("pipeline", "app-0"))
    assert (busy_s.totals, rows.totals) == ({series: 2.0}, {series: 30})
    assert busy_s.num_calls == rows.num_calls == 2
