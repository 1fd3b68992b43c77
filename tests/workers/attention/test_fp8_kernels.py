"""Triton's kernels on a cache in FP8: by the interpreter, compiled for GPUs that are not there, and
on a GPU.
"""

import pytest
from compiled_kernels import ResourceUsage, resource_usage
from fp8_cache_checks import CHECKS
from kernel_tests import checks_as_tests

from tramontane.proto.errors import ConfigError
from tramontane.workers.attention.triton_attention import KEYS, STAGES, WARPS
from tramontane.workers.attention.triton_cache import A_BLOCK, READ_WARPS
from tramontane.workers.attention.triton_decode import VARIANTS
from tramontane.workers.stage.device_backend import check_fp8_support

ADA, HOPPER = 89, 90
FP8_SHARED_BYTES = {ADA: 99 * 2**10, HOPPER: 227 * 2**10}  # of a program at most


failures, test_interpreted, test_on_a_gpu = checks_as_tests("fp8_cache_checks", CHECKS)


@pytest.mark.parametrize("capability", [ADA, HOPPER])
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("page_size", [16, 64])
def test_decodes_compile_without_spills(
    variant: tuple[int, int, int], page_size: int, capability: int
) -> None:
    """With 4 query heads of 128 for each key/value head; keys and values are read 16 bytes at a
    time.
    """
    block, warps, stages = variant
    types = (
        "*bf16",
        *("*fp8e4nv",) * 2,
        *("*i64",) * 2,
        *("*fp32",) * 3,
        "*i32",
        "*bf16",
        *("i32",) * 4,
        "fp32",
        *("*fp32",) * 2,
    )
    constants, aligned = (page_size, 4, 8, 128, 128, 16, 4, block, 16), (*range(11), 15, 16)
    module = "tramontane.workers.attention.triton_decode"
    usage = resource_usage(module, "_attend", types, constants, aligned, warps, stages, capability)
    assert usage.spilled_bytes == 0
    assert usage.shared_bytes <= FP8_SHARED_BYTES[capability]
    assert usage.has_wide_loads


@pytest.mark.parametrize("capability", [ADA, HOPPER])
def test_the_batch_invariant_kernel_spills_no_more_than_of_keys_in_bfloat16(
    capability: int,
) -> None:
    """With 4 query heads of 128 for each key/value head: on Hopper nothing, on Ada a few bytes of
    either.
    """
    module, constants = (
        "tramontane.workers.attention.triton_attention",
        (4, 8, 128, 128, 64, KEYS[2], 16),
    )

    def compiled(keys: str, scales: tuple[str, ...], aligned: tuple[int, ...]) -> ResourceUsage:
        types = (
            "*bf16",
            keys,
            keys,
            "*i32",
            "*i64",
            "*bf16",
            *("*fp32",) * 2,
            *("i32",) * 4,
            "fp32",
            *scales,
        )
        given = constants if scales else (None, None, *constants)
        return resource_usage(
            module, "_kernel", types, given, (*range(8), *aligned), WARPS, STAGES, capability
        )

    usage, plain = compiled("*fp8e4nv", ("*fp32",) * 2, (13, 14)), compiled("*bf16", (), ())
    assert usage.spilled_bytes <= min(plain.spilled_bytes, 64)
    assert usage.shared_bytes <= min(plain.shared_bytes, FP8_SHARED_BYTES[capability])


@pytest.mark.parametrize("capability", [ADA, HOPPER])
def test_rotation_and_writes_compile_without_spills(capability: int) -> None:
    """Of 32 query heads and 8 key/value heads of 128."""
    module = "tramontane.workers.attention.triton_cache"
    types = (*("*bf16",) * 3, "*i64", "*bf16", *("*fp8e4nv",) * 2, "i32", *("*fp32",) * 2)
    rotation = resource_usage(
        module, "_rotate_and_write", types, (32, 8, 64, 64, A_BLOCK), range(10), 1, 3, capability
    )
    assert rotation.spilled_bytes == 0
    assert rotation.has_wide_loads
    types = (*("*bf16",) * 2, *("*fp8e4nv",) * 2, *("*fp32",) * 2, *("*i64",) * 2, *("i32",) * 2)
    for has_tokens in (False, True):
        usage = resource_usage(
            module,
            "_write_quantized",
            types,
            (8, 128, 8, 128, has_tokens),
            range(10),
            4,
            3,
            capability,
        )
        assert usage.spilled_bytes == 0
    types = (*("*fp8e4nv",) * 2, *("*fp32",) * 2, "*i64", *("*bf16",) * 2)
    usage = resource_usage(
        module, "_read_quantized", types, (8, 128, 8, 128), range(7), READ_WARPS, 3, capability
    )
    assert usage.spilled_bytes == 0
    assert usage.has_wide_loads
    types = (*("*bf16",) * 4, *("i32",) * 2)
    usage = resource_usage(
        module, "_read_back", types, (8, 128, 8, 128), range(6), 4, 3, capability
    )
    assert usage.spilled_bytes == 0


def test_gpus_without_fp8_are_refused_in_one_sentence() -> None:
    for capability in ((8, 9), (9, 0), (10, 0), (12, 1)):
        check_fp8_support("Stage 1/2 layers 0-15", capability)
    for capability in ((7, 5), (8, 0), (8, 6)):
        with pytest.raises(ConfigError) as refusal:
            check_fp8_support("Stage 1/2 layers 0-15", capability)
        text = (
            f"compute capability {capability[0]}.{capability[1]}, and --kv-cache-dtype fp8 needs"
            " 8.9 or later"
        )
        assert str(refusal.value) == f"Stage 1/2 layers 0-15 is on a GPU of {text}; leave it out"
