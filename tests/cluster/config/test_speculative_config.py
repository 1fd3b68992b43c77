"""The value of ``--speculative-config``: vLLM's JSON object, or a mapping of a configuration
file.
"""

from pathlib import Path

import pytest

from tramontane.cluster.config.engine_config import ConfigFile, EngineConfig
from tramontane.proto.errors import ConfigError
from tramontane.proto.plan import SpeculativeConfig


def _parsed(value: object) -> SpeculativeConfig | None:
    return EngineConfig.build(None, {"speculative_config": value}).speculative_config


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ('{"method": "ngram", "num_speculative_tokens": 5}', SpeculativeConfig(5, 2, 5)),
        ({"num_speculative_tokens": 3, "prompt_lookup_min": 7}, SpeculativeConfig(3, 7, 7)),
        ({"num_speculative_tokens": 3, "prompt_lookup_max": 1}, SpeculativeConfig(3, 1, 1)),
        (
            {"num_speculative_tokens": 3, "prompt_lookup_max": 4, "prompt_lookup_min": 4},
            SpeculativeConfig(3, 4, 4),
        ),
        (None, None),
    ],
)
def test_what_is_given_and_what_follows_from_it(
    value: object, expected: SpeculativeConfig | None
) -> None:
    assert _parsed(value) == expected
    config = EngineConfig.build(None, {"speculative_config": value})
    assert config.num_drafts == (expected.max_drafts() if expected else 0)
    again = EngineConfig.build(None, config.model_dump(mode="json", include={"speculative_config"}))
    assert again.speculative_config == expected, "as a Ray Serve config has it"


def test_a_draft_model_is_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes with another working directory get its absolute path."""
    value = '{"method": "draft_model", "model": "small", "num_speculative_tokens": 4}'
    config = EngineConfig.build(None, {"speculative_config": value})
    assert config.speculative_config == SpeculativeConfig(4, 0, 0, "draft_model", "small")
    assert (config.num_draft_models, EngineConfig().num_draft_models) == (1, 0)
    monkeypatch.chdir(tmp_path)
    again = EngineConfig.build(None, config.model_dump(mode="json", include={"speculative_config"}))
    assert again.speculative_config == config.speculative_config, "as a Ray Serve config has it"
    absolute = config.with_absolute_paths().speculative_config
    assert absolute is not None
    assert absolute.model == str(tmp_path / "small")
    with pytest.raises(
        ConfigError,
        match="--local keeps everything in one process, so --speculative-config cannot have",
    ):
        EngineConfig.build(None, {"speculative_config": value, "local": True})


def test_a_file_has_a_mapping(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(
        "speculative-config:\n  method: ngram\n  num_speculative_tokens: 4\n"
    )
    config = EngineConfig.build(ConfigFile.read(tmp_path / "c.yaml"), {})
    assert config.speculative_config == SpeculativeConfig(4, 2, 5)


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("ngram", r"is 'ngram'; it must be a JSON object such as"),
        ("[1]", r"is .*; it must be a JSON object"),
        ("[" * 100_000, r"is '\[{59}; it must be a JSON object"),
        (
            '{"num_speculative_tokens": 5, "methode": "ngram"}',
            r"has 'methode'; its keys are method, model, num_speculative_tokens",
        ),
        (
            {"num_speculative_tokens": 5, "method": "eagle"},
            (
                r"method is 'eagle'; it must be ngram, which drafts from the text itself, or"
                r" draft_model"
            ),
        ),
        ({"method": "ngram"}, r"has no num_speculative_tokens"),
        (
            {"num_speculative_tokens": 0},
            r"num_speculative_tokens is 0; it must be a whole number from 1 to 32",
        ),
        (
            {"num_speculative_tokens": "5"},
            r"num_speculative_tokens is '5'; it must be a whole number",
        ),
        (
            {"num_speculative_tokens": True},
            r"num_speculative_tokens is True; it must be a whole number",
        ),
        (
            {"num_speculative_tokens": 5, "prompt_lookup_min": 0},
            r"prompt_lookup_min is 0; it must be a whole number",
        ),
        (
            {"num_speculative_tokens": 5, "prompt_lookup_min": 4, "prompt_lookup_max": 3},
            r"prompt_lookup_max is 3, less than prompt_lookup_min, which is 4",
        ),
        ({"num_speculative_tokens": 5, "prompt_lookup_max": "9"}, r"prompt_lookup_max is '9'"),
        (
            {"num_speculative_tokens": 5, "prompt_lookup_max": 65},
            r"prompt_lookup_max is 65; it must be .* from 1 to 64",
        ),
        ({"num_speculative_tokens": 5, "model": "small"}, r"model is for method draft_model"),
        (
            {"num_speculative_tokens": 5, "method": "draft_model"},
            r"has no model: method draft_model needs the folder",
        ),
        (
            {"num_speculative_tokens": 5, "method": "draft_model", "model": ""},
            r"model is ''; it must be the folder",
        ),
        (
            {"num_speculative_tokens": 5, "method": "draft_model", "model": 5},
            r"model is 5; it must be the folder",
        ),
        (
            {
                "num_speculative_tokens": 5,
                "method": "draft_model",
                "model": "small",
                "prompt_lookup_max": 3,
            },
            r"prompt_lookup_max is for method ngram",
        ),
    ],
)
def test_what_is_wrong_is_named(value: object, problem: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"--speculative-config\S* {problem}|--speculative-config: {problem}"
    ):
        _parsed(value)
