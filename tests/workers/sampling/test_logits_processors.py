"""Biases, penalties and the ban of an early end, against their formulas, however a sequence's
tokens come in.
"""

from dataclasses import replace

import pytest
import torch
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from logit_formulas import changed_logits

from tramontane.proto.request import SamplingParams
from tramontane.proto.step import Chunk, DecodeColumns, MicroBatch
from tramontane.workers.sampling.logits_processors import LogitsProcessor

VOCAB, EOS = 12, (2, 7)
PLAIN = SamplingParams(max_tokens=50)

TOKENS = st.integers(0, VOCAB - 1)
WISHES = st.builds(
    SamplingParams,
    max_tokens=st.just(50),
    presence_penalty=st.sampled_from([0.0, 0.5, -2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.75, -1.5]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.5]),
    logit_bias=st.dictionaries(TOKENS, st.floats(-100, 100, width=32), max_size=3).map(
        lambda biases: tuple(biases.items())
    ),
    min_tokens=st.integers(0, 5),
    stop_token_ids=st.lists(TOKENS, max_size=2).map(tuple),
)
SEQUENCES = st.lists(
    st.tuples(WISHES, st.lists(TOKENS, min_size=1, max_size=9), st.lists(TOKENS, max_size=6)),
    min_size=1,
    max_size=6,
)


def _changes() -> LogitsProcessor:
    return LogitsProcessor(VOCAB, EOS, torch.device("cpu"))


def _chunks(
    seq_id: int,
    sampling: SamplingParams,
    ids: list[int],
    num_prompt: int,
    size: int,
    num_cached: int = 0,
) -> list[Chunk]:
    """Return the chunks of a sequence; of its tokens so many are cached, and at least one is
    not.
    """
    begin = min(num_cached, len(ids) - 1)
    chunks = [
        Chunk(seq_id, start, tuple(ids[start : start + size]), (), None, start + size >= len(ids))
        for start in range(begin, len(ids), size)
    ]
    skipped = tuple(ids[:begin]) if sampling.needs_tokens else ()
    return [
        chunks[0]._replace(sampling=sampling, num_prompt=num_prompt, skipped_ids=skipped),
        *chunks[1:],
    ]


def _logits(rows: int) -> torch.Tensor:
    return 3 * torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(rows))


@settings(derandomize=True, deadline=None, max_examples=examples(200))
@given(
    sequences=SEQUENCES,
    size=st.integers(1, 5),
    replayed=st.booleans(),
    earlier=st.integers(0, 3),
    num_cached=st.integers(0, 12),
)
def test_logits_are_changed_as_the_formulas_say(
    sequences: list[tuple[SamplingParams, list[int], list[int]]],
    size: int,
    replayed: bool,
    earlier: int,
    num_cached: int,
) -> None:
    """Prompts come in chunks behind what is cached; then the output one decode at a time, or,
    ``replayed``, with the prompt.
    """
    changes = _changes()
    begun: list[MicroBatch] = []
    for number in range(earlier):  # earlier sequences leave nothing behind
        busy = replace(PLAIN, frequency_penalty=2.0, repetition_penalty=9.0)
        begun.append(
            MicroBatch(
                0, len(begun), (Chunk(100 + number, 0, tuple(range(VOCAB)), (), busy, True, 3),)
            )
        )
    changes_after = tuple(range(100, 100 + earlier))
    whole = [prompt + (output if replayed else []) for _, prompt, output in sequences]
    pieces = [
        _chunks(seq_id, wish, ids, len(prompt), size, num_cached)
        for seq_id, ((wish, prompt, _), ids) in enumerate(zip(sequences, whole, strict=True))
    ]
    for turn in range(max(map(len, pieces))):
        chunks = tuple(own[turn] for own in pieces if turn < len(own))
        begun.append(MicroBatch(0, len(begun), chunks, changes_after if turn == 0 else ()))
    for turn in range(0 if replayed else max(len(output) for *_, output in sequences)):
        going = [
            (seq_id, prompt, output)
            for seq_id, (_, prompt, output) in enumerate(sequences)
            if turn < len(output)
        ]
        decodes = DecodeColumns(
            tuple(seq_id for seq_id, *_ in going),
            tuple(len(prompt) + turn for _, prompt, _ in going),
            tuple(output[turn] for *_, output in going),
        )
        begun.append(MicroBatch(0, len(begun), (), (), decodes))
    for batch in begun:
        changes.update(batch)
    logits = _logits(len(sequences))
    before = logits.clone()
    positions = [len(prompt) + len(output) for _, prompt, output in sequences]
    got = changes.apply(logits, range(len(sequences)), positions)
    expected = [
        changed_logits(row, *wish, EOS)
        for row, wish in zip(logits.tolist(), sequences, strict=True)
    ]
    torch.testing.assert_close(got, torch.tensor(expected), rtol=1e-5, atol=1e-4)
    assert torch.equal(logits, before), "the logits of the model are needed for log-probabilities"


def test_who_wants_nothing_costs_nothing() -> None:
    changes, logits = _changes(), _logits(2)
    changes.update(
        MicroBatch(0, 0, tuple(_chunks(seq_id, PLAIN, [1, 2, 3], 3, 3)[0] for seq_id in range(2)))
    )
    assert len(changes._states) == 0
    assert changes.apply(logits, (0, 1), (3, 3)) is logits


@pytest.mark.parametrize("ended", ["released", "cleared"])
def test_a_sequence_that_has_ended_is_forgotten(ended: str) -> None:
    wish = replace(PLAIN, presence_penalty=1.0, logit_bias=((3, 5.0),), min_tokens=2)
    changes, logits = _changes(), _logits(1)
    changes.update(MicroBatch(0, 0, (Chunk(5, 0, (1, 2), (), wish, True, 1),)))
    assert len(changes._states) == 1
    if ended == "released":
        changes.update(MicroBatch(0, 1, (), (5,)))
    else:
        changes.clear()
    assert len(changes._states) == 0
    assert changes.apply(logits, (5,), (2,)) is logits


def test_the_first_token_after_the_prompt_knows_the_prompt_and_no_output() -> None:
    wish = replace(PLAIN, repetition_penalty=2.0, frequency_penalty=1.0)
    changes = _changes()
    changes.update(MicroBatch(0, 0, (Chunk(0, 0, (4,), (), wish, True, 1),)))
    logits = torch.full((1, VOCAB), 6.0)
    assert changes.apply(logits, (0,), (1,))[0, 4] == 3.0
    changes.update(MicroBatch(0, 1, (), (), DecodeColumns((0,), (1,), (4,))))
    assert changes.apply(logits, (0,), (2,))[0, 4] == 2.0
