"""Checks of Triton's kernel for latent attention: it agrees with the reference, and a token has the
same bits whatever else is in the batch.

Shape letters: T tokens of a row, B single tokens, L tokens of a prompt, S keys of a packed row, N
rows of a cache, H query heads, G key/value heads (1), d width of a key, c of a value.
"""

from dataclasses import dataclass, replace
from functools import partial
from unittest.mock import patch

import torch
from interpreted_checks import Check
from native_attention import inputs, prefill_in_chunks, prefill_index
from reference import reference_attention
from tiny_models import latent_args, tiny_plan
from torch import Tensor

from tramontane.proto.model_args import LatentArgs
from tramontane.proto.plan import StagePlan, WindowClass, ring_pages
from tramontane.workers.attention import triton_latent
from tramontane.workers.attention.autotune import select_working_kernels
from tramontane.workers.attention.backend import AttentionKernels, PrefillKernel
from tramontane.workers.attention.metadata import PrefillMetadata, build_decode_metadata
from tramontane.workers.attention.rolling_cache import LayerCache, PageRings
from tramontane.workers.attention.sdpa_backend import SdpaPrefill
from tramontane.workers.attention.triton_cache import cache_rows
from tramontane.workers.attention.triton_latent import (
    LatentDecode,
    LatentKernel,
    LatentPrefill,
    Tile,
    invariant_kernels,
    latent_decode_kernels,
    latent_prefill_kernels,
)

TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}  # relative, by norms
MAX_LEN = 160
POSITIONS = (0, 15, 16, 40, 150)
LENGTH = 40  # of a prompt
CUTS = [(LENGTH,), (2, 17, 21)]
OTHERS = ((5, 1), (40, 2))
DECODED = (0, 31, 39)


@dataclass(frozen=True, slots=True)
class Kind:
    """Query heads, numbers of a value and rotated ones, a window, a dtype, a size of pages, and how
    a token's keys are divided.

    ``tile`` are query heads and keys of a program.
    """

    heads: int = 4
    widths: tuple[int, int] = (64, 16)
    window: int | None = None
    dtype: str = "float32"
    page_size: int = 16
    tile: tuple[int, int] = (16, 16)
    parts: int = 1
    least_blocks: int = 1

    @property
    def kernel(self) -> LatentKernel:
        """Return the kernel."""
        return LatentKernel(
            *self.widths,
            Tile(*self.tile, warps=4, stages=2, blocks=1),
            self.parts,
            self.least_blocks,
        )


def _rings(window: int | None, page_size: int, num_slots: int, device: str) -> PageRings:
    """Return page rings with pages in random order."""
    entries = ring_pages(window, page_size, MAX_LEN)
    ring = PageRings(
        WindowClass(window, entries, entries * num_slots),
        page_size,
        num_slots,
        torch.device(device),
    )
    pages = torch.randperm(entries * num_slots, generator=torch.Generator().manual_seed(1)).tolist()
    for slot in range(num_slots):
        ring.put_pages(slot, 0, tuple(pages[slot * entries : (slot + 1) * entries]))
    ring.flush()
    return ring


def check_decode(kind: Kind, device: str) -> None:
    """Compare tokens at several positions, and padding, with the reference in float64; rows that
    none of them sees are NaN.
    """
    ring, width, dtype = (
        _rings(kind.window, kind.page_size, len(POSITIONS), device),
        sum(kind.widths),
        getattr(torch, kind.dtype),
    )
    generator = torch.Generator().manual_seed(0)
    slots = [(3 * i) % len(POSITIONS) for i in range(len(POSITIONS))] + [ring.scratch_slot]
    positions = [*POSITIONS, 0]
    k_NGd = torch.full(((ring.num_pages + 1) * kind.page_size, 1, width), torch.nan, dtype=dtype)
    q_BHd = torch.randn(len(slots), kind.heads, width, generator=generator).to(dtype)
    expected = []
    for token, (slot, position) in enumerate(zip(slots, positions, strict=True)):
        seen = torch.arange(ring.first_visible(position), position + 1, device=device)
        rows = ring.rows(torch.full_like(seen, slot), seen).cpu()
        k_SGd = torch.randn(len(rows), 1, width, generator=generator).to(dtype)
        k_NGd[rows] = k_SGd
        expected.append(_reference(q_BHd[token, None], k_SGd, kind))
    slots_B, positions_B = (torch.tensor(each, device=device) for each in (slots, positions))
    decode, cached = LatentDecode(kind.kernel), k_NGd.to(device)
    mask = decode.build_mask(build_decode_metadata(ring, slots_B, positions_B, 0, [], cache_rows))
    for slot in range(len(POSITIONS)):  # the next step begins while this one is in its first layers
        ring.put_pages(slot, 0, (slot,) * ring.ring_pages)
    ring.flush()
    out_BHc = decode.attend(q_BHd.to(device), LayerCache(cached, cached), mask).cpu()
    _assert_close(out_BHc, torch.cat(expected), dtype)


def check_least_keys(device: str) -> None:
    """Divide the keys of a prompt by 2 and by 8: with at least 32 keys in a part, up to 64 keys are
    divided alike.
    """
    index = prefill_index([(30, 30)], None)
    q_THd, k_SGd, _ = inputs(30, 60, (1, 1), 80, "float32")
    by_two, by_eight = (
        _prefill(Kind(parts=parts, least_blocks=2), device, q_THd, k_SGd, k_SGd, index)
        for parts in (2, 8)
    )
    assert torch.equal(by_two, by_eight)


def check_prompts(kind: Kind, device: str) -> None:
    """Compare chunks with the reference in float64."""
    index = prefill_index([(0, 7), (63, 2), (31, 5)], kind.window)
    q_THd, k_SGd, _ = inputs(
        sum(index.query_lens), sum(index.key_lens), (kind.heads, 1), sum(kind.widths), kind.dtype
    )
    parts = q_THd.split(index.query_lens), k_SGd.split(index.key_lens)
    expected = torch.cat([_reference(q, k, kind) for q, k in zip(*parts, strict=True)])
    _assert_close(
        _prefill(kind, device, q_THd, k_SGd, k_SGd, index), expected, getattr(torch, kind.dtype)
    )


def check_bits(kind: Kind, device: str) -> None:
    """Compare a prompt as a whole, in chunks among other sequences, some tokens at a time, and
    decoded.
    """
    q_LHd, k_LGd, _ = prompt = inputs(LENGTH, LENGTH, (kind.heads, 1), sum(kind.widths), kind.dtype)
    attend = partial(_prefill, kind, device)
    whole_LHc = prefill_in_chunks(prompt, CUTS[0], kind.window, attend=attend)
    for cuts in CUTS[1:]:
        assert torch.equal(
            prefill_in_chunks(prompt, cuts, kind.window, OTHERS, attend), whole_LHc
        ), cuts
    few_numbers = 17 * kind.heads * kind.parts * kind.widths[0]
    with (
        patch.object(triton_latent, "MAX_PART_NUMBERS", few_numbers),
        patch.object(triton_latent, "MAX_TOKENS", 17),
    ):
        assert torch.equal(
            prefill_in_chunks(prompt, CUTS[0], kind.window, attend=attend), whole_LHc
        ), "some at a time"
    for position in DECODED:
        out_3Hc = _decode_at(position, q_LHd, k_LGd, kind, device)
        assert torch.equal(out_3Hc[1], whole_LHc[position]), f"decode at {position}"
        assert torch.equal(out_3Hc[2], whole_LHc[position]), f"decode at {position}, in other pages"


def _decode_at(position: int, q_LHd: Tensor, k_LGd: Tensor, kind: Kind, device: str) -> Tensor:
    """Decode a token of a prompt, twice, from other pages, behind an earlier one; what is after it
    in a cache is NaN.
    """
    ring = _rings(kind.window, kind.page_size, 2, device)
    seen = torch.arange(ring.first_visible(position), position + 1, device=device)
    k_NGd = torch.full(
        (ring.num_pages * kind.page_size, 1, sum(kind.widths)),
        torch.nan,
        dtype=k_LGd.dtype,
        device=device,
    )
    for slot in range(2):
        k_NGd[ring.rows(torch.full_like(seen, slot), seen)] = k_LGd.to(device)[seen]
    positions = [max(position - 1, ring.first_visible(position)), position, position]
    slots_B, positions_B = (
        torch.tensor([1, 0, 1], device=device),
        torch.tensor(positions, device=device),
    )
    decode = LatentDecode(kind.kernel)
    mask = decode.build_mask(build_decode_metadata(ring, slots_B, positions_B, 0, []))
    return decode.attend(q_LHd[positions].to(device), LayerCache(k_NGd, k_NGd), mask).cpu()


def _prefill(
    kind: Kind, device: str, q_THd: Tensor, k_SGd: Tensor, v_SGd: Tensor, index: PrefillMetadata
) -> Tensor:
    kernel, none = (
        LatentPrefill(kind.kernel, kind.page_size),
        torch.empty(0, dtype=torch.int64, device=device),
    )
    index = replace(index, cached_rows=none)
    return kernel.attend(
        *(x.to(device) for x in (q_THd, k_SGd, v_SGd)), kernel.build_mask(index)
    ).cpu()


def _reference(q_THd: Tensor, k_SGd: Tensor, kind: Kind) -> Tensor:
    return reference_attention(q_THd.double(), k_SGd.double(), k_SGd.double(), kind.window)[
        ..., : kind.widths[0]
    ]


def _assert_close(out_THc: Tensor, expected_THc: Tensor, dtype: torch.dtype) -> None:
    assert out_THc.dtype == dtype
    difference = float((out_THc.double() - expected_THc).norm() / expected_THc.norm())
    assert difference < TOLERANCE[dtype], difference


def plan_of(
    widths: tuple[int, int] = (34, 6),
    heads: int = 2,
    dtype: str = "bfloat16",
    page_size: int = 16,
    max_num_seqs: int = 64,
) -> StagePlan:
    """Return a stage of one layer whose cache has these widths."""
    args = latent_args(n_layers=1)
    latent = LatentArgs(
        None, widths[0], qk_nope_head_dim=8, qk_rope_head_dim=widths[1], v_head_dim=8
    )
    args = replace(args, latent=latent, n_heads=heads, head_dim=latent.cached_dim)
    return tiny_plan(args, 1, page_size, max_num_seqs, dtype=dtype).stages[0]


def check_candidates(device: str) -> None:
    """Try the kernels of a stage that has to be batch-invariant, and all candidates for some single
    tokens.
    """
    plan, on = plan_of(), torch.device(device)
    with patch.object(triton_latent, "FIXED_PARTS", 2):
        select_working_kernels(plan, on, invariant_kernels(plan, on))
    decodes = [*latent_decode_kernels(64, plan, on).values()]
    assert len(decodes) >= 2
    prefills: list[PrefillKernel] = [
        *latent_prefill_kernels(plan, on).values(),
        *(SdpaPrefill() for _ in decodes),
    ]
    for prefill, decode in zip(prefills, decodes, strict=False):
        select_working_kernels(plan, on, AttentionKernels(prefill, decode))


NARROW, WIDE = (256, 64), (512, 64)
KINDS = {
    "one part": Kind(),
    "a window, and pages that are no multiple of a block": Kind(window=40, page_size=24, parts=3),
    "a window, and small pages": Kind(window=20, page_size=4, tile=(16, 32), parts=2),
    "pages of several blocks": Kind(window=70, page_size=64, parts=2),
    "more parts than blocks, and than are combined at a time": Kind(heads=1, parts=20),
    "parts of several blocks": Kind(parts=4, least_blocks=3),
    "widths that are no powers of two": Kind(heads=5, widths=(34, 6), parts=3),
    "several blocks of heads": Kind(heads=20, widths=(16, 16), tile=(16, 32), parts=2),
    "bfloat16": Kind(dtype="bfloat16", tile=(16, 32), parts=2),
    "float16": Kind(dtype="float16", window=40, tile=(16, 64), parts=3),
}
OF_PROMPTS = (
    "one part",
    "a window, and pages that are no multiple of a block",
    "widths that are no powers of two",
    "float16",
)
WITH_BITS = (
    "a window, and pages that are no multiple of a block",
    "parts of several blocks",
    "bfloat16",
)
CHECKS: dict[str, Check] = {
    **{f"decode: {name}": partial(check_decode, kind) for name, kind in KINDS.items()},
    "decode: widths of Small 4": partial(
        check_decode, Kind(widths=NARROW, dtype="bfloat16", tile=(16, 32), parts=4)
    ),
    "decode: widths of Large 3 and 4": partial(
        check_decode, Kind(widths=WIDE, dtype="bfloat16", tile=(16, 32), parts=2)
    ),
    **{f"prompts: {name}": partial(check_prompts, KINDS[name]) for name in OF_PROMPTS},
    **{f"bits: {name}": partial(check_bits, replace(KINDS[name], heads=2)) for name in WITH_BITS},
    "a part has a least number of keys": check_least_keys,
    "candidates": check_candidates,
}
