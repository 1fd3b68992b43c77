"""Alignment of tensors for Triton, which compiles a separate kernel for data that does not begin at
a multiple of 16 bytes.
"""

from torch import Tensor

ALIGNMENT = 16  # bytes


def aligned(x: Tensor) -> Tensor:
    """Return a tensor itself, or a copy if it has gaps or is not aligned.

    Row 1 of rows of 33 numbers in bfloat16 begins at byte 66, so it is copied; of 32 numbers at
    byte 64.
    """
    x = x.contiguous()
    return x.clone() if x.data_ptr() % ALIGNMENT else x
