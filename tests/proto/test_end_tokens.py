"""Tokens that end an answer: those of every file that names some, as transformers and
mistral-common understand these files.
"""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from mistral_common.tokens.tokenizers.tekken import Tekkenizer
from tokenizer_files import small_tekken, thinking_tekken
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from tramontane.cluster.config.engine_config import EngineConfig
from tramontane.cluster.pipeline.engine import validate_model
from tramontane.proto.end_tokens import tokenizer_eos_ids
from tramontane.proto.hf_config import SUPPORTED_ARCHITECTURES, WRAPPERS
from tramontane.proto.model_folder import read_model_args
from tramontane.proto.presets import PRESETS, tiny_variant
from tramontane.workers.weights.config_writer import to_hf_config, to_mistral_params

CONFIG = to_hf_config(tiny_variant(PRESETS["mistral-nemo-12b"])) | {"vocab_size": 200}
TEXT_TYPES = {
    "mistral": "mistral-nemo-12b",
    "ministral3": "ministral-3-8b",
    "mistral4": "mistral-small-4-119b",
}
CHATML = {
    "eos_token": "<|im_end|>",
    "added_tokens_decoder": {"2": {"content": "</s>"}, "150": {"content": "<|im_end|>"}},
}


def _write(folder: Path, **files: Any) -> Path:  # JSON values
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def _without_eos(config: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key != "eos_token_id"}


def _theirs(folder: Path) -> tuple[int, ...]:
    """Return the ids that transformers' ``generate`` ends at, from the configuration alone."""
    value = GenerationConfig.from_model_config(AutoConfig.from_pretrained(folder)).eos_token_id
    return () if value is None else (value,) if isinstance(value, int) else tuple(value)


def _published(architecture: str) -> dict[str, Any]:
    for args in map(tiny_variant, PRESETS.values()):
        config = to_hf_config(args)
        if config["architectures"] == [architecture]:
            return config
    config = to_hf_config(tiny_variant(PRESETS["mistral-small-4-119b"]))
    config["rope_parameters"]["llama_4_scaling_beta"] = 0.0
    return config | {"architectures": [architecture], "model_type": "deepseek_v3"}


@pytest.mark.parametrize(
    "architecture", [name for name in SUPPORTED_ARCHITECTURES if name not in WRAPPERS]
)
@pytest.mark.parametrize(
    "said", [{}, {"eos_token_id": None}, {"eos_token_id": 7}, {"eos_token_id": [5, 7]}], ids=str
)
def test_a_configuration_that_says_nothing_has_the_default_of_its_class(
    architecture: str, said: dict[str, Any], tmp_path: Path
) -> None:
    _write(tmp_path, config=_without_eos(_published(architecture)) | said)
    assert read_model_args(tmp_path).eos_token_ids == _theirs(tmp_path)
    if not said:
        assert read_model_args(tmp_path).eos_token_ids == (
            (1,) if "Deepseek" in architecture else (2,)
        )


@pytest.mark.parametrize("kind", TEXT_TYPES)
@pytest.mark.parametrize("inner", [{}, {"eos_token_id": 7}, {"eos_token_id": None}], ids=str)
@pytest.mark.parametrize("outer", [{}, {"eos_token_id": 9}], ids=str)
def test_of_a_wrapper_both_configurations_count(
    kind: str, inner: dict[str, Any], outer: dict[str, Any], tmp_path: Path
) -> None:
    text = (
        _without_eos(to_hf_config(tiny_variant(PRESETS[TEXT_TYPES[kind]])))
        | {"model_type": kind}
        | inner
    )
    wrapper = {
        "architectures": ["Mistral3ForConditionalGeneration"],
        "model_type": "mistral3",
        "text_config": text,
    }
    _write(tmp_path, config=wrapper | outer)
    ours, theirs = read_model_args(tmp_path).eos_token_ids, _theirs(tmp_path)
    assert set(theirs) <= set(ours)
    assert set(ours) == set(theirs) | {
        value for value in (*inner.values(), *outer.values()) if value is not None
    }


def test_the_generation_config_counts_in_both_layouts(tmp_path: Path) -> None:
    _write(tmp_path, config=CONFIG, generation_config={"eos_token_id": [2, 9]})
    assert read_model_args(tmp_path).eos_token_ids == (2, 9)
    (tmp_path / "config.json").unlink()
    _write(tmp_path, params=to_mistral_params(tiny_variant(PRESETS["mistral-nemo-12b"])))
    assert read_model_args(tmp_path).eos_token_ids == (2, 9)
    _write(tmp_path, tokenizer_config=CHATML)
    assert read_model_args(tmp_path).eos_token_ids == (2, 9, 150)


# ---- the tokenizer's


VOCAB = {"<unk>": 0, "<s>": 1, "</s>": 2, "a": 3, "b": 4, "<|plain|>": 5}
TOKENIZER = {
    "version": "1.0",
    "added_tokens": [
        {
            "id": i,
            "content": name,
            "special": True,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "single_word": False,
        }
        for i, name in ((0, "<unk>"), (1, "<s>"), (2, "</s>"), (6, "<|im_end|>"))
    ],
    "model": {"type": "BPE", "vocab": VOCAB, "merges": [], "unk_token": "<unk>"},
}
FAST = {"tokenizer_class": "PreTrainedTokenizerFast"}
AS_OBJECT = {
    "content": "<|im_end|>",
    "lstrip": False,
    "rstrip": False,
    "normalized": False,
    "single_word": False,
}
DECODER = {
    str(token["id"]): {key: token[key] for key in token if key != "id"}
    for token in TOKENIZER["added_tokens"]
}  # type: ignore[index,attr-defined]


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (
            {
                "tokenizer_config": FAST
                | {"eos_token": "<|im_end|>", "added_tokens_decoder": DECODER}
            },
            (6,),
        ),
        ({"tokenizer_config": FAST | {"eos_token": "<|im_end|>"}}, (6,)),
        ({"tokenizer_config": FAST | {"eos_token": AS_OBJECT | {"__type": "AddedToken"}}}, (6,)),
        (
            {
                "tokenizer_config": FAST | {"eos_token": "</s>"},
                "special_tokens_map": {"eos_token": "<|im_end|>"},
            },
            (6,),
        ),
        (
            {
                "tokenizer_config": FAST | {"eos_token": "</s>"},
                "special_tokens_map": {"eos_token": AS_OBJECT},
            },
            (6,),
        ),
        ({"tokenizer_config": FAST, "special_tokens_map": {"eos_token": "<|im_end|>"}}, (6,)),
        ({"tokenizer_config": FAST | {"eos_token": "<|plain|>"}}, (5,)),
        ({"tokenizer_config": FAST | {"eos_token": "</s>"}}, (2,)),
        (
            {
                "tokenizer_config": FAST | {"eos_token": "</s>", "added_tokens_decoder": DECODER},
                "special_tokens_map": {"eos_token": "<|im_end|>"},
            },
            (2,),
        ),
        ({"tokenizer_config": FAST}, ()),
    ],
)
def test_the_eos_token_is_that_of_transformers(
    files: dict[str, Any], expected: tuple[int, ...], tmp_path: Path
) -> None:
    _write(tmp_path, tokenizer=TOKENIZER, **files)
    theirs = AutoTokenizer.from_pretrained(tmp_path).eos_token_id
    assert expected == (() if theirs is None else (theirs,))
    assert tokenizer_eos_ids(tmp_path, 200) == expected


def test_older_fine_tunes_have_their_tokens_in_a_file_of_their_own(tmp_path: Path) -> None:
    _write(
        tmp_path,
        tokenizer_config={"eos_token": "<|im_end|>"},
        added_tokens={"<|im_end|>": 32_000, "<|im_start|>": 32_001},
    )
    assert tokenizer_eos_ids(tmp_path, 32_002) == (32_000,)
    assert tokenizer_eos_ids(tmp_path, 32_000) == (), "the model cannot produce it"


def test_the_eos_of_tekken_is_that_of_mistral_common(tmp_path: Path) -> None:
    for write in (small_tekken, thinking_tekken):
        write(tmp_path)
        path = tmp_path / "tekken.json"
        theirs = Tekkenizer.from_file(path).eos_id
        assert tokenizer_eos_ids(tmp_path, 10_000) == (theirs,)
    moved = json.loads(path.read_text())
    moved["vocab"][300]["token_str"] = moved["vocab"][301]["token_str"] = "</s>"  # pieces of text
    moved["vocab"][302]["token_str"] = "{"
    ranks = {token["token_str"]: token for token in moved["special_tokens"]}
    ranks["</s>"]["rank"], ranks["[INST]"]["rank"] = ranks["[INST]"]["rank"], ranks["</s>"]["rank"]
    path.write_text(json.dumps(moved))
    assert tokenizer_eos_ids(tmp_path, 10_000) == (Tekkenizer.from_file(path).eos_id,) == (3,)


@pytest.mark.parametrize(
    "damage",
    [
        '{"eos_token": "x", "added_tokens_decoder": {"%s": {"content": "x"}}}' % ("9" * 5000),
        "[",
        "[1]",
        '{"eos_token": 3}',
        '{"eos_token": "x", "added_tokens_decoder": [1]}',
    ],
)
def test_damaged_files_name_no_token(damage: str, tmp_path: Path) -> None:
    """Loading the tokenizer reports them."""
    for name in ("tokenizer_config", "special_tokens_map", "added_tokens", "tokenizer", "tekken"):
        (tmp_path / f"{name}.json").write_text(damage)
    (tmp_path / "tekken.json").write_text(
        '{"special_tokens": [3, {"token_str": "</s>", "rank": "2"}]}'
    )
    assert tokenizer_eos_ids(tmp_path, 200) == ()


# ---- what the pipeline gets


def test_a_chatml_fine_tune_ends_at_im_end(tmp_path: Path) -> None:
    """Its config.json keeps the base model's 2."""
    _write(tmp_path, config=CONFIG | {"eos_token_id": 2}, tokenizer_config=CHATML)
    config = EngineConfig.build(None, {"model": tmp_path, "load_format": "dummy"})
    assert validate_model(config).eos_token_ids == (2, 150)


def test_a_model_whose_answers_nothing_ends_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = EngineConfig.build(None, {"model": tmp_path, "load_format": "dummy"})
    _write(tmp_path, config=CONFIG | {"eos_token_id": None})
    with caplog.at_level(logging.WARNING):
        assert validate_model(config).eos_token_ids == ()
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    message = record.getMessage()
    assert f"nothing ends an answer of {tmp_path}" in message
    assert (
        "add eos_token_id to config.json, or give stop or stop_token_ids with each request"
        in message
    )
    caplog.clear()
    _write(tmp_path, tokenizer_config=CHATML)
    validate_model(config)
    assert not caplog.records
