"""The rows of decoding sequences in a micro-batch: their columns, and the tokens of a result."""

from tramontane.proto.plan import SpeculativeConfig
from tramontane.proto.request import SamplingParams
from tramontane.proto.step import NO_TOKEN, PLACEHOLDER_TOKEN, DecodeColumns
from tramontane.router.scheduling.decode_queue import DecodeRows
from tramontane.router.scheduling.model_drafter import NgramDrafter
from tramontane.router.scheduling.sequence import Sequence
from tramontane.router.scheduling.speculation_state import SpeculationState


def _sequence(seq_id: int, num_known: int, last_id: int, num_lookahead: int = 0) -> Sequence:
    """Return a decoding sequence with so many drafts in flight, that in ``rows`` included."""
    prompt = (1,) * (num_known - 1)
    sequence = Sequence(seq_id, prompt, SamplingParams(), max_len=100, output_ids=[last_id])
    sequence.num_dispatched = num_known
    config = SpeculativeConfig(3, 1, 2)
    sequence.speculation = SpeculationState(
        config, prompt, lambda tokens: NgramDrafter(tokens, 1, 2)
    )
    sequence.speculation.num_lookahead = num_lookahead
    return sequence


def _rows(*drafted: tuple[Sequence, tuple[int, ...]], is_lookahead: bool = False) -> DecodeRows:
    rows = DecodeRows(is_lookahead)
    for sequence, drafts in drafted:
        rows.add_drafts(drafts)
        rows.sequences.append(sequence)
    return rows


def test_the_rows_of_a_sequence_are_its_last_token_and_its_drafts() -> None:
    rows = _rows((_sequence(7, 10, 50, 2), (60, 61)), (_sequence(8, 4, 40), ()))
    assert rows.num_rows == 4
    rows.new_pages.append((2, ((5,),)))
    assert rows.columns() == DecodeColumns(
        (7, 7, 7, 8), (9, 10, 11, 3), (50, 60, 61, 40), ((2, ((5,),)),)
    )


def test_drafts_ahead_follow_those_in_flight() -> None:
    rows = _rows((_sequence(7, 10, 50, 3), (62,)), is_lookahead=True)
    assert rows.num_rows == 1
    assert rows.columns() == DecodeColumns((7,), (12,), (62,), is_lookahead=True)


def test_without_drafts_a_sequence_has_one_row_perhaps_for_a_placeholder() -> None:
    rows, ahead = DecodeRows(), _sequence(8, 4, 40)
    ahead.num_placeholders, ahead.num_dispatched = 1, 5
    rows.sequences += [_sequence(7, 10, 50), ahead]
    assert rows.columns() == DecodeColumns((7, 8), (9, 4), (50, PLACEHOLDER_TOKEN))


def test_a_result_is_split_by_sequence_up_to_the_first_row_without_a_token() -> None:
    one, other = _sequence(7, 10, 50, 2), _sequence(8, 4, 40)
    rows = _rows((one, (60, 61)), (other, ()))
    assert list(rows.split(iter((60, 70, NO_TOKEN, 41)))) == [(one, 2, (60, 70)), (other, 0, (41,))]
    ahead = _rows((one, (62,)), (other, (42, 43)), is_lookahead=True)
    assert list(ahead.split(iter((NO_TOKEN, 43, 44)))) == [(one, 1, ()), (other, 2, (43, 44))]
    plain = DecodeRows(sequences=[one, other])
    assert list(plain.split(iter((51, 41)))) == [(one, 0, (51,)), (other, 0, (41,))]
