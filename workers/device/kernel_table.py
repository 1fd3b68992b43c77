"""Kernels selected by earlier measurements, by GPU, job and size: a stage tests them without
timing.

The rows are for matrices, keys and values in bfloat16. The rows of Hopper come from an H100 and an
H200 (decision 71 has the costs). Jobs without a row are timed.
"""

from collections.abc import Mapping
from types import MappingProxyType

# a job, such as ``product of 16`` tokens, and a size
Row = tuple[str, str]

# matrices from this number of elements on are large: 4096 x 4096
LARGE = 2**24
# key/value heads of attention; matrices; the number of experts, and their matrices
HEADS, MATRIX, EXPERTS = "8 heads of 128", "large", "8 large"

TABLE: Mapping[tuple[int, int], Mapping[Row, str]] = MappingProxyType(  # by compute capability
    {
        (9, 0): {
            ("prefill", HEADS): "torch's varlen",
            # the fastest with 32,000 keys; 16 parts take 0.92 of its time with 1,100, and 1.3 then
            ("decode of 1", HEADS): "split-K of 128 keys in 32 parts, 4 warps, 2 stages",
            ("decode of 4", HEADS): "split-K of 128 keys in 16 parts, 4 warps, 2 stages",
            ("decode of 16", HEADS): "split-K of 128 keys in 4 parts, 4 warps, 2 stages",
            ("decode of 64", HEADS): "split-K of 64 keys in 1 parts, 4 warps, 3 stages",
            ("product of 1", MATRIX): "gemv 8x512x4",
            ("product of 2", MATRIX): "the library",
            ("product of 16", MATRIX): "the library",
            ("product of 64", MATRIX): "the library",
            ("experts of 64 rows", EXPERTS): "32x128x128x4x3",
            ("experts of 128 rows", EXPERTS): "32x128x128x4x3",
            ("experts of 256 rows", EXPERTS): "64x128x64x4x4",
        }
    }
)
