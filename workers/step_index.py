"""Index tensors of one micro-batch: built once per window class, used by every layer.

Worked example, W = 3, three prompts of 4, 1 and 3 tokens, two tokens per sequence
and step. First step: queries [2, 1, 2], keys [2, 1, 2]. Second step, if the short
prompt waits: queries [2, 0, 1], keys [4, 1, 3]: a chunk sees min(start, W-1) cached
keys and its own. Then one decode token each: keys [3, 2, 3] = min(W, position + 1).

Chunks of several tokens come first in the row and read their cached keys in position
order ("unrotated"), then write. Single tokens come last; they write first, then read.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tramontane.proto.step import Chunk, MicroBatch
from tramontane.workers.rolling_cache import PageRings, SequenceTable

SHORT = 256
MAX_GROUP_KEYS = 2**15


@dataclass(frozen=True, slots=True)
class PrefillIndex:
    """Chunks of several tokens, for one window class.

    ``cached_rows`` [C]: cache rows of all keys from earlier chunks. ``key_order``: for the
    concatenation of those C keys and the row's own, the order that puts each chunk's keys
    together, oldest first. ``written`` [N]: tokens of the row that stay in the cache, and
    ``write_rows`` [N] where.
    """

    window: int | None
    query_lens: tuple[int, ...]
    key_lens: tuple[int, ...]
    cached_rows: Tensor
    key_order: Tensor
    written: Tensor
    write_rows: Tensor


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """B of the single tokens, with up to L keys each: of similar lengths, since all are padded to the longest.

    ``tokens`` [B] counts among the single tokens. ``key_rows`` [B, L] in position order;
    entries past ``key_lens`` [B] repeat the token's own row.
    """

    tokens: Tensor
    key_rows: Tensor
    key_lens: Tensor


@dataclass(frozen=True, slots=True)
class DecodeIndex:
    """Single tokens, for one window class: ``write_rows`` of all of them, reads by group."""

    write_rows: Tensor
    groups: tuple[DecodeGroup, ...]


@dataclass(frozen=True, slots=True)
class StepIndex:
    """``prefill`` and ``decode`` have one entry per window class, None where there are no such chunks."""

    token_ids: Tensor
    positions: Tensor
    num_prefill_tokens: int
    sampled_rows: Tensor
    prefill: tuple[PrefillIndex | None, ...]
    decode: tuple[DecodeIndex | None, ...]


def num_cached_keys(start: int, window: int | None) -> int:
    """Earlier positions that a chunk starting at ``start`` can still see."""
    return start if window is None else min(start, window - 1)


def build_step_index(batch: MicroBatch, table: SequenceTable, device: torch.device) -> StepIndex:
    runs = [chunk for chunk in batch.chunks if chunk.num_tokens > 1]
    ones = batch.chunks[len(runs) :]
    assert all(chunk.num_tokens == 1 for chunk in ones), "chunks of several tokens stand first"
    starts = [*(chunk.start for chunk in ones), *batch.decodes.starts]
    slots = [table.slots[seq_id] for seq_id in (*(chunk.seq_id for chunk in ones), *batch.decodes.seq_ids)]
    positions = torch.tensor(starts, dtype=torch.int64)
    if runs:
        positions = torch.cat([_ranges([(chunk.start, chunk.num_tokens) for chunk in runs]), positions])
    return StepIndex(
        token_ids=torch.tensor(
            [*(t for chunk in batch.chunks for t in chunk.token_ids), *batch.decodes.token_ids], device=device
        ),
        positions=positions.to(device),
        num_prefill_tokens=sum(chunk.num_tokens for chunk in runs),
        sampled_rows=torch.tensor(_sampled_rows(batch), dtype=torch.int64, device=device),
        prefill=tuple(_prefill_index(runs, ring, table, device) if runs else None for ring in table.rings),
        decode=tuple(_decode_index(slots, starts, ring, device) if starts else None for ring in table.rings),
    )


def _sampled_rows(batch: MicroBatch) -> list[int]:
    """Chunks of 3 and 2 tokens, of which the second wants one, and two decodes: rows 4, 5 and 6."""
    ends = _ends([chunk.num_tokens for chunk in batch.chunks])
    wanting = [end - 1 for end, chunk in zip(ends, batch.chunks, strict=True) if chunk.wants_token]
    first = ends[-1] if ends else 0
    return [*wanting, *range(first, first + len(batch.decodes.seq_ids))]


def _prefill_index(runs: list[Chunk], ring: PageRings, table: SequenceTable, device: torch.device) -> PrefillIndex:
    window = ring.window
    cached = [num_cached_keys(chunk.start, window) for chunk in runs]
    kept = [chunk.num_tokens if window is None else min(chunk.num_tokens, window) for chunk in runs]
    lens = [chunk.num_tokens for chunk in runs]
    slots = torch.tensor([table.slots[chunk.seq_id] for chunk in runs])
    cached_positions = _ranges([(c.start - n, n) for c, n in zip(runs, cached, strict=True)])
    written_positions = _ranges([(c.start + c.num_tokens - n, n) for c, n in zip(runs, kept, strict=True)])
    return PrefillIndex(
        window=window,
        query_lens=tuple(lens),
        key_lens=tuple(n + m for n, m in zip(cached, lens, strict=True)),
        cached_rows=ring.rows(_repeat(slots, cached).to(device), cached_positions.to(device)),
        key_order=_key_order(cached, lens).to(device),
        written=_ranges([(e - n, n) for e, n in zip(_ends(lens), kept, strict=True)]).to(device),
        write_rows=ring.rows(_repeat(slots, kept).to(device), written_positions.to(device)),
    )


def _key_order(cached: list[int], lens: list[int]) -> Tensor:
    """cached [2, 1], own [2, 1]: rows are c0 c0 c1 o0 o0 o1, wanted c0 c0 o0 o0 c1 o1: [0, 1, 3, 4, 2, 5]."""
    total = sum(cached)
    ranges = []
    for cached_end, num_cached, own_end, num_own in zip(_ends(cached), cached, _ends(lens), lens, strict=True):
        ranges += [(cached_end - num_cached, num_cached), (total + own_end - num_own, num_own)]
    return _ranges(ranges)


def _decode_index(slots: list[int], starts: list[int], ring: PageRings, device: torch.device) -> DecodeIndex:
    slots_B, positions_B = torch.tensor(slots, device=device), torch.tensor(starts, device=device)
    key_lens = [1 + num_cached_keys(start, ring.window) for start in starts]
    groups = []
    for members in group_by_length(key_lens):
        tokens = torch.tensor(members, device=device)
        own_B, lens_B = positions_B[tokens], torch.tensor([key_lens[i] for i in members], device=device)
        offsets_L = torch.arange(max(key_lens[i] for i in members), device=device)
        oldest_B = own_B - lens_B + 1
        key_positions_BL = torch.minimum(oldest_B[:, None] + offsets_L, own_B[:, None])
        groups.append(DecodeGroup(tokens, ring.rows(slots_B[tokens][:, None], key_positions_BL), lens_B))
    return DecodeIndex(ring.rows(slots_B, positions_B), tuple(groups))


def group_by_length(lens: list[int]) -> list[list[int]]:
    """Members of each group, so that padding to the group's longest at most doubles it (below 256 it does not matter)
    and no group of several gathers more than 32,768 keys. [300, 9000, 7, 310] -> [[2], [0, 3], [1]]
    """
    groups: list[list[int]] = []
    for i in sorted(range(len(lens)), key=lens.__getitem__):
        limit = max(2 * lens[groups[-1][0]], SHORT) if groups else 0
        if groups and lens[i] <= limit and (len(groups[-1]) + 1) * lens[i] <= MAX_GROUP_KEYS:
            groups[-1].append(i)
        else:
            groups.append([i])
    return [list(range(len(lens)))] if len(groups) == 1 else groups


def _ranges(ranges: list[tuple[int, int]]) -> Tensor:
    """[(5, 2), (0, 3)] -> [5, 6, 0, 1, 2]"""
    starts = torch.tensor([start for start, _ in ranges], dtype=torch.int64)
    lens = torch.tensor([n for _, n in ranges], dtype=torch.int64)
    offsets = torch.arange(int(lens.sum())) - torch.repeat_interleave(lens.cumsum(0) - lens, lens)
    return torch.repeat_interleave(starts, lens) + offsets


def _repeat(values: Tensor, counts: list[int]) -> Tensor:
    return torch.repeat_interleave(values, torch.tensor(counts))


def _ends(lens: list[int]) -> list[int]:
    """[2, 3] -> [2, 5]"""
    ends, total = [], 0
    for n in lens:
        total += n
        ends.append(total)
    return ends
