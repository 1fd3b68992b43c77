"""``tramontane bench`` on an engine of its own: random token ids, greedy, answers of exactly their lengths."""

import asyncio
import time
from collections.abc import Callable

from tramontane.cluster.bench.report import BenchDisplay
from tramontane.cluster.bench.results import BenchResult, PipelineUsage, RequestTrace, Round, RoundPlan
from tramontane.cluster.bench.workload import BenchRequest, Workload
from tramontane.cluster.config.engine_config import EngineConfig
from tramontane.cluster.pipeline.engine import Engine, open_engine
from tramontane.proto.errors import ConfigError
from tramontane.proto.model_folder import resolve_model_args
from tramontane.proto.request import SamplingParams, SequenceRequest
from tramontane.proto.step import StepResult
from tramontane.router.engine.stage_usage import UsageMeter, hop_times


class StepRecorder:
    """Every step's result since it was last emptied."""

    def __init__(self) -> None:
        self.results: list[StepResult] = []

    def observe(self, result: StepResult) -> None:
        self.results.append(result)

    def taken(self, engine: Engine) -> PipelineUsage:
        results, self.results = self.results, []
        usage = UsageMeter(len(engine.plan.stages))
        for result in results:
            usage.observe(result)
        hops = hop_times([result.timings for result in results])
        return PipelineUsage(engine.plan, usage, hops, tuple(timing for result in results for timing in result.timings))


async def bench_offline(config: EngineConfig, workload: Workload, rounds: RoundPlan, display: BenchDisplay) -> BenchResult:
    """Raises ConfigError, before anything is started, if the context is too short for the work."""
    args = resolve_model_args(config.model)
    context = min(config.max_model_len or args.max_seq_len, args.max_seq_len)
    if workload.longest > context:
        raise ConfigError(
            f"--input-len and --output-len come to {workload.longest} positions, and the context has {context}; ask for less"
        )
    recorder = StepRecorder()
    alone = config.single_pipeline()
    async with open_engine(alone, display.report, recorder.observe, display.loading) as engine:

        async def one(number: int) -> Round:
            requests = workload.requests(number, args.vocab_size)
            display.begin_round(number, rounds, requests)
            return Round(await _run(engine, requests, display.advance), recorder.taken(engine))

        outcome = await rounds.run(one)
        engine.router.scheduler.check_integrity()
        return outcome


async def _run(engine: Engine, requests: list[BenchRequest], advance: Callable[[int], None]) -> list[RequestTrace]:
    """All at once."""
    due_at = time.perf_counter()
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_trace(engine, request, due_at, advance)) for request in requests]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


async def _trace(engine: Engine, request: BenchRequest, due_at: float, advance: Callable[[int], None]) -> RequestTrace:
    assert not isinstance(request.prompt, str)
    sampling = SamplingParams(request.num_new_tokens, temperature=0.0, ignore_eos=True)
    pieces_at, num_tokens = list[float](), 0
    async for batch in engine.router.generate([SequenceRequest(request.prompt, sampling)]):
        pieces_at.append(time.perf_counter())
        num_tokens += len(batch.events)
        advance(len(batch.events))
    return RequestTrace(due_at, request.num_prompt_tokens, num_tokens, tuple(pieces_at))
