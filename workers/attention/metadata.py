"""Index tensors of one micro-batch: built once per window class, used by every layer.

Worked example, W = 3, three prompts of 4, 1 and 3 tokens, two tokens per sequence and step. First
step: queries [2, 1, 2], keys [2, 1, 2]. Second step, if the short prompt waits: queries [2, 0, 1],
keys [4, 1, 3]: a chunk sees min(start, W-1) cached keys and its own. Then one decode token each:
keys [3, 2, 3] = min(W, position + 1).

Chunks of several tokens come first in the row; they read their cached keys in position order
("unrotated"), then write. Single tokens come last; they write first, then read, gathered
(``bucket_decodes``) or by page (``page_table``), depending on the kernel.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from tramontane.proto.step import Chunk, MicroBatch
from tramontane.workers.attention.rolling_cache import (
    PageRings,
    StageSequences,
    TokenRings,
    padded_width,
)
from tramontane.workers.device.cuda import tensor_on, to_device


@dataclass(frozen=True, slots=True)
class PrefillMetadata:
    """Chunks of several tokens, for one window class.

    Attributes:
        query_lens: tokens of each chunk.
        key_lens: keys of each chunk, cached and own.
        starts: position of each chunk's first token.
        cached_rows: [C], cache rows of all keys from earlier chunks.
        key_order: permutation of the C cached keys followed by the row's own keys, which puts each
            chunk's keys together, oldest first.
        written: [N], tokens of the row that are written to the cache.
        write_rows: [N], cache rows of the written tokens.
        pages_CN: [C, N] (int32), for kernels that read pages in place (``cached_rows`` and
            ``key_order`` are then empty): the pages of each chunk's cached keys, from the page of
            the oldest key that it sees.
    """

    window: int | None
    query_lens: tuple[int, ...]
    key_lens: tuple[int, ...]
    starts: tuple[int, ...]
    cached_rows: Tensor
    key_order: Tensor
    written: Tensor
    write_rows: Tensor
    pages_CN: Tensor | None = None


@dataclass(frozen=True, slots=True)
class DecodeMetadata:
    """B single tokens, for one window class: ``slots``, ``positions`` and ``write_rows`` [B] on the
    device.

    ``starts`` are the positions on the host. ``num_pages`` is the width of a page table for all
    keys that the tokens see. The tensors belong to the step and do not change when the next step
    begins.
    """

    ring: TokenRings
    slots: Tensor
    positions: Tensor
    write_rows: Tensor
    num_pages: int
    starts: list[int]


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Index tensors of a micro-batch. ``prefill`` and ``decode`` have one entry per window class,
    None without such tokens.
    """

    token_ids: Tensor
    positions: Tensor
    num_prefill_tokens: int
    sampled_rows: Tensor
    prefill: tuple[PrefillMetadata | None, ...]
    decode: tuple[DecodeMetadata | None, ...]


def num_cached_keys(start: int, window: int | None) -> int:
    """Return how many earlier positions a chunk that starts at ``start`` can see."""
    return start if window is None else min(start, window - 1)


def build_attention_metadata(
    batch: MicroBatch, table: StageSequences, device: torch.device, reads_pages: bool = False
) -> AttentionMetadata:
    """Build the index tensors of a micro-batch after ``table.update(batch)``, and make the table's
    new pages visible.

    ``reads_pages``: whether the prefill kernel reads pages in place.
    """
    runs = [chunk for chunk in batch.chunks if chunk.num_tokens > 1]
    find = _cached_pages if reads_pages else _cached_rows
    cached = [find(runs, ring, table, device) if runs else None for ring in table.rings]
    table.flush()
    ones = batch.chunks[len(runs) :]
    assert all(chunk.num_tokens == 1 for chunk in ones), "chunks of several tokens stand first"
    starts = [*(chunk.start for chunk in ones), *batch.decodes.starts]
    slots = [
        table.slots[seq_id]
        for seq_id in (*(chunk.seq_id for chunk in ones), *batch.decodes.seq_ids)
    ]
    positions = _ranges(
        [*((chunk.start, chunk.num_tokens) for chunk in runs), *((start, 1) for start in starts)]
    )
    num_prefill, positions_T = sum(chunk.num_tokens for chunk in runs), to_device(positions, device)
    slots_B, positions_B = tensor_on(slots, torch.int64, device), positions_T[num_prefill:]
    token_ids = [*(t for chunk in batch.chunks for t in chunk.token_ids), *batch.decodes.token_ids]
    return AttentionMetadata(
        token_ids=tensor_on(token_ids, torch.int64, device),
        positions=positions_T,
        num_prefill_tokens=num_prefill,
        sampled_rows=tensor_on(_sampled_rows(batch), torch.int64, device),
        prefill=tuple(
            None if found is None else _prefill_index(runs, ring, table, device, found, reads_pages)
            for ring, found in zip(table.rings, cached, strict=True)
        ),
        decode=tuple(
            build_decode_metadata(ring, slots_B, positions_B, padded_width(starts, ring), starts)
            if starts
            else None
            for ring in table.rings
        ),
    )


def _sampled_rows(batch: MicroBatch) -> list[int]:
    """Return the rows to sample. Chunks of 3 and 2 tokens, of which the second needs a sample, and
    two decodes: 4, 5 and 6.
    """
    ends = _ends([chunk.num_tokens for chunk in batch.chunks])
    of_chunks = [
        end - 1 for end, chunk in zip(ends, batch.chunks, strict=True) if chunk.needs_sample
    ]
    first = ends[-1] if ends else 0
    return [*of_chunks, *range(first, first + len(batch.decodes.seq_ids))]


def _cached_rows(
    runs: list[Chunk], ring: PageRings, table: StageSequences, device: torch.device
) -> Tensor:
    """Return ``PrefillMetadata.cached_rows``, before the chunks' own pages replace the pages that
    they read.
    """
    cached = [num_cached_keys(chunk.start, ring.window) for chunk in runs]
    slots = torch.tensor([table.slots[chunk.seq_id] for chunk in runs])
    positions = _ranges([(chunk.start - n, n) for chunk, n in zip(runs, cached, strict=True)])
    return ring.rows(to_device(_repeat(slots, cached), device), to_device(positions, device))


def _cached_pages(
    runs: list[Chunk], ring: PageRings, table: StageSequences, device: torch.device
) -> Tensor:
    """Return ``PrefillMetadata.pages_CN``, before the chunks' own pages replace the pages that they
    read.

    P = 16, W = 40, a chunk from position 100 on: it sees positions 61, on page 3, to 99, on page 6.
    """
    firsts = [
        (chunk.start - num_cached_keys(chunk.start, ring.window)) // ring.page_size
        for chunk in runs
    ]
    width = max(
        -(-chunk.start // ring.page_size) - first for chunk, first in zip(runs, firsts, strict=True)
    )
    slots = tensor_on([table.slots[chunk.seq_id] for chunk in runs], torch.int64, device)
    entries_CN = tensor_on(firsts, torch.int64, device)[:, None] + torch.arange(
        width, device=device
    )
    return ring.pages_SR[slots[:, None], entries_CN % ring.ring_pages].int()


def _prefill_index(
    runs: list[Chunk],
    ring: PageRings,
    table: StageSequences,
    device: torch.device,
    found: Tensor,
    reads_pages: bool,
) -> PrefillMetadata:
    window = ring.window
    cached = [num_cached_keys(chunk.start, window) for chunk in runs]
    kept = [chunk.start + chunk.num_tokens - ring.first_written(chunk) for chunk in runs]
    lens = [chunk.num_tokens for chunk in runs]
    slots = torch.tensor([table.slots[chunk.seq_id] for chunk in runs])
    nothing = torch.empty(0, dtype=torch.int64, device=device)
    written_positions = _ranges(
        [(c.start + c.num_tokens - n, n) for c, n in zip(runs, kept, strict=True)]
    )
    return PrefillMetadata(
        window=window,
        query_lens=tuple(lens),
        key_lens=tuple(n + m for n, m in zip(cached, lens, strict=True)),
        starts=tuple(chunk.start for chunk in runs),
        cached_rows=nothing if reads_pages else found,
        key_order=nothing if reads_pages else to_device(_key_order(cached, lens), device),
        written=to_device(
            _ranges([(e - n, n) for e, n in zip(_ends(lens), kept, strict=True)]), device
        ),
        write_rows=ring.rows(
            to_device(_repeat(slots, kept), device), to_device(written_positions, device)
        ),
        pages_CN=found if reads_pages else None,
    )


def _key_order(cached: list[int], lens: list[int]) -> Tensor:
    """Return ``PrefillMetadata.key_order``.

    Cached [2, 1], own [2, 1]: keys are c0 c0 c1 o0 o0 o1, ordered c0 c0 o0 o0 c1 o1: [0, 1, 3, 4,
    2, 5].
    """
    total = sum(cached)
    ranges = []
    for cached_end, num_cached, own_end, num_own in zip(
        _ends(cached), cached, _ends(lens), lens, strict=True
    ):
        ranges += [(cached_end - num_cached, num_cached), (total + own_end - num_own, num_own)]
    return _ranges(ranges)


def build_decode_metadata(
    ring: PageRings,
    slots_B: Tensor,
    positions_B: Tensor,
    num_pages: int,
    starts: list[int],
    cache_rows: Callable[[PageRings, Tensor, Tensor], Tensor] = PageRings.rows,
) -> DecodeMetadata:
    """Build the index tensors of single tokens for one window class."""
    write_rows = cache_rows(ring, slots_B, positions_B)
    return DecodeMetadata(
        ring.of_tokens(slots_B), slots_B, positions_B, write_rows, num_pages, starts
    )


def _ranges(ranges: list[tuple[int, int]]) -> Tensor:
    """Concatenate ranges of (start, length): [(5, 2), (0, 3)] -> [5, 6, 0, 1, 2]."""
    starts = torch.tensor([start for start, _ in ranges], dtype=torch.int64)
    lens = torch.tensor([n for _, n in ranges], dtype=torch.int64)
    offsets = torch.arange(int(lens.sum())) - torch.repeat_interleave(lens.cumsum(0) - lens, lens)
    return torch.repeat_interleave(starts, lens) + offsets


def _repeat(values: Tensor, counts: list[int]) -> Tensor:
    return torch.repeat_interleave(values, torch.tensor(counts))


def _ends(lens: list[int]) -> list[int]:
    """Return the running sums: [2, 3] -> [2, 5]."""
    return list(accumulate(lens))
