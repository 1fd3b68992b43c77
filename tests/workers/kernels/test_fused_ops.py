"""What is fused computes what it was, and nothing is lost where nothing can be fused."""

import logging
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from harness import run_in_process
from tiny_models import experts_together, random_model, split_model, tiny_args, tiny_plan

from tramontane.proto.request import SamplingParams
from tramontane.workers.attention.sdpa_backend import cpu_kernels
from tramontane.workers.device.native_library import CompilerError
from tramontane.workers.kernels import fused_ops
from tramontane.workers.kernels.fused_ops import EAGER, FusedOps, NativeOps, compile_ops, native_ops
from tramontane.workers.model.layers import Attention, FeedForward
from tramontane.workers.stage.device_backend import DeviceBackend, select_backend
from tramontane.workers.stage.stage_worker import StageWorker

CPU = torch.device("cpu")


@pytest.mark.nightly
def test_compiled_functions_agree_with_plain_ones() -> None:
    program = Path(__file__).parents[2] / "support" / "compiled_ops.py"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(program.parent), *sys.path])}
    done = subprocess.run(
        [sys.executable, program],
        env=environment,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    differences = [float(line) for line in done.stdout.split()]
    if not differences:
        pytest.skip(f"torch.compile needs a C++ compiler: {done.stderr.splitlines()[-1]}")
    assert len(differences) == 8
    assert max(differences) < 1e-5


def test_every_operation_is_tried_and_then_used(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: Counter[str] = Counter()

    def compile_nothing(function: Callable[..., object]) -> Callable[..., object]:
        def counted(*inputs: object) -> object:
            calls[function.__name__] += 1
            return function(*inputs)

        return counted

    monkeypatch.setattr(torch, "compile", compile_nothing)
    assert compile_ops(tiny_args(), CPU, torch.float32) is not EAGER
    assert calls == {
        "apply_rotary": 3,
        "silu_and_mul": 3,
        "rms_norm": 3,
        "fused_add_rms_norm": 3,
        "cos_sin": 3,
    }


def test_where_nothing_compiles_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object, **__: object) -> object:
        def fails(*_: object) -> object:
            raise RuntimeError("Failed to find a compiler.\nMore lines.")

        return fails

    monkeypatch.setattr(torch, "compile", broken)
    with caplog.at_level(logging.WARNING, logger="tramontane.workers.kernels.fused_ops"):
        assert compile_ops(tiny_args(), CPU, torch.float32) is EAGER
    (record,) = caplog.records
    assert record.getMessage().endswith("(Failed to find a compiler. ... More lines.)")


TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 6e-3, torch.float16: 8e-4}  # relative, by norms


@pytest.fixture(params=TOLERANCE, ids=str)
def native(request: pytest.FixtureRequest) -> tuple[FusedOps, torch.dtype]:
    fused = native_ops(tiny_args(), request.param)
    if fused is EAGER:
        pytest.skip("needs a C compiler")
    return fused, request.param


# One thread computes up to 32,768 numbers: 36 rows of 900 are less, 37 more; and so on for the
# three heads of a rotation.
@pytest.mark.parametrize(
    ("num_rows", "width"), [(1, 2), (2, 6), (17, 64), (40, 200), (36, 900), (37, 900), (60, 200)]
)
def test_operations_in_c_agree_with_plain_ones_in_float64(
    native: tuple[FusedOps, torch.dtype], num_rows: int, width: int
) -> None:
    fused, dtype = native
    torch.manual_seed(0)
    heads, cosines, sines = (
        torch.randn(num_rows, 5, width),
        torch.randn(num_rows, width),
        torch.randn(num_rows, width),
    )
    gate_up, h, more, weight = (
        torch.randn(size)
        for size in ((num_rows, 2 * width), (num_rows, width), (num_rows, width), width)
    )
    gate_up[0, :2] = torch.tensor([-90.0, 90.0])
    cases = (
        (fused.apply_rotary, EAGER.apply_rotary, heads[:, :3], cosines, sines),
        (fused.silu_and_mul, EAGER.silu_and_mul, gate_up),
        (
            fused.silu_and_mul,
            EAGER.silu_and_mul,
            torch.cat((gate_up, gate_up), dim=1)[:, : 2 * width],
        ),
        (fused.fused_add_rms_norm, EAGER.fused_add_rms_norm, h, more, weight, 1e-5),
    )
    for function, plain, *inputs in cases:
        given = [each.to(dtype) if isinstance(each, torch.Tensor) else each for each in inputs]
        exact = [each.double() if isinstance(each, torch.Tensor) else each for each in given]
        outs, expected = function(*given), plain(*exact)  # type: ignore[operator]
        for out, right in zip(
            *((x,) if isinstance(x, torch.Tensor) else x for x in (outs, expected)), strict=True
        ):
            assert out.dtype == dtype
            assert (out.double() - right).norm() <= TOLERANCE[dtype] * right.norm(), plain.__name__  # type: ignore[attr-defined]


def test_a_row_in_c_depends_on_no_other_row_and_on_no_number_of_threads(
    native: tuple[FusedOps, torch.dtype],
) -> None:
    fused, dtype = native
    torch.manual_seed(0)
    gate_up, h, weight = (
        torch.randn(40, 1800).to(dtype),
        torch.randn(40, 900).to(dtype),
        torch.randn(900).to(dtype),
    )
    heads, angles = torch.randn(40, 3, 300).to(dtype), torch.randn(40, 300).to(dtype)

    def computed(rows: slice) -> list[torch.Tensor]:
        normalized = fused.fused_add_rms_norm(h[rows], h[rows], weight, 1e-5)
        return [
            fused.silu_and_mul(gate_up[rows]),
            fused.apply_rotary(heads[rows], angles[rows], angles[rows]),
            *normalized,
        ]

    together, threads = computed(slice(None)), torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        for rows in (slice(0, 40), slice(7, 8), slice(20, 40)):
            assert all(
                torch.equal(one, all_[rows])
                for one, all_ in zip(computed(rows), together, strict=True)
            )
    finally:
        torch.set_num_threads(threads)


def test_where_nothing_compiles_in_c_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(_source: Path, _dtype: str) -> None:
        raise CompilerError("there is no C compiler")

    monkeypatch.setattr(fused_ops, "compile_library", fails)
    with caplog.at_level(logging.INFO, logger="tramontane.workers.kernels.fused_ops"):
        assert native_ops(tiny_args(), torch.float32) is EAGER
    (record,) = caplog.records
    assert (
        record.getMessage()
        == "operations between products are computed by PyTorch, one by one: there is no C compiler"
    )


def test_operations_in_c_that_are_wrong_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NativeOps, "_silu_and_mul", lambda _self, x: EAGER.silu_and_mul(x) * 1.1)
    assert native_ops(tiny_args(), torch.float32) is EAGER


def test_a_stage_on_a_cpu_has_them(native: tuple[FusedOps, torch.dtype]) -> None:
    plan = tiny_plan(tiny_args(), 1, dtype=str(native[1]).removeprefix("torch."))
    assert select_backend(plan.stages[0], CPU).fused_ops != EAGER


def test_every_layer_uses_what_its_stage_has() -> None:
    args = tiny_args(n_layers=2, moe=False)
    mine = FusedOps(silu_and_mul=lambda x: EAGER.silu_and_mul(x))
    (worker,) = split_model(
        random_model(args), tiny_plan(args, 1), backend=DeviceBackend(cpu_kernels(), mine)
    )
    users = [
        module for module in worker.model.modules() if isinstance(module, (Attention, FeedForward))
    ]
    assert len(users) == 4
    assert all(module.fused_ops is mine for module in users)


def test_experts_that_lie_together_use_it_too() -> None:
    args = tiny_args(n_layers=2)
    plan, num_rows = tiny_plan(args, 1), []

    def gated(gate_up_T2F: torch.Tensor) -> torch.Tensor:
        num_rows.append(len(gate_up_T2F))
        return EAGER.silu_and_mul(gate_up_T2F)

    backend = DeviceBackend(cpu_kernels(), FusedOps(silu_and_mul=gated))
    worker = StageWorker(plan.stages[0], experts_together(random_model(args)), backend=backend)
    run_in_process(plan, [worker], [[1, 2, 3]], SamplingParams(max_tokens=1))
    assert num_rows == [6, 6], "two experts of each token, in two layers"


COUNT_THREADS = """
import os, torch
from tramontane.workers.kernels.fused_ops import NativeOps
torch.set_num_threads(7)
ops = NativeOps("float32").fused_ops
run = {
    "silu": lambda rows: ops.silu_and_mul(torch.empty(rows, 2048)),
    "norm": lambda rows: ops.fused_add_rms_norm(
        torch.empty(rows, 1024), torch.empty(rows, 1024), torch.empty(1024), 1e-5
    ),
}[os.environ["OPERATION"]]
for rows in (32, 33):
    run(rows)
    print(len(os.listdir("/proc/self/task")))
"""


@pytest.mark.parametrize("operation", ["silu", "norm"])
def test_more_than_32768_numbers_and_no_fewer_are_shared_by_threads(operation: str) -> None:
    """In a new process: threads of OpenMP stay."""
    if native_ops(tiny_args(), torch.float32) is EAGER:
        pytest.skip("there is no C compiler here")
    environment = os.environ | {"OPERATION": operation}
    command = [sys.executable, "-c", COUNT_THREADS]
    few, many = map(
        int,
        subprocess.run(
            command, env=environment, capture_output=True, text=True, check=True
        ).stdout.split(),
    )
    assert many == few + 6


def test_the_norm_is_of_the_rounded_sum() -> None:
    """256 + 1 is 256 in bfloat16."""
    h, ones = torch.full((1, 64), 256.0).bfloat16(), torch.ones(1, 64).bfloat16()
    sums, out = native_ops(tiny_args(), torch.bfloat16).fused_add_rms_norm(h, ones, ones[0], 1e-5)
    assert (sums == 256).all()
    assert (out == 1).all()
