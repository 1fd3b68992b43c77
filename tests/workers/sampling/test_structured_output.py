"""Which tokens a grammar allows, and who pays for it."""

import json
from collections.abc import Sequence

import pytest
import torch

from tramontane.proto.request import FinishReason, SamplingParams
from tramontane.proto.step import Chunk, MicroBatch
from tramontane.workers.sampling import structured_output as grammar
from tramontane.workers.sampling.structured_output import (
    StructuredOutputManager,
    output_tokens,
    unpack_bitmasks,
)

# 0 to 255 are bytes, then some longer pieces; two control tokens, and a piece twice
PIECES = (*(bytes([i]) for i in range(256)), b'{"', b"", b'"}', b'": ', b"", b'{"', b"true")
OPEN, CONTROL, CLOSE, COLON, CALL, OPEN_AGAIN, TRUE = range(256, 263)
# of the model, which has ids that its tokenizer does not know
VOCAB, EOS, OTHER_EOS = 300, 257, 290
DIGITS = 'start: /[0-9]{1,3}/ | "yes"'
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}},
    "required": ["a"],
    "additionalProperties": False,
}
JSON = "start: %json " + json.dumps(SCHEMA | {"x-guidance": {"whitespace_flexible": False}})


def _constraints(
    pieces: Sequence[bytes] = PIECES, eos: tuple[int, ...] = (EOS, OTHER_EOS)
) -> StructuredOutputManager:
    return StructuredOutputManager(lambda: pieces, VOCAB, eos)


def _begin(
    constraints: StructuredOutputManager,
    *grammars: str,
    said: bytes = b"",
    released: tuple[int, ...] = (),
    **sampling: bool,
) -> None:
    """Sequences 0, 1, ... with prompts of two tokens, and what they have said before."""
    chunks = [
        Chunk(
            i,
            0,
            (5, 6, *said),
            (),
            SamplingParams(grammar=text, ignore_eos=sampling.get("ignore_eos", False)),
            True,
            2,
        )
        for i, text in enumerate(grammars)
    ]
    constraints.update(MicroBatch(0, 0, tuple(chunks), released))


def _allowed(constraints: StructuredOutputManager, seq_id: int = 0) -> set[int]:
    logits = constraints.apply_masks(torch.zeros(1, VOCAB), [seq_id])
    return set(torch.isfinite(logits[0]).nonzero()[:, 0].tolist())


def _say(
    constraints: StructuredOutputManager, *token_ids: int
) -> tuple[tuple[int, FinishReason], ...]:
    for token_id in token_ids:
        ended = constraints.finished([0], [token_id])
    return ended


def test_only_what_the_grammar_allows_and_the_end_where_it_may_end() -> None:
    constraints = _constraints()
    _begin(constraints, DIGITS)
    assert _allowed(constraints) == set(b"0123456789y")
    assert _say(constraints, *b"12") == ()
    assert _allowed(constraints) == {*b"0123456789", EOS, OTHER_EOS}
    assert _say(constraints, OTHER_EOS) == (), "the router sees that by itself"
    _begin(constraints, DIGITS)
    assert _say(constraints, *b"ye") == ()
    assert _allowed(constraints) == set(b"s"), "the end is not allowed here"
    assert _say(constraints, *b"s") == ((0, FinishReason.STOP),), (
        "nothing can follow, which needs no token"
    )


def test_pieces_of_several_characters_and_pieces_that_are_there_twice() -> None:
    constraints = _constraints()
    _begin(constraints, JSON)
    assert _allowed(constraints) == {ord("{"), OPEN, OPEN_AGAIN}
    assert _say(constraints, OPEN_AGAIN, *b'a":') == ()
    assert _allowed(constraints) == {*b"tf", TRUE}
    assert _say(constraints, TRUE, ord("}")) == ((0, FinishReason.STOP),)


def test_control_tokens_are_no_text_and_can_be_requested() -> None:
    constraints = _constraints()
    _begin(constraints, f"start: TEXT | <[{CALL}]> DIGITS\nTEXT: /(.|\\n)+/\nDIGITS: /[0-9]/")
    assert {CONTROL, EOS}.isdisjoint(_allowed(constraints))
    assert {CALL, *b"aA9 \n", OPEN} <= _allowed(constraints)
    assert _say(constraints, CALL) == ()
    assert _allowed(constraints) == set(b"0123456789")


def test_the_end_of_sequence_is_a_token_like_others_for_who_ignores_it() -> None:
    constraints = _constraints()
    _begin(constraints, DIGITS, ignore_eos=True)
    assert _say(constraints, *b"1") == ()
    assert _allowed(constraints) == set(b"0123456789")
    assert _say(constraints, *b"23") == ((0, FinishReason.STOP),)


def test_only_the_tokens_of_a_set_are_allowed_and_never_used_up() -> None:
    grammar = f"start: answer\nanswer: body\nbody: <[1,5,{CONTROL},{CALL}]>+"
    constraints = _constraints()
    _begin(constraints, grammar, ignore_eos=True)
    for token_id in (5, CALL, 1, CONTROL):
        assert _allowed(constraints) == {1, 5, CONTROL, CALL}
        assert _say(constraints, token_id) == ()
    constraints = _constraints()
    _begin(constraints, grammar)
    assert _allowed(constraints) == {1, 5, CONTROL, CALL}
    assert _say(constraints, 5) == ()
    assert _allowed(constraints) == {1, 5, CONTROL, CALL, EOS, OTHER_EOS}


def test_what_was_said_before_is_taken_in_again_chunk_by_chunk() -> None:
    whole, cut = _constraints(), _constraints()
    _begin(whole, JSON, said=b'{"a":tr')
    tokens = (5, 6, *b'{"a":tr')
    for start, end in ((0, 1), (1, 4), (4, 5), (5, 9)):
        first = (SamplingParams(grammar=JSON), 2) if start == 0 else (None, 0)
        chunk = Chunk(0, start, tokens[start:end], (), first[0], end == 9, first[1])
        cut.update(MicroBatch(0, 0, (chunk,)))
    assert _allowed(whole) == _allowed(cut) == set(b"u")


@pytest.mark.parametrize("num_cached", range(1, 8))
def test_what_was_said_in_a_cached_prefix_is_taken_in_too(num_cached: int) -> None:
    """Of a sequence that was preempted, or continues on another pipeline: two tokens of prompt and
    what was said since.
    """
    constraints, tokens = _constraints(), (5, 6, *b'{"a":tr')
    for start, end in ((num_cached, num_cached + 1), (num_cached + 1, len(tokens))):
        is_first = start == num_cached
        first, skipped = (
            (SamplingParams(grammar=JSON) if is_first else None),
            tokens[:start] if is_first else (),
        )
        chunk = Chunk(
            0, start, tokens[start:end], (), first, False, 2 if is_first else 0, skipped_ids=skipped
        )
        constraints.update(MicroBatch(0, 0, (chunk,)))
    assert _allowed(constraints) == set(b"u")


@pytest.mark.parametrize(
    ("start", "ids", "expected"),
    [(0, (1, 2), ()), (4, (1, 2, 3), (2, 3)), (5, (1, 2), (1, 2)), (9, (1,), (1,))],
)
def test_which_tokens_of_a_chunk_are_the_answers(
    start: int, ids: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    assert output_tokens(Chunk(0, start, ids, (), None, False), 5) == expected


def test_rows_without_a_grammar_stay_as_they_are() -> None:
    constraints = _constraints()
    logits = torch.randn(3, VOCAB)
    assert constraints.apply_masks(logits, [0, 1, 2]) is logits, (
        "no sequence has a grammar, so nothing is changed"
    )
    _begin(constraints, "", DIGITS, "")
    before = logits.clone()
    masked = constraints.apply_masks(logits, [0, 1, 2])
    assert torch.equal(logits, before)
    assert torch.equal(masked[[0, 2]], logits[[0, 2]])
    assert torch.isfinite(masked[1]).sum() == len("0123456789y")
    _begin(constraints, "", "", "", released=(1,))
    assert constraints.apply_masks(logits, [0, 1, 2]) is logits


def test_the_vocabulary_is_read_once_and_only_for_who_needs_it() -> None:
    reads = []

    def read() -> Sequence[bytes]:
        reads.append(1)
        return PIECES

    constraints = StructuredOutputManager(read, VOCAB, ())
    _begin(constraints, "", "")
    assert not reads
    _begin(constraints, DIGITS, JSON)
    _begin(constraints, DIGITS, released=(0, 1))
    assert len(reads) == 1


def test_few_compiled_grammars_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar, "MAX_COMPILED_GRAMMARS", 2)
    constraints = _constraints()
    for text in ('start: "a"', 'start: "b"', 'start: "a"', 'start: "c"'):
        _begin(constraints, text, released=(0,))
    assert list(constraints._compiled) == ['start: "a"', 'start: "c"']


@pytest.mark.parametrize("pieces", [PIECES, PIECES[:255], PIECES[:256], (*PIECES, *(b"x",) * 60)])
def test_vocabularies_of_any_size_fit_the_models(pieces: tuple[bytes, ...]) -> None:
    """Also where llguidance's end is the first bit of a byte, and where there are more pieces than
    the model has ids.
    """
    constraints = _constraints(pieces, (OTHER_EOS,))
    _begin(constraints, DIGITS, said=b"1")
    assert _allowed(constraints) == {*b"0123456789", OTHER_EOS}


def test_what_a_grammar_does_not_allow_ends_the_sequence() -> None:
    """As a row of logits that are no numbers may bring about."""
    constraints = _constraints()
    _begin(constraints, DIGITS, DIGITS)
    assert constraints.finished([0, 1], [ord("x"), ord("1")]) == ((0, FinishReason.ERROR),)
    assert constraints.finished([0, 1], [ord("x"), ord("1")]) == ((0, FinishReason.ERROR),)


@pytest.mark.parametrize("sampled", [ord("x"), EOS])
def test_a_grammar_that_cannot_be_followed_never_ends_well(sampled: int) -> None:
    """Nothing is masked then, so the model may end by itself at once."""
    constraints = _constraints()
    _begin(constraints, "start: nothing", DIGITS)
    assert constraints.finished([0, 1], [sampled, ord("1")]) == ((0, FinishReason.ERROR),)


def test_bits_count_from_the_lowest() -> None:
    allowed = unpack_bitmasks([b"\x05\x80", b"\x00\x01"], 20)
    assert [row.nonzero()[:, 0].tolist() for row in allowed] == [[0, 2, 15], [8]]
    assert allowed.shape == (2, 20)


@pytest.mark.parametrize("last", [(EOS,), b"s"], ids=["end of sequence", "nothing can follow"])
def test_a_row_in_vain_after_the_end_breaks_no_grammar(
    last: Sequence[int], caplog: pytest.LogCaptureFixture
) -> None:
    """It was submitted before the end was known, and may have any token."""
    constraints = _constraints()
    _begin(constraints, DIGITS)
    _say(constraints, *(b"12" if last == (EOS,) else b"ye"), *last)
    assert constraints.num_sequences == 0
    assert _say(constraints, ord("x")) == ()
    assert not caplog.records
