"""Measured load: how many tokens each expert was given, as ``tramontane experts --json`` writes it."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from tramontane.proto.errors import ConfigError
from tramontane.proto.plan import ExpertId

ExpertLoad = tuple[tuple[int, ...], ...]  # tokens by expert, by layer
KEY, PIPELINES = "tokens_per_expert", "pipelines"
MOST = 2**53  # tokens
NO_EXPERTS = "no_experts"  # the code of a door's error


@dataclass(frozen=True, slots=True)
class MeasuredLoad:
    """Of so many pipelines together, each counted since its stages were loaded. No layers: the model has no experts."""

    tokens: ExpertLoad
    num_pipelines: int

    @classmethod
    def summed(cls, loads: Iterable[ExpertLoad]) -> Self:
        """Of pipelines of the same model: ((1, 2), (3, 0)) and ((1, 0), (0, 1)) are ((2, 2), (3, 1))."""
        each = list(loads)
        by_layer = zip(*each, strict=True)
        return cls(tuple(tuple(map(sum, zip(*rows, strict=True))) for rows in by_layer), len(each))

    def as_data(self) -> dict[str, object]:
        """What ``from_data`` reads; also what ``parse_load`` does."""
        return load_as_data(self.tokens) | {PIPELINES: self.num_pipelines}

    @classmethod
    def from_data(cls, data: Any) -> Self:  # noqa: ANN401 - whatever came as JSON
        """Raises ValueError, TypeError or LookupError for anything else."""
        tokens, num_pipelines = parse_load(data), data[PIPELINES]
        lengths = {len(row) for row in tokens}
        if len(lengths) != 1 or 0 in lengths or type(num_pipelines) is not int:
            raise ValueError("no load of experts")
        return cls(tokens, num_pipelines)


def load_as_data(load: ExpertLoad) -> dict[str, object]:
    """What ``read_load`` reads."""
    return {KEY: [list(row) for row in load]}


def parse_load(data: Any) -> ExpertLoad:  # noqa: ANN401 - whatever came as JSON
    """Raises TypeError or LookupError where there is no list of lists, ValueError where they are not whole numbers (to 2**53)."""
    load = tuple(tuple(row) for row in data[KEY])
    if not all(type(tokens) is int and 0 <= tokens <= MOST for row in load for tokens in row):
        raise ValueError("must be a list of whole numbers for each layer")
    return load


def read_load(path: Path, name: str = "--expert-load") -> ExpertLoad:
    """Raises ConfigError for a file that holds no such thing."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{name} {path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{name} {path} is not what tramontane experts --json writes: it is no JSON") from error
    try:
        return parse_load(data)
    except ValueError as error:
        raise ConfigError(f"{name} {path}: {KEY} {error}") from error
    except (TypeError, LookupError) as error:
        raise ConfigError(f"{name} {path} is not what tramontane experts --json writes: it has no {KEY}") from error


def parse_load_option(given: object) -> object:
    """A path is read at once: where the configuration is used the file may not be there."""
    return read_load(Path(given)) if isinstance(given, str | Path) else given


def per_expert(load: ExpertLoad) -> dict[ExpertId, float]:
    """As the planner wants it. An expert that was never chosen may yet be: it counts as a token."""
    return {ExpertId(layer, expert): max(float(n), 1.0) for layer, row in enumerate(load) for expert, n in enumerate(row)}
