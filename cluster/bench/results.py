"""What the requests of a benchmark add up to. Pure: no clock, no network, no Ray.

The rounds of a benchmark: some to warm up, then those that count.
"""

from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Self

import numpy as np

from tramontane.proto.errors import ConfigError
from tramontane.proto.plan import PipelinePlan
from tramontane.proto.step import StageTiming
from tramontane.router.engine.stage_usage import HopTime, UsageMeter

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class Failure:
    """``kind`` is what failures are counted by: ``HTTP 429``."""

    kind: str
    message: str


@dataclass(frozen=True, slots=True)
class RequestTrace:
    """One request. All times are of one clock, in seconds.

    It counts from ``due_at``, when it was to be sent: a client that is late does not make the server look fast.
    A piece of the answer may hold several tokens. A request that failed has no part in any figure but the failures.
    """

    due_at: float
    num_prompt_tokens: int
    num_new_tokens: int
    pieces_at: tuple[float, ...]
    failure: Failure | None = None

    @property
    def ttft_s(self) -> float:
        """Time to the first token."""
        return self.pieces_at[0] - self.due_at

    @property
    def e2e_s(self) -> float:
        return self.pieces_at[-1] - self.due_at

    @property
    def itls_s(self) -> list[float]:
        """Between one piece and the next, as a reader sees them."""
        return [later - earlier for earlier, later in pairwise(self.pieces_at)]

    @property
    def tpot_s(self) -> float:
        """Per token after the first piece; only where there are several tokens."""
        return (self.pieces_at[-1] - self.pieces_at[0]) / (self.num_new_tokens - 1)


@dataclass(frozen=True, slots=True)
class Latency:
    """``percentiles_s`` are those of ``PERCENTILES``."""

    mean_s: float
    percentiles_s: tuple[float, ...]

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Self | None:
        """None if there is nothing to tell."""
        if not seconds:
            return None
        return cls(float(np.mean(seconds)), tuple(float(at) for at in np.percentile(seconds, PERCENTILES)))


@dataclass(frozen=True, slots=True)
class FailureCount:
    kind: str
    count: int
    example: str


@dataclass(frozen=True, slots=True)
class BenchMetrics:
    """Of one round: from the first request's due time to the last token."""

    elapsed_s: float
    num_completed: int
    num_prompt_tokens: int
    num_new_tokens: int
    ttft: Latency | None
    tpot: Latency | None
    itl: Latency | None
    e2e: Latency | None
    failures: tuple[FailureCount, ...]

    @classmethod
    def of(cls, traces: Sequence[RequestTrace]) -> Self:
        done = [trace for trace in traces if trace.failure is None]
        begin = min((trace.due_at for trace in traces), default=0.0)
        return cls(
            elapsed_s=max((trace.pieces_at[-1] for trace in done), default=begin) - begin,
            num_completed=len(done),
            num_prompt_tokens=sum(trace.num_prompt_tokens for trace in done),
            num_new_tokens=sum(trace.num_new_tokens for trace in done),
            ttft=Latency.of([trace.ttft_s for trace in done]),
            tpot=Latency.of([trace.tpot_s for trace in done if trace.num_new_tokens > 1]),
            itl=Latency.of([gap for trace in done for gap in trace.itls_s]),
            e2e=Latency.of([trace.e2e_s for trace in done]),
            failures=count_failures(trace.failure for trace in traces if trace.failure is not None),
        )

    @property
    def num_failed(self) -> int:
        return sum(failed.count for failed in self.failures)

    @property
    def tokens_per_s(self) -> float:
        """In and out."""
        return self.per_s(self.num_prompt_tokens + self.num_new_tokens)

    def per_s(self, number: int) -> float:
        return number / self.elapsed_s if self.elapsed_s else 0.0


def count_failures(failures: Iterable[Failure]) -> tuple[FailureCount, ...]:
    """By kind, the most frequent first, each with the first message."""
    seen = list(failures)
    examples = {failure.kind: failure.message for failure in reversed(seen)}
    return tuple(FailureCount(kind, count, examples[kind]) for kind, count in Counter(f.kind for f in seen).most_common())


def median_index(speeds: Sequence[float]) -> int:
    """Which round stands for all: the one of median speed, the slower of two."""
    return sorted(range(len(speeds)), key=speeds.__getitem__)[(len(speeds) - 1) // 2]


@dataclass(frozen=True, slots=True)
class PipelineUsage:
    """What only our own engine tells: how its stages were used."""

    plan: PipelinePlan
    usage: UsageMeter
    hops: tuple[HopTime, ...]
    timings: tuple[StageTiming, ...]


@dataclass(frozen=True, slots=True)
class Round:
    traces: Sequence[RequestTrace]
    pipeline: PipelineUsage | None = None


@dataclass(frozen=True, slots=True)
class BenchResult:
    """One round of several, the one of median speed, so that its figures belong together; ``speeds`` are of all, in order."""

    round: Round
    figures: BenchMetrics
    speeds: tuple[float, ...]
    num_warmups: int


@dataclass(frozen=True, slots=True)
class RoundPlan:
    num_warmups: int
    num_repeats: int

    def __post_init__(self) -> None:
        for name, value, least in (("warmups", self.num_warmups, 0), ("repeats", self.num_repeats, 1)):
            if value < least:
                raise ConfigError(f"--{name} is {value}; it must be at least {least}")

    @property
    def total(self) -> int:
        return self.num_warmups + self.num_repeats

    async def run(self, one: Callable[[int], Awaitable[Round]]) -> BenchResult:
        """One after the other; each is told its number, from 0."""
        rounds = [await one(number) for number in range(self.total)][self.num_warmups :]
        figures = [BenchMetrics.of(done.traces) for done in rounds]
        speeds = tuple(each.tokens_per_s for each in figures)
        chosen = median_index(speeds)
        return BenchResult(rounds[chosen], figures[chosen], speeds, self.num_warmups)
