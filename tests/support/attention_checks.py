"""Checks of Triton's attention: it is right, and a query has the same bits as a decode and in any
chunk, company and pages.

Shape letters: T tokens of a row, L tokens of a prompt, S keys of a packed row, H query heads, G
key/value heads, d head_dim.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from unittest.mock import patch

import torch
from interpreted_checks import Check
from native_attention import inputs, prefill_in_chunks, prefill_index
from reference import reference_attention
from torch import Tensor

from tramontane.proto.plan import WindowClass, ring_pages
from tramontane.workers.attention import triton_attention
from tramontane.workers.attention.metadata import PrefillMetadata, build_decode_metadata
from tramontane.workers.attention.rolling_cache import LayerCache, PageRings
from tramontane.workers.attention.triton_attention import TritonDecode, TritonPrefill

TOLERANCE = {"float32": 1e-6, "bfloat16": 8e-3, "float16": 5e-4}  # relative, by norms
# start, tokens: blocks of 64 (32 in float32) keys begin within them
CHUNKS = [(0, 70), (63, 2), (95, 9)]
LENGTH = 75
CUTS = [(LENGTH,), (2, 30, 31, 12), (64, 11)]
OTHERS = ((5, 3), (40, 2))
POSITIONS = (0, 31, 64, 74)  # that are decoded
NAN_POSITION = 40


@dataclass(frozen=True, slots=True)
class Kind:
    """A geometry of heads, a window, a dtype and a size of pages."""

    heads: tuple[int, int]
    head_dim: int
    window: int | None
    dtype: str
    page_size: int


KINDS = {
    "groups of 2": Kind((4, 2), 16, None, "float32", 16),
    "a window of some keys": Kind((2, 2), 96, 5, "float16", 4),
    "groups of 3 in a window": Kind((3, 1), 80, 40, "bfloat16", 8),
    "heads of 128": Kind((4, 1), 128, None, "bfloat16", 64),
    "groups of 5 in a window of more than a block": Kind((5, 1), 24, 70, "float32", 16),
}


def _prefill(
    kind: Kind, device: str, q_THd: Tensor, k_SGd: Tensor, v_SGd: Tensor, index: PrefillMetadata
) -> Tensor:
    kernel, none = (
        TritonPrefill(q_THd.shape[1] // k_SGd.shape[1], kind.page_size),
        torch.empty(0, dtype=torch.int64, device=device),
    )
    index = PrefillMetadata(
        index.window, index.query_lens, index.key_lens, index.starts, none, none, none, none
    )
    return kernel.attend(
        *(x.to(device) for x in (q_THd, k_SGd, v_SGd)), kernel.build_mask(index)
    ).cpu()


def _decode(kind: Kind, prompt: tuple[Tensor, Tensor, Tensor], device: str) -> Tensor:
    """Decode the tokens at ``POSITIONS`` while a cache fills, each in company of two others, with
    pages in no order; [P, H, d].

    The second slot holds the same sequence in other pages: results must be equal. Rows that are not
    written yet are NaN.
    """
    q_LHd, k_LGd, v_LGd = (x.to(device) for x in prompt)
    ring_length = ring_pages(kind.window, kind.page_size, LENGTH)
    ring = PageRings(
        WindowClass(kind.window, ring_length, 2 * ring_length),
        kind.page_size,
        2,
        torch.device(device),
    )
    pages = torch.randperm(2 * ring_length, generator=torch.Generator().manual_seed(1)).tolist()
    for slot in range(2):
        ring.put_pages(slot, 0, tuple(pages[slot * ring_length : (slot + 1) * ring_length]))
    ring.flush()
    shape = (2 * ring_length * kind.page_size, *k_LGd.shape[1:])
    cache = LayerCache(
        *(torch.full(shape, torch.nan, dtype=k_LGd.dtype, device=device) for _ in range(2))
    )
    kernel, outs = TritonDecode(), []
    for position in range(LENGTH):
        slots = torch.tensor([1, 0, 1], device=device)
        positions = torch.tensor([max(position - 1, 0), position, position], device=device)
        index = build_decode_metadata(ring, slots, positions, ring_length, [])
        cache.write(index.write_rows[1:], k_LGd[[position] * 2], v_LGd[[position] * 2])
        if position in POSITIONS:
            out_3Hd = kernel.attend(q_LHd[positions], cache, kernel.build_mask(index))
            assert torch.equal(out_3Hd[1].nan_to_num(9), out_3Hd[2].nan_to_num(9)), (
                f"other pages at {position}"
            )
            outs.append(out_3Hd[1].cpu())
    return torch.stack(outs)


def check_reference(kind: Kind, device: str) -> None:
    """Compare prefill with the reference in float64."""
    index = prefill_index(CHUNKS, kind.window)
    q_THd, k_SGd, v_SGd = inputs(
        sum(index.query_lens), sum(index.key_lens), kind.heads, kind.head_dim, kind.dtype
    )
    out_THd = _prefill(kind, device, q_THd, k_SGd, v_SGd, index)
    parts = (
        q_THd.double().split(index.query_lens),
        *(x.double().split(index.key_lens) for x in (k_SGd, v_SGd)),
    )
    expected = torch.cat(
        [reference_attention(*part, kind.window) for part in zip(*parts, strict=True)]
    )
    assert out_THd.dtype == q_THd.dtype
    difference = float((out_THd.double() - expected).norm() / expected.norm())
    assert difference < TOLERANCE[kind.dtype], difference


def check_bits(kind: Kind, device: str) -> None:
    """Compare a prompt as a whole, in chunks among other sequences, and decoded by one program for
    each token and by several.
    """
    prompt, attend = (
        inputs(LENGTH, LENGTH, kind.heads, kind.head_dim, kind.dtype),
        partial(_prefill, kind, device),
    )
    whole_LHd = prefill_in_chunks(prompt, CUTS[0], kind.window, attend=attend)
    for cuts in CUTS[1:]:
        assert torch.equal(
            prefill_in_chunks(prompt, cuts, kind.window, OTHERS, attend), whole_LHd
        ), cuts
    for programs in (1, 2, 8):
        with patch.object(triton_attention, "num_programs", lambda *_, programs=programs: programs):
            decoded_PHd = _decode(kind, prompt, device)
        for row, position in enumerate(POSITIONS):
            assert torch.equal(decoded_PHd[row], whole_LHd[position]), (
                f"decode at {position} by {programs} programs"
            )


def check_many_blocks(window: int | None, device: str) -> None:
    """Compare a prompt with the reference, and decodes with it, in pages in no order, by as many
    programs as there would be.
    """
    kind, length = Kind((8, 2), 32, window, "bfloat16", 16), 300
    q_LHd, k_LGd, v_LGd = inputs(length, length, kind.heads, kind.head_dim, kind.dtype)
    whole_LHd = prefill_in_chunks(
        (q_LHd, k_LGd, v_LGd), (200, 100), window, attend=partial(_prefill, kind, device)
    )
    expected = reference_attention(q_LHd.double(), k_LGd.double(), v_LGd.double(), window)
    difference = float((whole_LHd.double() - expected).norm() / expected.norm())
    assert difference < TOLERANCE[kind.dtype], difference
    entries, written = ring_pages(window, kind.page_size, length), 0
    ring = PageRings(WindowClass(window, entries, entries), kind.page_size, 1, torch.device(device))
    ring.put_pages(
        0, 0, tuple(torch.randperm(entries, generator=torch.Generator().manual_seed(1)).tolist())
    )
    ring.flush()
    shape = entries * kind.page_size, *k_LGd.shape[1:]
    cache = LayerCache(
        *(torch.full(shape, torch.nan, dtype=k_LGd.dtype, device=device) for _ in range(2))
    )
    for position in (63, 64, 205, length - 1):
        fresh = torch.arange(
            max(written, position + 1 - (window or length)), position + 1, device=device
        )
        cache.write(
            ring.rows(torch.zeros_like(fresh), fresh),
            *(x[fresh.cpu()].to(device) for x in (k_LGd, v_LGd)),
        )
        written, at = position + 1, torch.tensor([position], device=device)
        mask = TritonDecode().build_mask(
            build_decode_metadata(ring, torch.zeros_like(at), at, 0, [])
        )
        out_1Hd = TritonDecode().attend(q_LHd[position, None].to(device), cache, mask)
        assert torch.equal(out_1Hd[0].cpu(), whole_LHd[position]), position


def check_values_that_are_not_finite(value: float, device: str) -> None:
    """Let a value be infinite or NaN: queries that do not see it keep their bits, all others become
    NaN, in any way.
    """
    kind = KINDS["groups of 3 in a window"]
    q_LHd, k_LGd, v_LGd = inputs(LENGTH, LENGTH, kind.heads, kind.head_dim, kind.dtype)
    attend: Callable[..., Tensor] = partial(_prefill, kind, device)
    whole_LHd = prefill_in_chunks((q_LHd, k_LGd, v_LGd), CUTS[0], kind.window, attend=attend)
    for changed_LGd in (k_LGd, v_LGd) if math.isnan(value) else (v_LGd,):
        kept = changed_LGd.clone()
        changed_LGd[NAN_POSITION, 0, 3] = value
        prompt = q_LHd, k_LGd, v_LGd
        out_LHd = prefill_in_chunks(prompt, CUTS[0], kind.window, attend=attend)
        assert torch.equal(out_LHd[:NAN_POSITION], whole_LHd[:NAN_POSITION])
        if changed_LGd is v_LGd:
            assert out_LHd[NAN_POSITION:].isnan().all()  # the window ends after the prompt
        chunks_LHd = prefill_in_chunks(prompt, CUTS[1], kind.window, attend=attend)
        assert torch.equal(chunks_LHd.nan_to_num(9), out_LHd.nan_to_num(9))
        assert torch.equal(
            _decode(kind, prompt, device).nan_to_num(9), out_LHd[list(POSITIONS)].nan_to_num(9)
        )
        changed_LGd.copy_(kept)


CHECKS: dict[str, Check] = {
    **{f"reference: {name}": partial(check_reference, kind) for name, kind in KINDS.items()},
    **{f"bits: {name}": partial(check_bits, kind) for name, kind in KINDS.items()},
    "many blocks": partial(check_many_blocks, None),
    "many blocks in a window": partial(check_many_blocks, 130),
    "values that are NaN": partial(check_values_that_are_not_finite, torch.nan),
    "values that are infinite": partial(check_values_that_are_not_finite, torch.inf),
}
