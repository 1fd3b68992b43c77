"""Measurements of a pipeline for the planner: load of experts, busy shares of stages, and the files
that hold them.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self, TypeVar

from tramontane.proto.errors import ConfigError
from tramontane.proto.plan import ExpertId

# tokens by expert, by layer; an empty row of a layer without experts
ExpertLoad = tuple[tuple[int, ...], ...]
Parsed = TypeVar("Parsed")
KEY = "tokens_per_expert"
MAX_TOKENS = 2**53  # of one expert: larger integers are not exact in JSON
NO_EXPERTS = "no_experts"  # the error code of GET /experts


@dataclass(frozen=True, slots=True)
class MeasuredLoad:
    """The sum over ``num_pipelines`` pipelines, each since its stages were loaded. Empty if the
    model has no experts.
    """

    tokens: ExpertLoad
    num_pipelines: int

    @classmethod
    def summed(cls, loads: Iterable[ExpertLoad]) -> Self:
        """Sum the loads of pipelines of one model: ((1, 2), (3, 0)) and ((1, 0), (0, 1)) are ((2,
        2), (3, 1)).
        """
        all_loads = list(loads)
        by_layer = zip(*all_loads, strict=True)
        return cls(
            tuple(tuple(map(sum, zip(*rows, strict=True))) for rows in by_layer), len(all_loads)
        )

    @classmethod
    def from_data(cls, data: Any) -> Self:  # any JSON
        """Read the answer of ``GET /experts``. Raises ValueError, TypeError or LookupError for
        other data.
        """
        tokens, num_pipelines = parse_load(data), data["pipelines"]
        # the first layers of a model may have no experts
        lengths = {len(row) for row in tokens if row}
        if len(lengths) != 1 or type(num_pipelines) is not int:
            raise ValueError("no load of experts")
        return cls(tokens, num_pipelines)


def load_as_data(load: ExpertLoad) -> dict[str, object]:
    """Return the form that ``read_load`` reads."""
    return {KEY: [list(row) for row in load]}


def parse_load(data: Any) -> ExpertLoad:  # any JSON
    """Read the tokens per expert and layer.

    Raises TypeError or LookupError if the list of lists is missing, ValueError if its elements are
    not whole numbers up to 2**53.
    """
    load = tuple(tuple(row) for row in data[KEY])
    if not all(type(tokens) is int and 0 <= tokens <= MAX_TOKENS for row in load for tokens in row):
        raise ValueError("must be a list of whole numbers for each layer")
    return load


def read_load(path: Path, name: str = "--expert-load") -> ExpertLoad:
    """Read a file written by ``tramontane experts --json``. Raises ConfigError for other files."""
    return _read(path, name, "tramontane experts --json", KEY, parse_load)


def _read(path: Path, name: str, command: str, key: str, parse: Callable[[Any], Parsed]) -> Parsed:
    """Read a file written by a command. Raises ConfigError if ``key`` is missing, or ``parse``
    raises ValueError.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{name} {path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{name} {path} is not what {command} writes: it is not JSON") from error
    try:
        return parse(data)
    except ValueError as error:
        raise ConfigError(f"{name} {path}: {key} {error}") from error
    except (TypeError, LookupError) as error:
        raise ConfigError(f"{name} {path} is not what {command} writes: it has no {key}") from error


def _parse_list(value: object) -> object:
    """Return the list of a configuration file that arrives as the text of a flag; other values
    unchanged.
    """
    if isinstance(value, str) and value.startswith("["):
        with suppress(ValueError):
            return json.loads(value)
    return value


def parse_load_option(value: object) -> object:
    """Return the load of a file, which is read at once: processes that use the configuration may
    not have it.
    """
    value = _parse_list(value)
    return read_load(Path(value)) if isinstance(value, str | Path) else value


def per_expert(load: ExpertLoad) -> dict[ExpertId, float]:
    """Return the load by expert, for the planner. An expert without tokens counts as one, since it
    may get some later.
    """
    return {
        ExpertId(layer, expert): max(float(n), 1.0)
        for layer, row in enumerate(load)
        for expert, n in enumerate(row)
    }


@dataclass(frozen=True, slots=True)
class StageDevice:
    """Device on which a stage runs, and its speed relative to the other stages', if that is
    known.
    """

    name: str
    speed: int | None = None


@dataclass(frozen=True, slots=True)
class StageTime:
    """Layers ``first`` to ``last`` of a stage that ran, and its busy time, relative to the other
    stages' and on a like device.
    """

    first: int
    last: int
    busy: float


def parse_stage_times(data: Any) -> tuple[StageTime, ...]:  # any JSON
    """Read the list ``stages`` of ``tramontane bench --json`` or ``generate --json``.

    A stage that is busy for 25 % of the time at speed 3 does the same work as one that is busy for
    75 % at speed 1: both 0.75.

    Raises TypeError or LookupError if the list is missing, ValueError if it is not from a pipeline
    of two stages or more, or if the devices differ and their speeds are not known.
    """
    times = tuple(
        StageTime(stage["layers"][0], stage["layers"][1], stage["busy_share"])
        for stage in data["stages"]
    )
    starts = [0, *(time.last + 1 for time in times)]
    are_numbers = all(type(n) is int for time in times for n in (time.first, time.last))
    if not are_numbers or any(
        time.first != start or time.last < start for time, start in zip(times, starts, strict=False)
    ):
        raise ValueError("must have the first and the last layer of each stage, without gaps")
    if len(times) < 2:
        raise ValueError(
            "must have two stages or more: with one, the output head cannot be separated from the"
            " layers"
        )
    if not all(type(time.busy) in (int, float) and 0 < time.busy < float("inf") for time in times):
        raise ValueError("must have a busy_share above 0 for each stage")
    speeds = _speeds(
        [stage.get("device") for stage in data["stages"]],
        [stage.get("speed") for stage in data["stages"]],
    )
    return tuple(
        replace(time, busy=time.busy * speed) for time, speed in zip(times, speeds, strict=True)
    )


def _speeds(devices: Sequence[object], speeds: Sequence[object]) -> list[int]:
    """Return the speeds, 1 where all devices are alike. Raises ValueError if they are not known."""
    if not all(isinstance(device, str) and device for device in devices):
        raise ValueError(
            "have no device, by which their times are compared; run tramontane bench --json again"
        )
    known = [speed for speed in speeds if type(speed) is int and speed > 0]
    if len(known) == len(speeds):
        return known
    if any(speed is not None for speed in speeds):
        raise ValueError("must have a speed above 0 for each stage, or none")
    if len(unlike := dict.fromkeys(map(str, devices))) > 1:
        raise ValueError(
            f"ran on unlike devices ({'; '.join(unlike)}) whose speeds are not known; run"
            " tramontane bench --json again with --gpu-speed, or on devices of one kind"
        )
    return [1] * len(devices)


def parse_stage_times_option(value: object) -> object:
    """Return the times in a file, which is read at once: processes that use the configuration may
    not have it.
    """
    value = _parse_list(value)
    if not isinstance(value, str | Path):
        return value
    return _read(
        Path(value), "--stage-times", "tramontane bench --json", "stages", parse_stage_times
    )
