"""Values that wait for the next token of their sequence: in order of positions, each once, and without a gap."""

import re

import pytest

from tramontane.proto.request import ExpertChoices, Logprobs, TokenEvent
from tramontane.router.engine.active_request import PositionBuffer

GAP = re.escape("positions are missing")


def _logprobs(start: int, end: int) -> Logprobs:
    return Logprobs(0, start, tuple(-float(p) for p in range(start, end)), ((),) * (end - start))


def _experts(layer: int, start: int, end: int) -> ExpertChoices:
    return ExpertChoices(0, layer, start, tuple((position,) for position in range(start, end)))


@pytest.mark.parametrize("num_missing", [1, 2, 9])
def test_positions_may_begin_anywhere_and_then_have_no_gap(num_missing: int) -> None:
    held = PositionBuffer[Logprobs]()
    held.add(_logprobs(4, 7))
    with pytest.raises(AssertionError, match=GAP):
        held.add(_logprobs(7 + num_missing, 20))
    held.add(_logprobs(7, 8))
    assert held.take([TokenEvent(0, 1)]) == (_logprobs(4, 7), _logprobs(7, 8)), "what was refused is not held"


def test_what_another_router_has_emitted_is_skipped_and_no_more() -> None:
    held = PositionBuffer[Logprobs]()
    held.skip_to(0, 5)
    with pytest.raises(AssertionError, match=GAP):
        held.add(_logprobs(6, 8))
    held.add(_logprobs(1, 6))
    assert held.take([TokenEvent(0, 1)]) == (_logprobs(5, 6),)


def test_every_layer_has_positions_of_its_own() -> None:
    held = PositionBuffer[ExpertChoices]()
    held.add(_experts(2, 0, 3), 2)
    held.add(_experts(5, 6, 9), 5)
    with pytest.raises(AssertionError, match=GAP):
        held.add(_experts(2, 4, 9), 2)
    held.add(_experts(2, 2, 4), 2)
    assert held.take([TokenEvent(0, 1)]) == (_experts(2, 0, 3), _experts(5, 6, 9), _experts(2, 3, 4))
