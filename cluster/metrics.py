"""What Ray exports of a pipeline for Prometheus. Its own names put ``ray_`` before these, and ``_total`` behind counters."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from ray.util.metrics import Counter


class Counting(Protocol):
    """As much of Ray's ``Counter`` as is used here."""

    def inc(self, value: float, tags: dict[str, str]) -> None: ...


class Follower:
    """Makes a counter follow numbers that are counted elsewhere: it is given what they grew by since the last time."""

    def __init__(self, counter: Counting) -> None:
        self._counter = counter
        self._told: dict[tuple[str, ...], float] = {}

    def tell(self, value: float, tags: dict[str, str]) -> None:
        """``value``: all that was counted so far under these tags."""
        series = tuple(tags.values())
        grown = value - self._told.get(series, 0)
        if grown > 0:  # Ray's counter refuses to be given nothing
            self._counter.inc(grown, tags)
            self._told[series] = value


class ExpertTokens:
    """Tokens that the experts of a stage's layers were given."""

    def __init__(self, counter: Counting, pipeline: str, stage_id: int) -> None:
        self._tokens = Follower(counter)
        self._tags = {"pipeline": pipeline, "stage": str(stage_id)}

    def tell(self, load: Mapping[int, Sequence[int]]) -> None:
        """``load``: tokens of each expert so far, by the global number of their layer."""
        for layer, tokens in load.items():
            for expert, number in enumerate(tokens):
                self._tokens.tell(number, self._tags | {"layer": str(layer), "expert": str(expert)})


class ExpertWork:
    """What an expert actor has done."""

    def __init__(self, busy_s: Counting, rows: Counting, pipeline: str, actor_id: int) -> None:
        self._busy_s, self._rows = Follower(busy_s), Follower(rows)
        self._tags = {"pipeline": pipeline, "actor": str(actor_id)}

    def tell(self, busy_s: float, num_rows: int) -> None:
        """All so far."""
        self._busy_s.tell(busy_s, self._tags)
        self._rows.tell(num_rows, self._tags)


def expert_tokens(pipeline: str, stage_id: int) -> ExpertTokens:
    """Exported by the process that calls this."""
    tags = ("pipeline", "stage", "layer", "expert")
    return ExpertTokens(Counter("tramontane_expert_tokens", "Tokens that an expert was given.", tags), pipeline, stage_id)


def expert_work(pipeline: str, actor_id: int) -> ExpertWork:
    """Exported by the process that calls this."""
    tags = ("pipeline", "actor")
    busy_s = Counter("tramontane_expert_busy_seconds", "Seconds in which an expert actor's experts worked.", tags)
    rows = Counter("tramontane_expert_rows", "Rows of hidden states that an expert actor was given.", tags)
    return ExpertWork(busy_s, rows, pipeline, actor_id)
