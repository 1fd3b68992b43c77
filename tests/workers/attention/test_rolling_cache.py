"""Which rows are written, which are read, and in what order: the worked examples of the design,
then any geometry.

A key here is (sequence, position), its value the same negated: what attention is given shows where
it came from.
"""

from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace

import psutil
import pytest
import torch
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import tiny_args, tiny_plan
from torch import Tensor

from tramontane.proto.plan import CachePlan, WindowClass, ring_pages
from tramontane.proto.request import SamplingParams
from tramontane.proto.step import Chunk, MicroBatch
from tramontane.router.scheduling.page_allocator import PageAllocator
from tramontane.router.scheduling.sequence import Sequence
from tramontane.workers.attention.backend import AttentionKernels, CachedAttention
from tramontane.workers.attention.metadata import (
    AttentionMetadata,
    DecodeMetadata,
    PrefillMetadata,
    build_attention_metadata,
    num_cached_keys,
)
from tramontane.workers.attention.rolling_cache import (
    LayerCache,
    PageRings,
    RollingCache,
    StageSequences,
    padded_width,
    page_table,
)
from tramontane.workers.attention.sdpa_backend import LengthBucket, bucket_decodes, group_by_length

CPU = torch.device("cpu")
SAMPLING = SamplingParams()
# A page ring per window class, in ring order
Pages = tuple[tuple[int, ...], ...]
# (sequence, position)
Key = tuple[int, int]


class PrefillRecorder:
    """A kernel that computes nothing and writes down the keys that each query row is given."""

    def __init__(self) -> None:
        self.seen: list[list[list[Key]]] = []  # per call and chunk

    def build_mask(self, index: PrefillMetadata) -> PrefillMetadata:
        return index

    def attend(self, q_THd: Tensor, k_SGd: Tensor, v_SGd: Tensor, mask: PrefillMetadata) -> Tensor:
        assert [len(q_THd), len(k_SGd)] == [sum(mask.query_lens), sum(mask.key_lens)]
        self.seen.append(
            [
                _keys(k, v)
                for k, v in zip(k_SGd.split(mask.key_lens), v_SGd.split(mask.key_lens), strict=True)
            ]
        )
        return q_THd


def _key_lens(bucket: LengthBucket) -> list[int]:
    """How many keys each token sees, which are the first ones."""
    seen_BL = bucket.keys.mask[:, 0, 0]
    lens_B = seen_BL.sum(dim=1)
    assert torch.equal(seen_BL, torch.arange(seen_BL.shape[1]) < lens_B[:, None])
    return lens_B.tolist()


class DecodeRecorder:
    """Checks decodes likewise; page tables lead to the same keys as gathering does."""

    def __init__(self) -> None:
        self.seen: list[list[list[Key]]] = []  # per call and token

    def build_mask(self, index: DecodeMetadata) -> DecodeMetadata:
        return index

    def attend(self, q_BHd: Tensor, cached: LayerCache, mask: DecodeMetadata) -> Tensor:
        gathered: dict[int, list[Key]] = {}
        for group in bucket_decodes(mask):
            k_BLGd, v_BLGd = cached.read(group.keys.rows_BL)
            for token, k_LGd, v_LGd, num_keys in zip(
                group.tokens.tolist(), k_BLGd, v_BLGd, _key_lens(group), strict=True
            ):
                # padding: the token's own key
                assert torch.equal(k_LGd[num_keys:], q_BHd[token].expand_as(k_LGd[num_keys:]))
                gathered[token] = _keys(k_LGd[:num_keys], v_LGd[:num_keys])
        in_order = [gathered[token] for token in range(len(q_BHd))]
        assert _paged_keys(cached, mask) == in_order
        self.seen.append(in_order)
        return q_BHd


def _paged_keys(cached: LayerCache, index: DecodeMetadata) -> list[list[Key]]:
    """Page by page and row by row, as the table has it."""
    table, page_size = (
        page_table(index.ring, index.positions, index.num_pages),
        index.ring.page_size,
    )
    seen = []
    for pages, first, end in zip(
        table.pages_BN.tolist(), table.first_B.tolist(), table.end_B.tolist(), strict=True
    ):
        assert end <= len(pages) * page_size
        rows = [page * page_size + row for page in pages for row in range(page_size)][first:end]
        seen.append(_keys(cached.k_NGd[rows], cached.v_NGd[rows]))
    return seen


def _keys(k_SGd: Tensor, v_SGd: Tensor) -> list[Key]:
    assert torch.equal(k_SGd, -v_SGd)
    return [(int(tag), int(position)) for tag, position in k_SGd[:, 0].tolist()]


class Stage:
    """A layer for each window, over the real tables and caches; ``run`` sends chunks through all of
    them.
    """

    def __init__(
        self, windows: Seq[int | None], page_size: int, max_len: int, max_num_seqs: int = 4
    ) -> None:
        args = tiny_args(
            n_layers=len(windows),
            windows=windows,
            n_heads=1,
            n_kv_heads=1,
            head_dim=2,
            max_seq_len=max_len,
        )
        self.plan = tiny_plan(args, 1, page_size, max_num_seqs)
        self.table = StageSequences(self.plan.cache, max_num_seqs, CPU)
        self.cache = RollingCache(self.plan.stages[0], torch.float32, CPU)
        for layer in self.cache.layers.values():
            layer.k_NGd.fill_(-1)  # so that an unwritten row shows
            layer.v_NGd.fill_(1)
        self.num_steps = 0
        self.num_written: list[int] = []  # rows, by calls

    def _write(
        self,
        cached: LayerCache,
        rows_W: Tensor,
        k_TGd: Tensor,
        v_TGd: Tensor,
        tokens_W: Tensor | None = None,
    ) -> None:
        self.num_written.append(len(rows_W))
        cached.write(rows_W, k_TGd, v_TGd, tokens_W)

    def index(self, chunks: Seq[Chunk], released: tuple[int, ...] = ()) -> AttentionMetadata:
        batch = MicroBatch(0, self.num_steps, tuple(chunks), released)
        self.num_steps += 1
        self.table.update(batch)
        return build_attention_metadata(batch, self.table, CPU)

    def run(
        self, chunks: Seq[Chunk], released: tuple[int, ...] = ()
    ) -> tuple[AttentionMetadata, PrefillRecorder, DecodeRecorder]:
        index, prefilled, decoded = (
            self.index(chunks, released),
            PrefillRecorder(),
            DecodeRecorder(),
        )
        k_TGd = torch.tensor(
            [(c.seq_id, c.start + i) for c in chunks for i in range(c.num_tokens)]
        ).float()[:, None, :]
        attend = CachedAttention(
            self.cache, index, AttentionKernels(prefilled, decoded, write=self._write)
        )
        for layer in self.cache.layers:
            # outputs are in the order of the tokens
            assert torch.equal(attend(layer, k_TGd, k_TGd, -k_TGd), k_TGd)
        return index, prefilled, decoded

    def positions(self, layer: int, pages: Seq[int]) -> list[int]:
        """Positions that these pages hold, row after row."""
        page_size = self.plan.cache.page_size
        return [
            int(self.cache.layers[layer].k_NGd[page * page_size + row, 0, 1])
            for page in pages
            for row in range(page_size)
        ]


def _chunk(seq_id: int, start: int, num_tokens: int, pages: Pages) -> Chunk:
    return Chunk(
        seq_id,
        start,
        (0,) * num_tokens,
        pages,
        SAMPLING if start == 0 else None,
        needs_sample=False,
    )


def _first(
    stage: Stage, seq_id: int, num_tokens: int, *rings: tuple[int, ...], start: int = 0
) -> Chunk:
    """Return a chunk, by default the first, of a sequence whose page of index n is the one in the
    entry of n.
    """
    size, end = stage.plan.cache.page_size, start + num_tokens
    pairs = zip(stage.plan.cache.classes, rings, strict=True)
    pages = (
        tuple(ring[n % c.ring_pages] for n in c.new_pages(start, end, size)) for c, ring in pairs
    )
    return _chunk(seq_id, start, num_tokens, tuple(pages))


@pytest.mark.parametrize("windows", [[3], [None], [3, None]])
@pytest.mark.parametrize("kinds", ["chunks", "single tokens", "both"])
def test_a_layer_writes_once_in_a_step(windows: list[int | None], kinds: str) -> None:
    """Also where chunks of several tokens and single tokens are packed together; each token's key
    stands in its row.
    """
    stage = Stage(windows, page_size=1, max_len=8)
    rings = [tuple(range(c.ring_pages)) for c in stage.plan.cache.classes]
    others = [tuple(range(8, 8 + c.ring_pages)) for c in stage.plan.cache.classes]
    chunks = [_first(stage, 0, 5, *rings)] if kinds != "single tokens" else []
    ones = [_first(stage, 1, 1, *others)] if kinds != "chunks" else []
    stage.run([*chunks, *ones])
    kept = {3: 3, None: 5} if chunks else {3: 0, None: 0}
    assert stage.num_written == [kept[window] + len(ones) for window in windows]
    for layer in stage.cache.layers:
        held = [
            position
            for position in stage.positions(layer, rings[stage.cache.class_of[layer]])
            if position >= 0
        ]
        assert sorted(held) == (list(range(5))[-kept[windows[layer]] :] if chunks else [])
        assert (stage.positions(layer, [8]) == [0]) == bool(ones)


# Worked examples


@pytest.mark.parametrize("pages", [(0, 1, 2), (7, 2, 5)])
def test_the_plain_ring_of_the_paper(pages: tuple[int, ...]) -> None:
    """W = 3, P = 1, chunks of 5: the rows hold [3, 4, 2], then [9, 7, 8]."""
    stage = Stage([3], page_size=1, max_len=32)
    _, first, _ = stage.run([_first(stage, 0, 5, pages)])
    assert stage.positions(0, pages) == [3, 4, 2]
    _, second, _ = stage.run([_chunk(0, 5, 5, ((),))])
    assert stage.positions(0, pages) == [9, 7, 8]
    assert [p for _, p in first.seen[0][0]] == [0, 1, 2, 3, 4]
    # two cached, unrotated, and its own
    assert [p for _, p in second.seen[0][0]] == [3, 4, 5, 6, 7, 8, 9]


def _lens(index: AttentionMetadata, chunks: Seq[Chunk]) -> dict[int, tuple[int, int]]:
    """Queries and keys of every sequence, whether it went as a run or as a single token."""
    queries: list[int] = []
    keys: list[int] = []
    if (prefill := index.prefill[0]) is not None:
        queries, keys = list(prefill.query_lens), list(prefill.key_lens)
    if (decode := index.decode[0]) is not None:
        (group,) = bucket_decodes(decode)
        queries, keys = queries + [1] * len(group.tokens), keys + _key_lens(group)
    return {c.seq_id: lens for c, lens in zip(chunks, zip(queries, keys, strict=True), strict=True)}


def test_three_prompts_two_tokens_a_step() -> None:
    """Prompts of 4, 1 and 3 tokens (sequences 0, 1, 2), W = 3: queries [2, 1, 2], then [2, 0, 1],
    then [1, 1, 1].
    """
    stage = Stage([3], page_size=1, max_len=32)
    first = [_chunk(0, 0, 2, ((0, 1),)), _chunk(2, 0, 2, ((3, 4),)), _chunk(1, 0, 1, ((6,),))]
    lens = _lens(stage.run(first)[0], first)
    assert [lens[s] for s in (0, 1, 2)] == [(2, 2), (1, 1), (2, 2)]

    second = [_chunk(0, 2, 2, ((2,),)), _chunk(2, 2, 1, ((5,),))]
    lens = _lens(stage.run(second)[0], second)
    assert lens[0] == (2, 4)
    assert num_cached_keys(1, 3) == 1  # the short prompt waits: no query, one key
    assert lens[2] == (1, 3)

    third = [_chunk(0, 4, 1, ((),)), _chunk(1, 1, 1, ((7,),)), _chunk(2, 3, 1, ((),))]
    index, _, decoded = stage.run(third)
    lens = _lens(index, third)
    assert [lens[s] for s in (0, 1, 2)] == [(1, 3), (1, 2), (1, 3)]
    assert decoded.seen == [[[(0, 2), (0, 3), (0, 4)], [(1, 0), (1, 1)], [(2, 1), (2, 2), (2, 3)]]]


@pytest.mark.parametrize(
    ("start", "window", "expected"),
    [(0, 3, 0), (1, 3, 1), (2, 3, 2), (3, 3, 2), (50, 3, 2), (9, 1, 0), (50, None, 50)],
)
def test_cached_keys(start: int, window: int | None, expected: int) -> None:
    assert num_cached_keys(start, window) == expected


@pytest.mark.parametrize(
    ("window", "page_size", "max_len", "expected"),
    [
        (3, 1, 1000, 3),
        (64, 16, 1000, 5),
        (65, 16, 1000, 5),
        (66, 16, 1000, 6),
        (1, 1, 1000, 1),
        (1, 16, 1000, 1),
        (2, 16, 1000, 2),
        (4096, 16, 32768, 257),
        (4096, 16, 100, 7),  # never more than the whole context
        (None, 16, 32768, 2048),
        (None, 16, 33, 3),
    ],
)
def test_ring_pages(window: int | None, page_size: int, max_len: int, expected: int) -> None:
    assert ring_pages(window, page_size, max_len) == expected


def test_headline_eight_times_smaller_at_32k_and_flat_from_the_window_on() -> None:
    context, window, page_size = 32768, 4096, 16
    rolling, full = (
        WindowClass(w, ring_pages(w, page_size, context), 10_000) for w in (window, None)
    )
    assert full.pages_for(context, page_size) == context // page_size
    assert abs(rolling.pages_for(context, page_size) - full.pages_for(context, page_size) / 8) <= 1
    assert (
        len({rolling.pages_for(position + 1, page_size) for position in range(window, context)})
        == 1
    )
    grown = [rolling.pages_for(position + 1, page_size) for position in range(window)]
    # until then only the pages it has filled
    assert grown == [position // page_size + 1 for position in range(window)]


def test_a_sequence_holds_no_more_pages_from_the_window_on() -> None:
    """The same through the page allocator: it gives back a page for each that it gains."""
    args = tiny_args(n_layers=2, windows=(64, None), max_seq_len=1024)
    allocator = PageAllocator(tiny_plan(args, 1, 16).cache)
    sequence = Sequence(0, (0,) * 1000, SAMPLING, max_len=1024)
    assert allocator.reserve_for_admission(sequence)
    held = []
    for position in range(1000):
        sequence.num_dispatched = position + 1
        gained = tuple(map(len, allocator.allocate(sequence, position, position + 1)))
        assert gained == ((1, 1) if position % 16 == 0 else (0, 0))
        held.append(tuple(map(len, sequence.pages)))
    assert held == [(min(position // 16 + 1, 5), position // 16 + 1) for position in range(1000)]
    allocator.check_integrity([sequence])


# Rows, P = 16, W = 64, R = 5: positions wrap after 80

RING = (9, 4, 0, 7, 2)
WINDOW, PAGE = 64, 16


def _row(position: int) -> int:
    return 16 * RING[position // 16 % 5] + position % 16


def _prefill_rows(start: int, num_tokens: int) -> PrefillMetadata:
    stage = Stage([WINDOW], PAGE, max_len=1024)
    if start:
        stage.index([_first(stage, 0, start, RING)])
    index = stage.index([_first(stage, 0, num_tokens, RING, start=start)]).prefill[0]
    assert index is not None
    return index


def test_rows_of_positions() -> None:
    rings = PageRings(WindowClass(WINDOW, 5, 10), PAGE, 2, CPU)
    rings.put_pages(1, 0, RING[:2])
    rings.put_pages(1, 2, RING[2:])
    rings.flush()
    positions = torch.tensor([0, 15, 16, 79, 80, 83, 160, 1599])
    rows = rings.rows(torch.ones_like(positions), positions)
    assert rows.tolist() == [144, 159, 64, 47, 144, 147, 144, 47]


@pytest.mark.parametrize(
    ("start", "num_tokens", "written"),
    [
        (0, 64, range(0, 64)),
        (0, 65, range(65)),
        (0, 80, range(80)),
        (70, 20, range(70, 90)),  # over the wrap at 80: entry 4 rows 6..15, then entry 0 rows 0..9
        (10, 200, range(144, 210)),  # longer than the ring: its last R pages
        (333, 2, range(333, 335)),
    ],
)
def test_a_chunk_writes_its_last_rows_in_order(start: int, num_tokens: int, written: range) -> None:
    index = _prefill_rows(start, num_tokens)
    assert index.write_rows.tolist() == [_row(p) for p in written]
    assert index.written.tolist() == [p - start for p in written]
    assert len(set(index.write_rows.tolist())) == len(written)


@pytest.mark.parametrize(
    ("start", "read"),
    [(0, range(0)), (5, range(5)), (63, range(63)), (64, range(1, 64)), (90, range(27, 90))],
)
def test_a_chunk_reads_what_the_window_leaves_in_position_order(start: int, read: range) -> None:
    index = _prefill_rows(start, 20)
    assert index.cached_rows.tolist() == [_row(p) for p in read]
    assert index.key_order.tolist() == list(range(len(read) + 20))
    assert index.key_lens == (len(read) + 20,)


def test_one_token_writes_one_row_and_reads_the_window() -> None:
    stage = Stage([WINDOW], PAGE, max_len=1024)
    stage.index([_first(stage, 0, 83, RING), _chunk(1, 0, 2, ((1,),))])
    index = stage.index([_chunk(0, 83, 1, ((),)), _chunk(1, 2, 1, ((),))]).decode[0]
    assert index is not None
    assert index.write_rows.tolist() == [_row(83), 18]
    (group,) = bucket_decodes(index)
    assert _key_lens(group) == [64, 3]
    assert group.keys.rows_BL[0].tolist() == [_row(p) for p in range(20, 84)]
    assert group.keys.rows_BL[1].tolist() == [16, 17] + [18] * 62


def test_positions_and_sampled_rows_of_a_step() -> None:
    stage = Stage([WINDOW], PAGE, max_len=1024)
    stage.index([_chunk(7, 0, 5, ((3,),)), _chunk(8, 0, 2, ((4,),))])
    wanting = Chunk(7, 5, (50, 51, 52), ((),), None, needs_sample=True)
    silent = Chunk(9, 0, (90, 91), ((5,),), SAMPLING, needs_sample=False)
    single = Chunk(8, 2, (82,), ((),), None, needs_sample=True)
    index = stage.index([wanting, silent, single])
    assert index.token_ids.tolist() == [50, 51, 52, 90, 91, 82]
    assert index.positions.tolist() == [5, 6, 7, 0, 1, 2]
    assert index.num_prefill_tokens == 5
    assert index.sampled_rows.tolist() == [2, 5]


def test_a_released_sequence_leaves_its_slot_and_nothing_else() -> None:
    table = StageSequences(CachePlan(1, (WindowClass(3, 3, 6),)), 1, CPU)
    wanting = replace(SAMPLING, return_experts=(0, 2))
    first = _chunk(4, 0, 5, ((0, 1, 2),))._replace(sampling=wanting, request_id="mine")
    table.update(MicroBatch(0, 0, (first,)))
    assert (table.expert_layers, table.request_ids) == ({4: (0, 2)}, {4: "mine"})
    table.update(MicroBatch(0, 1, (_chunk(5, 0, 2, ((5, 3),)),), freed_seq_ids=(4,)))
    table.flush()
    assert table.slots == {5: 0}
    assert table.sampling.keys() == {5}
    assert table.expert_layers == table.request_ids == {}, (
        "or every such sequence would cost memory"
    )
    assert table.rings[0].rows(torch.tensor([0, 0]), torch.tensor([0, 1])).tolist() == [5, 3]


# Any geometry


@dataclass
class Life:
    """A sequence that arrives, runs through its chunks and leaves its pages, dirty, to others."""

    seq_id: int
    cut: deque[int]
    sequence: Sequence = field(init=False)

    def __post_init__(self) -> None:
        length = sum(self.cut)
        self.sequence = Sequence(self.seq_id, (0,) * length, SAMPLING, max_len=length + 1)


def _visible(seq_id: int, start: int, num_tokens: int, window: int | None) -> list[Key]:
    """Keys that any token of a chunk may see."""
    oldest = 0 if window is None else max(0, start - window + 1)
    return [(seq_id, position) for position in range(oldest, start + num_tokens)]


def _next_chunk(allocator: PageAllocator, life: Life) -> Chunk:
    start, num_tokens = life.sequence.num_dispatched, life.cut.popleft()
    life.sequence.num_dispatched += num_tokens
    return _chunk(
        life.seq_id, start, num_tokens, allocator.allocate(life.sequence, start, start + num_tokens)
    )


@settings(max_examples=examples(60), deadline=None, derandomize=True)
@given(
    windows=st.lists(st.one_of(st.none(), st.integers(1, 40)), min_size=1, max_size=3, unique=True),
    page_size=st.sampled_from([1, 2, 3, 5, 16]),
    cuts=st.lists(
        st.lists(
            st.one_of(st.just(1), st.integers(1, 12), st.integers(1, 60)), min_size=1, max_size=8
        ),
        min_size=1,
        max_size=6,
    ),
    max_num_seqs=st.integers(1, 3),
)
def test_any_cut_reads_exactly_the_window(
    windows: list[int | None], page_size: int, cuts: list[list[int]], max_num_seqs: int
) -> None:
    stage = Stage(windows, page_size, max_len=max(map(sum, cuts)) + 1, max_num_seqs=max_num_seqs)
    allocator = PageAllocator(stage.plan.cache)
    waiting = deque(Life(i, deque(cut)) for i, cut in enumerate(cuts))
    running: list[Life] = []
    while waiting or running:
        finished = [life for life in running if not life.cut]
        running = [life for life in running if life.cut]
        for life in finished:
            allocator.release(life.sequence)
        while waiting and len(running) < max_num_seqs:
            assert allocator.reserve_for_admission(waiting[0].sequence)
            running.append(waiting.popleft())
        if not running:
            break
        chunks = sorted(
            (_next_chunk(allocator, life) for life in running),
            key=lambda chunk: chunk.num_tokens == 1,
        )
        _check_step(stage, windows, chunks, tuple(life.seq_id for life in finished))


def _check_step(
    stage: Stage, windows: list[int | None], chunks: list[Chunk], released: tuple[int, ...]
) -> None:
    index, prefilled, decoded = stage.run(chunks, released)
    runs = [(c.seq_id, c.start, c.num_tokens) for c in chunks if c.num_tokens > 1]
    singles = [(c.seq_id, c.start, 1) for c in chunks if c.num_tokens == 1]
    assert prefilled.seen == [
        [_visible(*run, window) for run in runs] for window in windows if runs
    ]
    assert decoded.seen == [
        [_visible(*single, window) for single in singles] for window in windows if singles
    ]
    for prefill in index.prefill:
        assert prefill is None or len(set(prefill.write_rows.tolist())) == len(prefill.write_rows)
    # Whatever a later token can still see now lies where the rows of its position say.
    for layer, window in enumerate(windows):
        for chunk in chunks:
            end = chunk.start + chunk.num_tokens
            positions = torch.arange(end - num_cached_keys(end, window), end)
            rows = stage.table.rings[layer].rows(
                torch.full_like(positions, stage.table.slots[chunk.seq_id]), positions
            )
            keys = stage.cache.layers[layer].k_NGd[rows, 0].tolist()
            assert keys == [[chunk.seq_id, position] for position in positions.tolist()]


def test_single_tokens_of_very_different_lengths_are_read_apart() -> None:
    """One long sequence must not make 63 short ones gather as many keys as it has."""
    stage = Stage([None], PAGE, max_len=1024)
    pages = (tuple(range(40)), tuple(range(40, 42)), tuple(range(42, 80)))
    stage.index(
        [_chunk(s, 0, n, (p,)) for s, (n, p) in enumerate(zip((600, 20, 590), pages, strict=True))]
    )
    chunks = [_chunk(0, 600, 1, ((),)), _chunk(1, 20, 1, ((),)), _chunk(2, 590, 1, ((),))]
    index = stage.index(chunks).decode[0]
    assert index is not None
    assert [group.tokens.tolist() for group in bucket_decodes(index)] == [[1], [2, 0]]
    assert [tuple(group.keys.rows_BL.shape) for group in bucket_decodes(index)] == [
        (1, 21),
        (2, 601),
    ]


@settings(derandomize=True, deadline=None)
@given(st.lists(st.integers(1, 70_000), min_size=1, max_size=64))
def test_groups_bound_padding_and_size(lens: list[int]) -> None:
    groups = group_by_length(lens)
    assert sorted(i for group in groups for i in group) == list(range(len(lens)))
    for group in groups:
        longest, shortest = max(lens[i] for i in group), min(lens[i] for i in group)
        assert longest <= max(2 * shortest, 256)
        assert len(group) == 1 or len(group) * longest <= 2**15


# Page tables


@pytest.mark.parametrize(
    ("position", "pages", "first", "end"),
    [(9, [2, 5, 7], 0, 6), (8, [7, 2, 5], 3, 9), (3, [7, 2, 5], 0, 4), (0, [7, 2, 5], 0, 1)],
)
def test_the_table_of_a_token(position: int, pages: list[int], first: int, end: int) -> None:
    """P = 4, W = 6: the worked example."""
    rings = PageRings(WindowClass(6, 3, 10), 4, 2, CPU)
    rings.put_pages(1, 0, (7, 2, 5))
    rings.flush()
    table = page_table(rings.of_tokens(torch.tensor([1])), torch.tensor([position]), 3)
    assert (table.pages_BN.tolist(), table.first_B.tolist(), table.end_B.tolist()) == (
        [pages],
        [first],
        [end],
    )


@pytest.mark.parametrize(
    ("window", "starts", "width"),
    [
        *(
            (None, [100, 2000], 128),
            (None, [70_000], 5120),
            (None, [3], 64),
            (4096, [3], 64),
            (4096, [5000], 257),
            (64, [999], 5),
        ),
        *(
            (None, [1023], 64),
            (None, [1024], 96),
            (None, [1535], 96),
            (None, [1536], 128),
            (None, [2048], 192),
            (None, [3072], 256),
        ),
        *((4096, [1024], 96), (4096, [3500], 256)),
    ],
)
def test_widths_of_tables(window: int | None, starts: list[int], width: int) -> None:
    """Powers of two and the middles between, none below 1024 keys, none beyond the ring; P = 16,
    81920 positions.
    """
    assert (
        padded_width(
            starts, PageRings(WindowClass(window, ring_pages(window, 16, 81_920), 1), 16, 1, CPU)
        )
        == width
    )


def test_there_are_few_widths_and_two_thirds_of_each_are_filled() -> None:
    """Each is a recording of its own, for each number of tokens; what is empty in it gives
    split-K's parts nothing to do.
    """
    rings = PageRings(WindowClass(None, ring_pages(None, 16, 32_768), 1), 16, 1, CPU)
    widths = {start: padded_width([start], rings) for start in range(32_768)}
    assert len({*widths.values()}) == 11
    assert all(
        2 * width < 3 * (start // 16 + 1) for start, width in widths.items() if start >= 1024
    )


def test_the_scratch_slot_has_the_page_behind_the_last_one() -> None:
    rings = PageRings(WindowClass(6, 3, 10), 4, 2, CPU)
    assert rings.rows(torch.tensor([rings.scratch_slot]), torch.tensor([0])).tolist() == [40]
    stage = tiny_plan(tiny_args(n_layers=1), 1).stages[0]
    plain, padded = (
        RollingCache(stage, torch.float32, CPU, has_scratch=has).layers[0].k_NGd
        for has in (False, True)
    )
    assert len(padded) == len(plain) + stage.cache.page_size


def test_rows_take_memory_on_a_processor_only_when_they_are_written() -> None:
    rows, wanted = 2**19, 2**29  # 512 MiB of keys, and as much of values
    before = psutil.Process().memory_info().rss
    cache = LayerCache.zeros((rows, 2, 128), torch.float32, CPU)
    assert cache.k_NGd.nbytes == cache.v_NGd.nbytes == wanted
    assert not cache.k_NGd[:: rows // 8].any()
    assert psutil.Process().memory_info().rss - before < wanted // 8
    written = torch.arange(rows // 4)
    cache.write(written, *(torch.ones(len(written), 2, 128),) * 2)
    assert wanted // 8 * 3 < psutil.Process().memory_info().rss - before < wanted // 8 * 6
    keys, values = cache.read(torch.tensor([0, rows // 4 - 1, rows // 4, rows - 1]))
    assert keys[:, 0, 0].tolist() == values[:, 1, 127].tolist() == [1, 1, 0, 0]
