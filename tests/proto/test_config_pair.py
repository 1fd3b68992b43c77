"""Folders with both ``config.json`` and ``params.json``: the same model from either, and what
happens where they differ.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, Mistral4Config

from tramontane.proto.errors import CheckpointError
from tramontane.proto.hf_config import from_hf_config
from tramontane.proto.mistral_params import from_mistral_params
from tramontane.proto.model_args import ModelArgs
from tramontane.proto.model_folder import Layout, detect_layout, read_model_args
from tramontane.proto.presets import PRESETS, tiny_variant
from tramontane.workers.weights.config_writer import to_hf_config, to_mistral_params

# params.json describes no sparse attention
FAMILIES = [name for name, args in PRESETS.items() if not args.sparse]


def _folder(
    folder: Path,
    config: dict[str, Any] | None,
    params: dict[str, Any] | None,
    weights: str = "model",
) -> Path:
    folder.mkdir(exist_ok=True)
    for name, content in (("config.json", config), ("params.json", params)):
        (folder / name).unlink(missing_ok=True)
        if content is not None:
            (folder / name).write_text(json.dumps(content))
    for path in folder.glob("*.safetensors"):
        path.unlink()
    (folder / f"{weights}.safetensors").touch()
    return folder


def _as_published(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return both files of a published model, with the words that their makers use for what differs
    between the layouts.
    """
    args = PRESETS[name]
    config, params = to_hf_config(args), to_mistral_params(args)
    if yarn := args.rope_scaling:
        rope = {
            key: value
            for key, value in config["rope_parameters"].items()
            if key != "attention_factor"
        }
        is_applied = params["yarn"]["apply_scale"]
        assert is_applied == (yarn.attention_factor > 1)
        config["rope_parameters"] = rope | {
            "mscale": 1.0,
            "mscale_all_dim": 0.0 if is_applied else 1.0,
        }
    # a class of one window, with the context that such a program can have
    if len(args.window_classes) > 1:
        config |= {
            "architectures": ["MistralForCausalLM"],
            "sliding_window": None,
            "max_position_embeddings": 32_768,
        }
        del config["layer_types"]
        params = {
            key: value
            for key, value in params.items()
            if key not in ("sliding_window", "max_seq_len")
        }
        params["_sliding_window"] = list(args.windows[:4])
    return config, params


@pytest.mark.parametrize("name", FAMILIES)
def test_either_file_and_both_give_the_same_model(name: str, tmp_path: Path) -> None:
    config, params = _as_published(name)
    expected = PRESETS[name]
    assert read_model_args(_folder(tmp_path, None, params, "consolidated")) == expected
    if len(expected.window_classes) == 1:
        assert read_model_args(_folder(tmp_path, config, None)) == expected
    for weights, layout in (("model", Layout.HUGGING_FACE), ("consolidated", Layout.MISTRAL)):
        folder = _folder(tmp_path, config, params, weights)
        assert detect_layout(folder) is layout
        assert read_model_args(folder) == expected


def test_small_4_by_its_own_configuration_has_no_magnitude() -> None:
    """SGLang's test has the two numbers: 0.088388 with the factor of 1, 0.194969 with YaRN's
    (sglang, pull request 26203).
    """
    args = from_hf_config(
        Mistral4Config().to_dict() | {"architectures": ["Mistral4ForCausalLM"], "dtype": "bfloat16"}
    )
    assert args == replace(PRESETS["mistral-small-4-119b"], quantization=None)
    assert args.latent is not None
    assert args.rope_scaling is not None
    assert args.rope_scaling.score_factor * args.latent.qk_head_dim**-0.5 == pytest.approx(
        0.088388, rel=1e-5
    )
    deepseek = to_hf_config(PRESETS["mistral-small-4-119b"]) | {
        "architectures": ["DeepseekV3ForCausalLM"]
    }
    deepseek["rope_parameters"] = {
        **deepseek["rope_parameters"],
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0,
    }
    scaling = from_hf_config(deepseek).rope_scaling
    assert scaling is not None
    assert scaling.score_factor * 128**-0.5 == pytest.approx(0.194969, rel=1e-5)


@pytest.mark.parametrize(("apply_scale", "score_factor"), [(True, 2.2058), (False, 1.0)])
def test_apply_scale_decides_where_config_json_says_nothing(
    apply_scale: bool, score_factor: float, tmp_path: Path
) -> None:
    config, params = _as_published("mistral-small-4-119b")
    for key in ("mscale", "mscale_all_dim"):
        del config["rope_parameters"][key]
    params["yarn"]["apply_scale"] = apply_scale
    for weights in ("model", "consolidated"):
        scaling = read_model_args(_folder(tmp_path, config, params, weights)).rope_scaling
        assert scaling is not None
        assert (scaling.attention_factor, scaling.score_factor) == (
            1.0,
            pytest.approx(score_factor, abs=1e-4),
        )


CONTRADICTIONS = [
    (
        {"rope_theta": 1e5},
        ["rope_theta is 1000000.0 in config.json", "rope_theta is 100000.0 in params.json"],
    ),
    ({"norm_eps": 1e-6}, ["rms_norm_eps is 1e-05 in", "norm_eps is 1e-06 in"]),
    ({"dim": 2048}, ["hidden_size is 4096", "dim is 2048"]),
    ({"head_dim": 64}, ["head_dim is 128", "head_dim is 64"]),
    ({"n_kv_heads": 32}, ["num_key_value_heads is 8", "n_kv_heads is 32"]),
    ({"n_layers": 16}, ["num_hidden_layers is 32", "n_layers is 16"]),
    (
        {"moe": {"num_experts": 8, "num_experts_per_tok": 4}},
        ["num_experts_per_tok is 2", "moe.num_experts_per_tok is 4"],
    ),
    (
        {"moe": {"num_experts": 16, "num_experts_per_tok": 2}},
        ["number of experts is 8", "moe.num_experts is 16"],
    ),
    ({"sliding_window": 4096}, ["the window of layer 0 is None", "sliding_window is 4096"]),
    (
        {"yarn": {"factor": 4, "original_max_position_embeddings": 8192}},
        ["factor is None", "yarn.factor is 4", "yarn.original_max_position_embeddings is 8192"],
    ),
]


@pytest.mark.parametrize(("changes", "words"), CONTRADICTIONS, ids=lambda value: str(value)[:30])
@pytest.mark.parametrize("weights", ["model", "consolidated"])
def test_contradictions_are_refused_with_both_values(
    changes: dict[str, Any], words: list[str], weights: str, tmp_path: Path
) -> None:
    config, params = _as_published("mixtral-8x7b")
    with pytest.raises(CheckpointError, match="describe different models") as refused:
        read_model_args(_folder(tmp_path, config, params | changes, weights))
    message = str(refused.value)
    assert [
        word
        for word in [*words, str(tmp_path), "correct the file that is wrong, or remove it"]
        if word not in message
    ] == []
    assert "\n" not in message


@pytest.mark.parametrize(
    ("name", "changes", "apply_scale", "values"),
    [
        ("mistral-small-4-119b", {}, True, ("1.0", "1.4852")),
        (
            "mistral-small-4-119b",
            {"attention_factor": 1.0, "mscale": 0.0},
            False,
            ("1.4852", "1.0"),
        ),
        ("ministral-3-8b", {}, True, ("1.0", "1.2772")),
        ("devstral-2-123b", {}, False, ("1.4158", "1.0")),
    ],
)
def test_a_contradiction_about_the_magnitude_is_refused(
    name: str, changes: dict[str, float], apply_scale: bool, values: tuple[str, str], tmp_path: Path
) -> None:
    config, params = _as_published(name)
    config["rope_parameters"] |= changes
    params["yarn"]["apply_scale"] = apply_scale
    with pytest.raises(CheckpointError, match="factor of queries and keys is") as refused:
        read_model_args(_folder(tmp_path, config, params))
    message = str(refused.value)
    assert f"is {values[0]}" in message
    assert (
        f"yarn.apply_scale is {str(apply_scale).lower()} and the factor is {values[1]}" in message
    )


def test_latent_attention_is_compared_number_by_number(tmp_path: Path) -> None:
    config, params = _as_published("mistral-small-4-119b")
    for key in (
        "q_lora_rank",
        "kv_lora_rank",
        "qk_nope_head_dim",
        "qk_rope_head_dim",
        "v_head_dim",
    ):
        with pytest.raises(
            CheckpointError, match=rf"{key} is \d+ in config\.json, {key} is 96 in params\.json"
        ):
            read_model_args(_folder(tmp_path, config, params | {key: 96}))
    for key in (
        "expert_hidden_dim",
        "num_shared_experts",
        "first_k_dense_replace",
        "num_expert_groups",
        "routed_scale",
    ):
        with pytest.raises(CheckpointError, match=rf"moe\.{key} is 7 in params\.json"):
            read_model_args(_folder(tmp_path, config, params | {"moe": params["moe"] | {key: 7}}))


def test_yarn_is_compared_number_by_number(tmp_path: Path) -> None:
    config, params = _as_published("ministral-3-8b")
    changes: dict[str, Any] = {
        "factor": 8,
        "original_max_position_embeddings": 8192,
        "beta": 4,
        "alpha": 2,
    }
    for key, value in changes.items():
        changed = params | {"yarn": params["yarn"] | {key: value}}
        if key == "original_max_position_embeddings":
            changed["llama_4_scaling"] = params["llama_4_scaling"] | {key: value}
        with pytest.raises(CheckpointError, match=rf"yarn\.{key} is {value} in params\.json"):
            read_model_args(_folder(tmp_path, config, changed))
    llama4 = params["llama_4_scaling"] | {"beta": 0.2}
    with pytest.raises(CheckpointError, match=r"llama_4_scaling\.beta is 0\.2 in params\.json"):
        read_model_args(_folder(tmp_path, config, params | {"llama_4_scaling": llama4}))


def test_what_changes_no_answer_is_not_refused(tmp_path: Path) -> None:
    """What a file does not say, what the tensors show, rounding, and a window as long as the
    context.
    """
    config, params = _as_published("mistral-nemo-12b")
    expected = read_model_args(_folder(tmp_path, config, None))
    harmless: list[dict[str, Any]] = [
        {"vocab_size": 131_080},
        {"tied_embeddings": True},
        {"dtype": "float16"},
        {"sliding_window": 128_000},
        {"rope_theta": 1_000_000},
        {"norm_eps": 0.0000100000001},
        {"quantization": {"qformat_weight": "nvfp4"}},
    ]
    for changes in harmless:
        assert read_model_args(_folder(tmp_path, config, params | changes)) == expected, changes
    assert read_model_args(_folder(tmp_path, config, {})) == expected


def test_of_weights_in_mistrals_layout_what_params_json_lacks_is_of_config_json(
    tmp_path: Path,
) -> None:
    config, params = _as_published("mistral-7b-v0.1")
    for key in ("rope_theta", "sliding_window", "max_seq_len"):
        del params[key]
    config |= {
        "max_position_embeddings": 16_384,
        "eos_token_id": 7,
        "rope_parameters": {"rope_theta": 5e5},
    }
    args = read_model_args(_folder(tmp_path, config, params, "consolidated"))
    assert (args.rope_theta, args.windows, args.max_seq_len) == (5e5, (4096,) * 32, 16_384)
    assert args.eos_token_ids == (2, 7)
    config["architectures"] = ["LlavaForConditionalGeneration"]  # is not compared
    assert read_model_args(
        _folder(tmp_path, config, params, "consolidated")
    ) == from_mistral_params(params)
    with pytest.raises(CheckpointError, match="Llava"):
        read_model_args(_folder(tmp_path, config, params))


def test_a_pattern_that_config_json_contradicts_is_refused(tmp_path: Path) -> None:
    config, params = _as_published("ministral-8b")
    same_window = config | {"sliding_window": 32_768, "max_position_embeddings": 131_072}
    assert read_model_args(_folder(tmp_path, same_window, params)) == PRESETS["ministral-8b"]
    for changes in (
        {"sliding_window": 4096},
        {
            "layer_types": ["sliding_attention", "full_attention"] * 18,
            "sliding_window": 32_768,
            "max_position_embeddings": 131_072,
        },
    ):
        with pytest.raises(CheckpointError, match=r"the window of layer \d is"):
            read_model_args(_folder(tmp_path, config | changes, params))


def test_the_limit_of_programs_with_one_window_is_not_the_context(tmp_path: Path) -> None:
    """Both files of Ministral 8B state 32,768 positions, its window."""
    config, params = _as_published("ministral-8b")
    assert (
        read_model_args(_folder(tmp_path, config, params | {"max_seq_len": 32_768})).max_seq_len
        == 131_072
    )
    assert (
        read_model_args(_folder(tmp_path, config, params | {"max_seq_len": 65_536})).max_seq_len
        == 65_536
    )
    # of no published model
    smaller = (config | {"hidden_size": 2048}, params | {"dim": 2048, "max_seq_len": 32_768})
    assert read_model_args(_folder(tmp_path, *smaller)).max_seq_len == 32_768


# ---- the context's length in one file


@pytest.mark.parametrize("vocab_size", [32_000, 32_768, 32_772])
def test_mixtral_8x22b_has_its_context_and_codestral_its_own(vocab_size: int) -> None:
    """The two have the same sizes but for experts; the vocabulary of Mixtral's versions and
    fine-tunes differs.
    """
    for name, context in (("mixtral-8x22b", 65_536), ("codestral-22b", 32_768)):
        params = to_mistral_params(PRESETS[name]) | {"vocab_size": vocab_size}
        del params["max_seq_len"]
        assert from_mistral_params(params) == replace(PRESETS[name], vocab_size=vocab_size)
        assert from_mistral_params(params).max_seq_len == context


def test_a_context_that_no_file_states() -> None:
    for name in ("mistral-small-24b", "mistral-small-3.1-24b"):  # which differ in rope_theta
        params = to_mistral_params(PRESETS[name])
        del params["max_seq_len"]
        assert from_mistral_params(params) == PRESETS[name]
    unknown = to_mistral_params(tiny_variant(PRESETS["mistral-nemo-12b"]))
    del unknown["max_seq_len"]
    assert from_mistral_params(unknown).max_seq_len == 32_768
    with pytest.raises(CheckpointError, match="max_seq_len is 'long'"):
        from_mistral_params(unknown | {"max_seq_len": "long"})


YARN_128K = {  # NousResearch/Yarn-Mistral-7b-128k
    **{
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
    },
    **{
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
    },
    **{
        "num_key_value_heads": 8,
        "max_position_embeddings": 32_768,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e4,
    },
    **{
        "sliding_window": 131_072,
        "vocab_size": 32_000,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
    },
    "rope_scaling": {
        "type": "yarn",
        "factor": 16.0,
        "original_max_position_embeddings": 8192,
        "finetuned": True,
    },
}


def test_yarn_extends_the_context_that_it_starts_from() -> None:
    assert from_hf_config(YARN_128K).max_seq_len == 131_072
    longer = YARN_128K | {"max_position_embeddings": 262_144}
    assert from_hf_config(longer).max_seq_len == 262_144


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"rope_parameters": YARN_128K["rope_scaling"] | {"factor": 8.0}},
            "factor is 16.0 in rope_scaling and 8.0 in",
        ),
        (
            {"rope_scaling": None, "rope_parameters": {"rope_theta": 1e6}},
            r"rope_theta is 10000\.0, and 1000000\.0",
        ),
    ],
)
def test_one_file_that_contradicts_itself_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        from_hf_config(YARN_128K | changes)


# ---- transformers' own classes


@pytest.mark.parametrize("name", FAMILIES)
def test_transformers_derives_the_same_of_a_published_configuration(
    name: str, tmp_path: Path
) -> None:
    """Without the magnitude, which test_logits_oracle and others compare by logits."""
    config, _ = _as_published(name)
    theirs = AutoConfig.from_pretrained(_folder(tmp_path, config, None)).get_text_config()
    args: ModelArgs = read_model_args(tmp_path)
    rope = theirs.rope_parameters
    assert args.rope_theta == rope["rope_theta"]
    assert args.max_seq_len == theirs.max_position_embeddings
    assert args.eos_token_ids == tuple(theirs.eos_token_id)
    if not args.latent:
        assert args.head_dim == theirs.head_dim
    if args.rope_scaling:
        ours = (
            args.rope_scaling.factor,
            args.rope_scaling.original_max_seq_len,
            args.rope_scaling.beta_fast,
        )
        assert ours == (rope["factor"], rope["original_max_position_embeddings"], rope["beta_fast"])
