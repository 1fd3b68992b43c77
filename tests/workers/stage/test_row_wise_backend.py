"""Stages on GPUs that have to be batch-invariant: which kernels they get, and that their check
holds, by the interpreter too.
"""

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from kernel_tests import checks_as_tests
from local_expert_actors import expert_plan
from stage_checks import ARGS, CHECKS, load
from tiny_models import tiny_plan
from torch import Tensor

from tramontane.proto.errors import ConfigError
from tramontane.proto.model_folder import RandomWeights
from tramontane.proto.plan import StagePlan
from tramontane.workers.attention.backend import AttentionKernels
from tramontane.workers.attention.sdpa_backend import PagedDecode, SdpaPrefill
from tramontane.workers.device.kernel_choices import KernelChoices
from tramontane.workers.experts import expert_worker
from tramontane.workers.experts.expert_worker import ExpertWorker
from tramontane.workers.kernels import triton_silu
from tramontane.workers.kernels.fused_ops import EAGER
from tramontane.workers.kernels.row_invariance import RowProducts
from tramontane.workers.model.transformer import StageModel
from tramontane.workers.stage import device_backend
from tramontane.workers.stage.device_backend import DeviceBackend, select_backend
from tramontane.workers.weights import loader
from tramontane.workers.weights.loader import load_module, supports_grouped_gemm
from tramontane.workers.weights.tensor_specs import stage_tensors

CPU, GPU = torch.device("cpu"), torch.device("cuda")


failures, test_interpreted, test_on_a_gpu = checks_as_tests("stage_checks", CHECKS)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
def test_graphs_on_a_gpu_are_recorded() -> None:
    worker = load(tiny_plan(ARGS, dtype="bfloat16", batch_invariant=True).stages[0], "cuda")
    assert worker.graphs is not None
    assert worker.graphs.sizes


@pytest.mark.parametrize("wanted", [True, None, False])
def test_only_what_is_required_to_be_invariant_is(
    monkeypatch: pytest.MonkeyPatch, wanted: bool | None
) -> None:
    """All other stages on GPUs choose as they did."""
    fastest, row_wise = (
        AttentionKernels(SdpaPrefill(), PagedDecode()),
        DeviceBackend(AttentionKernels(SdpaPrefill(), PagedDecode())),
    )
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    capture = SimpleNamespace(in_pieces=object())
    monkeypatch.setattr(device_backend, "CudaGraphCapture", lambda: capture)
    # there is no GPU that could be named
    monkeypatch.setattr(KernelChoices, "of_device", lambda _: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    monkeypatch.setattr(device_backend, "select_kernels", lambda *_: fastest)
    monkeypatch.setattr(device_backend, "compile_ops", lambda *_: EAGER)
    monkeypatch.setattr(
        device_backend,
        "row_wise_backend",
        lambda *given: row_wise if given[2::2] == (capture, capture.in_pieces) else None,
    )
    backend = select_backend(tiny_plan(ARGS, batch_invariant=wanted).stages[0], GPU)
    assert (backend is row_wise) is (wanted is True)
    assert (backend.kernels is fastest) is (wanted is not True)
    assert not backend.has_exact_sums
    assert backend.row_products is None


@pytest.mark.parametrize(
    ("wanted", "quantize", "is_grouped"),
    [(True, None, True), (None, None, False), (True, "int8", True), (None, "int8", True)],
)
def test_experts_are_grouped_on_every_gpu(
    monkeypatch: pytest.MonkeyPatch, wanted: bool | None, quantize: str | None, is_grouped: bool
) -> None:
    """Torch's grouped product needs capability 9 or 10; Triton's do not."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 6))
    plan = tiny_plan(ARGS, dtype="bfloat16", quantize=quantize, batch_invariant=wanted).stages[0]
    assert supports_grouped_gemm(plan, "cuda") is is_grouped


def _linear(x_CK: Tensor, weight_NK: Tensor, scale_N: Tensor | None) -> Tensor:
    return x_CK @ (weight_NK if scale_N is None else weight_NK.to(x_CK.dtype) * scale_N[:, None]).T


def _grouped(x_CK: Tensor, weight_ENK: Tensor, ends_E: Tensor, scale_EN: Tensor | None) -> Tensor:
    expert_C = torch.searchsorted(ends_E, torch.arange(len(x_CK)), right=True).clamp(
        max=len(weight_ENK) - 1
    )
    wide_ENK = weight_ENK if scale_EN is None else weight_ENK.to(x_CK.dtype) * scale_EN[..., None]
    return torch.einsum("ck,cnk->cn", x_CK, wide_ENK[expert_C])


def _model(plan: StagePlan, monkeypatch: pytest.MonkeyPatch) -> StageModel:
    monkeypatch.setattr(loader, "pack_linears", lambda *_: {})
    layers = plan.layers
    return load_module(
        lambda: StageModel(ARGS, layers),
        lambda layout: stage_tensors(ARGS, layers, layout),
        plan,
        RandomWeights(),
        "cpu",
        lambda _read, _loaded: None,
        contiguous_experts=True,
    )


@pytest.mark.parametrize("quantize", [None, "int8"])
def test_products_of_a_backend_replace_those_of_layers_and_experts(
    monkeypatch: pytest.MonkeyPatch, quantize: str | None
) -> None:
    """They are called, and without them a layer computes as before."""
    plan = tiny_plan(ARGS, quantize=quantize).stages[0]
    model, x_TD, calls = (
        _model(plan, monkeypatch),
        torch.randn(5, ARGS.dim),
        {"linear": 0, "grouped": 0},
    )

    def linear(*given: Tensor) -> Tensor:
        calls["linear"] += 1
        return _linear(*given)

    def grouped(*given: Tensor) -> Tensor:
        calls["grouped"] += 1
        return _grouped(*given)

    with torch.inference_mode():
        model.finalize_weights(CPU)
        expected = model.feed_forward(0, x_TD)
        model.finalize_weights(CPU, RowProducts(linear, grouped))
        torch.testing.assert_close(model.feed_forward(0, x_TD), expected, rtol=1e-4, atol=1e-6)
        assert calls["linear"] == 1, "the gate"
        assert calls["grouped"] == 2
        counted = dict(calls)
        model.finalize_weights(CPU)
        assert torch.equal(model.feed_forward(0, x_TD), expected)
        assert calls == counted


def test_expert_actors_on_gpus_get_the_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or say why there are none."""
    plan, products = (
        replace(expert_plan(ARGS, 2), batch_invariant=True),
        RowProducts(_linear, _grouped),
    )
    monkeypatch.setattr(expert_worker, "triton_products", lambda *_: products)
    worker = ExpertWorker(plan, RandomWeights(), "cuda")
    assert worker._products is products
    assert worker._fused_ops.silu_and_mul is triton_silu.silu_and_mul, (
        "that of stages, which rounds once"
    )
    assert ExpertWorker(plan, RandomWeights(), "cpu")._products is None
    assert (
        ExpertWorker(replace(plan, batch_invariant=None), RandomWeights(), "cuda")._products is None
    )

    def fails(*_: object) -> None:
        raise ImportError("No module named 'triton'")

    monkeypatch.setattr(expert_worker, "triton_products", fails)
    reason = (
        r"Experts cannot be batch-invariant: Triton's kernels cannot be used \(No module named"
        r" 'triton'\)"
    )
    with pytest.raises(ConfigError, match=reason):
        ExpertWorker(plan, RandomWeights(), "cuda")
