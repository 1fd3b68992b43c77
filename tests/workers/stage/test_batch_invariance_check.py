"""A stage or expert actor tries, when it is loaded, whether a token's bits depend on the other
tokens of a micro-batch.
"""

import re
import shutil
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from local_expert_actors import expert_plan
from tiny_models import tiny_args, tiny_plan

from tramontane.proto.errors import ConfigError
from tramontane.proto.model_folder import RandomWeights
from tramontane.proto.plan import StagePlan
from tramontane.proto.weight_format import Quantization
from tramontane.workers.attention import autotune
from tramontane.workers.attention.autotune import kernels_for_cpu
from tramontane.workers.attention.native_backend import NativeDecode
from tramontane.workers.device.native_library import CompilerError
from tramontane.workers.experts.expert_worker import ExpertWorker
from tramontane.workers.kernels import row_invariance
from tramontane.workers.kernels.fused_ops import EAGER, FusedOps, native_ops
from tramontane.workers.kernels.packed_linear import PackedLinear
from tramontane.workers.model.layers import set_fused_ops
from tramontane.workers.model.moe import ExpertPermutation
from tramontane.workers.model.rotary import RotaryCache
from tramontane.workers.model.transformer import StageModel
from tramontane.workers.stage import batch_invariance, device_backend
from tramontane.workers.stage.stage_worker import StageWorker

pytestmark = pytest.mark.skipif(
    shutil.which("cc") is None, reason="batch invariance needs kernels in C, and they a C compiler"
)
NUDGE = 1e-3
ARGS = tiny_args(n_layers=2, windows=(None, 24))


def _plan(wanted: bool | None, num_stages: int = 1) -> StagePlan:
    return tiny_plan(ARGS, num_stages, batch_invariant=wanted).stages[-1]


def _load(wanted: bool | None, num_stages: int = 1) -> StageWorker:
    return StageWorker.load(_plan(wanted, num_stages), RandomWeights())


def _nudge_single_rows(
    of: Callable[..., torch.Tensor], width: int | None = None
) -> Callable[..., torch.Tensor]:
    """Return a function that computes something else for one row, of outputs of this width only."""

    def nudged(*args: object, **words: object) -> torch.Tensor:
        out = of(*args, **words)
        return out + NUDGE if len(out) == 1 and width in (None, out.shape[1]) else out

    return nudged


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("wanted", [True, None])
def test_it_holds_on_cpus(wanted: bool | None, dtype: str) -> None:
    worker = StageWorker.load(
        tiny_plan(ARGS, dtype=dtype, batch_invariant=wanted).stages[0], RandomWeights()
    )
    assert worker.is_batch_invariant
    assert not any(sum(load) for load in worker.model.expert_load.values()), (
        "the trial's tokens are not counted"
    )


@pytest.mark.parametrize("quantize", list(Quantization))
def test_it_holds_for_quantized_weights(quantize: Quantization) -> None:
    plan = tiny_plan(ARGS, dtype="bfloat16", quantize=quantize, batch_invariant=True).stages[0]
    assert StageWorker.load(plan, RandomWeights()).is_batch_invariant


def test_a_product_that_differs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PackedLinear, "forward", _nudge_single_rows(PackedLinear.forward, width=64))
    with pytest.raises(
        ConfigError,
        match=(
            r"Stage 1/1 layers 0-1 cannot be batch-invariant: the product of 1 of 67 tokens and a"
            r" matrix of"
        ),
    ):
        _load(True)


def test_every_shape_of_matrix_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _load(None).model
    layers = [layer for layer in model.modules() if isinstance(layer, PackedLinear)]
    shapes = {(layer.out_features, layer.in_features) for layer in layers}
    assert len(shapes) == 5, (
        "two of attention, the gate's, two of experts, of which the head has one"
    )
    multiply = PackedLinear.forward
    for shape in shapes:

        def nudged(
            layer: PackedLinear, x_TK: torch.Tensor, shape: tuple[int, int] = shape
        ) -> torch.Tensor:
            is_other = len(x_TK) == 1 and (layer.out_features, layer.in_features) == shape
            return multiply(layer, x_TK) + (NUDGE if is_other else 0)

        monkeypatch.setattr(PackedLinear, "forward", nudged)
        with torch.inference_mode():
            problem = row_invariance.find_row_dependence(model, torch.float32, torch.device("cpu"))
        assert f"a matrix of {shape[0]} x {shape[1]} has" in problem


@pytest.mark.parametrize("row", [0, row_invariance.NUM_TOKENS - 1])
def test_the_first_and_the_last_tokens_of_a_product_are_tried(row: int) -> None:
    def of_whole(x_TK: torch.Tensor) -> torch.Tensor:
        is_other_T1 = torch.arange(len(x_TK))[:, None] == row
        return x_TK + NUDGE * is_other_T1 if len(x_TK) == row_invariance.NUM_TOKENS else x_TK

    assert (
        row_invariance.differing_row_count(of_whole, torch.zeros(row_invariance.NUM_TOKENS, 3)) == 1
    )


@pytest.mark.parametrize("count", [1, 3, 8, 20])
def test_several_numbers_of_tokens_are_tried(count: int) -> None:
    def compute(x_TK: torch.Tensor) -> torch.Tensor:
        return x_TK + NUDGE * (len(x_TK) == count)

    assert (
        row_invariance.differing_row_count(compute, torch.zeros(row_invariance.NUM_TOKENS, 3))
        == count
    )


def test_a_layer_that_differs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    attend = NativeDecode.attend
    monkeypatch.setattr(NativeDecode, "attend", lambda *args: attend(*args) + NUDGE)
    with pytest.raises(
        ConfigError,
        match="layer 0 gives the tokens of a prompt other bits one by one, or in smaller chunks",
    ):
        _load(True)


def test_only_the_layer_of_one_window_may_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    attend = NativeDecode.attend
    monkeypatch.setattr(
        NativeDecode,
        "attend",
        lambda self, q, c, mask: attend(self, q, c, mask) + NUDGE * (mask.window == 24),
    )
    with pytest.raises(ConfigError, match="layer 1 gives"):
        _load(True)


def test_the_first_norm_of_a_stage_is_that_of_other_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else tokens would depend on the number of stages."""

    def with_other_norm(*args: object) -> FusedOps:
        fused = native_ops(*args)  # type: ignore[arg-type]
        return replace(
            fused, rms_norm=lambda x, weight, eps: fused.rms_norm(x, weight, eps) + NUDGE
        )

    monkeypatch.setattr(device_backend, "native_ops", with_other_norm)
    with pytest.raises(ConfigError, match="layer 0 gives"):
        _load(True)


def test_experts_of_a_layer_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StageModel, "feed_forward", _nudge_single_rows(StageModel.feed_forward))
    with pytest.raises(ConfigError, match="layer 0 gives"):
        _load(True)


def test_the_gate_is_tried_where_experts_are_on_actors(monkeypatch: pytest.MonkeyPatch) -> None:
    choose = StageModel.choose_experts

    def nudged(
        model: StageModel, layer: int, x_TD: torch.Tensor
    ) -> tuple[ExpertPermutation, torch.Tensor]:
        groups, weights_Tk = choose(model, layer, x_TD)
        return groups, weights_Tk + NUDGE * (len(x_TD) == 1)

    monkeypatch.setattr(StageModel, "choose_experts", nudged)
    with pytest.raises(ConfigError, match="layer 0 gives"):
        StageWorker.load(replace(_plan(True), experts_inside=False), RandomWeights())


def test_positions_of_a_stage_have_tables_that_are_kept() -> None:
    """PyTorch's cosines of a micro-batch could depend on where a position stands in it."""
    assert isinstance(getattr(_load(None).rotary_tables, "__self__", None), RotaryCache)


def test_the_final_norm_is_that_of_layers() -> None:
    """PyTorch's could depend on the number of tokens."""
    model = _load(None).model
    set_fused_ops(
        model, replace(EAGER, rms_norm=lambda x_TD, _weight_D, _eps: torch.zeros_like(x_TD))
    )
    with torch.inference_mode():
        assert not model.head(torch.ones(3, ARGS.dim)).any()


def test_a_head_that_differs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StageModel, "head", _nudge_single_rows(StageModel.head))
    with pytest.raises(ConfigError, match="the logits of 1 of 92 tokens have other bits"):
        _load(True)


def test_where_it_is_not_required_a_warning_says_what_differs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(StageModel, "head", _nudge_single_rows(StageModel.head))
    assert not _load(None).is_batch_invariant
    assert (
        "Stage 1/1 layers 0-1: a request's tokens may depend on what else is computed at the same"
        " time: the logits" in caplog.text
    )


def test_where_it_is_not_wanted_nothing_is_tried(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(StageModel, "head", _nudge_single_rows(StageModel.head))
    assert not _load(False).is_batch_invariant
    assert "may depend" not in caplog.text


@pytest.mark.parametrize(
    ("device", "wanted", "is_tried"),
    [
        ("cpu", True, True),
        ("cpu", None, True),
        ("cpu", False, False),
        ("cuda", True, True),
        ("cuda", None, False),
        ("cuda", False, False),
    ],
)
def test_where_it_is_tried(device: str, wanted: bool | None, is_tried: bool) -> None:
    tries: list[int] = []
    found = row_invariance.try_invariance(
        "a stage", wanted, torch.device(device), lambda: "" if tries.append(1) is None else "x"
    )
    assert found is is_tried
    assert len(tries) == is_tried


def _without_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise CompilerError("there is no C compiler cc")

    monkeypatch.setattr(autotune, "native_kernels", fails)
    monkeypatch.setattr(device_backend, "kernels_for_cpu", kernels_for_cpu.__wrapped__)
    monkeypatch.setattr("tramontane.workers.kernels.packed_linear.packed_matmul", lambda *_: None)
    monkeypatch.setattr(device_backend, "native_ops", lambda *_: EAGER)


def test_without_a_compiler_it_is_refused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _without_compiler(monkeypatch)
    failure = "/tmp/x is mounted noexec"
    monkeypatch.setattr(batch_invariance, "why_no_kernels", lambda: failure)
    reason = (
        "PyTorch computes products and attention and norms, since there are no kernels in C"
        rf" \({failure}\)"
    )
    with pytest.raises(ConfigError, match=reason):
        _load(True)
    assert not _load(None).is_batch_invariant
    assert re.search(reason, caplog.text)


def test_expert_actors_try_their_products(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = replace(expert_plan(ARGS, 2), batch_invariant=True)
    ExpertWorker.load(plan, 0, RandomWeights())
    monkeypatch.setattr(PackedLinear, "forward", _nudge_single_rows(PackedLinear.forward))
    with pytest.raises(
        ConfigError,
        match=(
            "Experts 1/2 cannot be batch-invariant: the product of 1 of 67 tokens and a matrix of"
        ),
    ):
        ExpertWorker.load(plan, 0, RandomWeights())
