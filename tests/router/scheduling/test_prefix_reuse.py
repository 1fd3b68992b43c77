"""Prefix caching in the scheduler: what sequences read is their own text under their own salt,
whatever else happens to pages.
"""

import random
from collections import deque
from dataclasses import replace

import pytest
from examples import examples
from fake_pipeline import FakePipeline, new_cache, new_pipeline, new_sequence
from hypothesis import given, settings
from hypothesis import strategies as st

from tramontane.proto.request import NOT_FINITE_TOKEN, FinishReason, SamplingParams
from tramontane.router.scheduling import prefix_cache
from tramontane.router.scheduling.page_allocator import PageAllocator
from tramontane.router.scheduling.policy import FixedInFlightPolicy
from tramontane.router.scheduling.prefix_cache import first_page_seen, reusable_blocks
from tramontane.router.scheduling.scheduler import Scheduler
from tramontane.router.scheduling.sequence import Sequence

TEXTS = [tuple(random.Random(seed).choices(range(10, 900), k=150)) for seed in range(2)]
SAMPLINGS = (
    SamplingParams(max_tokens=9, temperature=0.0),
    SamplingParams(max_tokens=9, temperature=0.0, repetition_penalty=1.2),
    SamplingParams(max_tokens=9, temperature=0.0, prompt_logprobs=1),
)


def _sequence(
    seq_id: int, prompt: tuple[int, ...], sampling: SamplingParams = SAMPLINGS[0], salt: str = ""
) -> Sequence:
    return Sequence(seq_id, prompt, sampling, len(prompt) + sampling.max_tokens, cache_salt=salt)


def _run(pipe: FakePipeline, *sequences: Sequence) -> None:
    for sequence in sequences:
        pipe.scheduler.add(sequence)
    pipe.drain()


@settings(max_examples=examples(150), deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10_000),
    page_size=st.sampled_from([1, 3, 8]),
    windows=st.sampled_from([(24,), (None,), (5, None), (1,), (40, 9)]),
    budget=st.integers(1, 120),
    in_flight=st.integers(1, 4),
    room=st.floats(1, 4),
)
def test_any_traffic_with_common_beginnings(
    seed: int,
    page_size: int,
    windows: tuple[int | None, ...],
    budget: int,
    in_flight: int,
    room: float,
) -> None:
    """Arrivals, aborts, fences and scarce pages: ``FakePipeline`` checks every row that a step
    reads, and all counts.
    """
    rng = random.Random(seed)
    pipe = new_pipeline(
        new_cache(page_size, room, *windows), seqs=5, budget=budget, in_flight=in_flight
    )
    pipe.token_at = lambda seq_id, position: 3 + (seq_id + position) % 990
    alive: list[int] = []
    for seq_id in range(14):
        begin = rng.choice(TEXTS)[: rng.randint(0, 150)]
        prompt = (*begin, *(rng.choices(range(900, 999), k=rng.randint(1, 30))))
        pipe.scheduler.add(
            _sequence(seq_id, prompt, rng.choice(SAMPLINGS), rng.choice(["", "", "other"]))
        )
        alive.append(seq_id)
        for _ in range(rng.randint(0, 8)):
            pipe.submit()
            if pipe.in_flight and rng.random() < 0.7:
                pipe.answer()
        if rng.random() < 0.15:
            pipe.scheduler.abort(alive.pop(rng.randrange(len(alive))))
        if rng.random() < 0.1:
            pipe.scheduler.restart(pipe.scheduler.epoch + 1)
            pipe.fence()
    pipe.drain()
    assert all(len(pipe.tokens_of(seq_id)) == 9 for seq_id in alive)
    assert pipe.scheduler.is_idle


@settings(max_examples=examples(150), deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10_000),
    page_size=st.sampled_from([1, 3, 8]),
    windows=st.sampled_from([(24,), (None,), (5, None), (40, 9)]),
    budget=st.integers(1, 120),
    room=st.floats(1, 4),
    is_asynchronous=st.booleans(),
)
def test_nothing_of_a_sequence_that_is_not_finite_is_reused(
    seed: int,
    page_size: int,
    windows: tuple[int | None, ...],
    budget: int,
    room: float,
    is_asynchronous: bool,
) -> None:
    """Some overflow at a position of their answers, also where steps in flight follow; the others
    get all their tokens.
    """
    rng, cache = random.Random(seed), new_cache(page_size, room, *windows)
    pipe = new_pipeline(cache, seqs=5, budget=budget, in_flight=2, async_scheduling=is_asynchronous)
    lengths: dict[int, int] = {}
    allocator, reuse_prefix = pipe.scheduler.allocator, pipe.scheduler.allocator.reuse_prefix

    def checked(sequence: Sequence) -> None:
        reuse_prefix(sequence)
        pages = [(index, page) for index, own in enumerate(sequence.pages) for page in own]
        assert pipe.failed.isdisjoint(
            pipe.writers[index, page, row] for index, page in pages for row in range(page_size)
        )

    allocator.reuse_prefix = checked  # type: ignore[method-assign]
    for seq_id in range(14):
        prompt = (
            *rng.choice(TEXTS)[: rng.randint(0, 150)],
            *rng.choices(range(900, 999), k=rng.randint(1, 30)),
        )
        # the position that overflows
        lengths[seq_id] = len(prompt) + (rng.randint(0, 8) if rng.random() < 0.4 else 99)
        pipe.token_at = lambda seq, at: (
            NOT_FINITE_TOKEN if at >= lengths[seq] else 3 + (seq + at) % 990
        )
        pipe.scheduler.add(_sequence(seq_id, prompt))
        for _ in range(rng.randint(0, 8)):
            pipe.submit()
            if pipe.in_flight and rng.random() < 0.7:
                pipe.answer()
    pipe.drain()
    for seq_id in lengths:
        events = pipe.tokens_of(seq_id)
        tokens = [event.token_id for event in events]
        is_bad = tokens[-1] == NOT_FINITE_TOKEN
        assert (seq_id in pipe.failed) == is_bad == (events[-1].finish is FinishReason.ERROR)
        assert is_bad or len(tokens) == 9
        assert NOT_FINITE_TOKEN not in tokens[:-1]
    assert pipe.scheduler.is_idle


@pytest.mark.parametrize("is_in_flight", [True, False])
def test_what_a_sequence_writes_after_it_was_forgotten_is_not_reused(is_in_flight: bool) -> None:
    """A chunk of it may be in flight when a result shows that it is not finite. A window sees
    nothing of the first chunk.
    """
    allocator = PageAllocator(new_cache(8, 4, 24), enable_prefix_caching=True)
    bad, same = _sequence(0, TEXTS[0][:64]), _sequence(1, (*TEXTS[0][:64], 901))
    assert allocator.reserve_for_admission(bad)
    for start in (0, 32):
        allocator.allocate(bad, start, start + 32)
        bad.num_dispatched, bad.is_started = start + 32, True
        if start and is_in_flight:
            allocator.forget(bad)
        allocator.register_written()
    if not is_in_flight:
        assert allocator.count_cached(same), "it would be reused"
        allocator.forget(bad)
    allocator.release(bad)
    assert allocator.count_cached(same) == 0


@pytest.mark.parametrize("windows", [(None,), (24,), (24, None)])
def test_what_is_reused(windows: tuple[int | None, ...]) -> None:
    """All whole pages of a common text, but for the last token; nothing with another salt, nor
    where the prompt is scored.

    Chunks are shorter than the ring: of a longer one the first pages are not kept.
    """
    pipe = new_pipeline(new_cache(8, 8, *windows), budget=16)
    text = TEXTS[0][:64]
    for seq_id, (prompt, sampling, salt, expected) in enumerate(
        [
            (text, SAMPLINGS[0], "", 0),
            (text, SAMPLINGS[0], "", 56),
            ((*text, 1), SAMPLINGS[1], "", 64),
            ((*text[:40], 1), SAMPLINGS[0], "", 40),
            ((*text[:39], 1, 2), SAMPLINGS[0], "", 32),
            ((1, *text), SAMPLINGS[0], "", 0),
            (text, SAMPLINGS[2], "", 0),
            (text, SAMPLINGS[0], "other", 0),
            (text, SAMPLINGS[0], "other", 56),
        ]
    ):
        pipe.num_reused = 0
        _run(pipe, _sequence(seq_id, prompt, sampling, salt))
        assert pipe.num_reused == expected, seq_id


def test_the_last_window_of_tokens_alone_is_no_prefix() -> None:
    """Two texts that differ before the window have other values in it: hidden states depend on all
    tokens.
    """
    pipe = new_pipeline(new_cache(8, 8, 16), budget=64)
    _run(pipe, _sequence(0, TEXTS[0][:64]))
    _run(pipe, _sequence(1, (1, *TEXTS[0][1:64], 2)))
    assert pipe.num_reused == 0


def test_sequences_that_arrive_together_share_what_the_first_computes() -> None:
    pipe = new_pipeline(new_cache(8, 8, None), budget=64)
    _run(pipe, *(_sequence(seq_id, (*TEXTS[0][:64], seq_id)) for seq_id in range(5)))
    assert pipe.num_reused == 4 * 64


def _schedule(pipe: FakePipeline, arrivals: list[tuple[int, int, int]]) -> tuple[list[object], int]:
    """Return what is in each micro-batch, and how many sequences were preempted, for arrivals after
    so many micro-batches.
    """
    steps: list[object] = []
    waiting = deque(
        (after, new_sequence(1000 + number, prompt, new))
        for number, (after, prompt, new) in enumerate(arrivals)
    )
    while waiting or pipe.in_flight or not pipe.scheduler.is_idle:
        while waiting and (waiting[0][0] <= len(steps) or pipe.scheduler.is_idle):
            pipe.scheduler.add(waiting.popleft()[1])
        while (batch := pipe.submit()) is not None:
            steps.append(
                ([(c.seq_id, c.start, c.num_tokens) for c in batch.chunks], batch.decodes.seq_ids)
            )
        pipe.answer()
    return steps, pipe.scheduler.num_preempted


@settings(max_examples=examples(60), deadline=None, derandomize=True)
@given(
    arrivals=st.lists(
        st.tuples(st.integers(0, 30), st.integers(1, 120), st.integers(1, 60)), max_size=14
    ).map(sorted),
    windows=st.sampled_from([(24, None), (None,), (24,), (1, 40)]),
    seqs=st.integers(1, 6),
    room=st.floats(1, 3),
    budget=st.integers(1, 100),
)
def test_cached_pages_keep_no_sequence_waiting(
    arrivals: list[tuple[int, int, int]],
    windows: tuple[int | None, ...],
    seqs: int,
    room: float,
    budget: int,
) -> None:
    """Prompts with nothing in common have the same micro-batches and preemptions with a full cache
    and an empty one.
    """
    cache = new_cache(8, room, *windows)
    full, empty = (new_pipeline(cache, seqs=seqs, budget=budget) for _ in range(2))
    limits = replace(empty.scheduler.limits, enable_prefix_caching=False)
    none = FakePipeline(Scheduler(cache, limits, FixedInFlightPolicy(3, budget)))
    for seq_id in range(8):  # of another text each
        _run(full, _sequence(seq_id, tuple(range(500 + seq_id, 500 + seq_id + 200))))
    full.scheduler.num_preempted = 0
    allocator = full.scheduler.allocator
    assert sum(allocator.num_cached) > 0.7 * allocator.num_pages
    with_full, with_empty, with_none = (_schedule(pipe, arrivals) for pipe in (full, empty, none))
    assert with_full == with_empty
    if not with_none[1]:  # else sequences find their own pages again
        assert with_empty == with_none


@pytest.mark.parametrize(
    ("hits", "expected"),
    [
        ([(1, 1)] * 6, 6),
        # of 40 positions on pages of 16 the last 3 pages suffice
        ([(1, 1), (1, 0), (1, 0), (1, 1), (1, 1), (1, 1)], 6),
        ([(1, 1), (1, 0), (1, 1), (1, 1), (1, 0)], 1),
        ([(0, 1), (1, 1)], 0),
        ([(1, 0)] * 6, 0),
        ([(1, 1), (1, 1), (0, 1), (1, 1)], 2),
    ],
)
def test_longest_prefix(hits: list[tuple[int, int]], expected: int) -> None:
    cache = new_cache(16, 4, None, 40)
    pages = [
        [block if has_page else None for block, has_page in enumerate(own)]
        for own in zip(*hits, strict=True)
    ]
    assert reusable_blocks(cache, pages) == expected
    assert [first_page_seen(n, 40, 16) for n in (16, 48, 96)] == [0, 0, 3]
    assert [first_page_seen(48, window, 16) for window in (32, 33, 34, None)] == [1, 1, 0, 0]


@settings(max_examples=examples(400), deadline=None, derandomize=True)
@given(
    page_size=st.sampled_from([1, 3, 8]),
    windows=st.lists(st.sampled_from([None, 1, 2, 5, 9, 24, 40]), min_size=1, max_size=3),
    blocks=st.lists(st.tuples(*[st.integers(0, 3)] * 3), max_size=20),
)
def test_longest_prefix_is_that_of_all_lengths(
    page_size: int, windows: list[int | None], blocks: list[tuple[int, int, int]]
) -> None:
    cache = new_cache(page_size, 4, *windows)
    pages = [
        [block if hits[index] else None for block, hits in enumerate(blocks)]
        for index in range(len(windows))
    ]

    def is_usable(num_blocks: int) -> bool:
        firsts = [first_page_seen(num_blocks * page_size, window, page_size) for window in windows]
        return all(
            None not in own[first:num_blocks] for own, first in zip(pages, firsts, strict=True)
        )

    assert reusable_blocks(cache, pages) == max(filter(is_usable, range(len(blocks) + 1)))


def test_missing_blocks_are_passed_over_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """With windows only, all blocks of a long prompt are looked up; one by one the missing ones
    would stop all streams.
    """
    num_candidates = 0

    def count(*args: int | None) -> int:
        nonlocal num_candidates
        num_candidates += 1
        return first_page_seen(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(prefix_cache, "first_page_seen", count)
    cache = new_cache(16, 4, 4096, max_len=2**17)
    assert reusable_blocks(cache, [[None] * 8192]) == 0
    assert (
        reusable_blocks(cache, [[*range(300), *[None] * 4000, *range(100), *[None] * 3000]]) == 300
    )
    assert 0 < num_candidates <= 4


def test_a_page_without_holders_is_taken_before_one_with_known_contents() -> None:
    cache = new_cache(8, 1, None)
    cache = replace(cache, classes=(replace(cache.classes[0], num_pages=32),))
    pipe = new_pipeline(cache, budget=64)
    _run(pipe, _sequence(0, TEXTS[0][:64]))
    cached = sum(pipe.scheduler.allocator.num_cached)
    _run(pipe, _sequence(1, TEXTS[1][:64]))
    assert sum(pipe.scheduler.allocator.num_cached) > cached
    _run(pipe, _sequence(2, (*TEXTS[0][:64], 5)), _sequence(3, (*TEXTS[1][:64], 5)))
    assert pipe.num_reused == 128


def test_tokens_of_sequences_whose_prefix_is_looked_up_are_counted() -> None:
    """Log-probabilities of a prompt need all of it to be computed."""
    pipe = new_pipeline(new_cache(8, 4, None), seqs=5, budget=200, in_flight=1)
    allocator = pipe.scheduler.allocator
    _run(pipe, _sequence(0, TEXTS[0]))
    assert (allocator.num_queried, allocator.num_hit) == (150, 0)
    _run(pipe, _sequence(1, TEXTS[0], SAMPLINGS[2]))
    assert (allocator.num_queried, allocator.num_hit) == (150, 0)
    _run(pipe, _sequence(2, TEXTS[0]))
    assert (allocator.num_queried, allocator.num_hit) == (300, 144)


def test_a_scheduler_that_keeps_no_prefixes_counts_no_tokens() -> None:
    pipe = new_pipeline(new_cache(8, 4, None), seqs=5, budget=200, in_flight=1)
    pipe.scheduler.allocator.enable_prefix_caching = False
    _run(pipe, _sequence(0, TEXTS[0]))
    assert pipe.scheduler.allocator.num_queried == 0
