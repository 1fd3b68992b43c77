"""Rolling key/value cache of one stage, in pages, the page rings of its sequences, and the page
tables of single tokens.

Position p of a sequence is in entry (p // P) mod R of its page ring, row p mod P of that page. Page
n of a sequence takes the entry of page n - R. The router's page allocator decides which pages a
sequence holds; this module records them and converts positions to rows.

Worked example, W = 3, P = 1, hence R = 3: of positions 0..4 in one chunk the last R are written, to
new pages 7, 2 and 5. Page 7 with position 2 is in entry 2, page 2 with position 3 in entry 0, page
5 with position 4 in entry 1: in ring order the positions are [3, 4, 2]. After positions 5..9, on
other pages: [9, 7, 8].

Shape letters: S slots, R pages of a ring, N rows of a cache, T tokens, G key/value heads, d
head_dim; in page tables B single tokens, N pages.
"""

import math
import mmap
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from tramontane.proto.plan import CachePlan, StagePlan, WindowClass
from tramontane.proto.request import SamplingParams
from tramontane.proto.step import Chunk, MicroBatch
from tramontane.workers.attention.quantized_rows import (
    FP8,
    RowScales,
    dequantize,
    gather_numbers,
    put_numbers,
    quantize,
)
from tramontane.workers.device.cuda import tensor_on

MIN_HUGE_BYTES = 2**26  # of a tensor that gets huge pages, of 2 MiB as a rule
# per page table: narrower tables would not be faster, and each width has its own kernels
MIN_KEYS = 1024


class PageRings:
    """Page rings of all sequences on this stage, for one window class.

    ``scratch_slot`` is used by no sequence. Padding is written to its one page, which follows the
    pages of the plan.
    """

    def __init__(
        self, window_class: WindowClass, page_size: int, max_num_seqs: int, device: torch.device
    ) -> None:
        self._window_class = window_class
        self.window = window_class.window
        self.page_size = page_size
        self.ring_pages = window_class.ring_pages
        self.num_pages = window_class.num_pages
        self.scratch_slot = max_num_seqs
        self.pages_SR = torch.zeros(
            max_num_seqs + 1, self.ring_pages, dtype=torch.int64, device=device
        )
        self.pages_SR[self.scratch_slot] = self.num_pages
        # slot, entry and page that are not on the device yet
        self._pending: list[tuple[int, int, int]] = []

    def put_pages(self, slot: int, first: int, pages: tuple[int, ...]) -> None:
        """Put a sequence's pages from index ``first`` on into their entries; ``flush`` makes them
        visible to ``rows``.

        R = 5, pages 7 and 8 of a sequence: entries 2 and 3, where they replace its pages 2 and 3.
        """
        assert len(pages) <= self.ring_pages
        assert all(0 <= page < self.num_pages for page in pages)
        self._pending += [
            (slot, (first + i) % self.ring_pages, page) for i, page in enumerate(pages)
        ]

    def flush(self) -> None:
        """Write all pending pages to the device in one copy."""
        if self._pending:
            slots, entries, pages = tensor_on(
                list(zip(*self._pending, strict=True)), torch.int64, self.pages_SR.device
            )
            self.pages_SR[slots, entries] = pages
            self._pending.clear()

    def first_visible(self, position: int) -> int:
        """Return the oldest position that the token at ``position`` sees."""
        return 0 if self.window is None else max(position - self.window + 1, 0)

    def first_written(self, chunk: Chunk) -> int:
        """Return the first position that a chunk leaves in the cache."""
        return self._window_class.first_written(
            chunk.start, chunk.start + chunk.num_tokens, self.page_size
        )

    def rows(self, slots: Tensor, positions: Tensor) -> Tensor:
        """Return the cache rows of positions, any shape. P = 16, R = 5, position 83: entry 83//16 %
        5 = 0, row 3 of that page.
        """
        pages = self.pages_SR[slots, positions // self.page_size % self.ring_pages]
        return pages * self.page_size + positions % self.page_size

    def of_tokens(self, slots_B: Tensor) -> "TokenRings":
        """Return a copy of the rings of the sequences in these slots."""
        return TokenRings(self.window, self.page_size, self.pages_SR.index_select(0, slots_B))


@dataclass(frozen=True, slots=True)
class TokenRings:
    """Page rings of the sequences of B single tokens, a copy [B, R].

    The copy belongs to the step: the next step may begin, and put pages into ``PageRings``, while
    this one is in its first layers.
    """

    window: int | None
    page_size: int
    pages_BR: Tensor

    @property
    def ring_pages(self) -> int:
        """Pages of a ring."""
        return self.pages_BR.shape[1]

    def rows(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Return the cache rows of positions in the sequences of the given tokens, any shape; see
        ``PageRings.rows``.
        """
        pages = self.pages_BR[tokens, positions // self.page_size % self.ring_pages]
        return pages * self.page_size + positions % self.page_size


class StageSequences:
    """State of each live sequence on this stage: slot, page rings and parameters."""

    def __init__(self, cache: CachePlan, max_num_seqs: int, device: torch.device) -> None:
        self._page_size, self._classes, self.device = cache.page_size, cache.classes, device
        self.rings = [PageRings(c, cache.page_size, max_num_seqs, device) for c in cache.classes]
        self.slots: dict[int, int] = {}
        self.sampling: dict[int, SamplingParams] = {}
        # layers whose expert choices are returned, for the few sequences that request them
        self.expert_layers: dict[int, tuple[int, ...]] = {}
        self.request_ids: dict[int, str] = {}  # for logs, where a request has an id
        self._free_slots = list(range(max_num_seqs))

    def update(self, batch: MicroBatch) -> None:
        """Remove freed sequences, add new ones, and put new pages. Pages of prefixes are visible at
        once, all others after ``flush``.

        Until then ``rows`` finds the pages that a chunk reads, even if its own pages replace them.
        """
        for seq_id in batch.freed_seq_ids:
            self._forget(seq_id)
        for chunk in batch.chunks:
            if chunk.sampling is not None:
                self._add(chunk, chunk.sampling)
        self.flush()
        for chunk in batch.chunks:
            self._put(
                chunk.seq_id, chunk.start + chunk.num_tokens, (own for _, own in self._split(chunk))
            )
        for index, new_pages in batch.decodes.new_pages:
            self._put(batch.decodes.seq_ids[index], batch.decodes.starts[index] + 1, new_pages)

    def flush(self) -> None:
        """Make all pages visible to ``rows``."""
        for ring in self.rings:
            ring.flush()

    def clear(self) -> None:
        """Remove all sequences."""
        for seq_id in list(self.slots):
            self._forget(seq_id)
        self.flush()

    def _add(self, chunk: Chunk, sampling: SamplingParams) -> None:
        """Add a sequence, with the pages of the cached prefix before its first chunk."""
        assert chunk.seq_id not in self.slots
        self.slots[chunk.seq_id] = self._free_slots.pop()
        self.sampling[chunk.seq_id] = sampling
        if sampling.return_experts:
            self.expert_layers[chunk.seq_id] = sampling.return_experts
        if chunk.request_id:
            self.request_ids[chunk.seq_id] = chunk.request_id
        self._put(chunk.seq_id, chunk.start, (given for given, _ in self._split(chunk)))

    def _split(self, chunk: Chunk) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Yield the pages of the cached prefix and the chunk's own, of each class.

        P = 16, pages 7 8 9, a first chunk of the positions 32 to 49: pages 7 and 8 are of positions
        0 to 31.
        """
        for window_class, pages in zip(self._classes, chunk.new_pages, strict=True):
            num_own = len(
                window_class.new_pages(chunk.start, chunk.start + chunk.num_tokens, self._page_size)
            )
            num_given = len(pages) - num_own if chunk.sampling else 0
            yield pages[:num_given], pages[num_given:]

    def _put(self, seq_id: int, end: int, new_pages: Iterable[tuple[int, ...]]) -> None:
        """Put the last pages of a sequence that has ``end`` positions."""
        slot, num_pages = self.slots[seq_id], -(-end // self._page_size)
        for ring, pages in zip(self.rings, new_pages, strict=True):
            if pages:
                ring.put_pages(slot, num_pages - len(pages), pages)

    def _forget(self, seq_id: int) -> None:
        slot = self.slots.pop(seq_id)
        del self.sampling[seq_id]
        self.expert_layers.pop(seq_id, None)
        self.request_ids.pop(seq_id, None)
        self._free_slots.append(slot)


@dataclass(frozen=True, slots=True)
class LayerCache:
    """Keys and values of one layer: the rows of all pages of its window class, one page after the
    other.

    With latent attention both are the same tensor. With ``scales`` they are FP8 numbers.
    """

    k_NGd: Tensor
    v_NGd: Tensor
    scales: RowScales | None = None

    @classmethod
    def zeros(
        cls,
        shape: tuple[int, int, int],
        dtype: torch.dtype,
        device: torch.device,
        values_are_keys: bool = False,
        is_fp8: bool = False,
    ) -> "LayerCache":
        """Allocate a cache of zeros, [N, G, d]. On a CPU rows take memory from when they are first
        written.
        """
        if is_fp8:
            assert not values_are_keys
            k_NG, v_NG = (_zeros(shape[:2], torch.float32, device) for _ in range(2))
            return cls(
                _zeros(shape, FP8, device), _zeros(shape, FP8, device), RowScales(k_NG, v_NG, dtype)
            )
        keys_NGd = _zeros(shape, dtype, device)
        return cls(keys_NGd, keys_NGd if values_are_keys else _zeros(shape, dtype, device))

    @property
    def values_are_keys(self) -> bool:
        """Whether both are one tensor."""
        return self.v_NGd is self.k_NGd

    @property
    def num_bytes(self) -> int:
        """Bytes of keys, values and scales."""
        tensors = [self.k_NGd] if self.values_are_keys else [self.k_NGd, self.v_NGd]
        return sum(
            each.nbytes
            for each in (*tensors, *((self.scales.k_NG, self.scales.v_NG) if self.scales else ()))
        )

    def read(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values of rows, of any shape. F.embedding copies each row in one piece,
        which indexing does not.
        """
        if self.scales is not None:
            return self.take(rows).dequantized()
        shape = (*rows.shape, *self.k_NGd.shape[1:])
        keys = F.embedding(rows, self.k_NGd.flatten(1)).view(shape)
        return keys, keys if self.values_are_keys else F.embedding(
            rows, self.v_NGd.flatten(1)
        ).view(shape)

    def take(self, rows: Tensor) -> "LayerCache":
        """Return a copy of some rows of an FP8 cache, of any shape."""
        assert self.scales is not None
        k_NG, v_NG = (F.embedding(rows, each) for each in (self.scales.k_NG, self.scales.v_NG))
        numbers = gather_numbers(self.k_NGd, rows), gather_numbers(self.v_NGd, rows)
        return LayerCache(*numbers, RowScales(k_NG, v_NG, self.scales.dtype))

    @classmethod
    def quantized(cls, k_TGd: Tensor, v_TGd: Tensor) -> "LayerCache":
        """Return keys and values as an FP8 cache keeps them."""
        (k_NGd, k_NG), (v_NGd, v_NG) = quantize(k_TGd), quantize(v_TGd)
        return cls(k_NGd, v_NGd, RowScales(k_NG, v_NG, k_TGd.dtype))

    def dequantized(self) -> tuple[Tensor, Tensor]:
        """Return all keys and values, which are rounded where they are numbers in FP8."""
        if (scales := self.scales) is None:
            return self.k_NGd, self.v_NGd
        return dequantize(self.k_NGd, scales.k_NG, scales.dtype), dequantize(
            self.v_NGd, scales.v_NG, scales.dtype
        )

    def read_back(self, k_TGd: Tensor, v_TGd: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values as they will be read after being written: with FP8 they differ."""
        return (k_TGd, v_TGd) if self.scales is None else self.quantized(k_TGd, v_TGd).dequantized()

    def write(
        self, rows_W: Tensor, k_TGd: Tensor, v_TGd: Tensor, tokens_W: Tensor | None = None
    ) -> None:
        """Overwrite rows [W] with the keys and values of ``tokens_W``, or of all tokens."""
        if self.scales is not None:
            written = self.quantized(
                *(each if tokens_W is None else each[tokens_W] for each in (k_TGd, v_TGd))
            )
            assert written.scales is not None
            put_numbers(self.k_NGd, rows_W, written.k_NGd)
            put_numbers(self.v_NGd, rows_W, written.v_NGd)
            self.scales.k_NG.index_copy_(0, rows_W, written.scales.k_NG)
            self.scales.v_NG.index_copy_(0, rows_W, written.scales.v_NG)
            return
        self.k_NGd.index_copy_(0, rows_W, k_TGd if tokens_W is None else k_TGd[tokens_W])
        if not self.values_are_keys:
            self.v_NGd.index_copy_(0, rows_W, v_TGd if tokens_W is None else v_TGd[tokens_W])


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros. On a CPU in pages that the system maps to memory when they are written;
    ``torch.zeros`` would write all.

    Large caches get huge pages where the system has them: prefix caching writes to ever new pages,
    which are all to be mapped.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    mapped = mmap.mmap(
        -1, math.prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    )
    if len(mapped) >= MIN_HUGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            mapped.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(mapped, dtype=dtype).view(shape)


class RollingCache:
    """One ``LayerCache`` per layer of the stage, by global layer number, and the keys of its
    indexers.

    A layer that uses the cache of another layer has the same object. ``index_keys`` [N, i] have the
    same rows. ``has_scratch`` adds a page for padding.
    """

    def __init__(
        self, plan: StagePlan, dtype: torch.dtype, device: torch.device, has_scratch: bool = False
    ) -> None:
        args = plan.args
        self.class_of = {layer: plan.cache.class_of(args.windows[layer]) for layer in plan.layers}
        self.layers: dict[int, LayerCache] = {}
        self.index_keys: dict[int, Tensor] = {}
        for layer, window_class in self.class_of.items():
            num_rows = (
                plan.cache.classes[window_class].num_pages + has_scratch
            ) * plan.cache.page_size
            if (source := args.kv_source(layer)) in self.layers:
                self.layers[layer] = self.layers[source]
            else:
                shape = (num_rows, args.n_kv_heads, args.head_dim)
                self.layers[layer] = LayerCache.zeros(
                    shape,
                    dtype,
                    device,
                    values_are_keys=args.latent is not None,
                    is_fp8=plan.kv_cache_dtype == "fp8",
                )
            if args.sparse and args.index_source(layer) == layer:
                self.index_keys[layer] = _zeros(
                    (num_rows, args.sparse.index_head_dim), dtype, device
                )


# ---- page tables: input of kernels that read pages in place


@dataclass(frozen=True, slots=True)
class PageTable:
    """Pages of each token's sequence, in position order, from the page of the oldest key that the
    token sees.

    Counting the rows of these pages consecutively, the token sees ``first_B`` up to and without
    ``end_B``. All tensors are int32 on the device.

    P = 4, W = 6, hence R = 3, ring [7, 2, 5]. A token at position 9 sees positions 4 to 9 on pages
    1 and 2 of the sequence: the table of 3 pages is [2, 5, 7], first 0, end 6. At position 8 it
    sees 3 to 8: [7, 2, 5], 3, 9.
    """

    pages_BN: Tensor
    first_B: Tensor
    end_B: Tensor


def page_table(ring: TokenRings, positions_B: Tensor, num_pages: int) -> PageTable:
    """Build the table on the device. Its shape depends on ``num_pages`` alone; entries past a
    token's own page are arbitrary.
    """
    oldest_B = (
        torch.zeros_like(positions_B)
        if ring.window is None
        else (positions_B - ring.window + 1).clamp(min=0)
    )
    first_page_B = oldest_B // ring.page_size
    entries_BN = (
        first_page_B[:, None] + torch.arange(num_pages, device=positions_B.device)
    ) % ring.ring_pages
    start_B = first_page_B * ring.page_size
    pages_BN = ring.pages_BR.gather(1, entries_BN).int()
    return PageTable(pages_BN, (oldest_B - start_B).int(), (positions_B - start_B + 1).int())


def padded_width(starts: list[int], ring: PageRings) -> int:
    """Return the width in pages of a table for tokens at these positions.

    It is a power of two, the midpoint between two, or the whole ring. So there are few widths, and
    little of a table is beyond its keys: split-K divides the table evenly, and a part without keys
    would be wasted.

    P = 16, no window, positions 100 and 2000: 126 pages are needed, 128 returned. Position 1024:
    65, 96, where three of four parts have keys (with 128 two of four, and one key). Position 70000
    of 81920: 4376, 5120.
    """
    needed = max(
        start // ring.page_size - ring.first_visible(start) // ring.page_size + 1
        for start in starts
    )
    assert needed <= ring.ring_pages, "a kernel would read past the table"
    return min(ring.ring_pages, max(_next_bucket(needed), -(-MIN_KEYS // ring.page_size)))


def _next_bucket(number: int) -> int:
    """Round up to a power of two or to the middle between two: 2, 3, 4, 6, 8, ..., 64, 96, 128. 64
    -> 64, 65 -> 96, 97 -> 128.
    """
    power = next_power_of_two(number)
    middle = 3 * power // 4
    return middle if number <= middle else power


def next_power_of_two(number: int) -> int:
    """Round up to a power of two: 1 -> 1, 5 -> 8, 8 -> 8."""
    return 1 << (number - 1).bit_length()
