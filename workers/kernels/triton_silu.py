"""Triton's activation of feed-forward networks, which computes an element in the same way at any
position.

Inductor compiles separate code for one token, and other compilers may fuse multiplications and
additions in another way.

Shape letters: T tokens, F feed-forward width; f of a block.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tramontane.workers.device.alignment import aligned

F_BLOCK = 1024  # with 4 warps a thread reads 16 bytes of each half in 16 bits


def silu_and_mul(gate_up_T2F: Tensor) -> Tensor:
    """Compute ``FusedOps.silu_and_mul``, in float32 up to the result."""
    gate_up_T2F = aligned(gate_up_T2F)
    num_tokens, width = gate_up_T2F.shape[0], gate_up_T2F.shape[1] // 2
    out_TF = gate_up_T2F.new_empty(num_tokens, width)
    if num_tokens:
        # Triton launches on the current device
        with torch.cuda.device_of(out_TF):  # type: ignore[no-untyped-call]
            _kernel[num_tokens, triton.cdiv(width, F_BLOCK)](gate_up_T2F, out_TF, width, F_BLOCK)
    return out_TF


@triton.jit  # type: ignore[untyped-decorator]
def _kernel(gate_up_T2F, out_TF, width, f_block: tl.constexpr):  # type: ignore[no-untyped-def]
    """Compute some elements of a token. Of width 14336, token 2: gates are elements 57344 and up of
    its rows, results 28672.
    """
    token = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * f_block + tl.arange(0, f_block)
    gates = gate_up_T2F + token * 2 * width + f
    gate_f = tl.load(gates, mask=f < width, other=0.0).to(tl.float32)
    up_f = tl.load(gates + width, mask=f < width, other=0.0).to(tl.float32)
    out_f = gate_f * tl.sigmoid(gate_f) * up_f
    tl.store(out_TF + token * width + f, out_f.to(out_TF.dtype.element_ty), mask=f < width)
