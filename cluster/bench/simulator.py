"""The simulator: the real scheduler against a modelled pipeline and synthetic traffic. The only
clock is the simulated one.
"""

import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from tramontane.proto.request import SamplingParams
from tramontane.proto.step import NO_TOKEN, MicroBatch, StageTiming, StepResult
from tramontane.router.scheduling.policy import BatchWork
from tramontane.router.scheduling.scheduler import Scheduler
from tramontane.router.scheduling.sequence import Sequence as LiveSequence

TOKEN = 7  # the only token of every prompt, and of outputs that repeat themselves
FIRST_NEW_TOKEN = 1000


@dataclass(frozen=True, slots=True)
class SimRequest:
    """A request: its time of arrival, the tokens of its prompt and of its output, its priority, and
    the number of its key.
    """

    at: float
    prompt_tokens: int
    new_tokens: int
    priority: int = 0
    owner: int = 0


@dataclass(frozen=True, slots=True)
class LengthDistribution:
    """Log-normal lengths, as in recorded traffic, cut to the bounds."""

    mean: int
    spread: float  # standard deviation of the logarithm
    max_tokens: int
    min_tokens: int = 1

    def draw(self, rng: random.Random) -> int:
        """Draw a length: mean = exp(mu + spread**2 / 2), so mu = log(mean) - spread**2 / 2."""
        drawn = rng.lognormvariate(math.log(self.mean) - self.spread**2 / 2, self.spread)
        return max(self.min_tokens, min(self.max_tokens, round(drawn)))


@dataclass(frozen=True, slots=True)
class TrafficModel:
    """Requests of random lengths."""

    num_requests: int
    prompt: LengthDistribution
    answer: LengthDistribution
    rate: float | None = None  # requests per second; None: all arrive at the start
    burst: int = 1  # requests that arrive at once

    def arrivals(self, seed: int = 0) -> tuple[SimRequest, ...]:
        """Draw Poisson arrivals of bursts: the time between two bursts is exponential with mean
        burst / rate.
        """
        rng, now, drawn = random.Random(seed), 0.0, []
        for number in range(self.num_requests):
            if self.rate is not None and number % self.burst == 0:
                now += rng.expovariate(self.rate / self.burst)
            drawn.append(SimRequest(now, self.prompt.draw(rng), self.answer.draw(rng)))
        return tuple(drawn)


@dataclass(frozen=True, slots=True)
class PipelineModel:
    """A model of a pipeline's times."""

    seconds: Callable[[BatchWork], Sequence[float]]  # of every stage for some work
    hop_s: float  # between neighbors, and from and to the router
    noise: float = 0.0  # standard deviation of a step's time, relative to it
    shares_one_core: bool = False  # whether only one stage works at a time
    # probability that a token of an output repeats the one before, and can be drafted; other tokens
    # are new
    repetition: float = 1.0


@dataclass(frozen=True, slots=True)
class SimTrace:
    """The record of one run."""

    arrivals: tuple[SimRequest, ...]
    token_times: tuple[tuple[float, ...], ...]  # of each request
    timings: tuple[tuple[StageTiming, ...], ...]  # of each micro-batch
    backlog_until: float  # until then there was always a request that waited for a slot
    # submission and completion of each micro-batch, where they are known
    in_flight: tuple[tuple[float, float], ...] = ()

    @property
    def span_s(self) -> float:
        """The time of the last token."""
        return max(times[-1] for times in self.token_times)

    @property
    def tokens_per_s(self) -> float:
        """Prompt and output tokens per second."""
        return sum(a.prompt_tokens + a.new_tokens for a in self.arrivals) / self.span_s

    def bubble(self, start: float, end: float) -> float:
        """Return the share of all stages' time between two moments in which they did not
        compute.
        """
        spans = [
            (max(t.started_at, start), min(t.ended_at, end))
            for timings in self.timings
            for t in timings
        ]
        busy = sum(max(until - since, 0.0) for since, until in spans)
        return 1 - busy / ((end - start) * len(self.timings[0]))

    def ttft_s(self) -> list[float]:
        """Return the time to the first token of each request."""
        return [
            times[0] - arrival.at
            for times, arrival in zip(self.token_times, self.arrivals, strict=True)
        ]

    def e2e_s(self) -> list[float]:
        """Return the time from the arrival to the last token of each request."""
        return [
            times[-1] - arrival.at
            for times, arrival in zip(self.token_times, self.arrivals, strict=True)
        ]

    def itl_s(self) -> list[float]:
        """Return all times between two tokens of a request."""
        return [later - earlier for times in self.token_times for earlier, later in pairwise(times)]


def simulate(
    scheduler: Scheduler, model: PipelineModel, arrivals: Sequence[SimRequest], seed: int = 0
) -> SimTrace:
    """Run all requests to their ends and return the record."""
    run = _Run(scheduler, model, arrivals, random.Random(seed))
    while run.is_unfinished:
        run.admit_arrivals()
        run.submit()
        run.wait()
        run.collect()
    return SimTrace(
        run.arrivals,
        tuple(map(tuple, run.token_times)),
        tuple(run.timings),
        run.backlog_until,
        tuple(run.in_flight),
    )


class _Run:
    """State of one run. Micro-batches keep their order, so all times of one are known when it is
    submitted.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        model: PipelineModel,
        arrivals: Sequence[SimRequest],
        rng: random.Random,
    ) -> None:
        self._scheduler, self._model, self._rng = scheduler, model, rng
        self.arrivals = tuple(sorted(arrivals, key=lambda arrival: arrival.at))
        self.token_times: list[list[float]] = [[] for _ in arrivals]
        self.timings: list[tuple[StageTiming, ...]] = []
        self.in_flight: list[tuple[float, float]] = []
        self.backlog_until = 0.0
        self._now, self._num_arrived = 0.0, 0
        self._free_at = [0.0] * len(model.seconds(BatchWork()))
        self._in_flight: deque[tuple[float, MicroBatch, tuple[StageTiming, ...]]] = deque()
        # position and id of each sequence's last token
        self._latest: dict[int, tuple[int, int]] = {}

    @property
    def is_unfinished(self) -> bool:
        """Whether requests have yet to arrive or to end."""
        return self._num_arrived < len(self.arrivals) or not self._scheduler.is_idle

    def admit_arrivals(self) -> None:
        """Add the requests that have arrived by now to the scheduler."""
        while (
            self._num_arrived < len(self.arrivals)
            and self.arrivals[self._num_arrived].at <= self._now
        ):
            arrival = self.arrivals[self._num_arrived]
            sampling = SamplingParams(max_tokens=arrival.new_tokens, temperature=0.0)
            prompt = (TOKEN,) * arrival.prompt_tokens
            max_len = arrival.prompt_tokens + arrival.new_tokens
            self._scheduler.add(
                LiveSequence(
                    self._num_arrived, prompt, sampling, max_len, arrival.priority, arrival.owner
                )
            )
            self._num_arrived += 1

    def submit(self) -> None:
        """Submit micro-batches until the scheduler makes no more."""
        while (batch := self._scheduler.schedule()) is not None:
            timings = self._pass(self._scheduler.measure_work(batch))
            self._in_flight.append((timings[-1].ended_at + self._model.hop_s, batch, timings))
            self.in_flight.append((self._now, self._in_flight[-1][0]))
        if self._scheduler.num_waiting:
            self.backlog_until = self._now

    def wait(self) -> None:
        """Advance the time to the next result, or the next arrival."""
        events = (
            [self.arrivals[self._num_arrived].at] if self._num_arrived < len(self.arrivals) else []
        )
        if self._in_flight:
            events.append(self._in_flight[0][0])
        self._now = min(events)

    def collect(self) -> None:
        """Complete the micro-batches that have returned by now."""
        while self._in_flight and self._in_flight[0][0] <= self._now:
            _, batch, timings = self._in_flight.popleft()
            tokens = self._sample(batch)
            for event in self._scheduler.complete(
                batch, StepResult(batch.epoch, batch.step_id, tokens, timings)
            ):
                self.token_times[event.seq_id].append(self._now)
            self.timings.append(timings)

    def _sample(self, batch: MicroBatch) -> tuple[int, ...]:
        """Return the answer for every sampled row; rows after a wrong draft have none."""
        tokens = [
            self._token(chunk.seq_id, chunk.start + chunk.num_tokens)
            for chunk in batch.chunks
            if chunk.needs_sample
        ]
        previous = None
        for seq_id, start, token_id in zip(*batch.decodes[:3], strict=True):
            is_known = seq_id != previous and not batch.decodes.is_lookahead
            is_right = is_known or self._latest[seq_id] == (start, token_id)
            tokens.append(self._token(seq_id, start + 1) if is_right else NO_TOKEN)
            if is_right:
                self._latest[seq_id] = start + 1, tokens[-1]
            previous = seq_id
        return tuple(tokens)

    def _token(self, seq_id: int, position: int) -> int:
        """Return the token of a sequence at a position, which does not depend on the
        micro-batch.
        """
        repeats = (
            self._model.repetition == 1
            or random.Random(seq_id << 32 | position).random() < self._model.repetition
        )
        return TOKEN if repeats else FIRST_NEW_TOKEN + position

    def _pass(self, work: BatchWork) -> tuple[StageTiming, ...]:
        """Return some work's timings. Submitted at 0, hops of 1 s, two stages of 3 s: one works
        from 1 to 4, one from 5 to 8.
        """
        timings, arrives = [], self._now + self._model.hop_s
        for stage, expected in enumerate(self._model.seconds(work)):
            busy = expected * max(1 + self._rng.gauss(0, self._model.noise), 0.1)
            started = max(arrives, self._free_at[stage])
            self._free_at[stage] = started + busy
            if self._model.shares_one_core:
                self._free_at = [max(free_at, started + busy) for free_at in self._free_at]
            timings.append(StageTiming(stage, started, busy, work.prefill_tokens + work.decodes))
            arrives = self._free_at[stage] + self._model.hop_s
        return tuple(timings)
