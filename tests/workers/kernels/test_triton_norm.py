"""The norms of Triton, compiled for a GPU that is not there."""

import pytest
from compiled_kernels import resource_usage

pytest.importorskip("triton", reason="Triton is not on every platform")

from tramontane.workers.kernels.triton_norm import WARPS


@pytest.mark.parametrize("has_more", [False, True], ids=["norm", "sum and norm"])
def test_it_compiles_for_hopper_without_spills(has_more: bool) -> None:
    """Rows of 4096 numbers, which are read 16 bytes at a time."""
    types, constants = (*("*bf16",) * 5, "i32", "fp32"), (4096, has_more)
    usage = resource_usage("tramontane.workers.kernels.triton_norm", "_kernel", types, constants, range(6), WARPS, 3)
    assert usage.spilled_bytes == 0
    assert usage.has_wide_loads
