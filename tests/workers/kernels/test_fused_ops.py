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
from tramontane.workers.kernels.fused_ops import EAGER, FusedOps, compile_ops
from tramontane.workers.model.layers import Attention, FeedForward
from tramontane.workers.stage.device_backend import DeviceBackend
from tramontane.workers.stage.stage_worker import StageWorker

CPU = torch.device("cpu")


def test_compiled_functions_agree_with_plain_ones() -> None:
    program = Path(__file__).parents[2] / "support" / "compiled_ops.py"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(program.parent), *sys.path])}
    done = subprocess.run([sys.executable, program], env=environment, capture_output=True, text=True, timeout=400, check=False)
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
    assert calls == {"apply_rotary": 3, "silu_and_mul": 3, "fused_add_rms_norm": 3}


def test_where_nothing_compiles_one_line_says_so(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def broken(*_: object, **__: object) -> object:
        def fails(*_: object) -> object:
            raise RuntimeError("Failed to find a compiler.\nMore lines.")

        return fails

    monkeypatch.setattr(torch, "compile", broken)
    with caplog.at_level(logging.WARNING, logger="tramontane.workers.kernels.fused_ops"):
        assert compile_ops(tiny_args(), CPU, torch.float32) is EAGER
    (record,) = caplog.records
    assert record.getMessage().endswith("(Failed to find a compiler. ... More lines.)")


def test_every_layer_uses_what_its_stage_has() -> None:
    args = tiny_args(n_layers=2, moe=False)
    mine = FusedOps(silu_and_mul=lambda x: EAGER.silu_and_mul(x))
    (worker,) = split_model(random_model(args), tiny_plan(args, 1), backend=DeviceBackend(cpu_kernels(), mine))
    users = [module for module in worker.model.modules() if isinstance(module, (Attention, FeedForward))]
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
