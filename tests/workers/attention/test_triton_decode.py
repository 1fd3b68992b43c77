"""Triton's decode kernel and writes to the cache: by the interpreter, compiled for a GPU that is
not there, and on a GPU.
"""

import pytest
from compiled_kernels import resource_usage
from decode_checks import CHECKS
from kernel_tests import checks_as_tests

from tramontane.workers.attention.triton_cache import A_BLOCK
from tramontane.workers.attention.triton_decode import PARTS, VARIANTS, split_k_kernels

failures, test_interpreted, test_on_a_gpu = checks_as_tests("decode_checks", CHECKS)


def test_candidates_have_programs_for_a_gpu_and_are_few() -> None:
    for num_tokens in (1, 4, 16, 64):
        parts = {kernel.parts for kernel in split_k_kernels(num_tokens, 8).values()}
        assert len(split_k_kernels(num_tokens, 8)) == len(parts) * len(VARIANTS)
        assert 2 <= len(parts) <= 5
        assert parts <= set(PARTS)
        assert all(num_tokens * each <= 128 for each in parts)


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("page_size", [16, 64])
def test_it_compiles_for_hopper_without_spills(
    variant: tuple[int, int, int], page_size: int
) -> None:
    """With 4 query heads of 128 for each key/value head; keys and values are read 16 bytes at a
    time.
    """
    block, warps, stages = variant
    types = (
        *("*bf16",) * 3,
        *("*i64",) * 2,
        *("*fp32",) * 3,
        "*i32",
        "*bf16",
        *("i32",) * 4,
        "fp32",
    )
    constants = (None, None, page_size, 4, 8, 128, 128, 16, 4, block, 16)
    usage = resource_usage(
        "tramontane.workers.attention.triton_decode",
        "_attend",
        types,
        constants,
        range(11),
        warps,
        stages,
    )
    assert usage.spilled_bytes == 0
    assert usage.has_wide_loads


@pytest.mark.parametrize(
    ("rows", "heads"), [("*i64", (32, 8)), ("*bf16", (40, 0))], ids=["with a write", "without"]
)
def test_rotation_compiles_for_hopper_without_spills(rows: str, heads: tuple[int, int]) -> None:
    """Of 32 query heads and 8 key/value heads of 128, which are read 16 bytes at a time."""
    types, constants = (
        (*("*bf16",) * 3, rows, *("*bf16",) * 3, "i32"),
        (None, None, *heads, 64, 64, A_BLOCK),
    )
    usage = resource_usage(
        "tramontane.workers.attention.triton_cache",
        "_rotate_and_write",
        types,
        constants,
        range(8),
        1,
        3,
    )
    assert usage.spilled_bytes == 0
    assert usage.has_wide_loads


@pytest.mark.parametrize("has_tokens", [False, True])
def test_writes_to_the_cache_compile_for_hopper_without_spills(has_tokens: bool) -> None:
    """Of 8 key/value heads of 128, which are read 16 bytes at a time."""
    types = (*("*bf16",) * 4, *("*i64",) * 2, *("i32",) * 2)
    constants = (1024, 1024, has_tokens, True)
    usage = resource_usage(
        "tramontane.workers.attention.triton_cache", "_write", types, constants, range(8), 4, 3
    )
    assert usage.spilled_bytes == 0
    assert usage.has_wide_loads


def test_cache_rows_compile_for_hopper_without_spills() -> None:
    types, constants = (*("*i64",) * 4, *("i32",) * 2), (64, 128)
    usage = resource_usage(
        "tramontane.workers.attention.triton_cache", "_rows", types, constants, range(4), 4, 3
    )
    assert usage.spilled_bytes == 0
