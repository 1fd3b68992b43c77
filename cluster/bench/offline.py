"""``tramontane bench`` with its own engine: random token ids, greedy sampling, answers of exactly
the given lengths.
"""

import asyncio
import time

from tramontane.cluster.bench.report import BenchDisplay
from tramontane.cluster.bench.results import (
    BenchRequest,
    BenchResult,
    PipelineUsage,
    RequestTrace,
    Round,
    RoundPlan,
    Workload,
)
from tramontane.cluster.config.engine_config import EngineConfig
from tramontane.cluster.config.measurements import StageDevice
from tramontane.cluster.pipeline.engine import Engine, open_engine
from tramontane.proto.errors import ConfigError
from tramontane.proto.model_folder import resolve_model_args
from tramontane.proto.request import Request, SamplingParams
from tramontane.proto.step import StepResult
from tramontane.router.engine.stats import UsageMeter, hop_times


class StepRecorder:
    """The results of all steps of a round."""

    def __init__(self) -> None:
        self.results: list[StepResult] = []

    def observe(self, result: StepResult) -> None:
        """Record a step."""
        self.results.append(result)

    def take_usage(self, engine: Engine, devices: tuple[StageDevice, ...]) -> PipelineUsage:
        """Summarize the steps, which ran on these devices, and clear them."""
        results, self.results = self.results, []
        usage = UsageMeter(len(engine.plan.stages))
        for result in results:
            usage.observe(result)
        hops = hop_times([result.timings for result in results])
        timings = tuple(timing for result in results for timing in result.timings)
        return PipelineUsage(engine.plan, usage, hops, timings, devices, engine.router.fingerprint)


async def bench_offline(
    config: EngineConfig, workload: Workload, rounds: RoundPlan, display: BenchDisplay
) -> BenchResult:
    """Run all rounds. Raises ConfigError, before any process is started, if the context is too
    short for the requests.
    """
    args = resolve_model_args(config.model)
    context = min(config.max_model_len or args.max_seq_len, args.max_seq_len)
    if workload.max_positions > context:
        raise ConfigError(
            f"--input-len and --output-len come to {workload.max_positions} positions, and the"
            f" context has {context}; use less"
        )
    recorder = StepRecorder()

    def observe(result: StepResult) -> None:
        recorder.observe(result)
        display.advance(result.timings[-1].num_tokens)

    async with open_engine(
        config.single_pipeline(), display.report, observe, display.loading
    ) as engine:
        devices = await engine.list_devices()

        async def run_one(number: int) -> Round:
            requests = workload.requests(number, args.vocab_size)
            display.begin_round(number, rounds, sum(map(_num_computed, requests)))
            return Round(await _run(engine, requests), recorder.take_usage(engine, devices))

        outcome = await rounds.run(run_one)
        engine.router.scheduler.check_integrity()
        return outcome


def _num_computed(request: BenchRequest) -> int:
    """Return the tokens that stages compute: all but the last one, which is only sampled."""
    return request.num_prompt_tokens + request.num_new_tokens - 1


async def _run(engine: Engine, requests: list[BenchRequest]) -> list[RequestTrace]:
    due_at = time.perf_counter()
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_trace(engine, request, due_at)) for request in requests]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


async def _trace(engine: Engine, request: BenchRequest, due_at: float) -> RequestTrace:
    assert not isinstance(request.prompt, str)
    sampling = SamplingParams(request.num_new_tokens, temperature=0.0, ignore_eos=True)
    pieces_at, num_tokens = list[float](), 0
    async for batch in engine.router.generate(Request.of(request.prompt, sampling)):
        pieces_at.append(time.perf_counter())
        num_tokens += len(batch.events)
    return RequestTrace(due_at, request.num_prompt_tokens, num_tokens, tuple(pieces_at))
