"""How what is counted elsewhere gets to Ray's metrics: once a second, and only what is new."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from ray.util import metrics as of_ray

from tramontane.cluster.observability.metric_table import EXPERT_BUSY, EXPERT_ROWS, EXPERT_TOKENS, PREFIX, Metric

Tags = dict[str, str]


class Counting(Protocol):
    """As much of Ray's ``Counter`` as is used here."""

    def inc(self, value: float, tags: Tags) -> None: ...


class Setting(Protocol):
    """Likewise of its ``Gauge``. Ray forgets one that is not set again within two of its reports."""

    def set(self, value: float, tags: Tags) -> None: ...


class Observing(Protocol):
    """Likewise of its ``Histogram``."""

    def observe(self, value: float, tags: Tags) -> None: ...


class Metrics(Protocol):
    """Makes them. In a process there is one for each name."""

    def counter(self, metric: Metric) -> Counting: ...
    def gauge(self, metric: Metric) -> Setting: ...
    def histogram(self, metric: Metric) -> Observing: ...


class RayMetrics:
    """Exported by the process that makes them."""

    def counter(self, metric: Metric) -> Counting:
        return of_ray.Counter(PREFIX + metric.name, metric.meaning, metric.labels)

    def gauge(self, metric: Metric) -> Setting:
        return of_ray.Gauge(PREFIX + metric.name, metric.meaning, metric.labels)

    def histogram(self, metric: Metric) -> Observing:
        return of_ray.Histogram(PREFIX + metric.name, metric.meaning, list(metric.boundaries), metric.labels)


class Follower:
    """Makes a counter follow numbers that are counted elsewhere: it is given what they grew by since the last time."""

    def __init__(self, counter: Counting) -> None:
        self._counter = counter
        self._told: dict[tuple[str, ...], float] = {}

    def tell(self, value: float, tags: Tags) -> None:
        """``value``: all that was counted so far under these tags."""
        series = tuple(tags.values())
        grown = value - self._told.get(series, 0)
        if grown > 0:  # Ray's counter refuses to be given nothing
            self._counter.inc(grown, tags)
            self._told[series] = value

    def begin_anew(self) -> None:
        """What it follows from now on is counted from nothing."""
        self._told.clear()


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
    return ExpertTokens(RayMetrics().counter(EXPERT_TOKENS), pipeline, stage_id)


def expert_work(pipeline: str, actor_id: int) -> ExpertWork:
    """Exported by the process that calls this."""
    made = RayMetrics()
    return ExpertWork(made.counter(EXPERT_BUSY), made.counter(EXPERT_ROWS), pipeline, actor_id)
