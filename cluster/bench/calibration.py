"""Calibration of the pipeline model of ``tramontane simulate`` on real stages."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from tramontane.cluster.bench.comparison import PolicyEntry, Summary, make_scheduler, summarize
from tramontane.cluster.bench.simulator import PipelineModel, SimRequest, SimTrace, simulate
from tramontane.cluster.config.engine_config import EngineConfig
from tramontane.cluster.pipeline.engine import Engine, open_engine
from tramontane.cluster.pipeline.load_progress import ShowLoading
from tramontane.proto.request import Request, SamplingParams
from tramontane.proto.step import StageTiming
from tramontane.proto.timing import steady_time
from tramontane.router.scheduling.cost_model import CostModel
from tramontane.router.scheduling.policy import BatchBudget, BatchWork, Policy, SchedulerState

Step = tuple[BatchWork, tuple[StageTiming, ...]]


@dataclass(frozen=True)
class Calibration:
    """The mean stage of a real pipeline, and how well its model predicts a run that it was not
    fitted to.
    """

    costs: CostModel
    hop_s: float
    measured: Summary
    modelled: Summary

    def pipeline(self, num_stages: int) -> PipelineModel:
        """Return a model with this number of stages, each like the mean of the real ones."""

        def seconds(work: BatchWork) -> list[float]:
            return [float(self.costs.predict([work])[0].mean())] * num_stages

        return PipelineModel(seconds, self.hop_s)

    @property
    def relative_errors(self) -> dict[str, float]:
        """Modelled over measured, minus one."""
        pairs = {
            "tokens_per_s": (self.modelled.tokens_per_s, self.measured.tokens_per_s),
            "busy_share": (1 - self.modelled.bubble, 1 - self.measured.bubble),
            "median_ttft": (self.modelled.ttft_s[0], self.measured.ttft_s[0]),
            "median_itl": (self.modelled.itl_s[0], self.measured.itl_s[0]),
        }
        return {name: modelled / measured - 1 for name, (modelled, measured) in pairs.items()}


class PolicyRecorder:
    """A policy that records the work and the times of every micro-batch."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.overlaps_chunks = policy.overlaps_chunks
        self.steps: list[Step] = []

    @property
    def max_in_flight(self) -> int:
        """The limit of the wrapped policy."""
        return self._policy.max_in_flight

    def choose_budget(self, state: SchedulerState) -> BatchBudget | None:
        """Return the budget of the wrapped policy."""
        return self._policy.choose_budget(state)

    def observe(self, budget: BatchBudget, work: BatchWork, timings: Sequence[StageTiming]) -> None:
        """Record a micro-batch."""
        self.steps.append((work, tuple(timings)))
        self._policy.observe(budget, work, timings)

    def restart(self) -> None:
        """Reset the wrapped policy."""
        self._policy.restart()

    def seconds(self, work: BatchWork) -> float:
        """Return the wrapped policy's estimate."""
        return self._policy.seconds(work)

    def draft_break_even(self, state: SchedulerState) -> float:
        """Return the wrapped policy's value."""
        return self._policy.draft_break_even(state)

    def lookahead_break_even(self, state: SchedulerState) -> float:
        """Return the wrapped policy's value."""
        return self._policy.lookahead_break_even(state)


async def calibrate(
    config: EngineConfig,
    arrivals: Sequence[Sequence[SimRequest]],
    candidate: PolicyEntry,
    report: Callable[[str], None],
    show_loading: ShowLoading,
) -> Calibration:
    """Run two sets of requests on a real pipeline: costs are fitted to the first and validated on
    the second.
    """
    async with open_engine(config, report, show_loading=show_loading) as engine:
        num_stages = len(engine.plan.stages)
        traces, steps = [], []
        for number, requests in enumerate(arrivals, start=1):
            report(f"calibrating on {num_stages} real stages, run {number} of {len(arrivals)}")
            recorder = PolicyRecorder(candidate.make(num_stages))
            engine.router.scheduler.policy.policy = recorder
            traces.append(await _run(engine, requests, recorder))
            steps.append(recorder.steps)
    costs = CostModel(num_stages, decay=1.0)
    for work, timings in steps[0]:
        costs.observe(work, [timing.busy_s for timing in timings])
    costs.refit()
    hop_s = hop_seconds(steps[0])
    pipeline = PipelineModel(lambda work: costs.predict([work])[0].tolist(), hop_s)
    scheduler = make_scheduler(candidate, num_stages, arrivals[1], engine.plan.max_num_seqs)
    modelled = simulate(scheduler, pipeline, arrivals[1])
    return Calibration(
        costs, hop_s, summarize("measured", traces[1]), summarize("modelled", modelled)
    )


def hop_seconds(steps: Sequence[Step]) -> float:
    """Return the median time between a stage's end and the next one's start, where the next stage
    had been waiting.

    The stages have to be on one machine, so that they have one clock.
    """
    hops, ended = [], [0.0] * len(steps[0][1])
    for _, timings in steps:
        for before, after in pairwise(timings):
            if ended[after.stage_id] < before.ended_at:
                hops.append(max(after.started_at - before.ended_at, 0.0))
        ended = [timing.ended_at for timing in timings]
    return median(hops) if hops else 0.0


async def _run(
    engine: Engine, arrivals: Sequence[SimRequest], recorder: PolicyRecorder
) -> SimTrace:
    vocab_size = engine.plan.args.vocab_size
    started, backlog_until = steady_time(), 0.0

    async def run_one(number: int, arrival: SimRequest) -> tuple[float, ...]:
        nonlocal backlog_until
        await asyncio.sleep(max(started + arrival.at - steady_time(), 0.0))
        prompt = tuple(
            (number * 7919 + i * 31) % (vocab_size - 3) + 3 for i in range(arrival.prompt_tokens)
        )
        sampling = SamplingParams(max_tokens=arrival.new_tokens, temperature=0.0, ignore_eos=True)
        times: list[float] = []
        async for batch in engine.router.generate(Request.of(prompt, sampling)):
            times += [steady_time() - started] * len(batch.events)
            if engine.router.scheduler.num_waiting:
                backlog_until = steady_time() - started
        return tuple(times)

    token_times = await asyncio.gather(
        *(run_one(number, arrival) for number, arrival in enumerate(arrivals))
    )
    timings = tuple(
        tuple(StageTiming(t.stage_id, t.started_at - started, t.busy_s, t.num_tokens) for t in each)
        for _, each in recorder.steps
    )
    return SimTrace(tuple(arrivals), tuple(token_times), timings, backlog_until)
