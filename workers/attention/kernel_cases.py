"""Inputs for the comparison of attention kernels: cases for correctness, and cases for speed.

Shape letters: T tokens, B single tokens, S keys of a packed row, N rows of a cache, H query heads,
G key/value heads, d head_dim.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tramontane.proto.plan import StagePlan, WindowClass, ring_pages
from tramontane.workers.attention.backend import (
    AttentionKernels,
    DecodeKernel,
    PrefillKernel,
    RotateAndWrite,
)
from tramontane.workers.attention.metadata import (
    DecodeMetadata,
    PrefillMetadata,
    build_decode_metadata,
    num_cached_keys,
)
from tramontane.workers.attention.rolling_cache import LayerCache, PageRings, padded_width
from tramontane.workers.attention.sdpa_backend import PagedDecode, SdpaPrefill
from tramontane.workers.device.kernel_selection import MAX_DIFFERENCE, Compute
from tramontane.workers.device.self_test import assert_close_norm

MAX_FP8_DIFFERENCE = 0.03  # of rotated keys in FP8
TABLE_KEYS = 2048  # of a token's page ring without a window
# Timed with the stage's own windows and with partly filled tables, as most are while a sequence
# grows: 80 pages of 16 in a table of 96, and 65 of the 32nd token.
TIMING_KEYS = 1280


@dataclass(frozen=True, slots=True)
class CaseSize:
    """Chunks and their tokens in a prefill case, and keys cached before each chunk or single token
    that shows correctness.

    With few keys errors show more clearly.
    """

    chunks: int
    chunk_tokens: int
    correctness_keys: int

    @property
    def max_correctness_window(self) -> int:
        """Window that replaces wider windows: it ends within the keys, and kernels do not
        distinguish them.
        """
        return self.correctness_keys // 4


# on CPUs the larger would take 7 s of the loading of a stage
GPU_SIZE, CPU_SIZE = CaseSize(4, 128, 1024), CaseSize(2, 32, 128)


@dataclass(frozen=True, slots=True)
class KernelCase:
    """Random inputs for kernels, of one window class and the stage's own geometry.

    The first ``value_dim`` elements of each output head are compared.
    """

    q_THd: Tensor
    k_SGd: Tensor
    v_SGd: Tensor
    prefill_index: PrefillMetadata
    q_BHd: Tensor
    cached: LayerCache
    decode_index: DecodeMetadata
    value_dim: int

    def prefill(self, kernel: PrefillKernel) -> Compute:
        """Return the prefill of this case by a kernel, with its mask built."""
        mask = kernel.build_mask(self.prefill_index)
        return lambda: kernel.attend(self.q_THd, self.k_SGd, self.v_SGd, mask)[
            ..., : self.value_dim
        ]

    def decode(self, kernel: DecodeKernel) -> Compute:
        """Return the decode of this case by a kernel, with its mask built."""
        mask = kernel.build_mask(self.decode_index)
        return lambda: kernel.attend(self.q_BHd, self.cached, mask)[..., : self.value_dim]

    @property
    def expected(self) -> tuple[Tensor, Tensor]:
        """Outputs of prefill and decode by PyTorch in float32."""
        inputs = (self.q_THd, self.k_SGd, self.v_SGd, self.q_BHd, *self.cached.dequantized())
        q_THd, k_SGd, v_SGd, q_BHd, k_NGd, v_NGd = (x.float() for x in inputs)
        prefill, decode = SdpaPrefill(), PagedDecode()
        out_THd = prefill.attend(q_THd, k_SGd, v_SGd, prefill.build_mask(self.prefill_index))
        out_BHd = decode.attend(
            q_BHd, LayerCache(k_NGd, v_NGd), decode.build_mask(self.decode_index)
        )
        return out_THd[..., : self.value_dim], out_BHd[..., : self.value_dim]


def correctness_cases(plan: StagePlan, device: torch.device, num_tokens: int) -> list[KernelCase]:
    """Return a case per window class, with this number of single tokens, for the correctness check
    of kernels.
    """
    windows, size = [window_class.window for window_class in plan.cache.classes], _size(device)
    return [
        _case(
            plan,
            device,
            num_tokens,
            window and min(window, size.max_correctness_window),
            size.correctness_keys,
        )
        for window in windows
    ]


def timing_cases(plan: StagePlan, device: torch.device, num_tokens: int) -> list[KernelCase]:
    """Return a case per window class, with this number of single tokens, for timing kernels."""
    return [
        _case(plan, device, num_tokens, window_class.window, TIMING_KEYS)
        for window_class in plan.cache.classes
    ]


@torch.inference_mode()
def check_writes(plan: StagePlan, device: torch.device, kernels: AttentionKernels) -> None:
    """Compare with PyTorch: cache writes of all tokens and of some, the rows of positions, and
    reads of rows.

    Raises ArithmeticError.
    """
    ring = _filled_ring(None, plan.cache.page_size, 2, device)
    slots_B, positions_B = (
        torch.tensor([1, 0, 1], device=device),
        torch.tensor([0, 17, TABLE_KEYS - 1], device=device),
    )
    rows_B = ring.rows(slots_B, positions_B)
    shape, is_fp8 = (
        (len(rows_B), plan.args.n_kv_heads, plan.args.head_dim),
        plan.kv_cache_dtype == "fp8",
    )
    wide_TGd = torch.randn(shape[0], 2 * shape[1], shape[2], device=device).to(
        getattr(torch, plan.dtype)
    )
    k_TGd, v_TGd = wide_TGd.chunk(2, dim=1)
    is_latent = plan.args.latent is not None
    for tokens in (None, torch.tensor([2, 0, 1], device=device)):
        caches = [
            LayerCache.zeros(
                (2 * TABLE_KEYS, *shape[1:]), k_TGd.dtype, device, is_latent, is_fp8=is_fp8
            )
            for _ in range(2)
        ]
        caches[0].write(rows_B, k_TGd, v_TGd, tokens)
        kernels.write(
            caches[1], kernels.cache_rows(ring, slots_B, positions_B), k_TGd, v_TGd, tokens
        )
        if not all(map(torch.equal, caches[0].dequantized(), caches[1].dequantized())):
            raise ArithmeticError("what is written to a cache differs from what PyTorch writes")
    reads = kernels.read(caches[0], rows_B), kernels.read_back(caches[0], k_TGd, v_TGd)
    for ours, theirs in zip(
        reads, (caches[0].read(rows_B), caches[0].read_back(k_TGd, v_TGd)), strict=True
    ):
        if not all(map(torch.equal, ours, theirs)):
            raise ArithmeticError("what is read of keys and values differs from what PyTorch reads")


@torch.inference_mode()
def check_rotation(plan: StagePlan, device: torch.device, rotate_and_write: RotateAndWrite) -> None:
    """Compare rotated queries and cache writes with PyTorch's. Raises ArithmeticError."""
    num_queries, num_keys, head_dim = plan.args.n_heads, plan.args.n_kv_heads, plan.args.head_dim
    dtype, rows_B = getattr(torch, plan.dtype), torch.tensor([5, 0, 2], device=device)
    qkv_BHd = torch.randn(3, num_queries + 2 * num_keys, head_dim, device=device).to(dtype)
    cos_Bd, sin_Bd = (torch.randn(3, head_dim, device=device).to(dtype) for _ in range(2))
    is_fp8 = plan.kv_cache_dtype == "fp8"
    cached, expected = (
        LayerCache.zeros((8, num_keys, head_dim), dtype, device, is_fp8=is_fp8) for _ in range(2)
    )
    q_BQd = rotate_and_write(cached, rows_B, qkv_BHd, cos_Bd, sin_Bd)
    x_BHd, swapped_BHd = (
        qkv_BHd.float(),
        torch.cat([-qkv_BHd.float().chunk(2, -1)[1], qkv_BHd.float().chunk(2, -1)[0]], dim=-1),
    )
    rotated_BHd = x_BHd * cos_Bd.float()[:, None] + swapped_BHd * sin_Bd.float()[:, None]
    assert_close_norm(q_BQd, rotated_BHd[:, :num_queries], MAX_DIFFERENCE)
    expected.write(
        rows_B,
        rotated_BHd[:, num_queries : num_queries + num_keys].to(dtype),
        qkv_BHd[:, num_queries + num_keys :],
    )
    (k_NGd, v_NGd), (expected_k_NGd, expected_v_NGd) = cached.dequantized(), expected.dequantized()
    # A key with another rounding may become the adjacent FP8 number, which differs by a sixteenth.
    assert_close_norm(k_NGd, expected_k_NGd, MAX_FP8_DIFFERENCE if is_fp8 else MAX_DIFFERENCE)
    untouched = torch.tensor([1, 3, 4, 6, 7], device=device)
    if k_NGd[untouched].any() or not torch.equal(v_NGd, expected_v_NGd):
        raise ArithmeticError("what is written to a cache differs from what PyTorch writes")


def _size(device: torch.device) -> CaseSize:
    return GPU_SIZE if device.type == "cuda" else CPU_SIZE


def _case(
    plan: StagePlan, device: torch.device, num_tokens: int, window: int | None, keys: int
) -> KernelCase:
    args, dtype, page_size = plan.args, getattr(torch, plan.dtype), plan.cache.page_size
    num_cached = num_cached_keys(keys, window)
    size = _size(device)
    num_keys = size.chunk_tokens + num_cached
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=dtype, device=device, generator=generator)

    none = torch.empty(0, dtype=torch.int64, device=device)
    lens = (
        (size.chunk_tokens,) * size.chunks,
        (num_keys,) * size.chunks,
        (num_cached,) * size.chunks,
    )
    prefill_index = PrefillMetadata(window, *lens, none, none, none, none)
    ring = _filled_ring(window, page_size, num_tokens, device)
    rows = (ring.num_pages + 1) * page_size, args.n_kv_heads, args.head_dim
    starts = [keys - 1 - 8 * (i % 32) for i in range(num_tokens)]
    slots_B, positions_B = (
        torch.arange(num_tokens, device=device),
        torch.tensor(starts, device=device),
    )
    q_THd = random(size.chunks * size.chunk_tokens, args.n_heads, args.head_dim)
    k_SGd = random(size.chunks * num_keys, args.n_kv_heads, args.head_dim)
    v_SGd = k_SGd if args.latent else random(*k_SGd.shape)
    q_BHd, k_NGd = random(num_tokens, args.n_heads, args.head_dim), random(*rows)
    v_NGd = k_NGd if args.latent else random(*rows)
    cached = (
        LayerCache(k_NGd, v_NGd)
        if plan.kv_cache_dtype == "auto"
        else LayerCache.quantized(k_NGd, v_NGd)
    )
    decode_index = build_decode_metadata(
        ring, slots_B, positions_B, padded_width(starts, ring), starts
    )
    value_dim = args.latent.kv_lora_rank if args.latent else args.head_dim
    return KernelCase(q_THd, k_SGd, v_SGd, prefill_index, q_BHd, cached, decode_index, value_dim)


def _filled_ring(
    window: int | None, page_size: int, num_tokens: int, device: torch.device
) -> PageRings:
    """Return a full page ring per token, from a pool in which the pages of a sequence are not in
    order.
    """
    entries = ring_pages(window, page_size, TABLE_KEYS)
    ring = PageRings(
        WindowClass(window, entries, entries * num_tokens), page_size, num_tokens, device
    )
    pages = torch.randperm(
        entries * num_tokens, generator=torch.Generator().manual_seed(0)
    ).tolist()
    for slot in range(num_tokens):
        ring.put_pages(slot, 0, tuple(pages[slot * entries : (slot + 1) * entries]))
    ring.flush()
    return ring
