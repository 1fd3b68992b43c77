"""Experts for few rows: the kernels interpreted, compiled for GPUs that are not there, and on a
GPU.
"""

import pytest

pytest.importorskip("triton")

from compiled_kernels import run_compiled
from kernel_tests import checks_as_tests
from moe_checks import CHECKS

COMPILED = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from tramontane.workers.kernels import triton_moe as f

def compiled(kernel, types, constants, capability):
    names, aligned = kernel.arg_names, {(i,): [["tt.divisibility", 16]] for i in range(len(types))}
    sizes = {(i,): each for i, each in enumerate(constants, len(types))}
    types = (*types, *("constexpr",) * len(constants))
    source = ASTSource(kernel, dict(zip(names, types, strict=True)), sizes, aligned)
    ptx = triton.compile(source, GPUTarget("cuda", capability, 32)).asm["ptx"]
    assert "st.local" not in ptx
    return ptx

for capability in (90, 100):
    for experts, k in ((8, 2), (128, 8)):
        for has_padding in (True, False):
            sizes = experts, k, has_padding, f.TOKENS, experts, k
            types = ("*bf16", "*i1", "*i64", "*bf16", "*i64", "i32")
            compiled(f._choose_kernel, types, sizes, capability)
        for number in ("bf16", "i8", "fp8e4nv"):
            numbers, has_scale = "*" + number, number != "bf16"
            gemvs = (
                (
                    f._gate_up_kernel,
                    ("*bf16", numbers, "*fp32", "*i64", "*bf16", "i32", "i32"),
                    (f.OUTPUTS, f.INPUTS),
                ),
                (
                    f._down_kernel,
                    ("*bf16", numbers, "*fp32", "*i64", "*bf16", "*bf16", "i32", "i32"),
                    f.down_blocks(k),
                ),
            )
            for kernel, types, blocks in gemvs:
                ptx = compiled(kernel, types, (experts, k, has_scale, *blocks), capability)
                assert ptx.count("ld.global.v4") >= (1 if has_scale else 4), "16 bytes at a time"
"""


failures, test_interpreted, test_on_a_gpu = checks_as_tests("moe_checks", CHECKS)


def test_kernels_compile_for_gpus_that_are_not_here() -> None:
    run_compiled(COMPILED)
