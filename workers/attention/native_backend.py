"""Attention on CPUs by ``attention.c``, which reads the cache's pages in place.

Shape letters: T tokens, B single tokens, S keys of a packed row, H query heads, G key/value heads,
d head_dim, C chunks.
"""

import ctypes
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tramontane.proto.model_args import ModelArgs
from tramontane.proto.plan import StagePlan
from tramontane.workers.attention.backend import AttentionKernels, ChosenKeys
from tramontane.workers.attention.metadata import DecodeMetadata, PrefillMetadata
from tramontane.workers.attention.rolling_cache import LayerCache, page_table
from tramontane.workers.device.native_library import compile_library

SOURCE = Path(__file__).with_name("attention.c")
INDEX_SOURCE = Path(__file__).with_name("index_scores.c")
POINTER, SIZE = ctypes.c_void_p, ctypes.c_int64
NO_WINDOW = 2**62  # more than any position


@dataclass(frozen=True, slots=True)
class NativeMask:
    """The pages [B, N] of single tokens and their positions, or of chunks their lengths and
    positions [C, 5], and the window.
    """

    window: int
    positions: Tensor
    pages: Tensor


def native_kernels(plan: StagePlan) -> AttentionKernels:
    """Compile the kernels of a stage. Raises CompilerError."""
    args = plan.args
    geometry = (
        args.head_dim,
        args.n_heads // args.n_kv_heads,
        plan.cache.page_size,
        plan.dtype,
        plan.kv_cache_dtype == "fp8",
    )
    sparse = NativeSparse(args, plan.dtype) if args.sparse else None
    prefill, decode = NativePrefill(*geometry), NativeDecode(*geometry)
    return AttentionKernels(
        prefill, decode, is_batch_invariant=True, sparse=sparse, paged_prefill=prefill
    )


class NativePrefill:
    """Prefill kernel for heads of ``head_dim`` elements; ``group`` query heads share their keys.
    Raises CompilerError.
    """

    def __init__(
        self, head_dim: int, group: int, page_size: int, dtype: str, is_fp8: bool = False
    ) -> None:
        library = _compile(head_dim, group, page_size, dtype, is_fp8)
        strided = (POINTER, SIZE)
        arguments = (*strided * 3, *[POINTER] * 4, *strided * 2, POINTER, SIZE, SIZE, ctypes.c_int)
        self._attend = ctypes.CFUNCTYPE(None, *arguments)(("attend_chunks", library))

    def build_mask(self, index: PrefillMetadata) -> NativeMask:
        """Build the lengths and positions of the chunks. Without pages all keys are given to
        ``attend``.
        """
        numbers = zip(index.query_lens, index.key_lens, index.starts, strict=True)
        first = [(queries, keys, start, start + queries - keys) for queries, keys, start in numbers]
        window = index.window or NO_WINDOW
        if index.pages_CN is None:
            chunks = [(*chunk, chunk[-1]) for chunk in first]
            return NativeMask(
                window,
                torch.tensor(chunks, dtype=torch.int64),
                torch.empty(len(chunks), 0, dtype=torch.int32),
            )
        chunks = [(queries, queries, start, start, oldest) for queries, _, start, oldest in first]
        return NativeMask(window, torch.tensor(chunks, dtype=torch.int64), index.pages_CN)

    def attend(self, q_THd: Tensor, k_SGd: Tensor, v_SGd: Tensor, mask: NativeMask) -> Tensor:
        """Compute the output [T, H, d]."""
        return self.attend_pages(q_THd, k_SGd, v_SGd, LayerCache(k_SGd, v_SGd), mask)

    def attend_pages(
        self, q_THd: Tensor, k_TGd: Tensor, v_TGd: Tensor, cached: LayerCache, mask: NativeMask
    ) -> Tensor:
        """Compute the output [T, H, d]; keys and values before the chunks' own are read from their
        pages.
        """
        out_THd = torch.empty_like(q_THd, memory_format=torch.contiguous_format)
        inputs = [_heads_together(heads) for heads in (q_THd, k_TGd, v_TGd)]
        strided = [part for heads in inputs for part in (heads.data_ptr(), heads.stride(0))]
        paged = (*_pointers(cached), mask.pages.data_ptr(), mask.pages.shape[1])
        chunks = (mask.positions.data_ptr(), len(mask.positions))
        self._attend(
            *strided,
            *paged,
            *chunks,
            out_THd.data_ptr(),
            k_TGd.shape[1],
            mask.window,
            torch.get_num_threads(),
        )
        return out_THd


class NativeDecode:
    """Decode kernel for heads of ``head_dim`` elements; ``group`` query heads share their keys.
    Raises CompilerError.
    """

    def __init__(
        self, head_dim: int, group: int, page_size: int, dtype: str, is_fp8: bool = False
    ) -> None:
        library = _compile(head_dim, group, page_size, dtype, is_fp8)
        arguments = (POINTER, SIZE, *[POINTER] * 7, *[SIZE] * 4, ctypes.c_int)
        self._attend = ctypes.CFUNCTYPE(None, *arguments)(("attend_tokens", library))

    def build_mask(self, index: DecodeMetadata) -> NativeMask:
        """Build the page tables."""
        pages_BN = page_table(index.ring, index.positions, index.num_pages).pages_BN
        return NativeMask(index.ring.window or NO_WINDOW, index.positions.contiguous(), pages_BN)

    def attend(self, q_BHd: Tensor, cached: LayerCache, mask: NativeMask) -> Tensor:
        """Compute the output [B, H, d]."""
        return self.attend_pages(q_BHd, cached, mask.positions, mask.pages, mask.window)

    def attend_pages(
        self, q_BHd: Tensor, cached: LayerCache, positions_B: Tensor, pages_BN: Tensor, window: int
    ) -> Tensor:
        """Attend to the keys in pages [B, N] (int32) that are in the window of each token's
        position.
        """
        out_BHd = torch.empty_like(q_BHd, memory_format=torch.contiguous_format)
        q_BHd = _heads_together(q_BHd)
        inputs = (q_BHd.data_ptr(), q_BHd.stride(0), *_pointers(cached))
        tables = (pages_BN.data_ptr(), positions_B.data_ptr())
        sizes = (len(q_BHd), cached.k_NGd.shape[1], pages_BN.shape[1], window)
        self._attend(*inputs, *tables, out_BHd.data_ptr(), *sizes, torch.get_num_threads())
        return out_BHd


class NativeSparse:
    """The ``SparseKernels`` in C. Selected keys are read like keys in pages of one row. Raises
    CompilerError.
    """

    def __init__(self, args: ModelArgs, dtype: str) -> None:
        assert args.sparse is not None
        heads, width = args.sparse.index_n_heads, args.sparse.index_head_dim
        library = compile_library(INDEX_SOURCE, dtype, HEADS=heads, DIM=width)
        self._score = ctypes.CFUNCTYPE(None, *[POINTER] * 5, SIZE, SIZE, ctypes.c_int)(
            ("score_keys", library)
        )
        self._rows = NativeDecode(args.head_dim, args.n_heads // args.n_kv_heads, 1, dtype)

    def score(self, q_nIi: Tensor, weights_nI: Tensor, keys_Ni: Tensor, rows_S: Tensor) -> Tensor:
        """See ``SparseKernels``."""
        q_nIi, weights_nI, rows_S = q_nIi.contiguous(), weights_nI.contiguous(), rows_S.contiguous()
        scores_nS = torch.empty(len(q_nIi), len(rows_S))
        tensors = (q_nIi, weights_nI, keys_Ni, rows_S, scores_nS)
        self._score(
            *(each.data_ptr() for each in tensors), *scores_nS.shape, torch.get_num_threads()
        )
        return scores_nS

    def attend(self, q_THd: Tensor, cached: LayerCache, chosen: ChosenKeys) -> Tensor:
        """See ``SparseKernels``."""
        return self._rows.attend_pages(
            q_THd,
            cached,
            (chosen.counts_T - 1).contiguous(),
            chosen.rows_TK.contiguous(),
            NO_WINDOW,
        )


def _compile(head_dim: int, group: int, page_size: int, dtype: str, is_fp8: bool) -> ctypes.CDLL:
    kind = {"FP8_CACHE": 1} if is_fp8 else {}
    return compile_library(SOURCE, dtype, HEAD_DIM=head_dim, GROUP=group, PAGE=page_size, **kind)


def _pointers(cached: LayerCache) -> tuple[int | None, ...]:
    """Return the addresses of keys, values and their scales, if any."""
    scales = (
        (None, None)
        if cached.scales is None
        else (cached.scales.k_NG.data_ptr(), cached.scales.v_NG.data_ptr())
    )
    return cached.k_NGd.data_ptr(), cached.v_NGd.data_ptr(), *scales


def _heads_together(heads: Tensor) -> Tensor:
    """Return [T, heads, d] itself, or a contiguous copy if the heads of a token are not
    adjacent.
    """
    is_together = heads.stride(2) == 1 and heads.stride(1) == heads.shape[2]
    return heads if is_together else heads.contiguous()
