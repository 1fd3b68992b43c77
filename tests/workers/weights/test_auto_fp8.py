"""Folders that AutoFP8 writes: the numbers of the FP8 that Mistral publishes, by other names
(auto_fp8/quantize.py).
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import random_ids
from published_models import SHAPES, publish
from safetensors.torch import load_file, save_file
from stage_driver import Driver
from tiny_models import tiny_args, tiny_plan
from torch import Tensor

from tramontane.proto.errors import CheckpointError
from tramontane.proto.model_folder import Layout, read_model_args
from tramontane.proto.weight_format import Quantization
from tramontane.workers.stage.stage_worker import StageWorker
from tramontane.workers.weights.checkpoint import Checkpoint
from tramontane.workers.weights.random_checkpoint import write_random_checkpoint

K_PROJ = "model.layers.1.self_attn.k_proj"


def _rewrite(folder: Path, target: Path, **quantization: Any) -> Path:  # JSON values
    """Write an FP8 folder again as AutoFP8 would; scales are of float32, and there are those of a
    key/value cache.
    """
    target.mkdir()
    stored = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        own = (
            name.removesuffix("_inv")
            if name.endswith(".weight_scale_inv")
            else name.replace(".activation_scale", ".input_scale")
        )
        stored[own] = tensor if own == name else tensor.float()
    stored |= {
        f"{K_PROJ}.output_scale": torch.tensor(0.1),
        "model.layers.0.self_attn.kv_scale": torch.tensor(0.1),
    }
    save_file(stored, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    auto_fp8 = {
        "quant_method": "fp8",
        "activation_scheme": "static",
        "kv_cache_scheme": "static",
        "ignored_layers": ["lm_head"],
    }
    config["quantization_config"] = auto_fp8 | quantization
    (target / "config.json").write_text(json.dumps(config))
    return target


def _logits(folder: Path, prompt: list[int]) -> Tensor:
    args = read_model_args(folder)
    Checkpoint(folder).check(args)
    return Driver(plan := tiny_plan(args), [StageWorker.load(plan.stages[0], folder)]).run(
        [prompt], [[len(prompt)]]
    )[0]


def test_a_model_is_that_of_the_same_numbers_by_the_other_names(tmp_path: Path) -> None:
    published = publish(tmp_path / "named as Mistral does", SHAPES["devstral-2-123b"], fp8=True)
    folder, prompt = (
        _rewrite(published.folder, tmp_path / "auto_fp8"),
        random_ids(40, seed=3, vocab_size=128),
    )
    assert read_model_args(folder) == read_model_args(published.folder)
    logits = _logits(folder, prompt)
    assert torch.equal(logits, _logits(published.folder, prompt))
    # of ``w.float() * scale``
    torch.testing.assert_close(logits, published.logits(prompt), rtol=0, atol=1e-4)


def test_the_scale_of_every_matrix_of_experts_is_read(tmp_path: Path) -> None:
    args = replace(tiny_args(n_layers=2), quantization=Quantization.FP8)
    write_random_checkpoint(tmp_path / "plain", args, Layout.HUGGING_FACE)
    tensors = load_file(tmp_path / "plain" / "model.safetensors")
    for number, name in enumerate(sorted(name for name in tensors if name.endswith("_scale_inv"))):
        tensors[name] *= 1 + number / 100  # all different, or an exchange would not show
    save_file(tensors, tmp_path / "plain" / "model.safetensors", metadata={"format": "pt"})
    gates = [f"model.layers.{layer}.block_sparse_moe.gate" for layer in range(2)]
    folder = _rewrite(tmp_path / "plain", tmp_path / "auto_fp8", ignored_layers=["lm_head", *gates])
    stage = tiny_plan(read_model_args(folder)).stages[0]
    own, other = (
        StageWorker.load(stage, each).model.state_dict() for each in (folder, tmp_path / "plain")
    )
    assert own.keys() == other.keys()
    assert all(
        torch.equal(own[name].view(torch.uint8), other[name].view(torch.uint8)) for name in own
    )
    rows = own["experts.layers.1.0.w13.scale"]
    for w, half in zip(("w1", "w3"), rows.chunk(2), strict=True):
        assert (
            half == tensors[f"model.layers.1.block_sparse_moe.experts.0.{w}.weight_scale_inv"]
        ).all()


@pytest.mark.parametrize(
    "kept", ["model.layers.1.self_attn.k_proj", "re:.*mlp.gate_proj", "model.layers.0"]
)
@pytest.mark.parametrize("key", ["ignored_layers", "modules_to_not_convert"])
def test_matrices_of_layers_that_are_not_quantized_are_refused_by_the_configuration(
    tmp_path: Path, kept: str, key: str
) -> None:
    plain = publish(tmp_path / "plain", SHAPES["devstral-2-123b"], fp8=True).folder
    folder = _rewrite(plain, tmp_path / "auto_fp8", **{key: ["lm_head", kept]})
    with pytest.raises(CheckpointError, match="only some are quantized") as refused:
        read_model_args(folder)
    assert f"{key} names {kept}" in str(refused.value)


def test_a_scale_by_both_names_is_refused(tmp_path: Path) -> None:
    plain = publish(tmp_path / "plain", SHAPES["devstral-2-123b"], fp8=True).folder
    folder = _rewrite(plain, tmp_path / "auto_fp8")
    tensors = load_file(folder / "model.safetensors")
    save_file(
        tensors | {f"{K_PROJ}.weight_scale_inv": torch.tensor(1.0)}, folder / "model.safetensors"
    )
    with pytest.raises(CheckpointError, match="one of them does not belong here"):
        Checkpoint(folder)
