"""Measured load: how many tokens each expert was given, as ``tramontane experts --json`` writes it."""

import json
from pathlib import Path

from tramontane.proto.errors import ConfigError
from tramontane.proto.expert_plan import ExpertId

ExpertLoad = tuple[tuple[int, ...], ...]  # tokens by expert, by layer
KEY = "tokens_per_expert"


def load_as_data(load: ExpertLoad) -> dict[str, object]:
    """What ``read_load`` reads."""
    return {KEY: [list(row) for row in load]}


def read_load(path: Path) -> ExpertLoad:
    """Raises ConfigError for a file that holds no such thing."""
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))[KEY]
        load = tuple(tuple(row) for row in rows)
    except OSError as error:
        raise ConfigError(f"--expert-load {path} cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ConfigError(f"--expert-load {path} is not what tramontane experts --json writes: it has no {KEY}") from error
    if not all(type(tokens) is int and tokens >= 0 for row in load for tokens in row):
        raise ConfigError(f"--expert-load {path}: {KEY} must be a list of whole numbers for each layer")
    return load


def given_load(given: object) -> object:
    """A path is read at once: where the configuration is used the file may not be there."""
    return read_load(Path(given)) if isinstance(given, str | Path) else given


def by_expert(load: ExpertLoad) -> dict[ExpertId, float]:
    """As the planner wants it. An expert that was never chosen may yet be: it counts as a token."""
    return {ExpertId(layer, expert): max(float(n), 1.0) for layer, row in enumerate(load) for expert, n in enumerate(row)}
