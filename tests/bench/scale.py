"""Benchmark of many pipelines without a model: what ingress, proxy and routers cost, and how it
grows from 1 router to 64.

    python tests/bench/scale.py [--routers 1,4,16,64] [--streams 2000] [--seconds 20] [--quick]
    [--json]

The application's own ingresses, on Ray Serve, and routers whose stages echo: every step takes
``--step-ms`` and returns the last token of each sequence. Several routers share a process. All
clients stream at once, so that each gets one token per step; CPU time is read from the processes
while all streams run. Everything shares this machine's cores: figures are CPU seconds per 1,000
tokens, and targets compare them with work of the same run: the events of 1,000 tokens, written as
JSON.
"""

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Sequence
from contextlib import ExitStack, aclosing, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import psutil
from bench_parts import Part, Report, conclude_part, console, numbers, say, table_of
from ray import serve
from ray.serve.config import RequestRouterConfig
from rich.progress import Progress
from serve_cluster import PORT, jobs_in, start_serve, wait_until_ready
from serve_process import TITLES, by_title, send_completion
from targets import Target, at_least, at_most, none_of

from tramontane.cluster.config.engine_config import EngineConfig
from tramontane.cluster.pipeline.engine import model_checkpoint_digest
from tramontane.cluster.pipeline.ray_cluster import local_ray_cluster
from tramontane.cluster.serving.app import APPLICATION, UNBOUNDED
from tramontane.cluster.serving.ingress import IngressReplica
from tramontane.cluster.serving.least_loaded_router import LeastLoadedRouter
from tramontane.cluster.serving.token_stream import TokenStreams
from tramontane.proto.plan import CachePlan, WindowClass
from tramontane.proto.step import MicroBatch, StepResult
from tramontane.router.engine.health import PipelineHealth
from tramontane.router.engine.router import Router
from tramontane.router.scheduling.policy import FixedInFlightPolicy
from tramontane.router.scheduling.scheduler import Scheduler
from tramontane.router.scheduling.waiting_queue import SchedulerLimits
from tramontane.workers.weights.checkpoint import short_digest

# the writes of each ingress are the same on every machine
CONTEXT, VOCAB, WRITES_PER_S = 1024, 2**17, 100
OPENING_AT_ONCE = 64  # streams that have no token yet
OPENING_TIMEOUT_S = 300.0
# CPU of ingress and router per 1,000 tokens, in times of writing their events as JSON
MAX_COST = 15.7
MAX_GROWTH = 2.0  # of that from the fewest routers to the most
MIN_SHARE = 0.8  # of the tokens that echoing stages would make alone, with the most routers


class EchoChain:
    """A stage chain without stages: every step takes as long, and returns the last token of each
    sequence.
    """

    num_stages = 1
    has_lost_node = False

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self.num_tokens = 0

    async def fence(self) -> int:
        return 1

    async def replace_hung_workers(self, _limit_s: float) -> str:
        return ""

    def submit(self, batch: MicroBatch) -> Awaitable[StepResult]:
        return self._echo(batch)

    async def _echo(self, batch: MicroBatch) -> StepResult:
        await asyncio.sleep(self._step_s)
        token_ids = (
            *(c.token_ids[-1] for c in batch.chunks if c.needs_sample),
            *batch.decodes.token_ids,
        )
        self.num_tokens += len(token_ids)
        return StepResult(batch.epoch, batch.step_id, token_ids, ())


class EchoRouters:
    """A replica of the Router deployment with several routers, each of which drives echoing stages
    of its own.
    """

    def __init__(self, num_routers: int, digest: str, step_s: float, max_num_seqs: int) -> None:
        name = serve.get_replica_context().replica_id.unique_id
        self._name, self._streams = name, TokenStreams(name, digest)
        self._chains = [EchoChain(step_s) for _ in range(num_routers)]
        cache = CachePlan(16, (WindowClass(CONTEXT, CONTEXT // 16, max_num_seqs * CONTEXT // 16),))
        limits = SchedulerLimits(max_num_seqs, 4096, CONTEXT, VOCAB)
        self._routers = [
            Router(Scheduler(cache, limits, FixedInFlightPolicy(1, 4096)), chain)
            for chain in self._chains
        ]
        self._driving: list[asyncio.Task[None]] = []

    async def subscribe(self, ingress: str, replica: str) -> Any:
        async with aclosing(self._streams.subscribe(ingress, replica)) as messages:
            async for message in messages:
                yield message

    async def generate(self, *arguments: Any) -> bytes:
        await self._drive()
        router = min(self._routers, key=lambda r: r.scheduler.num_running + r.scheduler.num_waiting)
        return await self._streams.generate(router, *arguments)

    async def health(self) -> tuple[PipelineHealth, str]:
        await self._drive()
        is_ready = all(router.is_ready for router in self._routers)
        return PipelineHealth("ready" if is_ready else "unavailable"), self._name

    async def stats(self) -> tuple[int, int]:
        """Return the tokens so far, and the sequences that run."""
        return sum(c.num_tokens for c in self._chains), sum(
            r.scheduler.num_running for r in self._routers
        )

    async def _drive(self) -> None:
        if not self._driving:
            self._driving = [asyncio.create_task(router.run()) for router in self._routers]
            await asyncio.sleep(0)


@dataclass(frozen=True)
class Run:
    """Figures with one number of routers. CPU times are seconds per 1,000 tokens, by kind of
    process.
    """

    routers: int
    processes: int
    streams: int
    tokens_per_s: float
    wanted_per_s: float
    cpu_s: dict[str, float]
    json_s: float  # to write the events of 1,000 tokens, on this machine at this time
    failed: int

    @property
    def cost(self) -> float:
        """CPU time of ingress and routers, in times of ``json_s``."""
        return (self.cpu_s["ingress"] + self.cpu_s["router"]) / self.json_s


async def stream(prompt: str, opened: asyncio.Event, failures: list[str]) -> None:
    """Read one stream until cancelled, on a plain socket."""
    body = {
        "prompt": prompt,
        "max_tokens": CONTEXT - 64,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
    }
    try:
        reader, writer = await send_completion(PORT, body)
        first = await reader.readuntil(b"data: ")
        if b" 200 " not in first.split(b"\r\n")[0]:
            failures.append(first.decode())
        opened.set()
        while await reader.read(2**16):
            pass
        failures.append("the stream ended")
    except (OSError, asyncio.IncompleteReadError) as error:
        failures.append(repr(error))
    finally:
        opened.set()
        with suppress(UnboundLocalError):
            writer.transport.abort()


async def open_streams(
    num_streams: int, failures: list[str], progress: Progress
) -> list["asyncio.Task[None]"]:
    task = progress.add_task("opening streams", total=num_streams)
    room, readers = asyncio.Semaphore(OPENING_AT_ONCE), []

    async def one(number: int) -> None:
        opened = asyncio.Event()
        async with room:
            readers.append(
                asyncio.create_task(stream(f"ROMEO {number}: what news?", opened, failures))
            )
            await opened.wait()
            progress.advance(task)

    async with asyncio.timeout(OPENING_TIMEOUT_S):
        await asyncio.gather(*(one(number) for number in range(num_streams)))
    return readers


def cpu_seconds() -> dict[str, float]:
    """Return the CPU time so far of the processes of each kind."""
    return by_title(psutil.Process(), lambda process: sum(process.cpu_times()[:2]))


def json_seconds() -> float:
    """Return the CPU time in which the events of 1,000 tokens are written as JSON; the median of
    some.
    """
    choice = {"index": 0, "text": " word", "logprobs": None, "finish_reason": None}
    event = {
        "id": "cmpl-0123456789",
        "object": "text_completion",
        "created": 1,
        "model": "demo",
        "choices": [choice],
    }
    times = []
    for _ in range(21):
        began = time.process_time()
        for _ in range(1000):
            json.dumps(event, ensure_ascii=False, separators=(",", ":")).encode()
        times.append(time.process_time() - began)
    return statistics.median(times)


async def tokens_so_far() -> int:
    handle = serve.get_deployment_handle("Router", APPLICATION)
    return sum(tokens for tokens, _ in await handle.broadcast("stats").results_async())


async def measure(
    routers: int, processes: int, streams: int, seconds: float, step_s: float, progress: Progress
) -> Run:
    failures: list[str] = []
    readers = await open_streams(streams, failures, progress)
    try:
        await asyncio.sleep(2.0)
        before, cpu, began = await tokens_so_far(), cpu_seconds(), time.perf_counter()
        say("measuring")
        task = progress.add_task("measuring", total=seconds)
        for _ in range(int(seconds)):
            await asyncio.sleep(1.0)
            progress.advance(task)
        tokens, spent, elapsed = (
            await tokens_so_far() - before,
            cpu_seconds(),
            time.perf_counter() - began,
        )
    finally:
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
    if not tokens:
        raise SystemExit(f"no stream has tokens: {failures[:1]}")
    per_thousand = {name: (spent[name] - cpu[name]) * 1000 / tokens for name in TITLES}
    figures = (tokens / elapsed, streams / step_s, per_thousand, json_seconds(), len(failures))
    return Run(routers, processes, streams, *figures)


def deploy(
    config: EngineConfig, routers: int, processes: int, ingresses: int, step_s: float, streams: int
) -> None:
    fingerprint = model_checkpoint_digest(config)
    common: dict[str, Any] = {
        "ray_actor_options": {"num_cpus": 0},
        "max_ongoing_requests": UNBOUNDED,
    }
    balancing = RequestRouterConfig(request_router_class=LeastLoadedRouter)  # type: ignore[arg-type]
    router = serve.deployment(
        name="Router", num_replicas=processes, request_router_config=balancing, **common
    )(EchoRouters)
    ingress = serve.deployment(name="Ingress", num_replicas=ingresses, **common)(
        serve.ingress()(IngressReplica)
    )
    bound = router.bind(routers // processes, short_digest(fingerprint), step_s, streams)
    serve.run(
        ingress.bind(config, fingerprint, bound, None, False, 20.0, "bench"),
        name=APPLICATION,
        route_prefix="/",
    )
    wait_until_ready()


def run(options: argparse.Namespace) -> list[Run]:
    runs, step_s = [], options.step_ms / 1000
    with tempfile.TemporaryDirectory() as folder:
        settings = jobs_in(folder) | {
            "stream_writes_per_s": WRITES_PER_S,
            "replicas": max(options.routers),
            "max_num_seqs": options.streams,
        }
        config = EngineConfig.build(None, settings)
        for routers in options.routers:
            processes = min(routers, options.processes)
            with ExitStack() as stack:
                stack.enter_context(local_ray_cluster(num_cpus=4))
                stack.callback(serve.shutdown)
                progress = stack.enter_context(
                    Progress(console=console, transient=True, disable=not console.is_terminal)
                )
                say(f"{routers} routers in {processes} processes")
                start_serve(PORT, 0)
                deploy(config, routers, processes, options.ingresses, step_s, options.streams)
                figures = (options.streams, options.seconds, step_s, progress)
                runs.append(asyncio.run(measure(routers, processes, *figures)))
    return runs


def targets(runs: Sequence[Run]) -> list[Target]:
    first, last = runs[0], runs[-1]
    return [
        at_most(f"ingress and router, {last.routers} routers", last.cost, MAX_COST, "JSON times"),
        at_most(f"the same against {first.routers}", last.cost / first.cost, MAX_GROWTH, "times"),
        at_least(
            "tokens/s against echoing stages alone",
            last.tokens_per_s / last.wanted_per_s,
            MIN_SHARE,
            "x",
        ),
        none_of("failed streams", range(sum(r.failed for r in runs))),
    ]


def scale(options: argparse.Namespace) -> Report:
    if options.quick:
        options.routers, options.streams, options.seconds = [1, 8], 100, 4.0
    os.environ.setdefault("RAY_SERVE_LOG_TO_STDERR", "0")
    runs = run(options)
    columns = ("routers", "processes", "streams", "tokens/s")
    rows = [
        (
            *(each.routers, each.processes, each.streams, f"{each.tokens_per_s:,.0f}"),
            *(f"{1000 * each.cpu_s[name]:.1f}" for name in TITLES),
            f"{each.cost:.1f}",
        )
        for each in runs
    ]
    cpu = (f"{name}, CPU ms" for name in TITLES)
    about = "CPU ms per 1,000 tokens; JSON times: of ingress and router together, see --help"
    return Report(
        targets(runs),
        [table_of((*columns, *cpu, "in JSON times"), rows), about],
        {"rows": [asdict(each) for each in runs]},
    )


QUICK = "a check: 1 and 8 routers, 100 streams, 4 seconds"
PARTS = {
    "scale": Part(
        scale,
        {
            "--routers": {"type": numbers, "default": [1, 4, 16, 64]},
            "--processes": {"default": 8, "help": "of routers, at most"},
            "--ingresses": 4,
            "--streams": 2000,
            "--seconds": 20.0,
            "--step-ms": 125.0,
            "--quick": {"default": False, "help": QUICK},
        },
    )
}


def main() -> None:
    conclude_part(__doc__, PARTS)


if __name__ == "__main__":
    main()
