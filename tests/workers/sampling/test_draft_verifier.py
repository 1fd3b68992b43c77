"""Verification of drafts: in the order of steps, also of those that follow drafts in flight."""

import threading
from collections.abc import Sequence

import pytest
import torch

from tramontane.proto.step import NO_TOKEN, Chunk, DecodeColumns, MicroBatch
from tramontane.workers.device.cuda import HostCopy
from tramontane.workers.sampling.token_sampler import DraftVerifier, SampledRows, StepVerdict


def _batch(
    *runs: tuple[int, int, Sequence[int]], is_lookahead: bool = False, freed: tuple[int, ...] = ()
) -> MicroBatch:
    """Return decodes: of each sequence its first position and its tokens."""
    rows = [
        (seq_id, start + i, token)
        for seq_id, start, tokens in runs
        for i, token in enumerate(tokens)
    ]
    seq_ids, starts, token_ids = zip(*rows, strict=True)
    return MicroBatch(
        1, 0, (), freed, DecodeColumns(seq_ids, starts, token_ids, is_lookahead=is_lookahead)
    )


def _begin(verifier: DraftVerifier, batch: MicroBatch, *sampled: int) -> StepVerdict:
    verifier.update(batch)
    return verifier.begin(SampledRows.of(batch), HostCopy(torch.tensor(sampled), lambda: None))


def _accept(verifier: DraftVerifier, batch: MicroBatch, *sampled: int) -> tuple[int, ...]:
    return verifier.accepted(_begin(verifier, batch, *sampled))


def test_a_draft_is_right_if_it_is_the_token_sampled_before_it() -> None:
    verifier = DraftVerifier(is_needed=True)
    batch = _batch((7, 9, (40, 41, 42)), (8, 3, (5,)), (9, 20, (1, 2)))
    assert _accept(verifier, batch, 41, 50, 60, 6, 2, 3) == (41, 50, NO_TOKEN, 6, 2, 3)


def test_drafts_ahead_are_right_if_those_in_flight_were() -> None:
    verifier = DraftVerifier(is_needed=True)
    first, second, third = (_begin(verifier, each, *sampled) for each, sampled in (
        (_batch((7, 9, (40, 41)), (8, 3, (5, 6))), (41, 43, 6, 9)),
        (_batch((7, 11, (43, 44)), (8, 5, (7, 8)), is_lookahead=True), (44, 60, 8, 10)),
        (_batch((7, 13, (45,)), (8, 7, (10,)), is_lookahead=True), (61, 62)),
    ))  # fmt: skip
    assert verifier.accepted(first) == (41, 43, 6, 9)
    assert verifier.accepted(second) == (44, 60, NO_TOKEN, NO_TOKEN), (
        "9 was sampled where 7 was drafted"
    )
    assert verifier.accepted(third) == (NO_TOKEN, NO_TOKEN), "60 was sampled where 45 was drafted"
    right = _batch((7, 13, (60, 61)), (8, 5, (9,)))
    assert _accept(verifier, right, 61, 70, 11) == (61, 70, 11)
    assert _accept(verifier, _batch((7, 15, (70,)), is_lookahead=True), 71) == (71,)


def test_the_position_has_to_be_the_one_that_was_sampled() -> None:
    """A draft that follows wrong ones may by chance be the token that was sampled in place of the
    first of these.
    """
    verifier = DraftVerifier(is_needed=True)
    assert _accept(verifier, _batch((7, 9, (40, 41, 42))), 43, 42, 43) == (43, NO_TOKEN, NO_TOKEN)
    assert _accept(verifier, _batch((7, 12, (43, 44)), is_lookahead=True), 44, 45) == (
        NO_TOKEN,
        NO_TOKEN,
    )


def test_steps_are_settled_in_their_order_by_whatever_thread_reads_first() -> None:
    verifier, gate = DraftVerifier(is_needed=True), threading.Event()
    first = _batch((7, 9, (40,)))
    verifier.update(first)
    waiting = verifier.begin(
        SampledRows.of(first), HostCopy(torch.tensor([41]), lambda: (gate.wait(), None)[1])
    )
    follower = _begin(verifier, _batch((7, 10, (41,)), is_lookahead=True), 42)
    read: list[tuple[int, ...]] = []
    thread = threading.Thread(target=lambda: read.append(verifier.accepted(follower)))
    thread.start()
    gate.set()
    thread.join(timeout=60)
    assert read == [(42,)]
    assert verifier.accepted(waiting) == (41,)


def test_a_prompt_ends_with_the_token_that_drafts_ahead_follow() -> None:
    verifier = DraftVerifier(is_needed=True)
    prompt = MicroBatch(1, 0, (Chunk(7, 0, (1, 2, 3), (), None, needs_sample=True),))
    assert _accept(verifier, prompt, 40) == (40,)
    assert _accept(verifier, _batch((7, 3, (40,)), is_lookahead=True), 41) == (41,)


def test_what_was_sampled_for_a_sequence_is_forgotten_with_it_and_all_with_a_fence() -> None:
    verifier = DraftVerifier(is_needed=True)
    _accept(verifier, _batch((7, 9, (40,))), 41)
    verifier.update(MicroBatch(1, 1, (), (7,)))  # without tokens to sample
    assert _accept(verifier, _batch((7, 10, (41,)), is_lookahead=True), 42) == (NO_TOKEN,)
    open_step = _begin(verifier, _batch((8, 9, (40,))), 41)
    verifier.clear()
    assert verifier.accepted(open_step) == (NO_TOKEN,), "its epoch is over"
    assert _accept(verifier, _batch((8, 10, (41,)), is_lookahead=True), 42) == (NO_TOKEN,)


def test_a_step_that_fails_fails_for_itself_alone() -> None:
    verifier = DraftVerifier(is_needed=True)
    first = _batch((7, 9, (40,)))

    def fail() -> None:
        raise RuntimeError("the device is lost")

    failing = verifier.begin(SampledRows.of(first), HostCopy(torch.tensor([41]), fail))
    follower = _begin(verifier, _batch((7, 10, (41,)), is_lookahead=True), 42)
    assert verifier.accepted(follower) == (NO_TOKEN,), "what it follows is not known"
    with pytest.raises(RuntimeError, match="the device is lost"):
        verifier.accepted(failing)


def test_without_drafts_tokens_are_taken_as_they_are() -> None:
    verifier = DraftVerifier(is_needed=False)
    assert _accept(verifier, _batch((7, 9, (40,)), (8, 3, (5,))), 41, 6) == (41, 6)
