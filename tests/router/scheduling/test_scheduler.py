"""The scheduler against an imagined pipeline: budgets, borders, pages, aborts. No torch, no event
loop.
"""

import random
from collections.abc import Callable

import pytest
from examples import examples
from fake_pipeline import EOS, new_cache, new_pipeline, new_sequence, some_token, submit_traffic
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_chain import all_chunks

from tramontane.cluster.bench.comparison import SarathiPolicy
from tramontane.proto.errors import RequestError
from tramontane.proto.plan import CachePlan, WindowClass
from tramontane.proto.request import FinishReason, SamplingParams
from tramontane.proto.step import StepResult
from tramontane.router.scheduling.balanced_policy import BalancedPolicy
from tramontane.router.scheduling.policy import FixedInFlightPolicy, Policy
from tramontane.router.scheduling.sequence import Sequence


def test_prompt_and_decode_share_a_micro_batch() -> None:
    pipe = new_pipeline(new_cache(16, 8, 64), budget=10)
    pipe.scheduler.add(new_sequence(0, 4, 5))
    pipe.submit()
    pipe.answer()
    pipe.scheduler.add(new_sequence(1, 30, 5))
    batch = pipe.submit()
    assert batch is not None
    assert [(c.seq_id, c.start, c.num_tokens, c.needs_sample) for c in all_chunks(batch)] == [
        (1, 0, 9, False),
        (0, 4, 1, True),
    ]


def test_chunks_of_one_prompt_fly_together_but_a_decode_waits() -> None:
    pipe = new_pipeline(new_cache(16, 8, 64), budget=10)
    pipe.scheduler.add(new_sequence(0, 25, 5))
    batches = [pipe.submit(), pipe.submit(), pipe.submit()]
    assert [b.chunks[0].num_tokens for b in batches if b] == [10, 10, 5]
    assert [b.chunks[0].needs_sample for b in batches if b] == [False, False, True]
    assert pipe.submit() is None, "the first new token is not known yet"
    for _ in range(3):
        pipe.answer()
    assert pipe.submit() is not None


def test_decodes_are_spread_over_the_micro_batches_in_flight() -> None:
    pipe = new_pipeline(new_cache(16, 8, 64), in_flight=3)
    for seq_id in range(8):
        pipe.scheduler.add(new_sequence(seq_id, 1, 5))
    pipe.submit()
    pipe.answer()
    sizes = [batch.num_tokens for batch in (pipe.submit(), pipe.submit(), pipe.submit()) if batch]
    assert sizes == [3, 3, 2]


def test_decodes_never_shut_a_prompt_out() -> None:
    pipe = new_pipeline(new_cache(16, 8, 64), budget=4, in_flight=1)
    for seq_id in range(4):
        pipe.scheduler.add(new_sequence(seq_id, 1, 100))
    pipe.submit()
    pipe.answer()
    pipe.scheduler.add(new_sequence(9, 3, 1))
    for _ in range(3):
        pipe.submit()
        pipe.answer()
    assert len(pipe.tokens_of(9)) == 1
    assert all(len(pipe.tokens_of(seq_id)) >= 3 for seq_id in range(4)), "and the decodes continue"


def test_finishes_by_length_stop_and_context() -> None:
    pipe = new_pipeline(new_cache(16, 8, 64))
    pipe.scheduler.add(new_sequence(0, 3, 4))
    pipe.scheduler.add(new_sequence(1, 250, 100))
    pipe.drain()
    assert [e.finish for e in pipe.tokens_of(0)] == [None, None, None, FinishReason.LENGTH]
    assert len(pipe.tokens_of(1)) == 6, "the context of 256 ends it"
    pipe.scheduler.add(new_sequence(2, 3, 4))
    pipe.submit()
    pipe.answer(EOS)
    assert [e.finish for e in pipe.tokens_of(2)] == [FinishReason.STOP]
    ignoring = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
    pipe.scheduler.add(Sequence(3, (5,), ignoring, 3))
    pipe.submit()
    pipe.answer(EOS)
    assert [e.finish for e in pipe.tokens_of(3)] == [None]


@pytest.mark.parametrize("ignores_eos", [False, True])
def test_the_clients_tokens_end_a_sequence_too(ignores_eos: bool) -> None:
    """As the first token, which follows a prompt, and as a later one, in a column of decodes."""
    pipe = new_pipeline(new_cache(16, 8, 64))
    sampling = SamplingParams(
        max_tokens=9, temperature=0.0, ignore_eos=ignores_eos, stop_token_ids=(7, 8)
    )
    for seq_id, answers in enumerate(([8], [EOS + 1, 7], [EOS + 1, EOS])):
        pipe.scheduler.add(Sequence(seq_id, (5,), sampling, 10))
        for answer in answers:
            pipe.submit()
            pipe.answer(answer)
        is_end = answers[-1] != EOS or not ignores_eos
        assert [e.finish for e in pipe.tokens_of(seq_id)] == [None] * (len(answers) - 1) + [
            FinishReason.STOP if is_end else None
        ]
        pipe.scheduler.abort(seq_id)
        pipe.submit()


def test_pages_stop_growing_at_the_window_and_start_small() -> None:
    """Must hold: no growth past the window, and a short sequence holds only the pages it filled."""
    cache = new_cache(16, 8, 64)
    pipe = new_pipeline(cache, budget=16)
    pipe.scheduler.add(new_sequence(0, 1, 250))
    held = []
    while pipe.submit():
        held.append(len(pipe.scheduler._running.by_id[0].pages[0]))
        pipe.answer()
    assert held[:17] == [1] * 16 + [2]
    assert max(held) == cache.classes[0].ring_pages == 5
    assert held[80:] == [5] * len(held[80:])
    assert pipe.scheduler.is_idle


def test_only_a_token_that_begins_a_page_carries_one() -> None:
    """A prompt of 14 in pages of 16: tokens 15 and 16 fill the first page, the next one begins the
    second.
    """
    pipe = new_pipeline(new_cache(16, 8, 64))
    pipe.scheduler.add(new_sequence(0, 14, 6))
    pipe.submit()
    grown = []
    for _ in range(4):
        pipe.answer()
        batch = pipe.submit()
        assert batch is not None
        grown.append(batch.decodes.new_pages)
    assert [len(new_pages) for new_pages in grown] == [0, 0, 1, 0]
    assert [len(pages) for pages in grown[2][0][1]] == [1]


def test_waits_for_pages_and_is_admitted_when_they_return() -> None:
    pipe = new_pipeline(new_cache(16, 2, 64))
    for seq_id in range(3):
        pipe.scheduler.add(new_sequence(seq_id, 100, 4))
    batch = pipe.submit()
    assert batch is not None
    assert {c.seq_id for c in all_chunks(batch)} == {0}
    pipe.drain()
    assert [len(pipe.tokens_of(i)) for i in range(3)] == [4, 4, 4]


def test_without_a_window_sequences_are_admitted_for_what_is_known_of_them() -> None:
    """Each may become 116 tokens long, 8 pages; there are 12. All run at once while they are
    short.
    """
    pipe = new_pipeline(CachePlan(16, (WindowClass(None, 16, 12),)))
    for seq_id in range(4):
        pipe.scheduler.add(new_sequence(seq_id, 16, 100))
    batch = pipe.submit()
    assert batch is not None
    assert {c.seq_id for c in all_chunks(batch)} == {0, 1, 2, 3}


def test_where_pages_run_out_the_youngest_is_computed_again() -> None:
    """12 pages, three sequences that will hold 5 each: the last one gives back what it has, and
    still gets all its tokens.
    """
    pipe = new_pipeline(CachePlan(16, (WindowClass(None, 16, 12),)), budget=200)
    for seq_id in range(3):
        pipe.scheduler.add(new_sequence(seq_id, 20, 60))
    again = []
    while batch := pipe.submit():
        again += [c for c in batch.chunks if c.sampling and len(pipe.tokens_of(c.seq_id)) > 0]
        pipe.answer()
    assert [c.seq_id for c in again] == [2]
    known = (*new_sequence(2, 20, 60).prompt_ids, *[50] * len(pipe.tokens_of(2)))
    assert again[0].token_ids == known[again[0].start : again[0].start + again[0].num_tokens], (
        "its prompt and its answer so far"
    )
    assert again[0].needs_sample
    assert pipe.scheduler.num_preempted == 1
    assert [len(pipe.tokens_of(i)) for i in range(3)] == [60, 60, 60]
    assert pipe.scheduler.is_idle


def test_a_preempted_sequence_keeps_its_pages_until_nothing_in_flight_can_touch_them() -> None:
    """Four pages of four positions, two for each. Sequence 0 needs a third while sequence 1 is in
    the pipeline.
    """
    pipe = new_pipeline(CachePlan(4, (WindowClass(None, 4, 4),)), in_flight=2)
    pipe.scheduler.add(new_sequence(0, 4, 10))
    pipe.scheduler.add(new_sequence(1, 3, 10))
    while not pipe.scheduler.num_preempted:
        while pipe.submit():
            pass
        assert not pipe.scheduler.num_preempted or [
            c.seq_id for batch in pipe.in_flight for c in all_chunks(batch)
        ] == [1]
        if not pipe.scheduler.num_preempted:
            pipe.answer()
    tokens = len(pipe.tokens_of(1))
    assert pipe.scheduler.allocator.num_free == [0]
    assert pipe.submit() is None
    pipe.answer()
    assert len(pipe.tokens_of(1)) == tokens + 1, "what was in flight counts"
    batch = pipe.submit()
    assert batch is not None
    assert (batch.freed_seq_ids, [c.seq_id for c in all_chunks(batch)]) == ((1,), [0])
    pipe.drain()
    assert [len(pipe.tokens_of(i)) for i in range(2)] == [10, 10]


def test_pages_of_an_aborted_sequence_wait_for_the_pipeline() -> None:
    pipe = new_pipeline(new_cache(16, 1, 64), budget=20)
    pipe.scheduler.add(new_sequence(0, 100, 4))
    pipe.submit()
    pipe.submit()
    pipe.scheduler.abort(0)
    pipe.scheduler.add(new_sequence(1, 100, 4))
    assert pipe.submit() is None, "its two micro-batches may still write to the pages"
    pipe.answer()
    assert pipe.submit() is None
    pipe.answer()
    batch = pipe.submit()
    assert batch is not None
    assert (batch.freed_seq_ids, all_chunks(batch)[0].seq_id) == ((0,), 1)
    pipe.drain()
    assert pipe.tokens_of(0) == []
    assert len(pipe.tokens_of(1)) == 4


def test_an_aborted_sequence_that_waits_is_removed() -> None:
    pipe = new_pipeline(new_cache(16, 1, 64))
    pipe.scheduler.add(new_sequence(0, 100, 4))
    pipe.scheduler.add(new_sequence(1, 100, 4))
    pipe.submit()
    pipe.scheduler.abort(1)
    pipe.drain()
    assert pipe.scheduler.is_idle
    assert pipe.tokens_of(1) == []


def test_a_result_of_an_older_epoch_changes_nothing() -> None:
    pipe = new_pipeline(new_cache(16, 8, 64))
    pipe.scheduler.add(new_sequence(0, 4, 5))
    batch = pipe.submit()
    assert batch is not None
    stale = StepResult(batch.epoch - 1, batch.step_id, (50,), ())
    assert pipe.scheduler.complete(batch, stale) == []
    pipe.scheduler.check_integrity()
    assert pipe.submit() is None


@pytest.mark.parametrize(("prompt", "message"), [(0, "empty"), (256, "256 tokens")])
def test_refuses_what_can_never_run(prompt: int, message: str) -> None:
    pipe = new_pipeline(new_cache(16, 8, 64))
    with pytest.raises(RequestError, match=message):
        pipe.scheduler.add(new_sequence(0, prompt, 1))


@pytest.mark.parametrize("token_id", [-1, 1000])
def test_refuses_ids_outside_the_vocabulary(token_id: int) -> None:
    pipe = new_pipeline(new_cache(16, 8, 64))
    with pytest.raises(
        RequestError,
        match=f"the prompt has token id {token_id}; the model's vocabulary has the ids 0 to 999",
    ):
        pipe.scheduler.add(Sequence(0, (5, token_id), SamplingParams(max_tokens=1), 3))
    with pytest.raises(RequestError, match=f"logit_bias: token id {token_id} is outside"):
        pipe.scheduler.add(
            Sequence(
                0, (5,), SamplingParams(max_tokens=1, logit_bias=((7, 1.0), (token_id, 1.0))), 3
            )
        )


def test_refuses_a_sequence_larger_than_the_pool() -> None:
    cache = CachePlan(16, (WindowClass(None, 16, 8),))
    pipe = new_pipeline(cache)
    with pytest.raises(RequestError, match="cache pages"):
        pipe.scheduler.add(new_sequence(0, 130, 10))


def test_check_integrity_sees_a_lost_page() -> None:
    pipe = new_pipeline(new_cache(16, 8, 64))
    pipe.scheduler.add(new_sequence(0, 40, 5))
    pipe.submit()
    pipe.scheduler._running.by_id[0].pages[0].pop()
    with pytest.raises(AssertionError):
        pipe.scheduler.check_integrity()


POLICIES: dict[str, Callable[[int, int], Policy]] = {
    "even": FixedInFlightPolicy,
    "balanced": BalancedPolicy,
    "balanced, with a target": lambda num_stages, budget: BalancedPolicy(
        num_stages, budget, itl_target_s=2e-3
    ),
    "uniform budget": SarathiPolicy,
}


@settings(max_examples=examples(300), deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10_000),
    page_size=st.sampled_from([1, 3, 16]),
    windows=st.sampled_from([(64,), (None,), (5, None), (1,)]),
    budget=st.integers(1, 70),
    in_flight=st.integers(1, 6),
    seqs=st.integers(1, 6),
    room=st.floats(1, 4),
    policy=st.sampled_from(sorted(POLICIES)),
    priorities=st.sampled_from([(0,), (0, 1), (0, 1, 9)]),
)
def test_any_traffic(
    seed: int,
    page_size: int,
    windows: tuple[int | None, ...],
    budget: int,
    in_flight: int,
    seqs: int,
    room: float,
    policy: str,
    priorities: tuple[int, ...],
) -> None:
    """Random arrivals, aborts and ends: every sequence gets its own tokens, all of them, or was
    aborted; all pages come back.
    """
    chosen = POLICIES[policy](in_flight, budget)
    pipe = new_pipeline(
        new_cache(page_size, room, *windows), seqs=seqs, budget=budget, policy=chosen
    )
    pipe.token_at, pipe.num_stages = some_token, in_flight
    wanted = submit_traffic(pipe, random.Random(seed), priorities)
    pipe.drain()
    for seq_id, tokens in wanted.items():
        events = pipe.tokens_of(seq_id)
        assert [event.token_id for event in events] == tokens
        ended = FinishReason.STOP if tokens[-1] == EOS else FinishReason.LENGTH
        assert [event.finish for event in events] == [None] * (len(tokens) - 1) + [ended]
    assert pipe.scheduler.is_idle
    pipe.scheduler.check_integrity()
