"""How often drafts are right, and how many are worth their rows."""

from typing import Literal

import pytest

from tramontane.proto.plan import SpeculativeConfig
from tramontane.router.scheduling.model_drafter import NgramDrafter
from tramontane.router.scheduling.speculation_state import (
    MAX_ACCEPTANCE,
    AcceptanceEstimate,
    SpeculationState,
)

CONFIG = SpeculativeConfig(4, 1, 3)
METHODS: tuple[Literal["ngram", "draft_model"], ...] = ("ngram", "draft_model")


def _state(prompt_ids: tuple[int, ...]) -> SpeculationState:
    return SpeculationState(CONFIG, prompt_ids, lambda tokens: NgramDrafter(tokens, 1, 3))


def test_an_estimate_follows_what_is_observed() -> None:
    estimate = AcceptanceEstimate()
    assert estimate.probability == 0.5
    for _ in range(4):
        estimate.observe(True)
    assert estimate.probability == pytest.approx(0.85, abs=0.005)
    for _ in range(60):
        estimate.observe(True)
    assert estimate.probability == MAX_ACCEPTANCE
    for _ in range(20):
        estimate.observe(False)
    assert estimate.probability < 0.4, "0.95 to the power of 20 is 0.36"


@pytest.mark.parametrize(
    ("probability", "expected"),
    [(0.3, 3), (0.71, 0), (0.69, 1), (0.49, 2), (1.0, 0), (2.0, 0), (0.0, 2**30)],
)
def test_how_many_drafts_are_likely(
    probability: float, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AcceptanceEstimate, "probability", 0.7)
    assert AcceptanceEstimate().num_likely(probability) == expected


@pytest.mark.parametrize("acceptance", [0.2, 0.5, 0.7, 0.9, 0.98])
@pytest.mark.parametrize("break_even", [0.02, 0.1, 0.3, 0.69, 0.9])
def test_as_many_drafts_are_worthwhile_as_give_most_tokens_in_the_same_time(
    acceptance: float, break_even: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A round of n drafts yields 1 + a + ... + a**n tokens, and takes 1 + n b of the time of one
    without.
    """
    monkeypatch.setattr(AcceptanceEstimate, "probability", acceptance)
    rates = [sum(acceptance**i for i in range(n + 1)) / (1 + n * break_even) for n in range(33)]
    estimate = AcceptanceEstimate()
    assert rates[estimate.num_worthwhile(break_even, 32)] == pytest.approx(max(rates))
    assert estimate.num_worthwhile(break_even, 1) <= 1
    assert estimate.num_worthwhile(1.0, 32) == estimate.num_worthwhile(2.0, 32) == 0


def test_text_that_repeats_is_drafted_and_other_text_is_not() -> None:
    """Also what is not submitted is compared, so that drafts begin again where the text does
    repeat.
    """
    state, output = _state((1, 2, 3)), list[int]()

    def draft(*tokens: int) -> tuple[int, ...]:
        output.extend(tokens)
        state.update(output)
        state.index(99)
        return state.draft(0.4, 9)

    assert draft(1) == (2,), "of four drafts one is likely enough: half, then a quarter"
    assert draft(9) == ()
    assert state.acceptance.probability < 0.4
    before = state.acceptance.probability
    for token in (1, 2, 3, 1, 2, 3):
        draft(token)
    assert state.acceptance.probability > before
    assert draft(1, 2, 3) == (1, 2, 3, 1)[: state.acceptance.num_worthwhile(0.4, 4)] != ()


def test_a_draft_is_the_same_until_a_token_comes() -> None:
    state = _state((1, 2, 3, 1))
    assert state.draft(0.3, 9) == (), "nothing has been indexed"
    state.update([2])
    state.index(99)
    assert state.draft(0.3, 9) == state.draft(0.3, 9) == (3,)
    assert state.index(99) == 0
    assert state.draft(0.3, 0) == ()
    assert state.draft(0.3, -1) == (), "at the end of the context there is no room"
    assert state.acceptance.probability == 0.5, "nothing was compared"


def test_drafts_in_flight_that_agree_with_the_output_stay() -> None:
    """Known 1 2 3 1, drafted 2 3 1 2 ...; two with the last token, and three in a micro-batch of
    their own.
    """
    state, output = _state((1, 2, 3)), [1]
    state.acceptance = AcceptanceEstimate()
    for _ in range(40):
        state.acceptance.observe(True)
    state.update(output)
    state.index(99)
    state.num_lookahead = len(state.draft(0.1, 2))
    assert state.draft_lookahead(0.1, 3) == (1, 2, 3)
    state.num_lookahead += 3
    output += (2, 3, 1)
    assert state.update(output), "the 1 is the first one of the other micro-batch"
    assert state.num_lookahead == 2
    state.index(99)
    assert state.draft_lookahead(0.1, 9) == (1, 2, 3, 1, 2)
    output += (2, 9)
    assert not state.update(output), "3 was drafted"
    assert state.num_lookahead == 0
    assert not state.update(output), "nothing has come"


def test_drafts_that_do_not_agree_with_those_in_flight_do_not_follow_them() -> None:
    state = _state((1, 2, 1))
    state.update([2])
    state.index(99)
    state.num_lookahead = len(state.draft(0.1, 1))
    state._draft = (7,)
    assert state.draft_lookahead(0.1, 3) == ()


def test_all_drafts_in_flight_together() -> None:
    assert SpeculativeConfig(5, 1, 3).max_drafts() == 47, (
        "five after a known token, and six in each of seven more micro-batches"
    )


def test_a_draft_model_is_not_asked_for_what_is_not_worth_a_row() -> None:
    """N-grams are compared with the output all the same: they cost next to nothing."""
    asked = list[int]()

    class Asked(NgramDrafter):
        def draft(self, num_tokens: int) -> tuple[int, ...]:
            asked.append(num_tokens)
            return super().draft(num_tokens)

    states = [
        SpeculationState(SpeculativeConfig(4, 1, 3, method), (1, 2, 1), lambda t: Asked(t, 1, 3))
        for method in METHODS
    ]
    for state in states:
        state.update([2])
        state.index(99)
        assert state.draft(2.0, 9) == state.draft(0.3, 0) == ()
    assert asked == [4], "of n-grams, which are kept"
    assert states[1].draft(0.3, 9) != ()
