"""xformers' unmodified split-K kernel, run by Triton's interpreter on the CPU.

A separate program, because the interpreter has to be chosen before Triton is imported. The kernel's inputs, the masks of
``PagedDecode`` over a pool of pages, are those of a GPU. Prints the largest difference from the reference for every case.
"""

from itertools import product

import torch
from test_attention import _decode_index, _expected, _filled, _random
from xformers.ops.fmha import triton_splitk

from tramontane.workers.attention.xformers_backend import PagedDecode

HEADS, HEAD_DIM = 4, 32
POSITIONS = [3, 0, 15, 16, 2, 50, 133]


def main() -> None:
    for number, (window, (kv_heads, splits)) in enumerate(product((None, 1, 16, 40), ((2, 1), (1, 2), (4, 3)))):
        page_size = (16, 64)[number % 2]  # with every window, and with every number of splits
        print(_difference(page_size, page_size, window, kv_heads, splits))


def _difference(page_size: int, num_keys: int, window: int | None, kv_heads: int, splits: int) -> float:
    attributes = {"BLOCK_N": num_keys, "SPLIT_K": splits, "SUPPORTED_DEVICES": {"cpu"}, "SUPPORTED_DTYPES": {torch.float32}}
    kernel = PagedDecode(type("OnCpu", (triton_splitk.FwOp,), attributes))
    index = _decode_index(POSITIONS, window, page_size)
    cached, q_BHd = _filled(index, kv_heads, torch.float32, HEAD_DIM), _random(len(POSITIONS), HEADS, HEAD_DIM, seed=1)
    out_BHd = kernel.attend(q_BHd, cached, kernel.build_mask(index))
    return float((out_BHd - _expected(index, q_BHd, cached)).abs().max())


if __name__ == "__main__":
    main()
