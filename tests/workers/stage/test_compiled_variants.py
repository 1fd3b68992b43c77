"""Nothing is compiled once a stage is ready, by what Triton's interpreter launches and what
torch.compile is given.
"""

import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from interpreted_checks import run_interpreted, some
from tiny_models import tiny_args, tiny_plan

from tramontane.proto.model_folder import RandomWeights
from tramontane.proto.plan import StagePlan
from tramontane.proto.request import SamplingParams
from tramontane.proto.step import Chunk, DecodeColumns, MicroBatch
from tramontane.workers.attention.sdpa_backend import cpu_kernels
from tramontane.workers.kernels import fused_ops
from tramontane.workers.kernels.fused_ops import EAGER, GPU_TEST_NUM_TOKENS, FusedOps
from tramontane.workers.stage import stage_worker
from tramontane.workers.stage.device_backend import DeviceBackend
from tramontane.workers.stage.stage_worker import StageWorker
from tramontane.workers.weights import loader

NAMES = (
    "the fastest",
    "the fastest, keys and values in fp8",
    "batch-invariant, int8",
    "the fastest, latent attention",
)


@pytest.fixture(scope="module")
def failures() -> dict[str, str]:
    return run_interpreted("specialization_checks", *some(NAMES))


@pytest.mark.interpreted
@pytest.mark.parametrize("name", some(NAMES))
def test_no_kernel_is_compiled_while_a_stage_serves(failures: dict[str, str], name: str) -> None:
    assert not failures[name], failures[name]


@pytest.mark.nightly
def test_all_checks_are_looked_at() -> None:
    assert tuple(run_interpreted("specialization_checks")) == NAMES


def test_what_is_compiled_once_a_stage_is_ready_is_reported(tmp_path: Path) -> None:
    """A real compilation for a GPU that is not there: of three launches the first is before, and
    the second finds its kernel.
    """
    program = Path(__file__).parents[2] / "support" / "compiled_while_serving.py"
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, program], env=environment, capture_output=True, text=True, check=True
    )
    name = "tramontane.workers.kernels.triton_norm._kernel"
    assert (
        done.stdout
        == f"WARNING Stage 1/2 compiled the kernel {name} after it was ready; a request has waited"
        " for it\n"
    )


def test_fused_operations_are_not_compiled_again_for_other_numbers_of_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What ``torch.compile`` is given a second time on a GPU, it is given here: the check at load
    is a GPU's.
    """
    compiled: list[str] = []

    def keep(graph: torch.fx.GraphModule, _inputs: list[torch.Tensor]) -> object:
        compiled.append(str(graph.graph))
        return graph.forward

    def select_backend(plan: StagePlan, device: torch.device) -> DeviceBackend:
        ops = FusedOps(
            *(torch.compile(getattr(EAGER, each.name), backend=keep) for each in fields(FusedOps))
        )
        fused_ops.try_ops(ops, plan.args, device, getattr(torch, plan.dtype))
        return DeviceBackend(cpu_kernels(), ops)

    monkeypatch.setattr(fused_ops, "TEST_NUM_TOKENS", GPU_TEST_NUM_TOKENS)
    monkeypatch.setattr(loader, "pack_linears", lambda *_: {})
    monkeypatch.setattr(stage_worker, "select_backend", select_backend)
    torch.compiler.reset()
    plan = tiny_plan(
        tiny_args(n_layers=1, max_seq_len=400), dtype="bfloat16", max_num_seqs=8
    ).stages[0]
    worker = StageWorker.load(plan, RandomWeights(), "cpu")
    num_compiled = len(compiled)
    assert num_compiled == 2 * len(fields(FusedOps)), "for one token, and for any other number"
    worker.fence(0)
    for step, length in enumerate((1, 2, 3, 17, 255, 300)):
        (ring,) = plan.cache.classes
        pages = tuple(
            step * ring.ring_pages + page % ring.ring_pages
            for page in ring.new_pages(0, length, 16)
        )
        chunk = Chunk(step, 0, (1,) * length, (pages,), SamplingParams(), needs_sample=True)
        worker.step(MicroBatch(0, step, (chunk,)), None)
    worker.step(
        MicroBatch(0, step + 1, (), decodes=DecodeColumns((0, 1, 2), (1, 2, 3), (1, 1, 1))), None
    )
    assert compiled[num_compiled:] == []
