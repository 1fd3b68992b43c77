"""What waits for the next token of its sequence: values in order of positions, each once and
without a gap; cached tokens.
"""

import re

import pytest

from tramontane.proto.errors import TramontaneError
from tramontane.proto.request import (
    ExpertChoices,
    Logprobs,
    RequestOutput,
    SamplingParams,
    TokenEvent,
)
from tramontane.router.engine.active_request import ActiveRequest, PositionBuffer
from tramontane.router.scheduling.sequence import Sequence

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
    assert held.take([TokenEvent(0, 1)], lambda _: 99) == (_logprobs(4, 7), _logprobs(7, 8)), (
        "what was refused is not held"
    )


def test_what_another_router_has_emitted_is_skipped_and_no_more() -> None:
    held = PositionBuffer[Logprobs]()
    held.skip_to(0, 5)
    with pytest.raises(AssertionError, match=GAP):
        held.add(_logprobs(6, 8))
    held.add(_logprobs(1, 6))
    assert held.take([TokenEvent(0, 1)], lambda _: 99) == (_logprobs(5, 6),)


def test_every_layer_has_positions_of_its_own() -> None:
    held = PositionBuffer[ExpertChoices]()
    held.add(_experts(2, 0, 3), 2)
    held.add(_experts(5, 6, 9), 5)
    with pytest.raises(AssertionError, match=GAP):
        held.add(_experts(2, 4, 9), 2)
    held.add(_experts(2, 2, 4), 2)
    assert held.take([TokenEvent(0, 1)], lambda _: 99) == (
        _experts(2, 0, 3),
        _experts(5, 6, 9),
        _experts(2, 3, 4),
    )


@pytest.mark.parametrize(
    ("num_known", "expected"),
    [(8, (_logprobs(4, 7), _logprobs(7, 8))), (6, (_logprobs(4, 6),)), (4, ())],
)
def test_what_follows_the_last_token_is_dropped(
    num_known: int, expected: tuple[Logprobs, ...]
) -> None:
    """Drafts after the token that ends a sequence may be right, and have values."""
    held = PositionBuffer[Logprobs]()
    held.add(_logprobs(4, 7))
    held.add(_logprobs(7, 8))
    assert held.take([TokenEvent(0, 1)], lambda _: num_known) == expected


class Delivered:
    """A request, its sequences being numbered from 10 on, and how many cached tokens each of its
    outputs has.
    """

    def __init__(self, *sequences: tuple[tuple[int, ...], list[int]]) -> None:
        self.num_cached: list[int] = []
        live = [
            Sequence(10 + index, prompt, SamplingParams(), 99, output_ids=output)
            for index, (prompt, output) in enumerate(sequences)
        ]
        self.request = ActiveRequest(live, self._sink, 0.0)

    def _sink(self, output: RequestOutput | TramontaneError) -> None:
        assert isinstance(output, RequestOutput)
        self.num_cached.append(output.num_cached)

    def start(self, *starts: tuple[int, int]) -> None:
        for seq_id, num_cached in starts:
            self.request.record_start(seq_id, num_cached, 1.0)

    def deliver(self, *seq_ids: int) -> None:
        self.request.deliver([TokenEvent(seq_id, 7) for seq_id in seq_ids], 2.0)


PROMPT, OTHER = tuple(range(70)), tuple(range(80))


def test_cached_tokens_come_with_the_first_token_of_their_sequence() -> None:
    made = Delivered((PROMPT, []), (OTHER, []))
    made.start((10, 16), (11, 32))
    for seq_ids in ((11,), (11,), (10, 11), (10, 11)):
        made.deliver(*seq_ids)
    assert made.num_cached == [32, 0, 16, 0]
    both = Delivered((PROMPT, []), (OTHER, []))
    both.start((10, 16), (11, 32))
    both.deliver(10, 11)
    assert both.num_cached == [48]


def test_a_prompt_of_several_choices_counts_once_as_its_first_one_finds_it() -> None:
    """The others find what the first one has computed."""
    for order in ((10, 11, 12), (12, 11, 10)):
        made = Delivered(*[(PROMPT, [])] * 3)
        made.start(*((seq_id, 16 if seq_id == 10 else 64) for seq_id in order))
        made.deliver(10, 11, 12)
        assert made.num_cached == [16]


def test_what_another_router_has_begun_is_not_counted_again() -> None:
    made = Delivered((PROMPT, [7, 7]), (PROMPT, []), (OTHER, []))
    made.start((10, 64), (11, 64), (12, 16))
    made.deliver(10)
    made.deliver(11, 12)
    assert made.num_cached == [0, 16]


@pytest.mark.parametrize("first", [0, 16])
def test_a_sequence_that_is_computed_again_counts_what_it_found_first(first: int) -> None:
    """Before its first token, or after it."""
    made = Delivered((PROMPT, []))
    made.start((10, first), (10, 64))
    made.deliver(10)
    made.start((10, 64))
    made.deliver(10)
    assert made.num_cached == [first, 0]
