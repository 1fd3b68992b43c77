"""Checks that attention reads nothing of other sequences: rows that are not a sequence's own may
hold anything.

A micro-batch has chunks and single tokens of seven sequences, of which two hold what is tried, in
the cache and in the row. So do the rows of the others' pages that they have not written yet, or no
longer see. The others have the same bits in any case.

Shape letters: T tokens, H query heads, G key/value heads, d head_dim.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from interpreted_checks import Check
from tiny_models import tiny_args, tiny_plan
from torch import Tensor

from tramontane.proto.plan import StagePlan
from tramontane.proto.request import SamplingParams
from tramontane.proto.step import Chunk, DecodeColumns, MicroBatch
from tramontane.workers.attention.backend import AttentionKernels, CachedAttention
from tramontane.workers.attention.metadata import build_attention_metadata, num_cached_keys
from tramontane.workers.attention.rolling_cache import (
    LayerCache,
    PageRings,
    RollingCache,
    StageSequences,
)
from tramontane.workers.attention.sdpa_backend import (
    BatchSizeDispatch,
    GatheredDecode,
    PagedDecode,
    SdpaPrefill,
    cpu_kernels,
)

MakeKernels = Callable[[StagePlan], AttentionKernels]


class Part(NamedTuple):
    """The tokens of one sequence in the micro-batch, and whether it is one of the two that hold
    what is tried.
    """

    start: int
    num_tokens: int
    is_bad: bool = False


# In the order of a row: chunks of several tokens, a chunk of one, decodes.
PARTS = [
    Part(40, 9),
    Part(20, 5, is_bad=True),
    Part(0, 3),
    Part(17, 1, is_bad=True),
    Part(50, 1),
    Part(3, 1),
    Part(16, 1),
]
NUM_CHUNKS = 4
PAGE_SIZE, MAX_LEN = 16, 96
FILLS = (math.nan, math.inf, -math.inf)
CASES = {
    f"{dtype}, window {window}": (dtype, window)
    for dtype, window in (("float32", None), ("float32", 24), ("bfloat16", 5), ("float16", None))
}


def plan_of(dtype: str, window: int | None) -> StagePlan:
    """Return a stage of one layer."""
    args = tiny_args(n_layers=1, window=window, head_dim=16, max_seq_len=MAX_LEN)
    return tiny_plan(args, 1, PAGE_SIZE, len(PARTS), dtype=dtype).stages[0]


def outputs(make_kernels: MakeKernels, plan: StagePlan, fill: float, device: str) -> list[Tensor]:
    """Return the attention of each part that is not bad, where all rows that these do not see hold
    ``fill``.
    """
    kernels, ring_pages = make_kernels(plan), plan.cache.classes[0].ring_pages
    table, cache = (
        StageSequences(plan.cache, len(PARTS), torch.device(device)),
        _filled_cache(plan, fill, device),
    )
    mixed = torch.randperm(
        plan.cache.classes[0].num_pages, generator=torch.Generator().manual_seed(3)
    ).tolist()
    pages = [(tuple(mixed[ring_pages * i : ring_pages * (i + 1)]),) for i in range(len(PARTS))]
    past = [
        Chunk(i, 0, (0,) * part.start, pages[i], SamplingParams(), False)
        for i, part in enumerate(PARTS)
        if part.start
    ]
    table.update(MicroBatch(0, 0, tuple(past)))
    table.flush()
    for seq_id, part in enumerate(PARTS):
        if not part.is_bad and part.start:
            _write_past(cache.layers[0], table.rings[0], table.slots[seq_id], part, seq_id)
    batch = MicroBatch(0, 1, _chunks(pages), decodes=_decodes())
    table.update(batch)
    attend = CachedAttention(
        cache,
        build_attention_metadata(batch, table, torch.device(device), kernels.reads_pages),
        kernels,
    )
    parts_THd = attend(0, *_row(plan, fill, device)).split([part.num_tokens for part in PARTS])
    return [out.cpu() for out, part in zip(parts_THd, PARTS, strict=True) if not part.is_bad]


def check_other_rows(
    make_kernels: MakeKernels, dtype: str, window: int | None, device: str
) -> None:
    """Compare what is computed where other rows are zeros and where they are not finite."""
    plan = plan_of(dtype, window)
    expected = outputs(make_kernels, plan, 0.0, device)
    assert all(out.isfinite().all() and out.any() for out in expected)
    for fill in FILLS:
        for number, (out, zeros) in enumerate(
            zip(outputs(make_kernels, plan, fill, device), expected, strict=True)
        ):
            assert torch.equal(out, zeros), (
                f"part {number} reads rows of {fill} that are not its own"
            )


def _filled_cache(plan: StagePlan, fill: float, device: str) -> RollingCache:
    cache = RollingCache(plan, getattr(torch, plan.dtype), torch.device(device))
    cache.layers[0].k_NGd.fill_(fill)
    cache.layers[0].v_NGd.fill_(fill)
    return cache


def _write_past(cached: LayerCache, ring: PageRings, slot: int, part: Part, seed: int) -> None:
    """Write the keys and values that the part's first token sees of the cache."""
    seen = torch.arange(
        part.start - num_cached_keys(part.start, ring.window),
        part.start,
        device=cached.k_NGd.device,
    )
    generator, shape = torch.Generator().manual_seed(seed), (len(seen), *cached.k_NGd.shape[1:])
    k_TGd, v_TGd = (torch.randn(shape, generator=generator).to(cached.k_NGd) for _ in range(2))
    cached.write(ring.rows(torch.full_like(seen, slot), seen), k_TGd, v_TGd)


def _chunks(pages: list[tuple[tuple[int, ...]]]) -> tuple[Chunk, ...]:
    return tuple(
        Chunk(
            i,
            part.start,
            (0,) * part.num_tokens,
            *(((),), None) if part.start else (pages[i], SamplingParams()),
            False,
        )
        for i, part in enumerate(PARTS[:NUM_CHUNKS])
    )


def _decodes() -> DecodeColumns:
    parts = PARTS[NUM_CHUNKS:]
    return DecodeColumns(
        tuple(range(NUM_CHUNKS, len(PARTS))), tuple(part.start for part in parts), (0,) * len(parts)
    )


def _row(plan: StagePlan, fill: float, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values of all parts; those of bad ones are ``fill``."""
    args, generator, row = plan.args, torch.Generator().manual_seed(9), []
    for heads in (args.n_heads, args.n_kv_heads, args.n_kv_heads):
        parts = [
            torch.randn(part.num_tokens, heads, args.head_dim, generator=generator)
            for part in PARTS
        ]
        parts = [
            torch.full_like(x, fill) if part.is_bad else x
            for x, part in zip(parts, PARTS, strict=True)
        ]
        row.append(torch.cat(parts).to(getattr(torch, plan.dtype)).to(device))
    q_THd, k_TGd, v_TGd = row
    return q_THd, k_TGd, v_TGd


def _triton(plan: StagePlan) -> AttentionKernels:
    # the interpreter is chosen before Triton is loaded
    from tramontane.workers.attention.triton_attention import triton_kernels
    from tramontane.workers.attention.triton_cache import cache_rows, write_rows

    return replace(triton_kernels(plan), write=write_rows, cache_rows=cache_rows)


def _split_k(block: int, parts: int, plan: StagePlan) -> AttentionKernels:
    from tramontane.workers.attention.triton_decode import SplitKDecode

    return AttentionKernels(
        SdpaPrefill(), SplitKDecode(plan.args.n_kv_heads, block, parts, warps=4, stages=2)
    )


def _native(plan: StagePlan) -> AttentionKernels:
    from tramontane.workers.attention.native_backend import native_kernels

    return native_kernels(plan)


IN_PROCESS: dict[str, MakeKernels] = {
    "PyTorch, gathered": lambda _: cpu_kernels(),
    "PyTorch, by page": lambda _: AttentionKernels(SdpaPrefill(), PagedDecode()),
    "PyTorch, by the number of tokens": lambda _: AttentionKernels(
        SdpaPrefill(), BatchSizeDispatch((GatheredDecode(), PagedDecode()), (2,))
    ),
    "C": _native,
    "C, prompts gathered": lambda plan: replace(_native(plan), paged_prefill=None),
}
INTERPRETED: dict[str, MakeKernels] = {
    "Triton": _triton,
    **{
        f"split-K of {block} keys in {parts} parts": partial(_split_k, block, parts)
        for block, parts in ((16, 1), (32, 3))
    },
}
CHECKS: dict[str, Check] = {
    f"{kernels}, {case}": partial(check_other_rows, make_kernels, *CASES[case])
    for kernels, make_kernels in INTERPRETED.items()
    for case in CASES
}
