"""What is wrong with a model folder is said in one line that names it; what is right is read once,
by its owner alone.
"""

import json
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import random_ids
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from stage_driver import teacher_forced
from tiny_models import (
    INDEX_NAME,
    SINGLE_NAME,
    loaded_state,
    random_model,
    tiny_args,
    tiny_plan,
    write_checkpoint,
)

from tramontane.proto.errors import CheckpointError
from tramontane.proto.hf_config import from_hf_config
from tramontane.proto.mistral_params import from_mistral_params
from tramontane.proto.model_args import ModelArgs, MoeArgs
from tramontane.proto.model_folder import (
    Layout,
    RandomWeights,
    WeightSource,
    detect_layout,
    read_model_args,
)
from tramontane.proto.plan import StagePlan
from tramontane.proto.weight_format import DTYPE_BYTES, Quantization, WeightFormat
from tramontane.workers.kernels import packed_linear
from tramontane.workers.kernels.packed_linear import PackedLinear, PackedMatmul, packed_matmul
from tramontane.workers.stage.stage_worker import StageWorker
from tramontane.workers.weights import safetensors_file as tensor_file
from tramontane.workers.weights import tensor_specs
from tramontane.workers.weights.checkpoint import Checkpoint, checkpoint_digest_without_weights
from tramontane.workers.weights.config_writer import to_hf_config, to_mistral_params
from tramontane.workers.weights.random_checkpoint import random_state, write_random_checkpoint
from tramontane.workers.weights.tensor_specs import TensorSpec, stage_tensors

ARGS = tiny_args(n_layers=3)
DENSE = tiny_args(n_layers=3, moe=False)
K_PROJ = "model.layers.1.self_attn.k_proj.weight"


def _specs(args: ModelArgs = ARGS) -> list[TensorSpec]:
    return list(stage_tensors(args, range(args.n_layers)))


def _shard(folder: Path) -> Path:
    """Cut the single file of a folder in three, with an index, as large checkpoints come."""
    tensors = load_file(folder / SINGLE_NAME)
    (folder / SINGLE_NAME).unlink()
    names = sorted(tensors)
    weight_map: dict[str, str] = {}
    for part in range(3):
        file = f"model-{part + 1:05}-of-00003.safetensors"
        save_file({name: tensors[name] for name in names[part::3]}, folder / file)
        weight_map |= dict.fromkeys(names[part::3], file)
    (folder / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def _refused(what: Callable[[], object]) -> str:
    """The message of the CheckpointError, which is one line."""
    with pytest.raises(CheckpointError) as refused:
        what()
    message = str(refused.value)
    assert message
    assert "\n" not in message
    return message


def _rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / SINGLE_NAME)
    change(tensors)
    save_file(tensors, folder / SINGLE_NAME)


# Weights: what is refused


@pytest.mark.parametrize("sharded", [False, True])
def test_a_missing_tensor_is_named(tmp_path: Path, sharded: bool) -> None:
    folder = write_checkpoint(tmp_path / "model", ARGS)
    _rewrite(folder, lambda tensors: tensors.pop(K_PROJ))
    if sharded:
        _shard(folder)
    for use in (
        lambda: Checkpoint(folder).check(ARGS),
        lambda: Checkpoint(folder).load(
            partial(stage_tensors, ARGS, range(3)), WeightFormat("float32", stored="float32"), "cpu"
        ),
    ):
        message = _refused(use)
        assert f"lacks the tensor {K_PROJ}" in message
        assert str(folder) in message


def test_a_tensor_that_only_the_index_knows_is_named(tmp_path: Path) -> None:
    folder = _shard(write_checkpoint(tmp_path / "model", ARGS))
    shard = folder / json.loads((folder / INDEX_NAME).read_text())["weight_map"][K_PROJ]
    tensors = load_file(shard)
    del tensors[K_PROJ]
    save_file(tensors, shard)
    # the shard is not damaged
    assert f"lacks the tensor {K_PROJ}" in _refused(lambda: Checkpoint(folder).check(ARGS))


def test_a_wrong_shape_is_named(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", ARGS)
    _rewrite(folder, lambda tensors: tensors.update({K_PROJ: tensors[K_PROJ][:-1].clone()}))
    message = _refused(lambda: Checkpoint(folder).check(ARGS))
    assert K_PROJ in message
    assert str(folder / SINGLE_NAME) in message
    assert "(15, 32)" in message
    assert "(16, 32)" in message


@pytest.mark.parametrize("keep", [0, 4, 50, 0.5, -1])
def test_a_truncated_file_is_named(tmp_path: Path, keep: float) -> None:
    folder = write_checkpoint(tmp_path / "model", ARGS)
    path = folder / SINGLE_NAME
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * keep) if keep == 0.5 else int(keep)])
    assert str(path) in _refused(lambda: Checkpoint(folder).check(ARGS))
    assert str(path) in _refused(lambda: StageWorker.load(tiny_plan(ARGS).stages[0], folder))


def test_a_truncated_shard_is_named(tmp_path: Path) -> None:
    folder = _shard(write_checkpoint(tmp_path / "model", ARGS))
    path = folder / "model-00002-of-00003.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    assert str(path) in _refused(lambda: Checkpoint(folder).check(ARGS))


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    folder = _shard(write_checkpoint(tmp_path / "model", ARGS))
    path = folder / "model-00002-of-00003.safetensors"
    path.unlink()
    message = _refused(lambda: Checkpoint(folder).check(ARGS))
    assert str(path) in message
    assert "missing" in message


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": 3}', '{"weight_map": ["a"]}'])
def test_a_broken_index_is_named(tmp_path: Path, text: str) -> None:
    folder = _shard(write_checkpoint(tmp_path / "model", ARGS))
    (folder / INDEX_NAME).write_text(text)
    assert str(folder / INDEX_NAME) in _refused(lambda: Checkpoint(folder))


def test_pickles_are_refused_unopened(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", ARGS)
    torch.save(load_file(folder / SINGLE_NAME), folder / "pytorch_model.bin")
    (folder / SINGLE_NAME).unlink()
    (folder / "consolidated.00.pth").write_bytes(b"not even a pickle")
    message = _refused(lambda: StageWorker.load(tiny_plan(ARGS).stages[0], folder))
    assert str(folder) in message
    assert "safetensors" in message


# Weights: what is read


@pytest.mark.parametrize(
    "args", [ARGS, DENSE, tiny_args(n_layers=3, tied=True)], ids=["mixtral", "mistral", "tied"]
)
@pytest.mark.parametrize("sharded", [False, True])
def test_stages_read_what_was_written(tmp_path: Path, args: ModelArgs, sharded: bool) -> None:
    model = random_model(args)
    folder = write_checkpoint(tmp_path / "model", args, model)
    if sharded:
        _shard(folder)
    assert read_model_args(folder) == args
    Checkpoint(folder).check(args)
    read: dict[str, torch.Tensor] = {}
    for stage in tiny_plan(args, 3).stages:
        read |= loaded_state(StageWorker.load(stage, folder))
    written = model.state_dict()
    assert read.keys() == written.keys()
    assert all(torch.equal(read[name], written[name]) for name in written)


@pytest.mark.parametrize("made", [False, True])
@pytest.mark.parametrize("args", [ARGS, DENSE], ids=["mixtral", "mistral"])
def test_matrices_are_packed_while_they_are_read(
    tmp_path: Path, args: ModelArgs, made: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A piece at a time: as long as one is packed no other is in memory, and no matrix as a
    whole.
    """
    weights: WeightSource = RandomWeights() if made else write_checkpoint(tmp_path / "model", args)
    plan = tiny_plan(args, dtype="bfloat16").stages[0]
    monkeypatch.setattr(tensor_specs, "MAX_CHUNK_ELEMENTS", 500)
    load = random_state if isinstance(weights, RandomWeights) else Checkpoint(weights).load
    expected = load(
        partial(stage_tensors, args, range(3)),
        weights=WeightFormat("bfloat16", stored="float32"),
        device="cpu",
    )
    pieces: list[weakref.ref[torch.Tensor]] = []
    pack_rows = PackedMatmul.pack_rows

    def watched(matmul: PackedMatmul, rows_BK: torch.Tensor, *rest: Any) -> None:
        assert not any(earlier() is not None for earlier in pieces)
        assert rows_BK.numel() <= 500
        pieces.append(weakref.ref(rows_BK))
        pack_rows(matmul, rows_BK, *rest)

    packed_matmul(torch.bfloat16, torch.bfloat16)  # its self test packs too
    monkeypatch.setattr(PackedMatmul, "pack_rows", watched)
    worker = StageWorker.load(plan, weights)
    assert len(pieces) > 2 * sum(
        isinstance(module, PackedLinear) for module in worker.model.modules()
    )
    state = loaded_state(worker)
    assert all(torch.equal(state[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize(
    ("stored", "wanted"),
    [("bfloat16", "float32"), ("float32", "bfloat16"), ("float16", "bfloat16")],
)
def test_weights_come_in_the_wanted_dtype(tmp_path: Path, stored: str, wanted: str) -> None:
    folder = write_checkpoint(tmp_path / "model", DENSE)
    dtype = getattr(torch, stored)
    _rewrite(
        folder,
        lambda tensors: tensors.update(
            {name: tensor.to(dtype) for name, tensor in tensors.items()}
        ),
    )
    assert Checkpoint(folder).check(DENSE) == stored
    state = Checkpoint(folder).load(
        partial(stage_tensors, DENSE, range(3)), WeightFormat(wanted, stored=wanted), "cpu"
    )
    expected = {
        name: tensor.to(dtype).to(getattr(torch, wanted))
        for name, tensor in random_model(DENSE).state_dict().items()
    }
    assert {tensor.dtype for tensor in state.values()} == {getattr(torch, wanted)}
    assert all(torch.equal(state[name], expected[name]) for name in expected)


@pytest.mark.parametrize("with_compiler", [True, False])
def test_in_float32_matrices_in_bfloat16_stay_as_they_are(
    with_compiler: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits are those of the same numbers in float32, and weights take half the memory."""
    if with_compiler and packed_linear.packed_matmul(torch.float32, torch.bfloat16) is None:
        pytest.skip("the kernel in C needs a compiler")
    if not with_compiler:
        monkeypatch.setattr(packed_linear, "packed_matmul", lambda *_: None)
    folder = write_checkpoint(tmp_path / "model", ARGS)
    _rewrite(
        folder,
        lambda tensors: tensors.update(
            {name: tensor.bfloat16().float() for name, tensor in tensors.items()}
        ),
    )
    ids = random_ids(40, 1, ARGS.vocab_size)
    expected_TV = teacher_forced(folder, ids, "float32")
    _rewrite(
        folder,
        lambda tensors: tensors.update(
            {name: tensor.bfloat16() for name, tensor in tensors.items()}
        ),
    )
    args = replace(ARGS, dtype=Checkpoint(folder).check(ARGS))
    (folder / "config.json").write_text(json.dumps(to_hf_config(args)))
    as_stored_TV = teacher_forced(folder, ids, "float32")
    assert (
        torch.equal(as_stored_TV, expected_TV)
        if with_compiler
        else torch.allclose(as_stored_TV, expected_TV, atol=1e-5)
    )
    worker = StageWorker.load(tiny_plan(args).stages[0], folder)
    sizes = {name: tensor.itemsize for name, tensor in loaded_state(worker).items()}
    assert {name for name, size in sizes.items() if size == 4} == {
        name for name in sizes if "norm" in name
    }


def test_several_dtypes_of_matrices_are_held_in_float32(tmp_path: Path) -> None:
    """Whatever the configuration says; a norm in another one does not count."""
    folder = write_checkpoint(tmp_path / "model", DENSE)
    says_bfloat16 = replace(DENSE, dtype="bfloat16")
    norms = {spec.name for spec in _specs(DENSE) if len(spec.shape) == 1}
    _rewrite(
        folder,
        lambda tensors: tensors.update(
            {n: t if n in norms else t.half() for n, t in tensors.items()}
        ),
    )
    assert Checkpoint(folder).check(says_bfloat16) == "float16"
    _rewrite(folder, lambda tensors: tensors.update({K_PROJ: tensors[K_PROJ].bfloat16()}))
    assert Checkpoint(folder).check(says_bfloat16) == "float32"
    state = loaded_state(
        StageWorker.load(tiny_plan(replace(DENSE, dtype="float32")).stages[0], folder)
    )
    stored = load_file(folder / SINGLE_NAME)
    assert all(
        torch.equal(state[s.parameter][s.rows], stored[s.name].float()) for s in _specs(DENSE)
    )


def test_matrices_are_not_rounded_to_what_the_plan_expects(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", DENSE)
    plan = tiny_plan(replace(DENSE, dtype="bfloat16")).stages[0]
    message = _refused(lambda: StageWorker.load(plan, folder))
    assert (
        "is torch.float32, and the plan is for torch.bfloat16, as of another checkpoint" in message
    )


@pytest.mark.parametrize("args", [ARGS, DENSE], ids=["mixtral", "mistral"])
@pytest.mark.parametrize("quantize", [None, *Quantization])
def test_matrices_of_one_product_lie_one_after_the_other(
    tmp_path: Path, args: ModelArgs, quantize: Quantization | None
) -> None:
    """Every tensor in its rows, every row of every parameter one tensor's."""
    folder = write_checkpoint(tmp_path / "model", args)
    stored = load_file(folder / SINGLE_NAME)
    state = Checkpoint(folder).load(
        partial(stage_tensors, args, range(3)),
        WeightFormat("float32", stored="float32", quantize=quantize),
        "cpu",
    )
    owned = {name: torch.zeros(len(tensor)) for name, tensor in state.items()}
    for spec in _specs(args):
        held, owner = state[spec.parameter][spec.rows].float(), owned[spec.parameter]
        if quantize and spec.quantizable:
            scale_N = state[spec.scale_parameter][spec.rows]
            owned[spec.scale_parameter][spec.rows] += 1
            # half of what lies between two numbers at most
            step = 0.51 if quantize is Quantization.INT8 else 16.1
            assert (
                (held * scale_N[:, None] - stored[spec.name]).abs() <= scale_N[:, None] * step
            ).all()
        else:
            assert torch.equal(held, stored[spec.name])
        owner[spec.rows] += 1
    assert all((count == 1).all() for count in owned.values())
    merged = {spec.parameter.rsplit(".", 2)[1] for spec in _specs(args) if spec.parameter_rows}
    assert merged == {"wqkv", "w13"}


class Requested:
    """safe_open that writes down which tensors are read, and from which file."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def __call__(self, path: Path, framework: str) -> AbstractContextManager[Any]:
        names = self.names

        class Recording(AbstractContextManager[Any]):
            def __enter__(self) -> "Recording":
                self.file = safe_open(path, framework=framework)
                self.file.__enter__()
                return self

            def __exit__(self, *error: Any) -> None:
                self.file.__exit__(*error)

            def keys(self) -> list[str]:
                return list(self.file.keys())

            def get_slice(self, name: str) -> Any:  # safetensors' slice has no type
                names.append(name)
                return self.file.get_slice(name)

        return Recording()


@pytest.mark.parametrize(
    "args", [ARGS, tiny_args(n_layers=3, moe=False, tied=True)], ids=["mixtral", "tied mistral"]
)
@pytest.mark.parametrize("sharded", [False, True])
def test_a_stage_reads_only_its_own_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, args: ModelArgs, sharded: bool
) -> None:
    folder = write_checkpoint(tmp_path / "model", args)
    all_names = sorted(load_file(folder / SINGLE_NAME))
    if sharded:
        _shard(folder)
    plan = tiny_plan(args, 3)
    requested: list[list[str]] = []
    for stage in plan.stages:
        recorder = Requested()
        monkeypatch.setattr(tensor_file, "safe_open", recorder)
        StageWorker.load(stage, folder)
        requested.append(recorder.names)
    for layer, names in enumerate(requested):
        ends = ["model.embed_tokens.weight"] if layer == 0 else []
        if layer == 2:
            ends = [
                "model.norm.weight",
                "model.embed_tokens.weight" if args.tied_embeddings else "lm_head.weight",
            ]
        own = [name for name in all_names if name.startswith(f"model.layers.{layer}.")]
        assert sorted(names) == sorted([*own, *ends])  # each of them once


@pytest.mark.parametrize(
    "args", [ARGS, tiny_args(n_layers=3, moe=False, tied=True)], ids=["mixtral", "tied mistral"]
)
@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
def test_a_stage_reads_no_more_bytes_than_its_weights_have(
    tmp_path: Path, args: ModelArgs, stored: str
) -> None:
    """As they are stored; and in the order that needs the least memory for what a tensor is copied
    from.
    """
    write_random_checkpoint(tmp_path / "model", replace(args, dtype=stored), Layout.HUGGING_FACE)
    for stage in tiny_plan(args, 3).stages:
        received = _received(stage, tmp_path / "model")
        read, loaded = (sum(sizes) for sizes in zip(*received, strict=True))
        assert loaded == stage.weight_bytes
        assert read == stage.weight_bytes * DTYPE_BYTES[stored] // DTYPE_BYTES[stage.dtype]
        assert received == sorted(received, reverse=True)


def _received(stage: StagePlan, folder: Path) -> list[tuple[int, int]]:
    """Bytes of every tensor as it is stored and as it is loaded."""
    received: list[tuple[int, int]] = []
    StageWorker.load(stage, folder, on_tensor=lambda read, loaded: received.append((read, loaded)))
    return received


def test_looking_reads_no_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_checkpoint(tmp_path / "model", ARGS)
    recorder = Requested()
    monkeypatch.setattr(tensor_file, "safe_open", recorder)
    found = Checkpoint(folder)
    assert {spec.name for spec in _specs()} <= set(found.files)
    assert recorder.names == []


# config.json


def test_no_folder_and_no_config(tmp_path: Path) -> None:
    assert str(tmp_path / "nowhere") in _refused(lambda: read_model_args(tmp_path / "nowhere"))
    message = _refused(lambda: read_model_args(tmp_path))
    assert str(tmp_path) in message
    assert "config.json" in message


@pytest.mark.parametrize("data", [b"{", b"", b"\xff\xfe\x00", b"[1]", b"3"])
def test_a_config_that_is_no_json_object(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "config.json").write_bytes(data)
    message = _refused(lambda: read_model_args(tmp_path))
    assert str(tmp_path / "config.json") in message
    assert "JSON" in message


def _changed(**changes: Any) -> dict[str, Any]:  # JSON values
    return {**to_hf_config(ARGS), **changes}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"architectures": ["LlamaForCausalLM"]},
            ["LlamaForCausalLM", "MistralForCausalLM", "MixtralForCausalLM"],
        ),
        ({"architectures": None}, ["MistralForCausalLM"]),
        ({"hidden_act": "gelu"}, ["gelu", "silu"]),
        ({"quantization_config": {"quant_method": "gptq"}}, ["quantized"]),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}},
            ["original_max_position_embeddings"],
        ),
        (
            {"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}},
            ["linear", "yarn"],
        ),
        ({"dtype": "float8_e4m3fn"}, ["float8_e4m3fn", "bfloat16"]),
        ({"num_key_value_heads": 3}, ["4", "3", "heads"]),
        ({"head_dim": 7}, ["head_dim", "7"]),
        ({"hidden_size": 0}, ["dim", "0"]),
        ({"num_hidden_layers": "3"}, ["config.json", "n_layers", "'3'"]),
        ({"sliding_window": -4}, ["window", "-4"]),
        ({"num_experts_per_tok": 5}, ["5", "4", "experts"]),
        ({"layer_types": ["sliding_attention"]}, ["windows", "1", "3"]),
    ],
)
def test_an_unsupported_config_says_why(changes: dict[str, Any], words: list[str]) -> None:
    message = _refused(lambda: from_hf_config(_changed(**changes)))
    assert [word for word in words if word not in message] == []


@pytest.mark.parametrize(
    "changes", [{"rms_norm_eps": "x"}, {"rope_parameters": "x"}, {"architectures": 5}]
)
def test_a_value_of_the_wrong_type_is_refused(changes: dict[str, Any]) -> None:
    assert "config.json" in _refused(lambda: from_hf_config(_changed(**changes)))


@pytest.mark.parametrize(
    "key",
    [
        "hidden_size",
        "num_hidden_layers",
        "intermediate_size",
        "num_attention_heads",
        "vocab_size",
        "num_local_experts",
    ],
)
def test_a_missing_key_is_named(key: str) -> None:
    config = _changed()
    del config[key]
    message = _refused(lambda: from_hf_config(config, source="x/config.json"))
    assert key in message
    assert "x/config.json" in message


COMMON: dict[str, Any] = {
    "architectures": ["MixtralForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "num_attention_heads": 32,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "rms_norm_eps": 1e-5,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
    "vocab_size": 32000,
}
MIXTRAL = ModelArgs(
    dim=4096,
    n_layers=32,
    head_dim=128,
    hidden_dim=14336,
    n_heads=32,
    n_kv_heads=8,
    norm_eps=1e-5,
    vocab_size=32000,
    rope_theta=1e6,
    max_seq_len=32768,
    windows=(None,) * 32,
    moe=MoeArgs(8, 2),
    dtype="float16",
    eos_token_ids=(2,),
)


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_theta": 1e6, "torch_dtype": "float16"},
        {"rope_theta": 1e6, "rope_scaling": None, "torch_dtype": "float16"},
        {"rope_theta": 1000000, "torch_dtype": "torch.float16", "head_dim": None},
        {
            "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"},
            "dtype": "float16",
            "head_dim": 128,
        },
    ],
    ids=["transformers 4", "4 with null scaling", "4 with null head_dim", "transformers 5"],
)
def test_both_spellings_mean_the_same(spelling: dict[str, Any]) -> None:
    assert from_hf_config({**COMMON, **spelling}) == MIXTRAL


def test_spellings_that_are_not_the_default() -> None:
    config = {
        **COMMON,
        "architectures": ["MistralForCausalLM"],
        "dtype": "bfloat16",
        "eos_token_id": [2, 5],
    }
    config |= {"rope_theta": 10_000.0}
    args = from_hf_config(
        {**config, "sliding_window": 4096, "head_dim": 160, "tie_word_embeddings": True}
    )
    assert args.windows == (4096,) * 32
    assert (args.head_dim, args.moe) == (160, None)
    assert args.tied_embeddings
    assert (args.eos_token_ids, args.dtype, args.rope_theta) == ((2, 5), "bfloat16", 10_000.0)
    kinds = ["full_attention", "sliding_attention"] * 16
    args = from_hf_config({**config, "sliding_window": 1024, "layer_types": kinds})
    assert args.windows == (None, 1024) * 16


@pytest.mark.parametrize(
    "key", ["rms_norm_eps", "num_key_value_heads", "sliding_window", "rope_theta", "hidden_size"]
)
def test_a_key_that_would_have_to_be_guessed_is_named(key: str) -> None:
    config = {
        **COMMON,
        "architectures": ["MistralForCausalLM"],
        "sliding_window": None,
        "rope_theta": 10_000.0,
    }
    from_hf_config(config)
    with pytest.raises(CheckpointError, match=f"lacks the key '{key}'"):
        from_hf_config({k: v for k, v in config.items() if k != key})


@pytest.mark.parametrize(
    "changes",
    [
        {"layer_types": ["odd_attention"] * 32},
        {"sliding_window": 16.0},
        {"sliding_window": True},
        {"eos_token_id": [None]},
        # of another model
        {"rms_norm_eps": float("nan")},
        {"rms_norm_eps": -1.0},
        {"rope_theta": 0.0},
        {"rope_theta": float("inf")},
        {"attention_bias": True},
        {"layer_types": ["sliding_attention"] * 32},
    ],
)
def test_values_that_look_almost_right_and_other_models_are_refused(
    changes: dict[str, object],
) -> None:
    config = {
        **COMMON,
        "architectures": ["MistralForCausalLM"],
        "sliding_window": None,
        "rope_theta": 10_000.0,
    }
    with pytest.raises(CheckpointError):
        from_hf_config(config | changes)


def test_quantized_weights_are_refused(tmp_path: Path) -> None:
    args = tiny_args(n_layers=1)
    folder = write_checkpoint(tmp_path, args)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.self_attn.q_proj.weight"] = tensors[
        "model.layers.0.self_attn.q_proj.weight"
    ].to(torch.int8)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"q_proj\.weight .* is of type I8"):
        Checkpoint(folder).check(args)


# Layouts


def test_a_tensor_that_the_model_does_not_have_is_named(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", ARGS)
    _rewrite(
        folder,
        lambda tensors: tensors.update({"model.layers.3.input_layernorm.weight": torch.ones(32)}),
    )
    message = _refused(lambda: Checkpoint(folder).check(ARGS))
    assert str(folder / SINGLE_NAME) in message
    assert "model.layers.3.input_layernorm.weight" in message


def test_what_old_writers_stored_next_to_the_weights_does_not_matter(tmp_path: Path) -> None:
    args = tiny_args(n_layers=3, tied=True)
    folder = write_checkpoint(tmp_path / "model", args)
    extra = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
        "lm_head.weight": torch.ones(96, 32),
    }
    _rewrite(folder, lambda tensors: tensors.update(extra))
    Checkpoint(folder).check(args)


def test_a_folder_with_both_layouts_is_read_as_hugging_faces(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", ARGS)
    (folder / "params.json").write_text("{}")
    assert detect_layout(folder) is Layout.HUGGING_FACE
    (folder / "consolidated.safetensors").write_bytes(b"")
    assert detect_layout(folder) is Layout.HUGGING_FACE
    (folder / "params.json").write_text('{"_sliding_window": [null, 8]}')
    assert detect_layout(folder) is Layout.HUGGING_FACE, "with the windows of params.json"
    (folder / SINGLE_NAME).unlink()
    assert detect_layout(folder) is Layout.MISTRAL, (
        "config.json came with it, the weights of its layout did not"
    )


@pytest.mark.parametrize(
    "name",
    ["params.json", "generation_config.json", "special_tokens_map.json", "added_tokens.json"],
)
def test_nodes_compare_every_file_from_which_the_model_follows(name: str, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", ARGS)
    found = [checkpoint_digest_without_weights(folder)]
    for content in ("{}", "{ }"):
        (folder / name).write_text(content)
        found.append(checkpoint_digest_without_weights(folder))
    assert len({*found}) == 3
    assert [file for file, _ in found[-1]] == sorted({"config.json", name})


def test_a_tensor_in_two_files_is_named(tmp_path: Path) -> None:
    write_random_checkpoint(tmp_path / "model", ARGS, Layout.MISTRAL)
    one = tmp_path / "model" / "consolidated.safetensors"
    one.rename(one.with_name("consolidated-00001-of-00002.safetensors"))
    save_file(
        {"norm.weight": torch.ones(32)}, one.with_name("consolidated-00002-of-00002.safetensors")
    )
    message = _refused(lambda: Checkpoint(tmp_path / "model"))
    assert "norm.weight" in message
    assert "consolidated-00002-of-00002.safetensors" in message


def test_an_index_cannot_name_files_elsewhere(tmp_path: Path) -> None:
    folder = _shard(write_checkpoint(tmp_path / "model", ARGS))
    (folder / INDEX_NAME).write_text(json.dumps({"weight_map": {K_PROJ: "../secret.safetensors"}}))
    assert "'../secret.safetensors', which is not in its folder" in _refused(
        lambda: Checkpoint(folder)
    )


PARAMS = to_mistral_params(ARGS)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dim": None}, ["dim"]),
        ({"n_layers": "three"}, ["params.json", "n_layers", "'three'"]),
        ({"model_type": "mamba"}, ["mamba", "transformer"]),
        ({"quantization": {"qformat_weight": "int4"}}, ["qformat_weight int4"]),
        ({"lora": {"rank": 8}}, ["lora"]),
        (
            {"moe": {"num_experts": 4, "num_experts_per_tok": 2, "num_shared_experts": 1}},
            ["moe.num_shared_experts"],
        ),
        ({"moe": {"num_experts": 4}}, ["num_experts_per_tok"]),
        ({"sliding_window": [None, 24]}, ["sliding_window", "2", "3"]),
        ({"activation": "gelu"}, ["gelu", "silu"]),
        (
            {"llama_4_scaling": {"original_max_position_embeddings": 8, "beta": 0.1}},
            ["llama_4_scaling"],
        ),
        ({"dtype": "float8"}, ["float8", "bfloat16"]),
    ],
)
def test_unsupported_params_say_why(changes: dict[str, Any], words: list[str]) -> None:
    message = _refused(lambda: from_mistral_params(PARAMS | changes))
    assert [word for word in words if word not in message] == []


@pytest.mark.parametrize(
    "key",
    [
        "dim",
        "n_layers",
        "head_dim",
        "hidden_dim",
        "n_heads",
        "n_kv_heads",
        "norm_eps",
        "vocab_size",
    ],
)
def test_missing_params_are_named(key: str) -> None:
    assert f"lacks the key '{key}'" in _refused(
        lambda: from_mistral_params({k: v for k, v in PARAMS.items() if k != key})
    )
