"""Attention on CPUs by ``attention.c``, which reads the cache's pages in place.

Shape letters: T tokens, B single tokens, S keys of a packed row, H query heads, G key/value heads, d head_dim, C chunks.
"""

import ctypes
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tramontane.proto.plan import StagePlan
from tramontane.workers.attention.backend import AttentionKernels
from tramontane.workers.attention.metadata import DecodeMetadata, PrefillMetadata
from tramontane.workers.attention.rolling_cache import LayerCache, page_table
from tramontane.workers.device.native_library import compile_library

SOURCE = Path(__file__).with_name("attention.c")
POINTER, SIZE = ctypes.c_void_p, ctypes.c_int64
NO_WINDOW = 2**62  # more than any position


@dataclass(frozen=True, slots=True)
class NativeMask:
    """The pages [B, N] of single tokens and their positions, or the lengths and positions [C, 4] of chunks, and the window."""

    window: int
    positions: Tensor
    pages_BN: Tensor | None = None


def native_kernels(plan: StagePlan) -> AttentionKernels:
    """Compile the kernels of a stage. Raises CompilerError."""
    args = plan.args
    geometry = (args.head_dim, args.n_heads // args.n_kv_heads, plan.cache.page_size, plan.dtype)
    return AttentionKernels(NativePrefill(*geometry), NativeDecode(*geometry), is_batch_invariant=True)


class NativePrefill:
    """Prefill kernel for heads of ``head_dim`` elements, of which ``group`` share their keys. Raises CompilerError."""

    def __init__(self, head_dim: int, group: int, page_size: int, dtype: str) -> None:
        library = compile_library(SOURCE, dtype, HEAD_DIM=head_dim, GROUP=group, PAGE=page_size)
        strided = (POINTER, SIZE)
        arguments = (*strided * 3, POINTER, SIZE, POINTER, SIZE, SIZE, ctypes.c_int)
        self._attend = ctypes.CFUNCTYPE(None, *arguments)(("attend_chunks", library))

    def build_mask(self, index: PrefillMetadata) -> NativeMask:
        """Build the lengths and positions of the chunks."""
        chunks = [
            (num_queries, num_keys, start, start + num_queries - num_keys)
            for num_queries, num_keys, start in zip(index.query_lens, index.key_lens, index.starts, strict=True)
        ]
        return NativeMask(index.window or NO_WINDOW, torch.tensor(chunks, dtype=torch.int64))

    def attend(self, q_THd: Tensor, k_SGd: Tensor, v_SGd: Tensor, mask: NativeMask) -> Tensor:
        """Compute the output [T, H, d]."""
        out_THd = torch.empty_like(q_THd, memory_format=torch.contiguous_format)
        inputs = [_heads_together(heads) for heads in (q_THd, k_SGd, v_SGd)]
        strided = [part for heads in inputs for part in (heads.data_ptr(), heads.stride(0))]
        chunks = (mask.positions.data_ptr(), len(mask.positions))
        self._attend(*strided, *chunks, out_THd.data_ptr(), k_SGd.shape[1], mask.window, torch.get_num_threads())
        return out_THd


class NativeDecode:
    """Decode kernel for heads of ``head_dim`` elements, of which ``group`` share their keys. Raises CompilerError."""

    def __init__(self, head_dim: int, group: int, page_size: int, dtype: str) -> None:
        library = compile_library(SOURCE, dtype, HEAD_DIM=head_dim, GROUP=group, PAGE=page_size)
        arguments = (POINTER, SIZE, *[POINTER] * 5, *[SIZE] * 4, ctypes.c_int)
        self._attend = ctypes.CFUNCTYPE(None, *arguments)(("attend_tokens", library))

    def build_mask(self, index: DecodeMetadata) -> NativeMask:
        """Build the page tables."""
        pages_BN = page_table(index.ring, index.slots, index.positions, index.num_pages).pages_BN
        return NativeMask(index.ring.window or NO_WINDOW, index.positions.contiguous(), pages_BN)

    def attend(self, q_BHd: Tensor, cached: LayerCache, mask: NativeMask) -> Tensor:
        """Compute the output [B, H, d]."""
        assert mask.pages_BN is not None
        out_BHd = torch.empty_like(q_BHd, memory_format=torch.contiguous_format)
        q_BHd = _heads_together(q_BHd)
        inputs = (q_BHd.data_ptr(), q_BHd.stride(0), cached.k_NGd.data_ptr(), cached.v_NGd.data_ptr())
        tables = (mask.pages_BN.data_ptr(), mask.positions.data_ptr())
        sizes = (len(q_BHd), cached.k_NGd.shape[1], mask.pages_BN.shape[1], mask.window)
        self._attend(*inputs, *tables, out_BHd.data_ptr(), *sizes, torch.get_num_threads())
        return out_BHd


def _heads_together(heads: Tensor) -> Tensor:
    """Return [T, heads, d] itself, or a copy if the heads of a token are not next to each other."""
    is_together = heads.stride(2) == 1 and heads.stride(1) == heads.shape[2]
    return heads if is_together else heads.contiguous()
