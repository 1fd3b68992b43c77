"""The real scheduler against a modelled pipeline: no model, no cluster, no clock but the simulated one."""

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from tramontane.proto.request import SamplingParams
from tramontane.proto.step import MicroBatch, StageTiming, StepResult
from tramontane.router.scheduling.policy import BatchWork
from tramontane.router.scheduling.scheduler import Scheduler
from tramontane.router.scheduling.sequence import Sequence as LiveSequence

TOKEN = 7  # what every sequence says


@dataclass(frozen=True, slots=True)
class SimRequest:
    """A request: when it comes, how many tokens it brings, how many it wants, and how urgent it is."""

    at: float
    prompt_tokens: int
    new_tokens: int
    priority: int = 0


@dataclass(frozen=True, slots=True)
class PipelineModel:
    """``seconds``: of every stage for a piece of work. A hop between neighbours, and from and to the router, takes ``hop_s``.

    ``noise``: standard deviation of a step's time, as a share of it. ``shares_one_core``: only one stage works at a time.
    """

    seconds: Callable[[BatchWork], Sequence[float]]
    hop_s: float
    noise: float = 0.0
    shares_one_core: bool = False


@dataclass(frozen=True, slots=True)
class SimTrace:
    """What happened: of each request when its tokens came, of each micro-batch when each stage worked.

    Until ``backlog_until`` there was always a request that waited for a place. ``in_flight``, where it is known: of each
    micro-batch when it was sent and when it was back.
    """

    arrivals: tuple[SimRequest, ...]
    token_times: tuple[tuple[float, ...], ...]
    timings: tuple[tuple[StageTiming, ...], ...]
    backlog_until: float
    in_flight: tuple[tuple[float, float], ...] = ()

    @property
    def span_s(self) -> float:
        return max(times[-1] for times in self.token_times)

    @property
    def tokens_per_s(self) -> float:
        """In and out."""
        return sum(a.prompt_tokens + a.new_tokens for a in self.arrivals) / self.span_s

    def bubble(self, start: float, end: float) -> float:
        """Share of all stages' time between two moments in which they had nothing to do."""
        spans = [(max(t.started_at, start), min(t.ended_at, end)) for timings in self.timings for t in timings]
        busy = sum(max(until - since, 0.0) for since, until in spans)
        return 1 - busy / ((end - start) * len(self.timings[0]))

    def ttft_s(self) -> list[float]:
        """Of each request, from its arrival."""
        return [times[0] - arrival.at for times, arrival in zip(self.token_times, self.arrivals, strict=True)]

    def e2e_s(self) -> list[float]:
        """Of each request, from its arrival to its last token."""
        return [times[-1] - arrival.at for times, arrival in zip(self.token_times, self.arrivals, strict=True)]

    def itl_s(self) -> list[float]:
        """Between a request's tokens, all of them."""
        return [later - sooner for times in self.token_times for sooner, later in pairwise(times)]


def simulate(scheduler: Scheduler, model: PipelineModel, arrivals: Sequence[SimRequest], seed: int = 0) -> SimTrace:
    """Run all requests to their ends."""
    run = _Run(scheduler, model, arrivals, random.Random(seed))
    while run.is_unfinished:
        run.admit_arrivals()
        run.submit()
        run.wait()
        run.collect()
    return SimTrace(run.arrivals, tuple(map(tuple, run.token_times)), tuple(run.timings), run.backlog_until, tuple(run.in_flight))


class _Run:
    """Micro-batches pass every stage in the order of submission, so that all their times are known when they are submitted."""

    def __init__(self, scheduler: Scheduler, model: PipelineModel, arrivals: Sequence[SimRequest], rng: random.Random) -> None:
        self._scheduler, self._model, self._rng = scheduler, model, rng
        self.arrivals = tuple(sorted(arrivals, key=lambda arrival: arrival.at))
        self.token_times: list[list[float]] = [[] for _ in arrivals]
        self.timings: list[tuple[StageTiming, ...]] = []
        self.in_flight: list[tuple[float, float]] = []
        self.backlog_until = 0.0
        self._now, self._num_come = 0.0, 0
        self._free_at = [0.0] * len(model.seconds(BatchWork()))
        self._in_flight: deque[tuple[float, MicroBatch, tuple[StageTiming, ...]]] = deque()

    @property
    def is_unfinished(self) -> bool:
        return self._num_come < len(self.arrivals) or not self._scheduler.is_idle

    def admit_arrivals(self) -> None:
        while self._num_come < len(self.arrivals) and self.arrivals[self._num_come].at <= self._now:
            arrival = self.arrivals[self._num_come]
            sampling = SamplingParams(max_tokens=arrival.new_tokens, temperature=0.0)
            prompt = (TOKEN,) * arrival.prompt_tokens
            max_len = arrival.prompt_tokens + arrival.new_tokens
            self._scheduler.add(LiveSequence(self._num_come, prompt, sampling, max_len, arrival.priority))
            self._num_come += 1

    def submit(self) -> None:
        while (batch := self._scheduler.schedule()) is not None:
            timings = self._pass(self._scheduler.measure_work(batch))
            self._in_flight.append((timings[-1].ended_at + self._model.hop_s, batch, timings))
            self.in_flight.append((self._now, self._in_flight[-1][0]))
        if self._scheduler.num_waiting:
            self.backlog_until = self._now

    def wait(self) -> None:
        """Until the next result, or the next arrival."""
        coming = [self.arrivals[self._num_come].at] if self._num_come < len(self.arrivals) else []
        self._now = min([*coming, *(back_at for back_at, _, _ in [*self._in_flight][:1])])

    def collect(self) -> None:
        while self._in_flight and self._in_flight[0][0] <= self._now:
            _, batch, timings = self._in_flight.popleft()
            tokens = (TOKEN,) * len(batch.sampled_seq_ids)
            for event in self._scheduler.complete(batch, StepResult(batch.epoch, batch.step_id, tokens, timings)):
                self.token_times[event.seq_id].append(self._now)
            self.timings.append(timings)

    def _pass(self, work: BatchWork) -> tuple[StageTiming, ...]:
        """Two stages of 3 s, hops of 1 s, submitted at 0: the first works from 1 to 4, the second from 5 to 8."""
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
