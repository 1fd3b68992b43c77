"""How many micro-batches decodes are spread over: predictions, trials, and what measured rounds
change.
"""

import itertools
from collections.abc import Mapping

import pytest

from tramontane.router.scheduling.round_times import (
    MAX_DRAFTED,
    RETRY_ROUNDS,
    TRIAL_ROUNDS,
    GroupTuner,
)

ALIKE = {1: 10.0, 2: 10.0}


class Measured:
    """A tuner whose micro-batches leave the last stage at times that the test gives."""

    def __init__(self) -> None:
        self.tuner, self.now = GroupTuner(), 0.0

    def observe(self, decode_groups: int, predicted_round_s: float, took_s: float) -> None:
        self.now += took_s
        self.tuner.observe(decode_groups, predicted_round_s, self.now)

    def spreads(
        self,
        round_s_by_groups: Mapping[int, float],
        count: int,
        ratios: Mapping[int, float] | None = None,
    ) -> list[int]:
        """Return the spreads of the next micro-batches. A round takes its predicted time, times the
        ratio of its spread.
        """
        found = []
        for _ in range(count):
            decode_groups = self.tuner.choose(round_s_by_groups)
            self.observe(
                decode_groups,
                round_s_by_groups[decode_groups],
                round_s_by_groups[decode_groups]
                * (ratios or {}).get(decode_groups, 1.0)
                / decode_groups,
            )
            found.append(decode_groups)
        return found


def _runs(spreads: list[int]) -> list[tuple[int, int]]:
    """Return (spread, micro-batches in a row)."""
    return [
        (decode_groups, len(list(group))) for decode_groups, group in itertools.groupby(spreads)
    ]


@pytest.mark.parametrize(
    ("round_s_by_groups", "best"),
    [
        ({1: 100.0, 2: 97.0}, 1),
        ({1: 100.0, 2: 96.9}, 2),
        ({1: 100.0, 2: 90.0, 4: 88.0}, 2),
        ({1: 100.0, 2: 90.0, 4: 80.0}, 4),
        ({3: 5.0}, 3),
    ],
)
def test_decodes_are_cut_only_if_that_saves_three_percent(
    round_s_by_groups: dict[int, float], best: int
) -> None:
    assert GroupTuner().choose(round_s_by_groups) == best


def test_another_spread_is_tried_once_the_best_is_measured() -> None:
    """The first micro-batch of a spread only begins its round; three rounds are measured. A trial
    of two has three rounds, too, one micro-batch of the former spread, which is still in flight,
    and the one that begins.
    """
    assert _runs(Measured().spreads(ALIKE, 20)) == [
        (1, 1 + TRIAL_ROUNDS),
        (2, 1 + 2 * TRIAL_ROUNDS + 1),
        (1, 8),
    ]


def test_what_is_predicted_to_take_more_than_twice_as_long_is_not_tried() -> None:
    assert 2 in Measured().spreads({1: 10.0, 2: 20.0}, 20)
    assert 2 not in Measured().spreads({1: 10.0, 2: 20.1}, 20)


def test_a_spread_is_tried_again_after_128_rounds_and_then_after_256() -> None:
    """Rounds of the best one count, three at a time: 43 times three are at least 128, 86 times
    three at least 256.
    """
    trial = 1 + 2 * TRIAL_ROUNDS + 1
    runs = _runs(Measured().spreads({1: 10.0, 2: 15.0}, 420))
    assert runs[:5] == [
        (1, 1 + TRIAL_ROUNDS),
        (2, trial),
        (1, 1 + 43 * TRIAL_ROUNDS),
        (2, trial),
        (1, 1 + 86 * TRIAL_ROUNDS),
    ]
    assert (RETRY_ROUNDS, 43 * TRIAL_ROUNDS, 86 * TRIAL_ROUNDS) == (128, 129, 258)


def test_a_spread_that_is_measured_to_be_faster_stays() -> None:
    """Predicted to be as fast, two take half of the time; one takes what was predicted."""
    assert _runs(Measured().spreads(ALIKE, 60, {2: 0.5})) == [(1, 4), (2, 56)]


def test_a_spread_that_is_measured_to_be_slower_is_left() -> None:
    spreads = _runs(Measured().spreads({1: 10.0, 2: 8.0}, 60, {2: 2.0}))
    assert spreads[0] == (2, 1 + 2 * TRIAL_ROUNDS)
    assert spreads[1][0] == 1


@pytest.mark.parametrize(
    ("ratios", "corrected"), [([2.0], 20.0), ([2.0, 1.0], 17.0), ([2.0, 1.0, 1.0], 14.9)]
)
@pytest.mark.parametrize(("offset", "best"), [(0.01, 1), (-0.01, 2)])
def test_a_measured_ratio_is_smoothed(
    ratios: list[float], corrected: float, offset: float, best: int
) -> None:
    """The first counts fully, each later one by 30 %: 2, then 2 - 0.3, then 1.7 - 0.3 * 0.7. Two
    begin at 97 % of that.
    """
    measured = Measured()
    for _ in range(1 + 2 * TRIAL_ROUNDS):
        measured.observe(2, 10.0, 5.0)  # as predicted
    measured.observe(1, 10.0, 5.0)
    for ratio in ratios:
        for _ in range(TRIAL_ROUNDS):
            measured.observe(1, 10.0, 10.0 * ratio)
    assert measured.tuner.choose({1: 10.0, 2: 0.97 * corrected + offset}) == best


def test_micro_batches_with_prompts_are_not_measured() -> None:
    """Spread 0; the round that they interrupt does not count, and neither does the time that they
    took.
    """
    measured = Measured()
    for _ in range(9):
        measured.observe(1, 10.0, 10.0)
        measured.observe(0, 0.0, 500.0)
    assert measured.tuner.choose(ALIKE) == 1, "nothing is measured, so nothing is tried"
    for _ in range(1 + TRIAL_ROUNDS):
        measured.observe(1, 10.0, 10.0)
    assert measured.tuner.choose(ALIKE) == 2
    assert measured.tuner.choose({1: 10.0, 3: 9.71}) == 3, (
        "of one, which is not slower than predicted, another is tried"
    )


def test_a_trial_ends_where_its_spread_is_not_possible() -> None:
    """Fewer sequences decode than the trial has micro-batches."""
    measured = Measured()
    assert measured.spreads(ALIKE, 6)[-2:] == [2, 2]
    assert measured.tuner.choose({1: 10.0}) == 1


def test_a_trial_in_which_sequences_draft_is_given_up_and_made_later() -> None:
    """Micro-batches with drafts are not measured."""
    measured = Measured()
    assert measured.spreads(ALIKE, 6)[-2:] == [2, 2]
    chosen = []
    for _ in range(3 * MAX_DRAFTED):
        chosen.append(measured.tuner.choose(ALIKE))
        measured.tuner.observe(0, 0.0, measured.now, has_drafts=True)
    assert _runs(chosen) == [(2, MAX_DRAFTED), (1, 2 * MAX_DRAFTED)]
    trial = 1 + 2 * TRIAL_ROUNDS + 1
    assert _runs(measured.spreads(ALIKE, 200))[:2] == [(1, 1 + 43 * TRIAL_ROUNDS), (2, trial)], (
        "after 128 rounds"
    )


def test_a_few_micro_batches_with_drafts_do_not_end_a_trial() -> None:
    measured = Measured()
    for _ in range(2):  # the second trial has no fewer of them than the first
        while measured.tuner.choose(ALIKE) == 1:
            measured.observe(1, 10.0, 10.0)
        for _ in range(MAX_DRAFTED - 1):
            measured.tuner.observe(0, 0.0, measured.now, has_drafts=True)
        assert _runs(measured.spreads(ALIKE, 10))[0] == (2, 1 + 2 * TRIAL_ROUNDS + 1)


def test_a_trial_waits_for_prompts() -> None:
    measured = Measured()
    assert measured.spreads(ALIKE, 6)[-2:] == [2, 2]
    for _ in range(3 * MAX_DRAFTED):
        assert measured.tuner.choose(ALIKE) == 2
        measured.observe(0, 0.0, 5.0)
