"""One selector of a stage's backend chooses all of its kernels: it reaches attention, products and
experts.
"""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tiny_models import experts_together, random_model, tiny_args, tiny_plan

from tramontane.proto.model_args import MoeArgs
from tramontane.proto.model_folder import RandomWeights
from tramontane.workers.attention.autotune import kernels_for_cpu
from tramontane.workers.attention.sdpa_backend import cpu_kernels
from tramontane.workers.device.kernel_choices import KernelChoices
from tramontane.workers.device.kernel_selection import KernelSelector, cuda_seconds
from tramontane.workers.kernels.fused_ops import EAGER
from tramontane.workers.kernels.linear import Linear
from tramontane.workers.model import moe, transformer
from tramontane.workers.model.moe import ExpertTokenCounter
from tramontane.workers.stage import device_backend
from tramontane.workers.stage.device_backend import DeviceBackend, select_backend
from tramontane.workers.stage.stage_worker import StageWorker

ARGS = replace(tiny_args(n_layers=1), moe=MoeArgs(4, 2))
GPU = torch.device("cuda")


def test_a_backend_of_a_gpu_has_the_selector_that_has_chosen_its_attention(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    choices, seen = KernelChoices("a GPU", tmp_path), list[tuple[str, object]]()
    monkeypatch.setattr(
        KernelChoices, "of_device", lambda device: seen.append(("choices", device)) or choices
    )
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    capture = SimpleNamespace(in_pieces=object())
    monkeypatch.setattr(device_backend, "CudaGraphCapture", lambda: capture)
    monkeypatch.setattr(device_backend, "compile_ops", lambda *_: EAGER)
    monkeypatch.setattr(
        device_backend,
        "select_kernels",
        lambda *given: seen.append(("by", given[2])) or cpu_kernels(),
    )
    backend = select_backend(tiny_plan(ARGS).stages[0], GPU)
    assert backend.selector == KernelSelector(cuda_seconds, choices)
    assert seen == [("choices", "cuda"), ("by", backend.selector)]
    assert (backend.graph_capture, backend.piecewise_capture) == (capture, capture.in_pieces)


def test_on_a_cpu_nothing_is_chosen_by_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a stage need not be batch-invariant."""
    monkeypatch.setattr(KernelSelector, "fastest", lambda *_: pytest.fail("something is timed"))
    for wanted in (True, None, False):
        plan = tiny_plan(ARGS, batch_invariant=wanted).stages[0]
        kernels_for_cpu.cache_clear()
        StageWorker.load(plan, RandomWeights())


def test_it_chooses_the_products_of_experts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    mine, seen = KernelSelector(cuda_seconds, KernelChoices("a GPU", tmp_path)), list[object]()
    model = experts_together(random_model(ARGS))
    monkeypatch.setattr(
        moe, "select_gpu_kernels", lambda stacks, _dtype, selector: seen.append(selector) or stacks
    )
    StageWorker(
        tiny_plan(ARGS).stages[0], model, backend=DeviceBackend(cpu_kernels(), selector=mine)
    )
    assert seen == [mine]


def test_it_chooses_all_other_products(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    mine, seen = (
        KernelSelector(cuda_seconds, KernelChoices("a GPU", tmp_path)),
        list[tuple[list[Linear], object]](),
    )
    model = experts_together(random_model(ARGS))
    monkeypatch.setattr(ExpertTokenCounter, "to_device", lambda *_: None)
    monkeypatch.setattr(moe, "select_gpu_kernels", lambda stacks, *_: stacks)
    monkeypatch.setattr(
        transformer, "select_products", lambda layers, selector: seen.append(([*layers], selector))
    )
    model.finalize_weights(GPU, None, mine)
    ((layers, selector),) = seen
    assert selector is mine
    assert model.output in layers
    assert not {*layers} & {*model.experts.modules()}  # type: ignore[union-attr]
