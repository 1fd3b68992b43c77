"""Benchmark of expert actors against experts in the stages, and of ping-pong over a slow link.

    python tests/bench/experts.py [--prompts 64] [--rounds 3] [--delay-ms 5] [--json]

A Mixtral of 214 M parameters with random weights in float32, with prompts of 128 tokens and answers
of 64, all at once. First complete pipelines by ``tramontane bench``: experts in the stages, with
both cores, and on two actors over either link. Then one stage in this process with two expert
actors in their own processes, whose answers are delayed: with one open micro-batch (ping-pong off)
and with several. Configurations alternate, so that a slow moment of the machine affects all;
figures are medians, and ratios are within a round.
"""

import argparse
import asyncio
import json
import multiprocessing
import queue
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import torch
from harness import random_ids, run_prompts, scheduler_for
from local_expert_actors import CPU, HOST, PingPongChain, expert_plan
from rich.console import Console
from rich.table import Table
from targets import Target, at_least, conclude

from tramontane.cluster.planning.planner import PlanRequest, StageBudget, make_plan
from tramontane.proto.model_args import ModelArgs, MoeArgs
from tramontane.proto.model_folder import RandomWeights
from tramontane.proto.plan import ExpertPlan
from tramontane.proto.request import SamplingParams
from tramontane.router.engine.stats import UsageMeter
from tramontane.router.scheduling.balanced_policy import BalancedPolicy
from tramontane.workers.experts.expert_link import (
    DirectExpertClient,
    ExpertMessageLayout,
    ExpertServer,
)
from tramontane.workers.experts.expert_worker import ExpertCall, ExpertReply, ExpertWorker
from tramontane.workers.experts.remote_experts import RemoteExperts
from tramontane.workers.links.channel import Address
from tramontane.workers.links.tcp_channel import TcpChannelFactory
from tramontane.workers.stage.ping_pong_executor import PingPongExecutor
from tramontane.workers.stage.stage_worker import StageWorker
from tramontane.workers.weights.config_writer import to_hf_config

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

INPUT_LEN, OUTPUT_LEN, BUDGET, ACTORS = 128, 64, 512, 2
MIN_RATIO_ACTORS = 0.7  # of two actors over the direct link to experts in one stage with both cores
MIN_RATIO_PING_PONG = 1.5  # of two open micro-batches, the default, to one
OPEN = (1, 2, 3, 4)  # micro-batches; 1 is off
ARGS = ModelArgs(
    dim=512,
    n_layers=8,
    head_dim=64,
    hidden_dim=1792,
    n_heads=8,
    n_kv_heads=2,
    norm_eps=1e-5,
    vocab_size=32_000,
    rope_theta=1e6,
    max_seq_len=2048,
    windows=(None,) * 8,
    moe=MoeArgs(8, 2),
    dtype="float32",
)
PIPELINES = {
    "inside, 1 x 2": "--stages 1 --threads-per-stage 2",
    "inside, 2 x 1": "--stages 2 --threads-per-stage 1",
    "2 actors, direct": "--stages 1 --threads-per-stage 1 --expert-actors 2 --link direct",
    "2 actors, object store": (
        "--stages 1 --threads-per-stage 1 --expert-actors 2 --link object-store"
    ),
}
console = Console(stderr=True)
Speeds = dict[str, list[float]]  # tokens/s, by round


def pipeline_speed(folder: Path, flags: str, prompts: int) -> float:
    """Return the tokens per second of prompts and answers."""
    work = (
        f"--num-prompts {prompts} --input-len {INPUT_LEN} --output-len {OUTPUT_LEN} --warmups 1"
        " --repeats 1 --max-model-len 2048"
    )
    command = f"bench --json --model {folder} --load-format dummy --dtype float32 {work} {flags}"
    entry = "from tramontane.cluster.cli.__main__ import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", entry, *command.split()], capture_output=True, text=True, check=True
    )
    return float(json.loads(done.stdout.splitlines()[-1])["tokens_per_second"])


def _expert_process(pipe: "Connection[Any, Any]", plan: ExpertPlan, actor_id: int) -> None:
    """Run an expert actor. Sends None when loaded; then receives addresses of calls and sends those
    of replies.
    """
    worker = ExpertWorker.load(plan, actor_id, RandomWeights())
    server = ExpertServer(worker, plan, HOST, TcpChannelFactory(), num_threads=1)
    pipe.send(None)
    while True:
        pipe.send(server.open(pipe.recv()))


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


@contextmanager
def expert_processes(plan: ExpertPlan) -> Iterator[list["Connection[Any, Any]"]]:
    context = multiprocessing.get_context("spawn")
    with ExitStack() as stack:
        pipes = []
        for actor in plan.actors:
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_expert_process, args=(theirs, plan, actor.actor_id), daemon=True
            )
            process.start()
            stack.callback(process.kill)
            pipes.append(ours)
        for pipe in pipes:
            pipe.recv()
        yield pipes


def process_client(
    pipes: list["Connection[Any, Any]"], plan: ExpertPlan, actor_id: int, notify: Callable[[], None]
) -> DirectExpertClient:
    """Connect to the process of an actor, as ``remote_experts.Connect`` does."""

    def introduce(calls: Address) -> Address:
        pipes[actor_id].send(calls)
        address: Address = pipes[actor_id].recv()
        return address

    layout = ExpertMessageLayout.of(plan, CPU)
    return DirectExpertClient(
        introduce, notify, layout, HOST, TcpChannelFactory(), f"experts {actor_id}"
    )


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


def run(prompts: int, rounds: int, delay_ms: float) -> tuple[Speeds, Speeds]:
    pipelines: Speeds = defaultdict(list)
    delayed: Speeds = defaultdict(list)
    plan = expert_plan(ARGS, ACTORS)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(to_hf_config(ARGS)))
        for number in range(rounds):
            for name, flags in PIPELINES.items():
                console.print(f"round {number + 1} of {rounds}: {name} ...", style="dim")
                pipelines[name].append(pipeline_speed(Path(folder), flags, prompts))
            with expert_processes(plan) as pipes:
                for max_open in OPEN:
                    console.print(
                        f"round {number + 1} of {rounds}: answers {delay_ms:g} ms later, {max_open}"
                        " open ...",
                        style="dim",
                    )
                    delayed[str(max_open)].append(
                        delayed_speed(pipes, plan, prompts, delay_ms / 1000, max_open)
                    )
    return dict(pipelines), dict(delayed)


def _ratio(speeds: Speeds, name: str, to: str) -> float:
    return statistics.median(a / b for a, b in zip(speeds[name], speeds[to], strict=True))


def targets(pipelines: Speeds, delayed: Speeds, delay_ms: float) -> list[Target]:
    to = next(iter(PIPELINES))
    actors = _ratio(pipelines, "2 actors, direct", to)
    return [
        at_least(f"tokens/s of 2 actors, direct, of {to}", actors, MIN_RATIO_ACTORS, "x"),
        at_least(
            f"2 micro-batches open, of one, {delay_ms:g} ms later",
            _ratio(delayed, "2", "1"),
            MIN_RATIO_PING_PONG,
            "x",
        ),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--delay-ms", type=float, default=5.0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    pipelines, delayed = run(options.prompts, options.rounds, options.delay_ms)
    table = Table("experts", "tokens/s", *(f"of {name}" for name in list(PIPELINES)[:2]))
    for name, speeds in pipelines.items():
        ratios = (f"{_ratio(pipelines, name, to):.2f}" for to in list(PIPELINES)[:2])
        table.add_row(name, f"{statistics.median(speeds):.0f}", *ratios)
    late = Table(
        "micro-batches open",
        "new tokens/s",
        "of one",
        title=f"answers {options.delay_ms:g} ms later",
    )
    for max_open, speeds in delayed.items():
        late.add_row(
            max_open, f"{statistics.median(speeds):.0f}", f"{_ratio(delayed, max_open, '1'):.2f}"
        )
    data = {"pipelines": pipelines, "delayed": delayed}
    conclude(
        targets(pipelines, delayed, options.delay_ms), table, late, data=data, as_json=options.json
    )


if __name__ == "__main__":
    main()
