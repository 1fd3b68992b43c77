"""Speculation against a modelled pipeline: how much sooner a stream ends, and what it costs the
others.
"""

from collections.abc import Iterable

import pytest
from examples import examples
from guessing_drafter import guess
from hypothesis import given, settings
from hypothesis import strategies as st

from tramontane.cluster.bench.simulator import (
    TOKEN,
    PipelineModel,
    SimRequest,
    SimTrace,
    simulate,
)
from tramontane.proto.plan import CachePlan, SpeculativeConfig, WindowClass, ring_pages
from tramontane.router.scheduling.balanced_policy import BalancedPolicy
from tramontane.router.scheduling.decode_queue import DecodeQueue, DecodeRows, DraftLimits
from tramontane.router.scheduling.policy import BatchWork, FixedInFlightPolicy, Policy
from tramontane.router.scheduling.scheduler import Scheduler
from tramontane.router.scheduling.sequence import Sequence
from tramontane.router.scheduling.waiting_queue import SchedulerLimits

PAGE, MAX_LEN, NUM_SEQS = 16, 4096, 64
BASE_S, ROW_S = 2e-3, 1e-4  # of a stage: for a micro-batch, and for each of its decodes


def _run(
    num_stages: int,
    requests: list[SimRequest],
    hop_s: float,
    repetition: float,
    num_drafts: int,
    policy: Policy | None = None,
) -> tuple[SimTrace, Scheduler]:
    ring = ring_pages(None, PAGE, MAX_LEN)
    config = SpeculativeConfig(num_drafts, 1, 1) if num_drafts else None
    cache = CachePlan(
        PAGE, (WindowClass(None, ring, ring * NUM_SEQS),), config.max_drafts() if config else 0
    )
    limits = SchedulerLimits(NUM_SEQS, 512, MAX_LEN, 1000, speculative=config)
    scheduler = Scheduler(cache, limits, policy or BalancedPolicy(num_stages, 512))

    def seconds(work: BatchWork) -> list[float]:
        return [BASE_S + 2e-5 * work.prefill_tokens + ROW_S * work.decodes] * num_stages

    return simulate(
        scheduler, PipelineModel(seconds, hop_s, repetition=repetition), requests
    ), scheduler


def test_a_stream_gets_its_tokens_sooner_the_more_its_text_repeats() -> None:
    lone = [SimRequest(0.0, 20, 600)]
    plain = _run(4, lone, 1e-3, 1.0, 0)[0].span_s
    runs = {share: _run(4, lone, 1e-3, share, 5) for share in (0.0, 0.3, 0.7, 1.0)}
    seconds = {share: trace.span_s / plain for share, (trace, _) in runs.items()}
    assert seconds[1.0] < 0.25
    assert seconds[0.7] < 0.8
    assert seconds[0.3] < 1.0
    assert seconds[0.0] < 1.01, "what is never right is hardly drafted"
    assert all(len(trace.token_times[0]) == 600 for trace, _ in runs.values())


@pytest.mark.nightly
@settings(max_examples=examples(40), deadline=None)
@given(
    stages=st.sampled_from([1, 2, 4, 8]),
    others=st.integers(1, 24),
    num_drafts=st.integers(1, 6),
    repetition=st.sampled_from([0.0, 0.5, 0.8, 1.0]),
    hop_s=st.sampled_from([1e-5, 1e-3, 5e-3]),
)
def test_a_sequence_that_speculates_delays_others_by_the_price_of_its_rows_at_most(
    stages: int, others: int, num_drafts: int, repetition: float, hop_s: float
) -> None:
    """Each of their tokens comes later by at most what all draft rows, and micro-batches of them,
    take in every stage.
    """
    requests = [SimRequest(0.0, 16, 300)] * (1 + others)
    plain, _ = _run(stages, requests, hop_s, repetition, 0, FixedInFlightPolicy(stages, 512))
    with pytest.MonkeyPatch.context() as patch:
        own, own_ahead, num_lookahead = DecodeQueue._draft, DecodeQueue.take_lookahead, [0]

        def take_lookahead(
            queue: DecodeQueue, sequences: Iterable[Sequence], limits: DraftLimits
        ) -> DecodeRows:
            taken = own_ahead(queue, [each for each in sequences if each.seq_id == 0], limits)
            num_lookahead[0] += bool(taken.sequences)
            return taken

        def draft(
            queue: DecodeQueue, sequence: Sequence, limits: DraftLimits, num_left: int
        ) -> tuple[int, ...]:
            return own(queue, sequence, limits, num_left) if sequence.seq_id == 0 else ()

        patch.setattr(DecodeQueue, "_draft", draft)
        patch.setattr(DecodeQueue, "take_lookahead", take_lookahead)
        drafted, scheduler = _run(
            stages, requests, hop_s, repetition, num_drafts, FixedInFlightPolicy(stages, 512)
        )
    price = (scheduler.draft_counts.num_draft_tokens * ROW_S + num_lookahead[0] * BASE_S) * stages
    for before, after in zip(plain.token_times[1:], drafted.token_times[1:], strict=True):
        assert max(late - early for early, late in zip(before, after, strict=True)) <= price + 1e-9
    if repetition == 1.0:
        assert drafted.token_times[0][-1] < plain.token_times[0][-1], "it has its tokens sooner"


def test_what_is_right_too_rarely_is_not_drafted_among_many() -> None:
    """Of 48 streams a row costs each of the others its time, so text that repeats in three of ten
    places has no drafts.
    """
    requests = [SimRequest(0.0, 16, 200)] * 48
    (plain, _), (drafted, scheduler) = (
        _run(1, requests, 1e-4, 0.3, num_drafts) for num_drafts in (0, 4)
    )
    assert scheduler.draft_counts.num_draft_tokens < 0.02 * 48 * 200
    assert drafted.span_s < 1.01 * plain.span_s


@pytest.mark.parametrize("seed", [0, 2])
def test_a_stream_over_eight_stages_is_three_times_as_fast_with_seven_of_ten_drafts_right(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """3.3 times is the most: of so many drafts in a row, one is wrong, and then all is to begin
    again.
    """
    lone = [SimRequest(0.0, 20, 3000)]
    plain = _run(8, lone, 5e-3, 1.0, 0)[0].span_s
    guess(monkeypatch, lambda _: TOKEN, 0.7, seed, always=False)
    trace, scheduler = _run(8, lone, 5e-3, 1.0, 3)
    assert 0.69 < scheduler.draft_counts.num_accepted_tokens / 3000 < 0.71
    assert plain / trace.span_s >= 3.0
