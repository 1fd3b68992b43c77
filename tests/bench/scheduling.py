"""Benchmark of scheduling: the scheduler's own time, the router's calls of stages, and the overlap
of a pipeline's stages.

    python tests/bench/scheduling.py scheduler [--sequences 256] [--steps 400]
    python tests/bench/scheduling.py calls [--stages 4,16,64] [--steps 300] [--rounds 3]
    python tests/bench/scheduling.py overlap [--stages 4] [--sequences 8] [--rounds 3]

All have ``--json``. Figures are medians; configurations alternate, so that a slow moment of the
machine affects all of them.

**Scheduler**: its own time per micro-batch while many sequences decode. The real scheduler and
policy run against a modelled pipeline. Timed are scheduling, construction of the micro-batch, and
processing of its result: the median of the steps after the policy's cost model is trained. In
addition the time of the router's activity log, with one request per sequence.

**Calls**: what those of a micro-batch cost the router's event loop, with 4, 16 and 64 stages that
do nothing. The chain of the direct link calls actors that answer at once; a few processes play all
stages, as only the caller is measured. It makes its calls in a thread. For comparison the same
calls are made on the event loop, as before. Figures are the loop's CPU time per micro-batch, how
long other work of the loop waits for its turn (95th percentile), and micro-batches per second with
5 in flight.

**Overlap** of a pipeline's stages, and its effect on throughput: the demo model on Ray stage
actors, one thread each. Two kinds of traffic: long prompts in chunks of 128 tokens with few new
tokens, and short prompts with many. Each runs with 1, stages and stages + 1 micro-batches in flight
(M), and with as many as the router's policy chooses from its measurements. Speed is relative to
M = 1.
"""

import argparse
import asyncio
import statistics
import sys
import time
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import ray
from bench_parts import Part, Report, conclude_part, console, medians, numbers, table_of
from harness import run_prompts, running_chain, scheduler_for
from rich.progress import Progress
from stage_overlap import overlap_share
from targets import Target, at_most

from tramontane.cluster.actors.pipeline_spec import PipelineSpec
from tramontane.cluster.config.engine_config import DEMO_MODEL
from tramontane.cluster.pipeline.ray_cluster import local_ray_cluster
from tramontane.cluster.pipeline.stage_chain import DirectStageChain, ObjectStoreStageChain
from tramontane.cluster.planning.hardware import probe_local
from tramontane.cluster.planning.planner import PlanRequest, StageBudget, make_plan
from tramontane.proto import wire
from tramontane.proto.model_folder import read_model_args
from tramontane.proto.plan import CachePlan, WindowClass, ring_pages
from tramontane.proto.request import SamplingParams
from tramontane.proto.step import MicroBatch, StageTiming, StepResult
from tramontane.router.engine.active_request import ActiveRequest
from tramontane.router.engine.activity_log import ActivityLog
from tramontane.router.engine.stats import UsageMeter
from tramontane.router.scheduling.balanced_policy import BalancedPolicy
from tramontane.router.scheduling.policy import FixedInFlightPolicy, Policy
from tramontane.router.scheduling.scheduler import Scheduler
from tramontane.router.scheduling.sequence import Sequence
from tramontane.router.scheduling.waiting_queue import SchedulerLimits
from tramontane.router.tokenization.backends import SentencePieceTokenizer

STAGES = (1, 2, 4, 8)
WARM_UP = 200  # steps
CONTEXT, WINDOW, PAGE_SIZE, BUDGET = 32768, 4096, 16, 512
PROCESSES, IN_FLIGHT = 2, 5
IN_THREAD, ON_LOOP = "in a thread", "on the loop"
MAX_GROWTH = 4.0  # of the loop's CPU time, from the fewest stages to the most
MAX_SHARE = 0.25  # of the CPU time with calls on the loop, with the most stages
CHUNK = 128
TEXT = (
    "Now is the winter of our discontent made glorious summer by this sun of York; and all the"
    " clouds "
)


# ---- scheduler


def scheduler_s(num_stages: int, num_sequences: int, num_steps: int) -> tuple[float, float, int]:
    """Return the median seconds of a step and of its logging, and the number of decodes of the last
    step.
    """
    ring = ring_pages(WINDOW, PAGE_SIZE, CONTEXT)
    cache = CachePlan(PAGE_SIZE, (WindowClass(WINDOW, ring, ring * num_sequences),))
    policy = BalancedPolicy(num_stages, BUDGET)
    scheduler = Scheduler(cache, SchedulerLimits(num_sequences, BUDGET, CONTEXT, 32_000), policy)
    sampling = SamplingParams(max_tokens=CONTEXT // 2, temperature=0.0)
    sequences = [
        Sequence(seq_id, tuple(range(10, 74)), sampling, CONTEXT) for seq_id in range(num_sequences)
    ]
    for sequence in sequences:
        scheduler.add(sequence)
    requests = {
        sequence.seq_id: ActiveRequest([sequence], lambda _: None, 0.0) for sequence in sequences
    }
    log = ActivityLog()
    now, free_at = 0.0, [0.0] * num_stages
    in_flight: deque[tuple[MicroBatch, tuple[StageTiming, ...]]] = deque()
    step_s, logging_s = [], []
    for _ in range(WARM_UP + num_steps):
        started, batches = time.perf_counter(), []
        while (batch := scheduler.schedule()) is not None:
            batches.append(batch)
        scheduling_s = time.perf_counter() - started
        in_flight.extend((batch, _timings(batch, now, free_at)) for batch in batches)
        batch, timings = in_flight.popleft()
        now = max(now, timings[-1].ended_at)
        result = StepResult(batch.epoch, batch.step_id, (50,) * len(batch.sampled_seq_ids), timings)
        started = time.perf_counter()
        events = scheduler.complete(batch, result)
        step_s.append(scheduling_s + time.perf_counter() - started)
        receivers = [requests[event.seq_id] for event in events]
        started = time.perf_counter()
        log.record(batch, result)
        log.record_tokens(receivers, now)
        logging_s.append(time.perf_counter() - started)
        for request in receivers:
            request.last_token_at = now
    return (
        statistics.median(step_s[WARM_UP:]),
        statistics.median(logging_s[WARM_UP:]),
        len(batch.decodes.seq_ids),
    )


def _timings(batch: MicroBatch, now: float, free_at: list[float]) -> tuple[StageTiming, ...]:
    """Return the timings of a micro-batch; each stage takes 1 ms and 20 us per token."""
    timings, busy = [], 1e-3 + 2e-5 * batch.num_tokens
    for stage in range(len(free_at)):
        now = max(now, free_at[stage])
        timings.append(StageTiming(stage, now, busy, batch.num_tokens))
        now = free_at[stage] = now + busy
    return tuple(timings)


def scheduler(options: argparse.Namespace) -> Report:
    """the scheduler's time per micro-batch"""
    found = {stages: scheduler_s(stages, options.sequences, options.steps) for stages in STAGES}
    rows = [
        (stages, decodes, f"{seconds * 1e6:.0f}", f"{logging_s * 1e6:.0f}")
        for stages, (seconds, logging_s, decodes) in found.items()
    ]
    columns = ("stages", "decodes in a micro-batch", "us per step", "us to log it")
    data = [
        {"stages": k, "step_s": s, "noting_s": logging_s, "decodes": n}
        for k, (s, logging_s, n) in found.items()
    ]
    title = f"{options.sequences} sequences decode"
    return Report([], [table_of(columns, rows, title)], {"rows": data})


# ---- calls


@dataclass(frozen=True)
class Calls:
    loop_ms: float
    wait_ms: float
    per_s: float


class IdleStage:
    """A stage that does nothing; ``message`` is its answer to every step."""

    def __init__(self, message: bytes) -> None:
        self._message = message

    def linked_step(self, _batch: bytes, _last_result: bytes | None = None) -> bytes:
        return self._message


class AtOnce:
    """In place of a thread: runs what is submitted."""

    def submit(self, call: Callable[..., None], *arguments: object) -> None:
        call(*arguments)


class OnLoop(DirectStageChain):
    """Makes its calls on the event loop."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._calling = AtOnce()  # type: ignore[assignment]


async def run_steps(chain: DirectStageChain, num_steps: int) -> None:
    room = asyncio.Semaphore(IN_FLIGHT)

    async def step(number: int) -> None:
        async with room:
            await chain.submit(MicroBatch(1, number, ()))

    await asyncio.gather(*map(step, range(num_steps)))


async def time_calls(chain: DirectStageChain, num_steps: int) -> Calls:
    cpu, began = time.thread_time(), time.perf_counter()
    await run_steps(chain, num_steps)
    spent, elapsed = time.thread_time() - cpu, time.perf_counter() - began
    stepping, waits = asyncio.create_task(run_steps(chain, num_steps // 4)), [0.0]
    while not stepping.done():
        last = time.perf_counter()
        await asyncio.sleep(0.001)
        waits.append(time.perf_counter() - last - 0.001)
    return Calls(
        spent / num_steps * 1000, statistics.quantiles(waits, n=20)[-1] * 1000, num_steps / elapsed
    )


def measure_calls(options: argparse.Namespace) -> dict[tuple[int, str], Calls]:
    found: dict[tuple[int, str], list[Calls]] = defaultdict(list)
    message = wire.encode_result(StepResult(1, 0, (), (StageTiming(0, 0.0, 0.0, 0),)))
    with local_ray_cluster(num_cpus=PROCESSES):
        # actors cannot import benchmarks
        ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
        actors: list[Any] = [
            ray.remote(num_cpus=1)(IdleStage).remote(message) for _ in range(PROCESSES)
        ]
        for number in range(options.rounds + 1):
            for stages in options.stages:
                for way, kind in ((IN_THREAD, DirectStageChain), (ON_LOOP, OnLoop)):
                    chain = kind(
                        [actors[stage % PROCESSES] for stage in range(stages)], actors[0], "bench"
                    )
                    figures = asyncio.run(time_calls(chain, options.steps))
                    if number:  # the first round warms up
                        found[stages, way].append(figures)
    return {case: medians(figures) for case, figures in found.items()}


def calls(options: argparse.Namespace) -> Report:
    """what the calls of a micro-batch cost the router's event loop"""
    found = measure_calls(options)
    fewest, most = min(stages for stages, _ in found), max(stages for stages, _ in found)
    last = found[most, IN_THREAD].loop_ms
    growth, share = last / found[fewest, IN_THREAD].loop_ms, last / found[most, ON_LOOP].loop_ms
    grown = f"CPU time of the loop, {most} stages against {fewest}"
    targets = [
        at_most(grown, growth, MAX_GROWTH, "times"),
        at_most(f"the same against calls on the loop, {most} stages", share, MAX_SHARE, "times"),
    ]
    columns = ("stages", "calls", "CPU ms of the loop", "ms that other work waits")
    rows = [
        (*case, f"{each.loop_ms:.2f}", f"{each.wait_ms:.1f}", f"{each.per_s:.0f}")
        for case, each in found.items()
    ]
    data = [{"stages": case[0], "calls": case[1]} | asdict(each) for case, each in found.items()]
    table = table_of((*columns, "micro-batches/s"), rows, "per micro-batch")
    return Report(targets, [table], {"rows": data})


# ---- overlap


@dataclass(frozen=True)
class Traffic:
    name: str
    prompt_tokens: int
    new_tokens: int


TRAFFIC = (Traffic("long prompts", 400, 8), Traffic("decoding", 16, 64))


@dataclass(frozen=True)
class Overlap:
    tokens_per_s: float  # in and out
    bubble: float
    overlap: float


def run_traffic(
    chain: ObjectStoreStageChain,
    spec: PipelineSpec,
    traffic: Traffic,
    sequences: int,
    policy: Policy,
) -> Overlap:
    usage, timings = UsageMeter(len(spec.plan.stages)), list[StageTiming]()

    def observe(result: StepResult) -> None:
        usage.observe(result)
        timings.extend(result.timings)

    prompt_ids = list(SentencePieceTokenizer(DEMO_MODEL / "tokenizer.model").encode(TEXT * 20))[
        : traffic.prompt_tokens
    ]
    sampling = SamplingParams(max_tokens=traffic.new_tokens, temperature=0.0, ignore_eos=True)
    scheduler = scheduler_for(spec.plan, CHUNK, policy)
    asyncio.run(run_prompts(chain, scheduler, [prompt_ids] * sequences, sampling, observe=observe))
    return Overlap(usage.stages[0].num_tokens / usage.span_s, usage.bubble, overlap_share(timings))


def measure_overlap(stages: int, sequences: int, rounds: int) -> dict[tuple[str, str], Overlap]:
    """Return the median figures by traffic and M."""
    args = read_model_args(DEMO_MODEL)
    memory = probe_local().stage_memory(stages)
    plan = make_plan(
        args,
        PlanRequest((StageBudget(memory),) * stages, args.dtype, args.max_seq_len, sequences, 16),
    )
    spec = PipelineSpec("bench", plan, DEMO_MODEL, threads_per_stage=1, use_gpus=False)
    policies: dict[str, Policy] = {
        str(m): FixedInFlightPolicy(m, CHUNK) for m in sorted({1, stages, stages + 1})
    }
    policies["measured"] = BalancedPolicy(stages, CHUNK)  # keeps its cost model over all runs
    cases = [(traffic, m) for traffic in TRAFFIC for m in policies]
    found: dict[tuple[str, str], list[Overlap]] = defaultdict(list)
    with (
        local_ray_cluster(num_cpus=stages),
        running_chain(spec, console.print) as chain,
        Progress(console=console) as progress,
    ):
        task = progress.add_task("measuring", total=(rounds + 1) * len(cases))
        for number in range((rounds + 1) * len(cases)):
            traffic, m = cases[number % len(cases)]
            figures = run_traffic(chain, spec, traffic, sequences, policies[m])
            if number >= len(cases):  # the first round warms up
                found[traffic.name, m].append(figures)
            progress.advance(task)
    return {case: medians(figures) for case, figures in found.items()}


def overlap(options: argparse.Namespace) -> Report:
    """overlap of the stages, with one micro-batch in flight and with several"""
    found = measure_overlap(options.stages, options.sequences, options.rounds)
    measured, alone = (found["long prompts", m].tokens_per_s for m in ("measured", "1"))
    faster = "long prompts: tokens/s, measured M against M = 1"
    columns = ("traffic", "in flight (M)", "tokens/s in+out", "against M = 1", "bubble", "overlap")
    rows = [
        (
            *(name, m, f"{f.tokens_per_s:.0f}"),
            *(f"{f.tokens_per_s / found[name, '1'].tokens_per_s:.2f} x", f"{f.bubble:.0%}"),
            f"{f.overlap:.0%}",
        )
        for (name, m), f in found.items()
    ]
    title = f"{options.stages} stages, {options.sequences} sequences at once"
    data = [{"traffic": name, "in_flight": m} | asdict(f) for (name, m), f in found.items()]
    return Report(
        [Target(faster, measured / alone, ">", 1.0, "x")],
        [table_of(columns, rows, title)],
        {"rows": data},
    )


PARTS = {
    "scheduler": Part(scheduler, {"--sequences": 256, "--steps": 400}),
    "calls": Part(
        calls,
        {
            "--stages": {"type": numbers, "default": [4, 16, 64]},
            "--steps": 300,
            "--rounds": 3,
        },
    ),
    "overlap": Part(overlap, {"--stages": 4, "--sequences": 8, "--rounds": 3}),
}


def main() -> None:
    conclude_part(__doc__, PARTS)


if __name__ == "__main__":
    main()
