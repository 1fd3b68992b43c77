"""The value of ``--speculative-config``: a JSON object with vLLM's keys."""

import json
from collections.abc import Mapping
from typing import Any

from tramontane.proto.errors import ConfigError
from tramontane.proto.plan import SpeculativeConfig

MAX_DRAFTS, MAX_LOOKUP = 32, 64
DEFAULT_LOOKUP_MIN, DEFAULT_LOOKUP_MAX = 2, 5
SPECULATIVE_KEYS = (
    "method",
    "model",
    "num_speculative_tokens",
    "prompt_lookup_min",
    "prompt_lookup_max",
)


def parse_speculative_config(value: object) -> SpeculativeConfig | None:
    """Return the configuration from vLLM's JSON object, or a file's mapping. Raises ConfigError."""
    if value is None or isinstance(value, SpeculativeConfig):
        return value
    try:
        keys = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        keys = value
    if not isinstance(keys, dict) or not all(isinstance(key, str) for key in keys):
        raise ConfigError(
            f"--speculative-config is {value!r:.60}; it must be a JSON object such as "
            '{"method": "ngram", "num_speculative_tokens": 5}'
        )
    if unknown := [key for key in keys if key not in SPECULATIVE_KEYS]:
        raise ConfigError(
            f"--speculative-config has {unknown[0]!r}; its keys are {', '.join(SPECULATIVE_KEYS)}"
        )
    if (method := keys.get("method", "ngram")) not in ("ngram", "draft_model"):
        raise ConfigError(
            f"--speculative-config: method is {method!r}; it must be ngram, which drafts from the"
            " text itself, or draft_model"
        )
    if keys.get("num_speculative_tokens") is None:
        raise ConfigError(
            "--speculative-config has no num_speculative_tokens: how many tokens are drafted at a"
            " time, such as 5"
        )
    _check_number("num_speculative_tokens", keys["num_speculative_tokens"], 1, MAX_DRAFTS)
    return _ngrams(keys) if method == "ngram" else _draft_model(keys)


def _ngrams(keys: Mapping[str, Any]) -> SpeculativeConfig:
    if keys.get("model"):
        raise ConfigError(
            "--speculative-config: model is for method draft_model; n-grams are of the text itself"
        )
    low, high = keys.get("prompt_lookup_min"), keys.get("prompt_lookup_max")
    low = (
        min(DEFAULT_LOOKUP_MIN, high if type(high) is int else DEFAULT_LOOKUP_MIN)
        if low is None
        else low
    )
    high = (
        max(DEFAULT_LOOKUP_MAX, low if type(low) is int else DEFAULT_LOOKUP_MAX)
        if high is None
        else high
    )
    _check_number("prompt_lookup_min", low, 1, MAX_LOOKUP)
    _check_number("prompt_lookup_max", high, 1, MAX_LOOKUP)
    if high < low:
        raise ConfigError(
            f"--speculative-config: prompt_lookup_max is {high}, less than prompt_lookup_min, which"
            f" is {low}"
        )
    return SpeculativeConfig(keys["num_speculative_tokens"], low, high)


def _draft_model(keys: Mapping[str, Any]) -> SpeculativeConfig:
    for name in ("prompt_lookup_min", "prompt_lookup_max"):
        if keys.get(name):
            raise ConfigError(f"--speculative-config: {name} is for method ngram")
    if (model := keys.get("model")) is None:
        raise ConfigError(
            "--speculative-config has no model: method draft_model needs the folder of the draft"
            " model"
        )
    if not isinstance(model, str) or not model:
        raise ConfigError(
            f"--speculative-config: model is {model!r}; it must be the folder of the draft model"
        )
    return SpeculativeConfig(keys["num_speculative_tokens"], 0, 0, "draft_model", model)


def _check_number(name: str, value: object, least: int, most: int) -> None:
    """Raise ConfigError unless the value of a key of ``--speculative-config`` is a whole number in
    this range.
    """
    if type(value) is not int or not least <= value <= most:
        raise ConfigError(
            f"--speculative-config: {name} is {value!r}; it must be a whole number from {least} to"
            f" {most}"
        )
