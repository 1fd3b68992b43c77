"""Configurations of the Mistral family and of its quantized variants: one verdict for all commands,
and transformers' numbers.

``serve`` runs up to the point where it plans its pipeline, before Ray is started: by then it has
checked its own settings, and the model's folder.
"""

import importlib
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from configurations import CONFIGURATIONS, HUGGING_FACE, MISTRALS_OWN, REFUSED
from safetensors.torch import save_file
from typer.testing import CliRunner

from tramontane.cluster.cli.main import app
from tramontane.cluster.serving import server
from tramontane.llm import LLM
from tramontane.proto.errors import CheckpointError, ConfigError
from tramontane.proto.model_args import ModelArgs
from tramontane.proto.model_folder import read_model_args
from tramontane.proto.weight_format import Quantization
from tramontane.workers.model.rotary import rotary_frequencies

# transformers multiplies the scores of Mistral's latent models by the square of YaRN's magnitude
# since July 2026, four months after the weights. ``params.json`` of the same models says
# apply_scale = false, and other servers compute it so, too.
WITHOUT_MAGNITUDE = {"Mistral4"}
Refused = Callable[..., str]


def _folder(tmp_path: Path, name: str) -> Path:
    return CONFIGURATIONS[name].write(tmp_path / "model")


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[ModelArgs]:
    """Make ``serve`` end where it would plan its pipeline; what it has read of the model is in the
    list.
    """
    found: list[ModelArgs] = []

    def end(_config: object, args: ModelArgs, *_: object) -> None:
        found.append(args)
        raise ConfigError("the folder was accepted")

    monkeypatch.setattr(server, "pipeline_spec", end)
    monkeypatch.setattr(server, "check_ports", lambda *_: None)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    return found


@pytest.mark.parametrize("name", REFUSED)
def test_a_folder_is_refused_by_plan_and_serve_in_the_same_words(
    name: str, tmp_path: Path, refused: Refused, served: list[ModelArgs]
) -> None:
    folder = _folder(tmp_path, name)
    message = refused("plan", "--model", folder, "--gpu-memory", "80GiB", "--gpus", 8)
    assert CONFIGURATIONS[name].refused in message
    assert str(folder) in message
    for load_format in ("dummy", "auto"):
        assert refused("serve", "--model", folder, "--load-format", load_format) == message
    assert not served


def test_tensors_of_a_single_file_are_read_in_its_header(tmp_path: Path, refused: Refused) -> None:
    """As those in an index are."""
    folder = _folder(tmp_path, "mistral-7b-v0.3")
    layer = "model.layers.0.self_attn.q_proj"
    save_file(
        {f"{layer}.qweight": torch.zeros(1), f"{layer}.qzeros": torch.zeros(1)},
        folder / "model.safetensors",
    )
    message = refused("plan", "--model", folder, "--gpu-memory", "80GiB")
    assert (
        f"{folder / 'model.safetensors'}: weights quantized as AWQ or GPTQ, as the tensor"
        in message
    )


@pytest.mark.parametrize(
    "name",
    ["AWQ in a file of its own", "GGUF", "EAGLE with a model's name", "MLX", "pickles", "Medusa"],
)
def test_every_other_entry_says_the_same(name: str, tmp_path: Path, refused: Refused) -> None:
    folder = _folder(tmp_path, name)
    message = refused("plan", "--model", folder, "--gpu-memory", "80GiB", "--gpus", 8)
    for command in (["generate", "--local", "The"], ["chat", "--local"], ["bench", "--local"]):
        assert refused(command[0], "--model", folder, *command[1:]) == message
    with pytest.raises(CheckpointError) as error:
        LLM(folder, local=True)
    assert str(error.value) in message


def test_a_file_in_gguf_is_refused(tmp_path: Path, refused: Refused) -> None:
    (tmp_path / "mistral.gguf").touch()
    assert "is a file in GGUF" in refused(
        "plan", "--model", tmp_path / "mistral.gguf", "--gpu-memory", "80GiB"
    )


@pytest.mark.parametrize("name", [*HUGGING_FACE, *MISTRALS_OWN])
def test_a_folder_is_accepted_by_plan_and_serve(
    name: str, tmp_path: Path, refused: Refused, served: list[ModelArgs]
) -> None:
    folder, args = _folder(tmp_path, name), read_model_args(tmp_path / "model")
    result = CliRunner().invoke(
        app, ["plan", "--model", str(folder), "--gpu-memory", "2000GiB", "--gpus", "1", "--json"]
    )
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["parameters"] == args.num_parameters
    assert "the folder was accepted" in refused(
        "serve", "--model", folder, "--load-format", "dummy"
    )
    assert served == [args]


def test_other_files_than_weights_and_no_weights_at_all_are_no_reason(tmp_path: Path) -> None:
    folder = _folder(tmp_path, "mistral-7b-v0.3")
    (folder / "training_args.bin").touch()
    read_model_args(folder)
    (folder / "hf_quant_config.json").write_text(
        '{"quantization": {"quant_algo": null, "kv_cache_quant_algo": "FP8"}}'
    )
    assert read_model_args(folder).quantization is None
    (folder / "model.safetensors.index.json").write_text(
        '{"weight_map": {"model.norm.weight": "a.safetensors"}}'
    )
    (folder / "pytorch_model.bin").touch()
    (folder / "mistral.gguf").touch()
    read_model_args(folder)


def test_a_damaged_index_is_left_to_the_reader_of_weights(tmp_path: Path) -> None:
    folder = _folder(tmp_path, "mistral-7b-v0.3")
    (folder / "model.safetensors.index.json").write_text("{")
    assert read_model_args(folder).n_layers == 32


@pytest.mark.parametrize(
    "name",
    [name for name, each in HUGGING_FACE.items() if "quantization_config" in str(each.files)],
)
def test_fp8_is_read(name: str, tmp_path: Path) -> None:
    assert read_model_args(_folder(tmp_path, name)).quantization is Quantization.FP8


# ---- what is derived, against transformers


def _theirs(folder: Path) -> dict[str, Any]:
    """Return what transformers' classes derive from the folder's ``config.json`` and
    ``generation_config.json``.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        whole = transformers.AutoConfig.from_pretrained(folder)
    text = whole.get_text_config()
    kind = type(text).__name__.removesuffix("Config")
    modeling = importlib.import_module(type(text).__module__.replace("configuration", "modeling"))
    rotary = getattr(modeling, f"{kind}RotaryEmbedding")(text)
    attention = getattr(modeling, f"{kind}Attention")(_small(text), 0)
    sliding = [getattr(text, "sliding_window", None)] * text.num_hidden_layers
    if kinds := getattr(text, "layer_types", None):
        sliding = [
            window if each == "sliding_attention" else None
            for window, each in zip(sliding, kinds, strict=True)
        ]
    generation = transformers.GenerationConfig.from_model_config(whole).eos_token_id
    if (folder / "generation_config.json").is_file():
        generation = transformers.GenerationConfig.from_pretrained(folder).eos_token_id
    ends = {
        end
        for each in (generation, text.eos_token_id)
        for end in (each if isinstance(each, list) else [each])
    }
    is_latent = hasattr(text, "kv_lora_rank")
    rope = text.rope_parameters
    return {
        "head size": text.qk_head_dim if is_latent else attention.head_dim,
        "windows": [None] * text.num_hidden_layers if is_latent else sliding,
        "context": text.max_position_embeddings,
        "end ids": ends - {None},
        "frequencies": rotary.inv_freq,
        "attention factor": rotary.attention_scaling,
        "llama 4 beta": rope.get("llama_4_scaling_beta") or 0.0,
        "score factor": 1.0
        if kind in WITHOUT_MAGNITUDE
        else attention.scaling * (text.qk_head_dim if is_latent else attention.head_dim) ** 0.5,
    }


def _small(text: Any) -> Any:  # a configuration
    """Return the configuration with narrow matrices: attention is made only for its factor."""
    small = type(text)(
        **(
            text.to_dict()
            | {"hidden_size": 8, "q_lora_rank": 8 if hasattr(text, "q_lora_rank") else None}
        )
    )
    small.head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return small


def _ours(args: ModelArgs) -> dict[str, Any]:
    return {
        "head size": args.latent.qk_head_dim if args.latent else args.head_dim,
        "windows": list(args.windows),
        "context": args.max_seq_len,
        "end ids": set(args.eos_token_ids),
        "frequencies": rotary_frequencies(args),
        "attention factor": args.rope_scaling.attention_factor if args.rope_scaling else 1.0,
        "llama 4 beta": args.rope_scaling.llama4_beta if args.rope_scaling else 0.0,
        "score factor": args.rope_scaling.score_factor if args.rope_scaling else 1.0,
    }


def _is_equal(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, torch.Tensor):
        return torch.allclose(ours.float(), theirs.float(), rtol=1e-6, atol=0)
    return bool(ours == (pytest.approx(theirs) if isinstance(ours, float) else theirs))


@pytest.mark.parametrize("name", [*HUGGING_FACE, *MISTRALS_OWN])
def test_what_is_derived_is_transformers(name: str, tmp_path: Path) -> None:
    ours = _ours(read_model_args(_folder(tmp_path, name)))
    theirs = _theirs(CONFIGURATIONS[CONFIGURATIONS[name].twin or name].write(tmp_path / "theirs"))
    theirs |= CONFIGURATIONS[name].expected
    differing = {value for value in ours if not _is_equal(ours[value], theirs[value])}
    assert not differing, [(each, ours[each], theirs[each]) for each in differing]


def test_there_are_enough() -> None:
    assert len(CONFIGURATIONS) >= 81
    assert len(REFUSED) >= 12


@pytest.mark.parametrize("name", ["quant_config.json", "quantize_config.json"])
@pytest.mark.parametrize(
    "given",
    [
        {"config_groups": [1]},
        {"config_groups": {"a": 3}},
        {"config_groups": {"a": {"weights": "x"}}},
    ],
)
def test_a_malformed_quantization_file_is_named_in_one_line(
    name: str, given: dict[str, Any], tmp_path: Path
) -> None:
    folder = _folder(tmp_path, "mistral-7b-v0.3")
    (folder / name).write_text(json.dumps(given))
    with pytest.raises(CheckpointError, match=rf"{name} holds a value of the wrong type: [^\n]+$"):
        read_model_args(folder)
