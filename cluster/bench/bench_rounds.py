"""The rounds of a benchmark: some to warm up, then those that count."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from tramontane.cluster.bench.results import Figures, RequestTrace, middle
from tramontane.proto.errors import ConfigError
from tramontane.proto.plan import ClusterPlan
from tramontane.proto.step import StageTiming
from tramontane.router.engine.stage_usage import HopTime, UsageMeter


@dataclass(frozen=True, slots=True)
class PipelineUse:
    """What only our own engine tells: how its stages were used."""

    plan: ClusterPlan
    usage: UsageMeter
    hops: tuple[HopTime, ...]
    timings: tuple[StageTiming, ...]


@dataclass(frozen=True, slots=True)
class Round:
    traces: Sequence[RequestTrace]
    pipeline: PipelineUse | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """One round of several, the one of median speed, so that its figures belong together; ``speeds`` are of all, in order."""

    round: Round
    figures: Figures
    speeds: tuple[float, ...]
    num_warmups: int


@dataclass(frozen=True, slots=True)
class Rounds:
    num_warmups: int
    num_repeats: int

    def __post_init__(self) -> None:
        for name, value, least in (("warmups", self.num_warmups, 0), ("repeats", self.num_repeats, 1)):
            if value < least:
                raise ConfigError(f"--{name} is {value}; it must be at least {least}")

    @property
    def total(self) -> int:
        return self.num_warmups + self.num_repeats

    async def run(self, one: Callable[[int], Awaitable[Round]]) -> Outcome:
        """One after the other; each is told its number, from 0."""
        rounds = [await one(number) for number in range(self.total)][self.num_warmups :]
        figures = [Figures.of(done.traces) for done in rounds]
        speeds = tuple(each.tokens_per_s for each in figures)
        chosen = middle(speeds)
        return Outcome(rounds[chosen], figures[chosen], speeds, self.num_warmups)
