"""Latent attention on GPUs by a Triton kernel: all query heads share the keys, and the first part
of a key is its value.

A block of keys is read once, and multiplied twice while it is in shared memory: by queries, and by
attention weights. The width of a key, 576 numbers or 320, is not a power of two, as Triton's blocks
are; so a key is two blocks, the 512 or 256 numbers that are the value too, and 64 rotated ones. A
program has query heads of one token, for prompts and single tokens alike: the heads of a token fill
the rows of a tensor core. A second kernel combines the parts of a token's keys.

Where parts have a minimum number of keys, and all launches have the same number of parts, the
result for a token depends only on its position: it has the same bits in any batch, as a decode and
in any chunk of its prompt.

Shape letters: T tokens, B single tokens, S keys of a packed row, N rows of a cache, H query heads,
G key/value heads (1), d width of a key, c of a value, R pages of a ring, P parts; h query heads, k
keys, c numbers of a value and r rotated ones of a program.
"""

from dataclasses import dataclass
from itertools import accumulate
from typing import ClassVar

import torch
import triton
import triton.language as tl
from torch import Tensor

from tramontane.proto.plan import StagePlan
from tramontane.workers.attention.backend import AttentionKernels
from tramontane.workers.attention.metadata import DecodeMetadata, PrefillMetadata
from tramontane.workers.attention.rolling_cache import LayerCache
from tramontane.workers.attention.triton_decode import (
    LOG2_E,
    LOWEST,
    NO_WINDOW,
    PARTS_AT_A_TIME,
    combine,
)
from tramontane.workers.device.alignment import aligned
from tramontane.workers.device.cuda import to_device

PARTS = (1, 2, 4, 8, 16, 32, 64, 128)
# of a launch for single tokens: a GPU has about a hundred multiprocessors
MIN_PROGRAMS, MAX_PROGRAMS = 64, 256
# with batch invariance: number of parts of a token's keys, and minimum keys per part
FIXED_PARTS, LEAST_KEYS = 16, 256
MAX_PART_NUMBERS = 2**24  # in memory at a time, of unfinished results: 64 MiB
MAX_TOKENS = 65535  # of a launch, as CUDA limits the second dimension of a grid
MIN_BLOCK = 16  # numbers and rows of a tensor core's product
MAX_VALUES, MAX_ROTATED = 512, 64  # of a key: wider ones would not fit into registers


@dataclass(frozen=True, slots=True)
class Tile:
    """Tile sizes of a program: query heads, keys at a time, warps, pipeline stages of loads.

    ``blocks``: blocks of keys in shared memory at a time, which Triton derives from the stages.
    """

    heads: int
    keys: int
    warps: int
    stages: int
    blocks: int

    def shared_bytes(self, width: int, element_size: int) -> int:
        """Return the most shared memory that a program needs.

        64 heads and two blocks of 32 keys of 576 numbers of 2 bytes: 144 KiB, and 4 for weights and
        2 for pages.
        """
        rows = self.heads + self.blocks * self.keys
        return (
            rows * width * element_size
            + self.heads * self.keys * element_size
            + 2 * self.blocks * self.keys * 16
        )


# By the bytes of a number, and the numbers of a value up to which they are: the first that fit into
# a GPU are used. No register is spilled with them on GPUs of capability 8.0, 8.9 and 9.0.
TILES: dict[tuple[int, int], tuple[Tile, ...]] = {
    (2, 256): (Tile(32, 32, 4, 5, 2), Tile(32, 64, 4, 3, 1)),
    (2, 512): (Tile(64, 32, 8, 5, 3), Tile(32, 32, 8, 5, 2), Tile(32, 32, 8, 3, 1)),
    (4, 256): (Tile(16, 16, 8, 2, 1),),
    (4, 512): (Tile(16, 16, 8, 2, 1),),
}
MAX_TILES = 2  # that are compiled and timed


@dataclass(frozen=True, slots=True)
class KeyPlaces:
    """Locations of the keys that each token sees. The key of position p is in the row pages[p //
    page_size % R] * page_size + p % page_size + shift.

    Single tokens have page rings [B, R] and shifts of 0. Tokens of prompts have the same pages
    [1, R] 0, 1, 2 and so on. A chunk from position 40 on, whose keys begin with position 30 in row
    100 of all keys: shift 70, the key of position 45 is in row 115.
    """

    window: int
    page_size: int
    positions_T: Tensor
    shifts_T: Tensor
    pages_TR: Tensor


@dataclass(frozen=True, slots=True)
class LatentKernel:
    """The kernel for keys of ``value_dim + rotary_dim`` numbers.

    ``parts`` programs share the keys of a token; each has at least ``least_blocks`` blocks if there
    are enough.
    """

    value_dim: int
    rotary_dim: int
    tile: Tile
    parts: int = 1
    least_blocks: int = 1

    def attend(self, q_THd: Tensor, k_NGd: Tensor, places: KeyPlaces) -> Tensor:
        """Compute the output [T, H, c], some tokens at a time, so that parts need a bounded
        memory.
        """
        (num_tokens, num_heads, _), q_THd = q_THd.shape, aligned(q_THd)
        out_THc = q_THd.new_empty(num_tokens, num_heads, self.value_dim)
        step = MAX_TOKENS
        if self.parts > 1:
            step = min(max(MAX_PART_NUMBERS // (num_heads * self.parts * self.value_dim), 1), step)
        # Triton launches on the current device
        with torch.cuda.device_of(out_THc):  # type: ignore[no-untyped-call]
            for first in range(0, num_tokens, step):
                self._launch(q_THd, k_NGd, places, out_THc, first, min(step, num_tokens - first))
        return out_THc

    def _launch(
        self,
        q_THd: Tensor,
        k_NGd: Tensor,
        places: KeyPlaces,
        out_THc: Tensor,
        first_token: int,
        num_tokens: int,
    ) -> None:
        """Compute the rows of some tokens."""
        num_heads, width, is_split = (
            q_THd.shape[1],
            self.value_dim + self.rotary_dim,
            self.parts > 1,
        )
        h_block = min(self.tile.heads, _block(num_heads))
        parts_THPc = highest_THP = sum_THP = out_THc
        if is_split:
            parts_THPc = out_THc.new_empty(
                num_tokens, num_heads, self.parts, self.value_dim, dtype=torch.float32
            )
            highest_THP, sum_THP = (parts_THPc.new_empty(parts_THPc.shape[:3]) for _ in range(2))
        ring_pages = places.pages_TR.shape[1]
        _attend[triton.cdiv(num_heads, h_block), num_tokens, self.parts](
            *(
                q_THd,
                aligned(k_NGd),
                places.pages_TR,
                places.positions_T,
                places.shifts_T,
                parts_THPc,
            ),
            *(highest_THP, sum_THP, out_THc, first_token),
            *(
                ring_pages if len(places.pages_TR) > 1 else 0,
                ring_pages,
                places.window,
                self.parts,
                self.least_blocks,
            ),
            *(
                LOG2_E / width**0.5,
                places.page_size,
                num_heads,
                self.value_dim,
                self.rotary_dim,
                h_block,
                self.tile.keys,
            ),
            *(_block(self.value_dim), _block(self.rotary_dim), is_split),
            num_warps=self.tile.warps,
            num_stages=self.tile.stages,
        )
        if is_split:
            _combine[(num_tokens * num_heads,)](
                *(
                    parts_THPc,
                    highest_THP,
                    sum_THP,
                    out_THc[first_token : first_token + num_tokens],
                ),
                *(self.parts, self.value_dim, _block(self.value_dim), PARTS_AT_A_TIME),
            )


@dataclass(frozen=True, slots=True)
class LatentDecode:
    """Decode kernel. It computes the numbers of the values alone: [B, H, c]."""

    kernel: LatentKernel
    # in page rings, so no page table is needed
    finds_pages: ClassVar[bool] = True

    def build_mask(self, index: DecodeMetadata) -> KeyPlaces:
        """Return the page rings."""
        ring = index.ring
        no_shifts_B = torch.zeros_like(index.positions)
        return KeyPlaces(
            ring.window or NO_WINDOW, ring.page_size, index.positions, no_shifts_B, ring.pages_BR
        )

    def attend(self, q_BHd: Tensor, cached: LayerCache, mask: KeyPlaces) -> Tensor:
        """Compute the output [B, H, c]."""
        return self.kernel.attend(q_BHd, cached.k_NGd, mask)


@dataclass(frozen=True, slots=True)
class LatentPrefill:
    """Prefill kernel, the same as for single tokens. ``page_size``: of the cache, for which Triton
    compiles the kernel.
    """

    kernel: LatentKernel
    page_size: int

    def build_mask(self, index: PrefillMetadata) -> KeyPlaces:
        """Build position and shift of every token."""
        device, lens = index.cached_rows.device, index.query_lens
        first_keys = [0, *accumulate(index.key_lens)]
        shifts = [
            first_key - (start + num_queries - num_keys)
            for first_key, start, num_queries, num_keys in zip(
                first_keys, index.starts, lens, index.key_lens, strict=False
            )
        ]
        ends = [start + num_queries for start, num_queries in zip(index.starts, lens, strict=True)]
        positions_T = torch.cat(
            [torch.arange(*chunk) for chunk in zip(index.starts, ends, strict=True)]
        )
        shifts_T = torch.repeat_interleave(torch.tensor(shifts), torch.tensor(lens))
        positions_T, shifts_T = to_device(torch.stack((positions_T, shifts_T)), device)
        pages_1R = torch.arange(-(-max(ends) // self.page_size), device=device)[None]
        return KeyPlaces(index.window or NO_WINDOW, self.page_size, positions_T, shifts_T, pages_1R)

    def attend(self, q_THd: Tensor, k_SGd: Tensor, _v_SGd: Tensor, mask: KeyPlaces) -> Tensor:
        """Compute the output [T, H, c]."""
        return self.kernel.attend(q_THd, k_SGd, mask)


def tiles_for(plan: StagePlan, device: torch.device) -> list[Tile]:
    """Return the tiles that fit into a multiprocessor of the device, the best first; none for keys
    that are too wide.
    """
    value_dim, rotary_dim = _widths(plan)
    if value_dim > MAX_VALUES or rotary_dim > MAX_ROTATED:
        return []
    element_size = getattr(torch, plan.dtype).itemsize
    widest = 256 if value_dim <= 256 else MAX_VALUES
    width, limit = _block(value_dim) + _block(rotary_dim), _max_shared_bytes(device)
    return [
        tile
        for tile in TILES[element_size, widest]
        if tile.shared_bytes(width, element_size) <= limit
    ][:MAX_TILES]


def latent_decode_kernels(
    num_tokens: int, plan: StagePlan, device: torch.device
) -> dict[str, LatentDecode]:
    """Return the candidates for a number of single tokens: parts that make 64 to 256 programs, or
    one part.

    4 tokens, 64 query heads, of which a program has 32: 8, 16 and 32 parts.
    """
    candidates = {}
    for tile in tiles_for(plan, device):
        programs = num_tokens * -(-plan.args.n_heads // tile.heads)
        for parts in PARTS:
            if (
                parts == 1
                if programs > MAX_PROGRAMS
                else MIN_PROGRAMS <= programs * parts <= MAX_PROGRAMS
            ):
                kernel = LatentDecode(LatentKernel(*_widths(plan), tile, parts))
                candidates[f"latent, {_named(tile)}, {parts} parts"] = kernel
    return candidates


def latent_prefill_kernels(plan: StagePlan, device: torch.device) -> dict[str, LatentPrefill]:
    """Return the candidate for prompts."""
    return {
        f"latent, {_named(tile)}": LatentPrefill(
            LatentKernel(*_widths(plan), tile), plan.cache.page_size
        )
        for tile in tiles_for(plan, device)[:1]
    }


def invariant_kernels(plan: StagePlan, device: torch.device) -> AttentionKernels:
    """Return kernels of a stage with which a token has the same bits in any batch.

    A token with 1,000 keys has 4 parts of up to 256 keys, one with 8,192 keys 16 parts of 512.
    Raises ValueError if no tile fits.
    """
    tiles = tiles_for(plan, device)
    if not tiles:
        raise ValueError(
            f"latent attention of {plan.args.head_dim} numbers needs more shared memory or"
            " registers than there are"
        )
    tile = tiles[0]
    kernel = LatentKernel(*_widths(plan), tile, FIXED_PARTS, LEAST_KEYS // tile.keys)
    return AttentionKernels(
        LatentPrefill(kernel, plan.cache.page_size), LatentDecode(kernel), is_batch_invariant=True
    )


def _widths(plan: StagePlan) -> tuple[int, int]:
    """Return the widths of a key's value part and of its remaining part."""
    assert plan.args.latent is not None
    value_dim = plan.args.latent.kv_lora_rank
    return value_dim, plan.args.head_dim - value_dim


def _named(tile: Tile) -> str:
    return f"{tile.heads} heads, {tile.keys} keys, {tile.warps} warps, {tile.stages} stages"


def _block(number: int) -> int:
    """Return the power of two that holds this number of elements or rows: 34 -> 64, 512 -> 512, 6
    -> 16.
    """
    return max(int(triton.next_power_of_2(number)), MIN_BLOCK)


def _max_shared_bytes(device: torch.device) -> int:
    """Return the shared memory available to a program; unlimited where kernels are interpreted."""
    if device.type != "cuda":
        return 2**30
    properties = torch.cuda.get_device_properties(device)
    # torch's stub lacks it
    return int(properties.shared_memory_per_block_optin)  # type: ignore[attr-defined]


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=[
        "first_token",
        "pages_stride",
        "ring_pages",
        "window",
        "num_parts",
        "least_blocks",
    ],
    do_not_specialize_on_alignment=["pages_TR", "positions_T", "shifts_T"],
)
def _attend(  # type: ignore[no-untyped-def]  # Triton reads annotations itself
    q_THd,
    k_NGd,
    pages_TR,
    positions_T,
    shifts_T,
    parts_THPc,
    highest_THP,
    sum_THP,
    out_THc,
    first_token,
    pages_stride,
    ring_pages,
    window,
    num_parts,
    least_blocks,
    scale,
    page_size: tl.constexpr,
    num_heads: tl.constexpr,
    value_dim: tl.constexpr,
    rotary_dim: tl.constexpr,
    h_block: tl.constexpr,
    k_block: tl.constexpr,
    c_block: tl.constexpr,
    r_block: tl.constexpr,
    is_split: tl.constexpr,
):
    """Attend with some query heads of one token to one part of its keys.

    Blocks of 32 keys, a window of 1000, a token at position 1300, 4 parts: it sees keys 301 to
    1300, in blocks 9 to 40; each part has 8 blocks, the first one 9 to 16. If a part has at least
    16 blocks, two parts have keys, and the other two a sum of 0.
    """
    width: tl.constexpr = value_dim + rotary_dim
    program, part = tl.program_id(1).to(tl.int64), tl.program_id(2)
    token = first_token + program
    position = tl.load(positions_T + token).to(tl.int32)
    shift = tl.load(shifts_T + token)
    pages = pages_TR + token * pages_stride
    oldest = tl.maximum(position - window + 1, 0)
    first_block = oldest // k_block
    blocks = position // k_block - first_block + 1
    share = tl.maximum((blocks + num_parts - 1) // num_parts, least_blocks)
    begin = (first_block + part * share) * k_block
    end = tl.minimum(begin + share * k_block, position + 1)
    h = tl.program_id(0) * h_block + tl.arange(0, h_block)
    c = tl.arange(0, c_block)
    r = tl.arange(0, r_block)
    queries = q_THd + (token * num_heads + h[:, None]) * width
    is_head_h, is_value_c, is_rotary_r = h < num_heads, c < value_dim, r < rotary_dim
    is_read_h = is_head_h & (begin < end)  # most parts of a short prompt have no keys
    q_hc = tl.load(queries + c[None, :], mask=is_read_h[:, None] & is_value_c[None, :], other=0.0)
    q_hr = tl.load(
        queries + value_dim + r[None, :], mask=is_read_h[:, None] & is_rotary_r[None, :], other=0.0
    )
    highest_h = tl.full((h_block,), LOWEST, dtype=tl.float32)
    sum_h = tl.zeros((h_block,), dtype=tl.float32)
    out_hc = tl.zeros((h_block, c_block), dtype=tl.float32)
    for start in range(begin, end, k_block):
        key_k = start + tl.arange(0, k_block)
        is_seen_k = (key_k >= oldest) & (key_k <= position)
        # Other rows may be another sequence's, and not finite: they are not read.
        read_k = tl.minimum(tl.maximum(key_k, oldest), position)
        row_k = (
            tl.load(pages + read_k // page_size % ring_pages) * page_size
            + read_k % page_size
            + shift
        )
        keys = k_NGd + row_k[:, None] * width
        k_kc = tl.load(keys + c[None, :], mask=is_value_c[None, :], other=0.0)
        k_kr = tl.load(keys + value_dim + r[None, :], mask=is_rotary_r[None, :], other=0.0)
        score_hk = tl.dot(q_hr, tl.trans(k_kr), input_precision="ieee")
        score_hk = tl.dot(q_hc, tl.trans(k_kc), score_hk, input_precision="ieee") * scale
        score_hk = tl.where(is_seen_k[None, :], score_hk, LOWEST)
        top_h = tl.maximum(highest_h, tl.max(score_hk, axis=1))
        # 0 for keys that are not seen: every block has a visible key
        weight_hk = tl.exp2(score_hk - top_h[:, None])
        factor_h = tl.exp2(highest_h - top_h)
        sum_h = sum_h * factor_h + tl.sum(weight_hk, axis=1)
        out_hc = tl.dot(
            weight_hk.to(k_kc.dtype), k_kc, out_hc * factor_h[:, None], input_precision="ieee"
        )
        highest_h = top_h
    if is_split:
        part_h = (program * num_heads + h) * num_parts + part
        tl.store(highest_THP + part_h, highest_h, mask=is_head_h)
        tl.store(sum_THP + part_h, sum_h, mask=is_head_h)
        if begin < end:
            tl.store(
                parts_THPc + part_h[:, None] * value_dim + c[None, :],
                out_hc,
                mask=is_head_h[:, None] & is_value_c[None, :],
            )
    else:
        head_h = token * num_heads + h
        out_hc = (out_hc * (1.0 / sum_h)[:, None]).to(out_THc.dtype.element_ty)
        tl.store(
            out_THc + head_h[:, None] * value_dim + c[None, :],
            out_hc,
            mask=is_head_h[:, None] & is_value_c[None, :],
        )


@triton.jit(do_not_specialize=["num_parts"], do_not_specialize_on_alignment=["out_THc"])  # type: ignore[untyped-decorator]
def _combine(  # type: ignore[no-untyped-def]
    parts_THPc,
    highest_THP,
    sum_THP,
    out_THc,
    num_parts,
    value_dim: tl.constexpr,
    c_block: tl.constexpr,
    p_block: tl.constexpr,
):
    """Combine the parts of one query head of one token."""
    head = tl.program_id(0).to(tl.int64)
    combine(
        parts_THPc,
        highest_THP,
        sum_THP,
        out_THc,
        head,
        1,
        value_dim,
        c_block,
        1,
        num_parts,
        p_block,
    )
