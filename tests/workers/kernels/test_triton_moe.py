"""Experts for few rows: the kernels interpreted, compiled for GPUs that are not there, and used where they work."""

import logging
import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from tramontane.workers.model import grouped_gemm as grouped
from tramontane.workers.model.grouped_gemm import MAX_SMALL_BATCH_ROWS, StackedExperts, enable_small_batch_kernel

INTERPRETED = """
import torch
from tramontane.workers.kernels.triton_moe import down_gemv, gate_up_gemv
from tramontane.workers.model.grouped_gemm import StackedExperts
torch.manual_seed(0)
for num_experts, width, hidden in ((8, 32, 48), (3, 24, 520), (2, 520, 20), (1, 40, 8)):
    w13_E2FD, w2_EDF = torch.randn(num_experts, 2 * hidden, width), torch.randn(num_experts, width, hidden)
    stack = StackedExperts(w13_E2FD / width**0.5, w2_EDF / hidden**0.5)
    for seed in range(2):
        generator = torch.Generator().manual_seed(seed)
        num_rows = int(torch.randint(1, 9, (1,), generator=generator))
        ends_E = torch.randint(num_rows + 1, (num_experts,), generator=generator, dtype=torch.int32).sort().values
        rows_CD, own = torch.randn(num_rows, width, generator=generator), slice(int(ends_E[-1]))
        expected_CD = stack.run(rows_CD, ends_E)
        done_CD = down_gemv(gate_up_gemv(rows_CD, stack.w13_E2FD, ends_E), stack.w2_EDF, ends_E)
        assert done_CD.shape == rows_CD.shape
        torch.testing.assert_close(done_CD[own], expected_CD[own], rtol=1e-4, atol=1e-5)
"""

COMPILED = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from tramontane.workers.kernels import triton_moe as f
names = f._kernel.arg_names
types = ("*bf16", "*bf16", "*i32", "*bf16", "i32", "i32", *("constexpr",) * 5)
aligned = {(i,): [["tt.divisibility", 16]] for i in range(6)}
for capability in (90, 100):
    for is_gated in (True, False):
        sizes = dict(zip([(i,) for i in range(6, 11)], (8, 8, is_gated, f.OUTPUTS, f.INPUTS), strict=True))
        source = ASTSource(f._kernel, dict(zip(names, types, strict=True)), sizes, aligned)
        made = triton.compile(source, GPUTarget("cuda", capability, 32))
        assert made.asm["ptx"].count("ld.global.v4") >= 4, "16 bytes at a time"
"""


@pytest.mark.parametrize(("script", "interpret"), [(INTERPRETED, "1"), (COMPILED, "0")], ids=["interpreted", "compiled"])
def test_the_kernels_without_a_gpu(script: str, interpret: str) -> None:
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": interpret}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def _stack() -> StackedExperts:
    return StackedExperts(torch.randn(4, 48, 16), torch.randn(4, 16, 24))


def _same(stack: StackedExperts, rows_CD: Tensor, ends_E: Tensor) -> Tensor:
    return stack._replace(has_small_batch_kernel=False).run(rows_CD, ends_E)


def test_nothing_is_tried_where_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StackedExperts, "run_small_batch", lambda *_: pytest.fail("tried"))
    stacks = {3: _stack()}
    assert enable_small_batch_kernel(stacks) == stacks
    assert enable_small_batch_kernel({}) == {}


@pytest.mark.parametrize(
    ("factor", "error", "why"),
    [
        (1.0, None, ""),
        (1.1, None, "differs by 0.1"),
        (torch.nan, None, "differs by nan"),
        (1.0, "No module named 'triton'", "triton"),
    ],
)
def test_what_does_not_work_is_said_and_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, factor: float, error: str | None, why: str
) -> None:
    def few_rows(stack: StackedExperts, rows_CD: Tensor, ends_E: Tensor) -> Tensor:
        if error:
            raise ImportError(error)
        return factor * _same(stack, rows_CD, ends_E)

    monkeypatch.setattr(StackedExperts, "run_small_batch", few_rows)
    monkeypatch.setattr(grouped, "_is_on_gpu", lambda _stack: True)
    with caplog.at_level(logging.WARNING):
        stacks = enable_small_batch_kernel({0: _stack(), 1: _stack()})
    assert [stack.has_small_batch_kernel for stack in stacks.values()] == [not why] * 2
    assert len(caplog.records) == bool(why)
    assert why in caplog.text


def test_more_rows_are_a_grouped_product(monkeypatch: pytest.MonkeyPatch) -> None:
    few: list[int] = []

    def few_rows(stack: StackedExperts, rows_CD: Tensor, ends_E: Tensor) -> Tensor:
        few.append(len(rows_CD))
        return _same(stack, rows_CD, ends_E)

    monkeypatch.setattr(StackedExperts, "run_small_batch", few_rows)
    for num_rows in (1, MAX_SMALL_BATCH_ROWS, MAX_SMALL_BATCH_ROWS + 1, 100):
        ends_E = torch.tensor([0, num_rows, num_rows, num_rows], dtype=torch.int32)
        rows_CD = torch.randn(num_rows, 16)
        assert torch.equal(_stack_run(rows_CD, ends_E, True), _stack_run(rows_CD, ends_E, False))
    assert few == [1, MAX_SMALL_BATCH_ROWS]


def _stack_run(rows_CD: Tensor, ends_E: Tensor, for_few: bool) -> Tensor:
    torch.manual_seed(0)
    return _stack()._replace(has_small_batch_kernel=for_few).run(rows_CD, ends_E)
