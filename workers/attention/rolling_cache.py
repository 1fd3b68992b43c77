"""Rolling key/value cache of one stage, in pages, and the page rings of its sequences.

Position p of a sequence is in entry (p // P) mod R of its page ring, row p mod P of that page, so it overwrites position
p - R*P. The router's page allocator decides which pages a sequence holds; here they are recorded and turned into rows.

Worked example, W = 3, P = 1, hence R = 3, pages [7, 2, 5]: positions 0..4 written in one chunk (only the last W rows are
written) leave page 7 with position 3, page 2 with position 4 and page 5 with position 2: in ring order [3, 4, 2]. After
positions 5..9: [9, 7, 8].
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from tramontane.proto.plan import CachePlan, StagePlan, WindowClass
from tramontane.proto.request import SamplingParams
from tramontane.proto.step import MicroBatch
from tramontane.workers.device.pinned_memory import tensor_on


class PageRings:
    """Page rings of all sequences on this stage, for one window class.

    ``scratch_slot`` belongs to no sequence. Padding is written to its one page, which follows the pages of the plan.
    """

    def __init__(self, window_class: WindowClass, page_size: int, max_num_seqs: int, device: torch.device) -> None:
        self.window = window_class.window
        self.page_size = page_size
        self.ring_pages = window_class.ring_pages
        self.num_pages = window_class.num_pages
        self.scratch_slot = max_num_seqs
        self.pages_SR = torch.zeros(max_num_seqs + 1, self.ring_pages, dtype=torch.int64, device=device)
        self.pages_SR[self.scratch_slot] = self.num_pages
        self._num_pages_held = [0] * max_num_seqs  # by slot
        self._pending: list[tuple[int, int, int]] = []  # slot, entry and page that are not on the device yet

    def append_pages(self, slot: int, pages: tuple[int, ...]) -> None:
        """Append pages to the ring of a slot; ``flush`` makes them visible to ``rows``."""
        first = self._num_pages_held[slot]
        assert first + len(pages) <= self.ring_pages
        assert all(0 <= page < self.num_pages for page in pages)
        self._pending += [(slot, first + i, page) for i, page in enumerate(pages)]
        self._num_pages_held[slot] = first + len(pages)

    def flush(self) -> None:
        """Write all appended pages to the device in one copy."""
        if self._pending:
            slots, entries, pages = tensor_on(list(zip(*self._pending, strict=True)), torch.int64, self.pages_SR.device)
            self.pages_SR[slots, entries] = pages
            self._pending.clear()

    def clear(self, slot: int) -> None:
        """Empty the ring of a slot."""
        self._num_pages_held[slot] = 0

    def first_visible(self, position: int) -> int:
        """Return the oldest position that the token at ``position`` sees."""
        return 0 if self.window is None else max(position - self.window + 1, 0)

    def rows(self, slots: Tensor, positions: Tensor) -> Tensor:
        """Return the cache rows of positions, any shape. P = 16, R = 5, position 83: entry 83//16 % 5 = 0, row 3 of that page."""
        pages = self.pages_SR[slots, positions // self.page_size % self.ring_pages]
        return pages * self.page_size + positions % self.page_size


class SequenceTable:
    """State of each live sequence on this stage: slot, page rings and parameters."""

    def __init__(self, cache: CachePlan, max_num_seqs: int, device: torch.device) -> None:
        self.rings = [PageRings(c, cache.page_size, max_num_seqs, device) for c in cache.classes]
        self.slots: dict[int, int] = {}
        self.sampling: dict[int, SamplingParams] = {}
        self.expert_layers: dict[int, tuple[int, ...]] = {}  # layers whose experts are returned, for the few sequences that ask
        self.request_ids: dict[int, str] = {}  # for logs, of the sequences that have one
        self._free_slots = list(range(max_num_seqs))

    def update(self, batch: MicroBatch) -> None:
        """Remove freed sequences, add new ones, append new pages."""
        for seq_id in batch.freed_seq_ids:
            self._forget(seq_id)
        for chunk in batch.chunks:
            if chunk.start == 0:
                assert chunk.sampling is not None
                assert chunk.seq_id not in self.slots
                self.slots[chunk.seq_id] = self._free_slots.pop()
                self.sampling[chunk.seq_id] = chunk.sampling
                if chunk.sampling.return_experts:
                    self.expert_layers[chunk.seq_id] = chunk.sampling.return_experts
                if chunk.request_id:
                    self.request_ids[chunk.seq_id] = chunk.request_id
            self._append(chunk.seq_id, chunk.new_pages)
        for index, new_pages in batch.decodes.new_pages:
            self._append(batch.decodes.seq_ids[index], new_pages)
        for ring in self.rings:
            ring.flush()

    def clear(self) -> None:
        """Remove all sequences."""
        for seq_id in list(self.slots):
            self._forget(seq_id)

    def _append(self, seq_id: int, new_pages: tuple[tuple[int, ...], ...]) -> None:
        slot = self.slots[seq_id]
        for ring, pages in zip(self.rings, new_pages, strict=True):
            if pages:
                ring.append_pages(slot, pages)

    def _forget(self, seq_id: int) -> None:
        slot = self.slots.pop(seq_id)
        del self.sampling[seq_id]
        self.expert_layers.pop(seq_id, None)
        self.request_ids.pop(seq_id, None)
        for ring in self.rings:
            ring.clear(slot)
        self._free_slots.append(slot)


@dataclass(frozen=True, slots=True)
class LayerCache:
    """Keys and values of one layer: the rows of all pages of its window class, one page after the other."""

    k_NGd: Tensor
    v_NGd: Tensor

    @classmethod
    def zeros(cls, num_rows: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> "LayerCache":
        """Allocate a cache of zeros."""
        shape = (num_rows, num_kv_heads, head_dim)
        return cls(torch.zeros(shape, dtype=dtype, device=device), torch.zeros(shape, dtype=dtype, device=device))

    def read(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values of rows, of any shape. F.embedding copies each row in one piece, which indexing does not."""
        k, v = (F.embedding(rows, all_NGd.flatten(1)) for all_NGd in (self.k_NGd, self.v_NGd))
        shape = (*rows.shape, *self.k_NGd.shape[1:])
        return k.view(shape), v.view(shape)

    def write(self, rows: Tensor, k_TGd: Tensor, v_TGd: Tensor) -> None:
        """Overwrite rows [T] with keys and values."""
        self.k_NGd.index_copy_(0, rows, k_TGd)
        self.v_NGd.index_copy_(0, rows, v_TGd)


class RollingCache:
    """One ``LayerCache`` per layer of the stage, by global layer number. ``has_scratch`` adds a page for padding."""

    def __init__(self, plan: StagePlan, dtype: torch.dtype, device: torch.device, has_scratch: bool = False) -> None:
        self.class_of = {layer: plan.cache.class_of(plan.args.windows[layer]) for layer in plan.layers}
        self.layers = {
            layer: LayerCache.zeros(
                (plan.cache.classes[self.class_of[layer]].num_pages + has_scratch) * plan.cache.page_size,
                plan.args.n_kv_heads,
                plan.args.head_dim,
                dtype,
                device,
            )
            for layer in plan.layers
        }
