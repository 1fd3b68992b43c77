"""Attention of single tokens on CPUs by ``paged_attention.c``, which reads the cache's pages in place.

Shape letters: B single tokens, H query heads, d head_dim.
"""

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from tramontane.proto.plan import StagePlan
from tramontane.workers.attention.metadata import DecodeMetadata
from tramontane.workers.attention.rolling_cache import LayerCache, PageTable, page_table
from tramontane.workers.device.native_library import compile_library

SOURCE = Path(__file__).with_name("paged_attention.c")
POINTER, SIZE = ctypes.c_void_p, ctypes.c_int64


class NativeDecode:
    """Decode kernel for heads of ``head_dim`` elements, of which ``group`` share their keys. Raises CompilerError."""

    def __init__(self, head_dim: int, group: int, page_size: int, dtype: str) -> None:
        library = compile_library(SOURCE, dtype, HEAD_DIM=head_dim, GROUP=group, PAGE=page_size)
        arguments = (*[POINTER] * 7, *[SIZE] * 3, ctypes.c_int)
        self._attend = ctypes.CFUNCTYPE(None, *arguments)(("attend", library))

    @classmethod
    def of(cls, plan: StagePlan) -> "NativeDecode":
        """Compile the kernel of a stage. Raises CompilerError."""
        args = plan.args
        return cls(args.head_dim, args.n_heads // args.n_kv_heads, plan.cache.page_size, plan.dtype)

    def build_mask(self, index: DecodeMetadata) -> PageTable:
        """Build the page tables."""
        return page_table(index.ring, index.slots, index.positions, index.num_pages)

    def attend(self, q_BHd: Tensor, cached: LayerCache, mask: PageTable) -> Tensor:
        """Compute the output [B, H, d]."""
        q_BHd = q_BHd.contiguous()
        out_BHd = torch.empty_like(q_BHd)
        tensors = (q_BHd, cached.k_NGd, cached.v_NGd, mask.pages_BN, mask.first_B, mask.end_B, out_BHd)
        sizes = (len(q_BHd), cached.k_NGd.shape[1], mask.pages_BN.shape[1])
        self._attend(*(tensor.data_ptr() for tensor in tensors), *sizes, torch.get_num_threads())
        return out_BHd
