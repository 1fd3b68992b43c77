"""How often drafts are right, and how many are worth their rows."""

import pytest

from tramontane.proto.plan import SpeculativeConfig
from tramontane.router.speculation.speculation_state import MAX_ACCEPTANCE, AcceptanceEstimate, SpeculationState

CONFIG = SpeculativeConfig(4, 1, 3)


def test_an_estimate_follows_what_is_observed() -> None:
    estimate = AcceptanceEstimate()
    assert estimate.probability == 0.5
    for _ in range(4):
        estimate.observe(True)
    assert estimate.probability == pytest.approx(0.86, abs=0.005)
    for _ in range(60):
        estimate.observe(True)
    assert estimate.probability == MAX_ACCEPTANCE
    for _ in range(20):
        estimate.observe(False)
    assert estimate.probability < 0.2


@pytest.mark.parametrize(("break_even", "expected"), [(0.3, 3), (0.7, 0), (0.69, 1), (0.49, 2), (2.0, 0), (0.0, 2**30)])
def test_how_many_drafts_are_worthwhile(break_even: float, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AcceptanceEstimate, "probability", 0.7)
    assert AcceptanceEstimate().num_worthwhile(break_even) == expected


def test_text_that_repeats_is_drafted_and_other_text_is_not() -> None:
    """Also what is not submitted is compared, so that drafts begin again where the text does repeat."""
    state, output = SpeculationState(CONFIG, (1, 2, 3)), list[int]()

    def draft(*tokens: int) -> tuple[int, ...]:
        output.extend(tokens)
        state.index(output, 99)
        return state.draft(0.4, 9)

    assert draft(1) == (2,), "of four drafts one is likely enough: half, then a quarter"
    assert draft(9) == ()
    assert state.acceptance.probability < 0.4
    before = state.acceptance.probability
    for token in (1, 2, 3, 1, 2, 3):
        draft(token)
    assert state.acceptance.probability > before
    assert draft(1, 2, 3) == (1, 2, 3, 1)[: state.acceptance.num_worthwhile(0.4)] != ()


def test_a_draft_is_the_same_until_a_token_comes() -> None:
    state = SpeculationState(CONFIG, (1, 2, 3, 1))
    assert state.draft(0.3, 9) == (), "nothing has been indexed"
    state.index([2], 99)
    assert state.draft(0.3, 9) == state.draft(0.3, 9) == (3,)
    assert state.index([2], 99) == 0
    assert state.draft(0.3, 0) == ()
    assert state.draft(0.3, -1) == (), "at the end of the context there is no room"
    assert state.acceptance.probability == 0.5, "nothing was compared"
