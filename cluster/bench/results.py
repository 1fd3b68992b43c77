"""Rounds of a benchmark, and the metrics of their requests. Pure: no clock, no network, no Ray."""

import math
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Self

import numpy as np

from tramontane.cluster.config.measurements import StageDevice
from tramontane.proto.errors import ConfigError
from tramontane.proto.plan import PipelinePlan
from tramontane.proto.step import StageTiming
from tramontane.router.engine.stats import HopTime, UsageMeter

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class Failure:
    """A failed request. Failures are counted by ``kind``, such as ``HTTP 429``."""

    kind: str
    message: str


@dataclass(frozen=True, slots=True)
class RequestTrace:
    """The times of one request, in seconds of one clock.

    They count from ``due_at``, when it was to be sent: a late client does not make the server look
    fast. A piece of the answer may hold several tokens. Failed requests count in no metric but the
    failures.
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
        """Time to the last token."""
        return self.pieces_at[-1] - self.due_at

    @property
    def itls_s(self) -> list[float]:
        """Times between one piece and the next, as a reader sees them."""
        return [later - earlier for earlier, later in pairwise(self.pieces_at)]

    @property
    def tpot_s(self) -> float:
        """Time per token after the first piece; only defined for several tokens."""
        return (self.pieces_at[-1] - self.pieces_at[0]) / (self.num_new_tokens - 1)


@dataclass(frozen=True, slots=True)
class Latency:
    """Mean and percentiles; ``percentiles_s`` has the values of ``PERCENTILES``."""

    mean_s: float
    percentiles_s: tuple[float, ...]

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Self | None:
        """Summarize; None if there are no values."""
        if not seconds:
            return None
        return cls(
            float(np.mean(seconds)), tuple(float(at) for at in np.percentile(seconds, PERCENTILES))
        )


@dataclass(frozen=True, slots=True)
class FailureCount:
    """The failures of one kind, with the first message."""

    kind: str
    count: int
    example: str


@dataclass(frozen=True, slots=True)
class BenchMetrics:
    """The metrics of one round, from the first request's due time to the last token."""

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
        """Summarize the requests of a round."""
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
        """Failed requests."""
        return sum(failed.count for failed in self.failures)

    @property
    def tokens_per_s(self) -> float:
        """Tokens in and out per second."""
        return self.per_s(self.num_prompt_tokens + self.num_new_tokens)

    def per_s(self, number: int) -> float:
        """Return a number per second of the round."""
        return number / self.elapsed_s if self.elapsed_s else 0.0


def count_failures(failures: Iterable[Failure]) -> tuple[FailureCount, ...]:
    """Count failures by kind, the most frequent first, each with the first message."""
    seen = list(failures)
    examples = {failure.kind: failure.message for failure in reversed(seen)}
    return tuple(
        FailureCount(kind, count, examples[kind])
        for kind, count in Counter(f.kind for f in seen).most_common()
    )


def median_index(speeds: Sequence[float]) -> int:
    """Return the index of the round with the median speed, the slower of two."""
    return sorted(range(len(speeds)), key=speeds.__getitem__)[(len(speeds) - 1) // 2]


@dataclass(frozen=True, slots=True)
class PipelineUsage:
    """The usage of the stages, known only for an engine in this process."""

    plan: PipelinePlan
    usage: UsageMeter
    hops: tuple[HopTime, ...]
    timings: tuple[StageTiming, ...]
    devices: tuple[StageDevice, ...]
    fingerprint: str = ""  # of the pipeline; "" if it is not known


@dataclass(frozen=True, slots=True)
class Round:
    """The requests of one round; ``pipeline`` is None for a server."""

    traces: Sequence[RequestTrace]
    pipeline: PipelineUsage | None = None


@dataclass(frozen=True, slots=True)
class BenchResult:
    """The round of median speed, so that its metrics are consistent; ``speeds``: of all rounds, in
    order.
    """

    round: Round
    figures: BenchMetrics
    speeds: tuple[float, ...]
    num_warmups: int


@dataclass(frozen=True, slots=True)
class RoundPlan:
    """Numbers of warm-up rounds and of measured rounds. Raises ConfigError for numbers that are too
    small.
    """

    num_warmups: int
    num_repeats: int

    def __post_init__(self) -> None:
        for name, value, minimum in (
            ("warmups", self.num_warmups, 0),
            ("repeats", self.num_repeats, 1),
        ):
            if value < minimum:
                raise ConfigError(f"--{name} is {value}; it must be at least {minimum}")

    @property
    def total(self) -> int:
        """Number of rounds."""
        return self.num_warmups + self.num_repeats

    async def run(self, run_one: Callable[[int], Awaitable[Round]]) -> BenchResult:
        """Run the rounds one after the other; ``run_one`` gets the number of the round, from 0."""
        rounds = [await run_one(number) for number in range(self.total)][self.num_warmups :]
        figures = [BenchMetrics.of(done.traces) for done in rounds]
        speeds = tuple(each.tokens_per_s for each in figures)
        median = median_index(speeds)
        return BenchResult(rounds[median], figures[median], speeds, self.num_warmups)


# The requests of a benchmark and their times. Pure: the same seed gives the same requests.

WORDS = (
    "wind",
    "sea",
    "sun",
    "rain",
    "hill",
    "stone",
    "road",
    "house",
    "gate",
    "light",
    "night",
    "day",
)


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """One request. The prompt is text, of about the given length, if the size of the vocabulary is
    unknown.
    """

    prompt: tuple[int, ...] | str
    num_prompt_tokens: int
    num_new_tokens: int


@dataclass(frozen=True, slots=True)
class Workload:
    """All requests of a benchmark.

    ``range_ratio`` 0: every prompt and answer has exactly its length. 0.5: any length from half of
    it to one and a half.
    """

    num_prompts: int = 64
    input_len: int = 128
    output_len: int = 64
    range_ratio: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("num_prompts", "input_len", "output_len"):
            if not 1 <= (value := getattr(self, name)) <= 2**24:
                raise ConfigError(
                    f"--{name.replace('_', '-')} is {value}; it must be at least 1 and at most"
                    f" {2**24}"
                )
        if not 0 <= self.range_ratio < 1:
            raise ConfigError(
                f"--range-ratio is {self.range_ratio}; it must be 0 (fixed lengths) or more, and"
                " below 1"
            )
        if self.seed < 0:
            raise ConfigError(f"--seed is {self.seed}; bench needs one that is not negative")

    @property
    def max_positions(self) -> int:
        """Positions that a request may need."""
        return self._bounds(self.input_len)[1] + self._bounds(self.output_len)[1]

    def requests(self, number: int, vocab_size: int | None) -> list[BenchRequest]:
        """Return the requests of one round: all rounds have the same lengths, but other tokens, so
        that no prompt cache helps.
        """
        lengths = np.random.default_rng(self.seed)
        ins, outs = (
            lengths.integers(*self._bounds(n), self.num_prompts, endpoint=True)
            for n in (self.input_len, self.output_len)
        )
        tokens = np.random.default_rng((self.seed, number))
        return [
            BenchRequest(_prompt(tokens, int(i), vocab_size), int(i), int(o))
            for i, o in zip(ins, outs, strict=True)
        ]

    def _bounds(self, length: int) -> tuple[int, int]:
        """Return the shortest and the longest length: 96 and 160 for 128 with a ratio of 0.25."""
        return max(1, math.ceil(length * (1 - self.range_ratio))), math.floor(
            length * (1 + self.range_ratio)
        )


def _prompt(
    tokens: np.random.Generator, length: int, vocab_size: int | None
) -> tuple[int, ...] | str:
    if vocab_size is None:
        return " ".join(WORDS[i] for i in tokens.integers(len(WORDS), size=length))
    return tuple(tokens.integers(vocab_size, size=length).tolist())


def arrivals(num_requests: int, rate: float, seed: int) -> Sequence[float]:
    """Return seconds from the start: a Poisson process of ``rate`` requests per second, or
    (infinity) all of them at 0.
    """
    if not rate > 0:
        raise ConfigError(
            f"--request-rate is {rate}; it must be above 0, or inf for all requests at once"
        )
    gaps = np.random.default_rng(seed).exponential(1 / rate, num_requests)
    return np.cumsum(gaps).tolist()  # type: ignore[no-any-return]
