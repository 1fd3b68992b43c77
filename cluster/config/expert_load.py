"""Measured expert load: tokens routed to each expert, as ``tramontane experts --json`` writes it."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from tramontane.proto.errors import ConfigError
from tramontane.proto.plan import ExpertId

ExpertLoad = tuple[tuple[int, ...], ...]  # tokens by expert, by layer
KEY = "tokens_per_expert"
MAX_TOKENS = 2**53  # of one expert: larger integers are not exact in JSON
NO_EXPERTS = "no_experts"  # the error code of GET /experts


@dataclass(frozen=True, slots=True)
class MeasuredLoad:
    """The sum over ``num_pipelines`` pipelines, each since its stages were loaded. Empty if the model has no experts."""

    tokens: ExpertLoad
    num_pipelines: int

    @classmethod
    def summed(cls, loads: Iterable[ExpertLoad]) -> Self:
        """Sum the loads of pipelines of one model: ((1, 2), (3, 0)) and ((1, 0), (0, 1)) are ((2, 2), (3, 1))."""
        all_loads = list(loads)
        by_layer = zip(*all_loads, strict=True)
        return cls(tuple(tuple(map(sum, zip(*rows, strict=True))) for rows in by_layer), len(all_loads))

    @classmethod
    def from_data(cls, data: Any) -> Self:  # noqa: ANN401 - whatever came as JSON
        """Read the answer of ``GET /experts``. Raises ValueError, TypeError or LookupError for anything else."""
        tokens, num_pipelines = parse_load(data), data["pipelines"]
        lengths = {len(row) for row in tokens}
        if len(lengths) != 1 or 0 in lengths or type(num_pipelines) is not int:
            raise ValueError("no load of experts")
        return cls(tokens, num_pipelines)


def load_as_data(load: ExpertLoad) -> dict[str, object]:
    """Return the form that ``read_load`` reads."""
    return {KEY: [list(row) for row in load]}


def parse_load(data: Any) -> ExpertLoad:  # noqa: ANN401 - whatever came as JSON
    """Read the tokens per expert and layer.

    Raises TypeError or LookupError if there is no list of lists, ValueError if these are not whole numbers up to 2**53.
    """
    load = tuple(tuple(row) for row in data[KEY])
    if not all(type(tokens) is int and 0 <= tokens <= MAX_TOKENS for row in load for tokens in row):
        raise ValueError("must be a list of whole numbers for each layer")
    return load


def read_load(path: Path, name: str = "--expert-load") -> ExpertLoad:
    """Read a file that ``tramontane experts --json`` wrote. Raises ConfigError for others."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{name} {path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{name} {path} is not what tramontane experts --json writes: it is not JSON") from error
    try:
        return parse_load(data)
    except ValueError as error:
        raise ConfigError(f"{name} {path}: {KEY} {error}") from error
    except (TypeError, LookupError) as error:
        raise ConfigError(f"{name} {path} is not what tramontane experts --json writes: it has no {KEY}") from error


def parse_load_option(value: object) -> object:
    """Return the load of a file, which is read at once: processes that use the configuration may not have it."""
    return read_load(Path(value)) if isinstance(value, str | Path) else value


def per_expert(load: ExpertLoad) -> dict[ExpertId, float]:
    """Return the load by expert, for the planner. An expert without tokens counts as one, since it may get some later."""
    return {ExpertId(layer, expert): max(float(n), 1.0) for layer, row in enumerate(load) for expert, n in enumerate(row)}
