"""Checks of whole stages that compute by Triton's kernels: as a GPU's, and on a CPU by the
interpreter.
"""

import re
from dataclasses import replace
from functools import partial
from unittest.mock import patch

import pytest
from interpreted_checks import Check
from tiny_models import latent_args, tiny_args, tiny_plan
from torch import Tensor

from tramontane.proto.errors import ConfigError
from tramontane.proto.model_folder import RandomWeights
from tramontane.proto.plan import StagePlan
from tramontane.workers.attention import triton_attention, triton_latent
from tramontane.workers.kernels import row_invariance, triton_linear
from tramontane.workers.stage import stage_worker
from tramontane.workers.stage.device_backend import row_wise_backend
from tramontane.workers.stage.stage_worker import StageWorker
from tramontane.workers.weights import loader

ARGS = tiny_args(n_layers=1, windows=(24,))
_LATENT = latent_args(n_layers=1)
LATENT_ARGS = replace(
    _LATENT, n_heads=2, moe=_LATENT.moe and replace(_LATENT.moe, first_k_dense_replace=0)
)


def load(plan: StagePlan, device: str) -> StageWorker:
    """Load a stage as on a GPU, also on a CPU."""
    if device != "cpu":
        return StageWorker.load(plan, RandomWeights(), device)
    with (
        patch.object(loader, "pack_linears", lambda *_: {}),
        patch.object(stage_worker, "supports_grouped_gemm", lambda *_: True),
        patch.object(stage_worker, "select_backend", row_wise_backend),
    ):
        return StageWorker.load(plan, RandomWeights(), device)


def check_stage(plan: StagePlan, device: str) -> None:
    """Load a stage that tries itself: it is batch-invariant, and its experts need no host."""
    worker = load(replace(plan, batch_invariant=True), device)
    assert worker.is_batch_invariant
    assert worker.backend.has_exact_sums
    assert worker.model.experts is not None
    assert worker.model.experts.is_graph_safe


def check_latent_stage(device: str) -> None:
    """The same with latent attention, where the keys of most tokens have several parts."""
    with (
        patch.object(triton_latent, "FIXED_PARTS", 2),
        patch.object(triton_latent, "LEAST_KEYS", 32),
    ):
        check_stage(tiny_plan(LATENT_ARGS, dtype="bfloat16").stages[0], device)


def check_refusal(device: str) -> None:
    """Let one kernel be wrong: the stage says so."""
    plan, right = (
        tiny_plan(ARGS, batch_invariant=True).stages[0],
        triton_attention.TritonDecode.attend,
    )
    with patch.object(triton_attention.TritonDecode, "attend", lambda *given: 1.1 * right(*given)):
        _assert_refused(plan, device, "Triton's kernels cannot be used (differs by 0.1)")
    with patch.object(triton_attention.TritonDecode, "attend", lambda *given: right(*given) + 1e-5):
        _assert_refused(
            plan,
            device,
            "layer 0 gives the tokens of a prompt other bits one by one, or in smaller chunks",
        )
    multiply = triton_linear.tiled_linear

    def other_alone(x_CK: Tensor, *given: Tensor, tile: triton_linear.Tile) -> Tensor:
        return multiply(x_CK, *given, tile=tile) + 1e-5 * (len(x_CK) == 1)

    with patch.object(triton_linear, "tiled_linear", other_alone):
        matrix = "a matrix of 64 x 32"
        _assert_refused(
            plan,
            device,
            f"the product of 1 of 67 tokens and {matrix} has other bits than among all of them",
        )
    with patch.object(
        row_invariance, "assert_close_norm", side_effect=ArithmeticError("differs by 0.2")
    ):
        _assert_refused(plan, device, "Triton's kernels cannot be used (differs by 0.2)")


def _assert_refused(plan: StagePlan, device: str, reason: str) -> None:
    message = f"{plan.label} cannot be batch-invariant: {reason}; start without --batch-invariant"
    with pytest.raises(ConfigError, match=re.escape(message)):
        load(plan, device)


CHECKS: dict[str, Check] = {
    "experts in bfloat16": partial(check_stage, tiny_plan(ARGS, dtype="bfloat16").stages[0]),
    "experts in int8": partial(
        check_stage, tiny_plan(ARGS, dtype="float32", quantize="int8").stages[0]
    ),
    "keys and values in fp8": partial(
        check_stage, tiny_plan(ARGS, dtype="bfloat16", kv_cache_dtype="fp8").stages[0]
    ),
    "latent attention": check_latent_stage,
    "refusal": check_refusal,
}
