"""Benchmark of expert actors: against experts in the stages, the order of work around them, and
kills.

    python tests/bench/experts.py actors [--prompts 64] [--rounds 3] [--delay-ms 5]
    python tests/bench/experts.py shared [--rounds 40]
    python tests/bench/experts.py kills [--kills 20]

All have ``--json``. Configurations alternate, so that a slow moment of the machine affects all;
figures are medians, and ratios are within a round.

**Actors** against experts in the stages, and ping-pong over a slow link: a Mixtral of 214 M
parameters with random weights in float32, with prompts of 128 tokens and answers of 64, all at
once. First complete pipelines by ``tramontane bench``: experts in the stages, with both cores, and
on two actors over either link. Then one stage in this process with two expert actors in their own
processes, whose answers are delayed: with one open micro-batch (ping-pong off) and with several.

**Shared experts**: the order of work in a layer with a shared expert, whose other experts are on an
actor. The random model in the shape of Mistral Small 4 with about 200 million parameters: one stage
with one thread, and one expert actor with another in a process of its own. A stage sends the rows
to the actor and computes the shared expert while that works. Here both orders alternate: this one,
and the shared expert before the rows are sent. Micro-batches are open one at a time, so that no
other one hides the wait. Times are the stage's own: a step is the time with a micro-batch, and the
exposed wait is the part of it in which the stage computed nothing. Ratios are of the same
micro-batch in both orders.

**Kills** of expert actors while requests run: failures, differences and pauses. The demo model in
float32: two stages, two expert actors, eight streams. For every combination of link and replicas
all prompts run once without kills, then while one expert actor after the other is killed with
SIGKILL, each when the one before serves again. Greedy tokens must be the same, except for close
calls (``close_calls``); a request that fails ends the benchmark. The longest time between two
tokens of any stream is reported for both.
"""

import argparse
import asyncio
import json
import queue
import random
import statistics
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import torch
from bench_models import MIXTRAL_200M, SMALL_4_200M
from bench_parts import (
    Part,
    Report,
    answer_of,
    conclude_part,
    console,
    in_rounds,
    median_ratio,
    table_of,
)
from close_calls import close_call
from expert_kills import kill_under_load
from harness import random_ids, run_prompts, running_chain, scheduler_for
from local_expert_actors import (
    PingPongChain,
    expert_plan,
    expert_processes,
    process_client,
    without_experts,
)
from rich.progress import Progress
from serve_process import TRAMONTANE
from stage_batches import PROMPT, OneStage, Phase, decode
from targets import Target, at_least, at_most
from torch import Tensor

from tramontane.cluster.actors.pipeline_spec import PipelineSpec
from tramontane.cluster.config.engine_config import DEMO_MODEL
from tramontane.cluster.pipeline.ray_cluster import local_ray_cluster
from tramontane.cluster.planning.planner import PlanRequest, StageBudget, make_plan
from tramontane.proto.model_folder import RandomWeights, read_model_args
from tramontane.proto.plan import ExpertPlan, Link
from tramontane.proto.request import SamplingParams
from tramontane.proto.step import StepResult
from tramontane.router.engine.stats import StageUsage, UsageMeter
from tramontane.router.scheduling.balanced_policy import BalancedPolicy
from tramontane.workers.experts.expert_link import DirectExpertClient
from tramontane.workers.experts.expert_worker import ExpertCall, ExpertReply
from tramontane.workers.experts.remote_experts import RemoteExperts
from tramontane.workers.model.moe import ExpertPermutation
from tramontane.workers.model.transformer import OnChoices, StageModel
from tramontane.workers.stage.ping_pong_executor import PingPongExecutor
from tramontane.workers.stage.stage_worker import StageWorker
from tramontane.workers.weights.config_writer import to_hf_config

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

INPUT_LEN, OUTPUT_LEN, BUDGET, ACTORS = 128, 64, 512, 2
MIN_RATIO_ACTORS = 0.7  # of two actors over the direct link to experts in one stage with both cores
MIN_RATIO_PING_PONG = 1.5  # of two open micro-batches, the default, to one
OPEN = (1, 2, 3, 4)  # micro-batches; 1 is off
ARGS = replace(MIXTRAL_200M, rope_theta=1e6, max_seq_len=2048, dtype="float32")
ON_ACTORS = "--stages 1 --threads-per-stage 1 --expert-actors 2 --link"
PIPELINES = {
    "inside, 1 x 2": "--stages 1 --threads-per-stage 2",
    "inside, 2 x 1": "--stages 2 --threads-per-stage 1",
    "2 actors, direct": f"{ON_ACTORS} direct",
    "2 actors, object store": f"{ON_ACTORS} object-store",
}
PHASES = (decode(16, num_steps=4), Phase("chunks 4 x 128", 4, PROMPT, 0, 2))
OURS, OTHER = "while the actor works", "before the rows are sent"
PROMPTS, STAGES = 12, 2
SAMPLING = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
MAX_PAUSE_S = 1.0  # with a replica
Speeds = dict[str, list[float]]  # tokens/s, by round


# ---- actors against experts in the stages


def pipeline_speed(folder: Path, flags: str, prompts: int) -> float:
    """Return the tokens per second of prompts and answers."""
    work = (
        f"--num-prompts {prompts} --input-len {INPUT_LEN} --output-len {OUTPUT_LEN} --warmups 1"
        " --repeats 1 --max-model-len 2048"
    )
    command = f"bench --json --model {folder} --load-format dummy --dtype float32 {work} {flags}"
    return float(answer_of([*TRAMONTANE, *command.split()])["tokens_per_second"])


class DelayedExpert:
    """``ExpertConnection`` whose answers arrive ``delay_s`` later."""

    def __init__(self, inner: DirectExpertClient, delay_s: float) -> None:
        self._inner, self._delay_s = inner, delay_s
        self._answers: queue.SimpleQueue[tuple[float, Future[ExpertReply], Future[ExpertReply]]] = (
            queue.SimpleQueue()
        )
        threading.Thread(target=self._deliver, daemon=True).start()

    @property
    def is_up(self) -> bool:
        return self._inner.is_up

    failure = None

    def call(self, call: ExpertCall, rows_CD: torch.Tensor) -> "Future[ExpertReply]":
        late: Future[ExpertReply] = Future()
        answer = self._inner.call(call, rows_CD)
        answer.add_done_callback(
            lambda done: self._answers.put((time.perf_counter() + self._delay_s, done, late))
        )
        return late

    def close(self) -> None:
        self._inner.close()

    def _deliver(self) -> None:
        while True:
            due, done, late = self._answers.get()
            time.sleep(max(due - time.perf_counter(), 0))
            late.set_result(done.result())


def delayed_speed(
    pipes: list["Connection[Any, Any]"],
    plan: ExpertPlan,
    prompts: int,
    delay_s: float,
    max_open: int,
) -> float:
    """Return the new tokens per second. A first round, which trains the policy's cost model, is not
    counted.
    """

    def connect(actor_id: int, notify: Callable[[], None]) -> DelayedExpert:
        return DelayedExpert(process_client(pipes, plan, actor_id, notify), delay_s)

    request = PlanRequest((StageBudget(2**33),), "float32", 2048, prompts, 16, experts_inside=False)
    stages = make_plan(ARGS, request)
    experts = RemoteExperts(plan, connect)
    stage = PingPongExecutor(
        StageWorker.load(stages.stages[0], RandomWeights()), experts, max_open, num_threads=1
    )
    chain = PingPongChain([stage])
    scheduler = scheduler_for(stages, BUDGET, BalancedPolicy(1, BUDGET, open_per_stage=max_open))
    sampling = SamplingParams(max_tokens=OUTPUT_LEN, temperature=0.0, ignore_eos=True)
    ids = [random_ids(INPUT_LEN, seed, ARGS.vocab_size) for seed in range(prompts)]
    try:
        asyncio.run(run_prompts(chain, scheduler, ids, sampling))
        usage = UsageMeter(1)
        again = scheduler_for(stages, BUDGET, scheduler.policy.policy)
        asyncio.run(run_prompts(chain, again, ids, sampling, observe=usage.observe))
    finally:
        stage.close()
        experts.close()
    return usage.tokens_per_s


def measure_actors(prompts: int, rounds: int, delay_ms: float) -> tuple[Speeds, Speeds]:
    """Return the speeds of pipelines, and with delayed answers by the number of open
    micro-batches.
    """
    pipelines: Speeds = defaultdict(list)
    delayed: Speeds = defaultdict(list)
    plan = expert_plan(ARGS, ACTORS)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(to_hf_config(ARGS)))
        late = f"answers {delay_ms:g} ms later"
        for _, name in in_rounds(rounds, [*PIPELINES, late]):
            if name in PIPELINES:
                pipelines[name].append(pipeline_speed(Path(folder), PIPELINES[name], prompts))
                continue
            with expert_processes(plan) as pipes:
                for max_open in OPEN:
                    delayed[str(max_open)].append(
                        delayed_speed(pipes, plan, prompts, delay_ms / 1000, max_open)
                    )
    return dict(pipelines), dict(delayed)


def actors(options: argparse.Namespace) -> Report:
    """against experts in the stages, and ping-pong over a slow link"""
    torch.set_num_threads(1)
    pipelines, delayed = measure_actors(options.prompts, options.rounds, options.delay_ms)
    inside, late = list(PIPELINES)[:2], f"{options.delay_ms:g} ms later"
    of_inside = median_ratio(pipelines["2 actors, direct"], pipelines[inside[0]])
    of_one = {name: median_ratio(speeds, delayed["1"]) for name, speeds in delayed.items()}
    targets = [
        at_least(f"tokens/s of 2 actors, direct, of {inside[0]}", of_inside, MIN_RATIO_ACTORS, "x"),
        at_least(f"2 micro-batches open, of one, {late}", of_one["2"], MIN_RATIO_PING_PONG, "x"),
    ]
    rows = [
        (
            name,
            f"{statistics.median(speeds):.0f}",
            *(f"{median_ratio(speeds, pipelines[to]):.2f}" for to in inside),
        )
        for name, speeds in pipelines.items()
    ]
    of_delayed = [
        (name, f"{statistics.median(speeds):.0f}", f"{of_one[name]:.2f}")
        for name, speeds in delayed.items()
    ]
    tables = [
        table_of(("experts", "tokens/s", *(f"of {name}" for name in inside)), rows),
        table_of(("micro-batches open", "new tokens/s", "of one"), of_delayed, f"answers {late}"),
    ]
    return Report(targets, tables, {"pipelines": pipelines, "delayed": delayed})


# ---- the order of work with a shared expert


@dataclass(frozen=True)
class StepTimes:
    """Seconds of a step."""

    exposed_wait_s: float
    step_s: float


Pair = dict[str, StepTimes]  # of one micro-batch, by order
Pairs = dict[Phase, list[Pair]]


@contextmanager
def shared_experts_first(model: StageModel) -> Iterator[None]:
    """Let the model compute a layer's shared expert when it has chosen the others, before their
    rows are sent.
    """
    choose, compute = model.choose_experts, model.run_shared_experts
    computed: dict[int, Tensor | None] = {}

    def choose_and_compute(
        layer: int, x_TD: Tensor, on_choices: OnChoices
    ) -> tuple[ExpertPermutation, Tensor]:
        chosen = choose(layer, x_TD, on_choices)
        computed[layer] = compute(layer, x_TD)
        return chosen

    with (
        patch.object(model, "choose_experts", choose_and_compute),
        patch.object(model, "run_shared_experts", lambda layer, _: computed.pop(layer)),
    ):
        yield


ORDERS: dict[str, Callable[[StageModel], AbstractContextManager[None]]] = {
    OURS: nullcontext,  # type: ignore[dict-item]
    OTHER: shared_experts_first,
}


def run_phase(
    bench: OneStage, experts: RemoteExperts, phase: Phase
) -> tuple[list[StepTimes], list[int]]:
    """Return the times of a phase's micro-batches, and their tokens."""
    figures, tokens = list[StepTimes](), list[int]()
    batches = bench.batches(phase)
    with closing(PingPongExecutor(bench.worker, experts, max_open=1, num_threads=1)) as stage:
        for batch in batches:
            result = stage.step(batch, lambda: None)
            assert isinstance(result, StepResult)
            usage = StageUsage().add(result.timings[0])
            figures.append(StepTimes(usage.exposed_wait_s, usage.open_s))
            tokens.extend(result.token_ids)
    return figures, tokens


def measure_orders(rounds: int) -> Pairs:
    """Run all phases in both orders, which take turns in being the first. A round that warms up is
    not counted.
    """
    found: Pairs = {phase: [] for phase in PHASES}
    plan = expert_plan(SMALL_4_200M, 1, dtype="bfloat16")
    bench = OneStage(SMALL_4_200M, "bfloat16", experts_inside=False)
    with (
        expert_processes(plan) as pipes,
        closing(RemoteExperts(plan, partial(process_client, pipes, plan))) as experts,
    ):
        for number in range(rounds + 1):
            for phase in PHASES:
                figures, tokens = dict[str, list[StepTimes]](), list[list[int]]()
                for order in (OURS, OTHER) if number % 2 else (OTHER, OURS):
                    with ORDERS[order](bench.worker.model):
                        figures[order], chosen = run_phase(bench, experts, phase)
                    tokens.append(chosen)
                assert tokens[0] == tokens[1], f"{phase.name}: the orders have different tokens"
                if number:
                    found[phase].extend(
                        {OURS: a, OTHER: b}
                        for a, b in zip(figures[OURS], figures[OTHER], strict=True)
                    )
    return found


def as_row(phase: Phase, pairs: list[Pair]) -> dict[str, str | float | list[float]]:
    """Return the medians, in milliseconds of a step, and the quartiles of the ratios of the stage's
    order to the other one.
    """
    row: dict[str, str | float | list[float]] = {"micro-batches": phase.name}
    for field in ("exposed_wait_s", "step_s"):
        own, other = ([getattr(pair[order], field) for pair in pairs] for order in (OURS, OTHER))
        name = field.removesuffix("_s").replace("_", " ")
        row[f"{name} {OURS}, ms"] = 1e3 * statistics.median(own)
        row[f"{name} {OTHER}, ms"] = 1e3 * statistics.median(other)
        row[f"{name}, ratio"] = statistics.quantiles(
            [a / b for a, b in zip(own, other, strict=True)], n=4
        )
    return row


def shown(value: str | float | list[float]) -> str:
    if isinstance(value, list):
        low, middle, high = value
        return f"{middle:.3f} ({low:.3f} to {high:.3f})"
    return value if isinstance(value, str) else f"{value:.2f}"


def shared(options: argparse.Namespace) -> Report:
    """exposed wait while the shared expert is computed, against before"""
    torch.set_num_threads(1)
    rows = [as_row(phase, pairs) for phase, pairs in measure_orders(options.rounds).items()]
    targets = [
        Target(
            f"{row['micro-batches']}: exposed wait, of the other order",
            row["exposed wait, ratio"][1],
            "<",
            1.0,
            "x",
        )
        for row in rows
    ]
    table = table_of(rows[0], [map(shown, row.values()) for row in rows])
    return Report(targets, [table], {"steps": rows})


# ---- kills


@dataclass(frozen=True)
class Kills:
    """What kills have done with one link and number of replicas."""

    link: Link
    replicas: int
    kills: int
    requests: int  # that ran while actors were killed
    different: int  # of these, with other tokens than without kills that rounding does not explain
    close_calls: int
    longest_pause_s: float
    undisturbed_pause_s: float


def measure_kills(link: Link, replicas: int, kills: int) -> Kills:
    args = read_model_args(DEMO_MODEL)
    stages = make_plan(
        args,
        PlanRequest((StageBudget(2**30),) * STAGES, "float32", 512, 16, 16, experts_inside=False),
    )
    plan = without_experts(stages, expert_plan(args, ACTORS, replicas))
    spec = PipelineSpec(
        "kills",
        plan,
        DEMO_MODEL,
        threads_per_stage=1,
        use_gpus=False,
        link=link,
        expert_micro_batches=2,
    )
    rng = random.Random(3)
    prompts = [
        [rng.randrange(3, args.vocab_size) for _ in range(rng.randint(4, 60))]
        for _ in range(PROMPTS)
    ]
    with running_chain(spec) as chain, Progress(console=console, transient=True) as progress:
        task = progress.add_task(f"{link}, replicas {replicas}", total=kills)
        baseline = asyncio.run(
            kill_under_load(spec, chain, prompts, 0, SAMPLING, min_outputs=3 * PROMPTS)
        )
        expected = dict(baseline.outputs)
        outcome = asyncio.run(
            kill_under_load(
                spec,
                chain,
                prompts,
                kills,
                SAMPLING,
                on_kill=lambda number: progress.update(task, completed=number),
            )
        )
    parted = [(prompt, output) for prompt, output in outcome.outputs if output != expected[prompt]]
    close = sum(is_close(prompt, output, expected[prompt]) for prompt, output in parted)
    pauses = outcome.longest_pause_s, baseline.longest_pause_s
    return Kills(link, replicas, kills, len(outcome.outputs), len(parted) - close, close, *pauses)


def is_close(prompt: tuple[int, ...], got: list[int], wanted: list[int]) -> bool:
    """Return True if rounding explains the first token that differs."""
    first = next(
        (n for n, (a, b) in enumerate(zip(got, wanted, strict=False)) if a != b),
        min(len(got), len(wanted)),
    )
    return bool(
        close_call({"prompt": list(prompt), "temperature": 0.0, "seed": 0}, 0, first, got, wanted)
    )


def kills(options: argparse.Namespace) -> Report:
    """failures, differences and pauses while expert actors are killed"""
    links: tuple[Link, ...] = ("direct", "object-store")
    with local_ray_cluster(num_cpus=STAGES + ACTORS):
        found = [measure_kills(link, each, options.kills) for each in (1, 2) for link in links]
    targets = []
    for f in found:
        row = f"{f.link}, replicas {f.replicas}"
        targets.append(at_most(f"requests with other tokens, {row}", f.different, 0))
        if f.replicas > 1:
            targets.append(at_most(f"longest pause, {row}", f.longest_pause_s, MAX_PAUSE_S, "s"))
    rows = [asdict(each) for each in found]
    return Report(targets, [table_of(rows[0], [row.values() for row in rows])], {"rows": rows})


PARTS = {
    "actors": Part(actors, {"--prompts": 64, "--rounds": 3, "--delay-ms": 5.0}),
    "shared": Part(shared, {"--rounds": 40}),
    "kills": Part(kills, {"--kills": 20}),
}


def main() -> None:
    conclude_part(__doc__, PARTS)


if __name__ == "__main__":
    main()
