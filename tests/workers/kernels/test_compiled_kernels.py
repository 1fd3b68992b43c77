"""Every Triton kernel is compiled for a Hopper GPU by some test, without that GPU.

Otherwise a kernel that does not compile, or spills registers, would be found on a GPU only.
"""

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[2]
WORKERS = TESTS.parent / "workers"
COMPILED_BY = {
    ("triton_attention", "_combine"): "attention/test_triton_attention.py",
    ("triton_attention", "_kernel"): "attention/test_triton_attention.py",
    ("triton_cache", "_read_back"): "attention/test_fp8_kernels.py",
    ("triton_cache", "_read_quantized"): "attention/test_fp8_kernels.py",
    ("triton_cache", "_rotate_and_write"): "attention/test_triton_decode.py",
    ("triton_cache", "_rows"): "attention/test_triton_decode.py",
    ("triton_cache", "_write"): "attention/test_triton_decode.py",
    ("triton_cache", "_write_quantized"): "attention/test_fp8_kernels.py",
    ("triton_decode", "_attend"): "attention/test_triton_decode.py",
    ("triton_fp8_linear", "_fp8_kernel"): "kernels/test_triton_linear.py",
    ("triton_linear", "_gemv_kernel"): "kernels/test_product_selection.py",
    ("triton_latent", "_attend"): "attention/test_triton_latent.py",
    ("triton_latent", "_combine"): "attention/test_triton_latent.py",
    ("triton_linear", "_kernel"): "kernels/test_triton_linear.py",
    ("triton_moe", "_choose_kernel"): "kernels/test_triton_moe.py",
    ("triton_moe", "_down_kernel"): "kernels/test_triton_moe.py",
    ("triton_moe", "_gate_up_kernel"): "kernels/test_triton_moe.py",
    ("triton_norm", "_kernel"): "kernels/test_triton_linear.py",
    ("triton_silu", "_kernel"): "kernels/test_triton_linear.py",
    ("triton_linear", "_quantized_gemv_kernel"): "kernels/test_quantized_linear.py",
    ("triton_linear", "_quantize_kernel"): "kernels/test_quantized_linear.py",
    ("triton_sampler", "_kernel"): "sampling/test_triton_sampler.py",
}


def _is_kernel(node: ast.AST) -> bool:
    """Tell whether it is decorated by ``triton.jit``, with or without options."""
    return isinstance(node, ast.FunctionDef) and any(
        "triton.jit" in ast.unparse(each) for each in node.decorator_list
    )


def _launched_kernels(path: Path) -> set[str]:
    """Return the names of a module's kernels, but for those that other kernels call: they are
    compiled with them.
    """
    kernels = [node for node in ast.walk(ast.parse(path.read_text())) if _is_kernel(node)]
    names = {node.name for node in kernels if isinstance(node, ast.FunctionDef)}
    calls = [each for node in kernels for each in ast.walk(node) if isinstance(each, ast.Call)]
    return names - {each.func.id for each in calls if isinstance(each.func, ast.Name)}


def test_the_table_has_every_kernel() -> None:
    paths = sorted(WORKERS.rglob("*.py"))
    assert {(path.stem, name) for path in paths for name in _launched_kernels(path)} == set(
        COMPILED_BY
    )


@pytest.mark.parametrize(("module", "kernel"), COMPILED_BY, ids=".".join)
def test_a_test_compiles_it(module: str, kernel: str) -> None:
    source = (TESTS / "workers" / COMPILED_BY[module, kernel]).read_text()
    assert "resource_usage(" in source or "GPUTarget(" in source
    assert module in source
    assert f"{kernel}," in source or f'{kernel}"' in source
