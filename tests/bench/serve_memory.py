"""Memory of ``tramontane serve``: of its processes while it is idle, and of its stages with all
places used, against the plan.

A random model of 135 million parameters (SmolLM2's geometry) with 8,192 positions, in ``bfloat16``.
Run with ``make bench-memory``. Memory is the proportional share (PSS), sampled every half second
from the start on: pages that several processes map count once in the sum. Counted are the command,
its stages, supervisor, router, ingress and batch replicas, and Ray Serve's controller and proxy.
Ray's daemons (GCS, raylet, agents, log monitor) and the workers that it keeps in reserve are shown
apart.

For the second figure as many sequences run as there are slots, and end at about the same time at
``--max-model-len``. The plan has weights and caches, not what the process of any stage takes, so
the latter is measured first, with a model whose weights and caches are a few KB. The caches count
as far as their pages were in use at one time.
"""

import argparse
import asyncio
import re
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import httpx
import psutil
from bench_parts import Part, Report, conclude_part, say, table_of
from model_135m import MODEL_135M
from rich.table import Table
from serve_process import starting_server, when_ready
from targets import Target, at_least, at_most

from tramontane.cluster.config.engine_config import EngineConfig
from tramontane.cluster.planning.hardware import probe_local
from tramontane.cluster.planning.plan_search import plan_pipeline
from tramontane.proto.model_args import ModelArgs
from tramontane.proto.model_folder import Layout
from tramontane.proto.plan import PipelinePlan
from tramontane.workers.weights.random_checkpoint import write_random_checkpoint

PORT = 8767
EMPTY = replace(
    MODEL_135M,
    dim=32,
    n_layers=2,
    head_dim=16,
    hidden_dim=32,
    n_heads=2,
    n_kv_heads=1,
    vocab_size=64,
    windows=(None,) * 2,
)
MAX_MORE_GB, MAX_DIFFERENCE, MIN_USED = 1.5, 0.02, 0.98
SAMPLE_EVERY_S, IDLE_S = 0.5, 15.0
GB, MB = 1e9, 1e6
# command lines; others are Ray's own
OURS = re.compile(r"^ray::(?!IDLE|DashboardAgent|RuntimeEnvAgent)|main\(\) serve\b")
PER_ROUND = 1024  # tokens of prompts in the time of a decode: 512 in each of two micro-batches
BASE_SLOTS = 4
STAGE = "StageActor"


@dataclass(frozen=True, slots=True)
class Figures:
    """Bytes. ``idle`` and ``stages`` are by role of the process; of several of a role it is the
    sum.
    """

    idle: dict[str, int]  # PSS at the moment when our processes together had the most
    rays_own: dict[str, int]  # at the same moment
    settled: int  # of ours, at the end of the idle time
    # weights as packed, and caches, of each stage, the largest first
    planned: tuple[tuple[int, int], ...]
    bases: tuple[int, ...]  # of stages without a model to speak of
    full: tuple[int, ...]
    used: float  # share of the pages that sequences held at one time

    @property
    def idle_peak(self) -> int:
        """Sum of our processes at their peak."""
        return sum(self.idle.values())

    @property
    def weights(self) -> int:
        """Weights of all stages."""
        return sum(weights for weights, _ in self.planned)

    @property
    def wanted(self) -> list[float]:
        """What each stage should take in addition to its base: weights, and the caches as far as
        they were used.
        """
        return [weights + self.used * caches for weights, caches in self.planned]

    @property
    def differences(self) -> list[float]:
        """What each stage has more than that, as a share of it."""
        return [
            (full - base - wanted) / wanted
            for full, base, wanted in zip(self.full, self.bases, self.wanted, strict=True)
        ]


@dataclass(slots=True)
class Samples:
    """The PSS of a server's processes, sampled in a thread."""

    server: psutil.Process
    # by role, at the moment of the highest sum of our own
    most: dict[str, int] = field(default_factory=dict)
    rays_most: dict[str, int] = field(default_factory=dict)
    last: dict[str, int] = field(default_factory=dict)
    stages: dict[int, int] = field(default_factory=dict)  # the most of each stage, by PID

    def take(self) -> None:
        """Take a sample."""
        ours, rays = Counter[str](), Counter[str]()
        for process in (self.server, *self.server.children(recursive=True)):
            with suppress(psutil.Error, OSError):
                line = " ".join(process.cmdline())
                size, role = pss(process.pid), role_of(line)
                (ours if OURS.search(line) else rays)[role] += size
                if role == STAGE:
                    self.stages[process.pid] = max(self.stages.get(process.pid, 0), size)
        self.last = dict(ours)
        if sum(ours.values()) > sum(self.most.values()):
            self.most, self.rays_most = dict(ours), dict(rays)


def role_of(line: str) -> str:
    """Return the title of an actor without its current method, ``command``, or the name of Ray's
    program.
    """
    if line.startswith("ray::"):
        title = line.removeprefix("ray::").split(".")[0].strip()
        return re.sub(r"ServeReplica:tramontane:", "", title)
    if OURS.search(line):
        return "command"
    return next(
        (
            name
            for name in ("gcs_server", "raylet", "log_monitor", "dashboard", "runtime_env")
            if name in line
        ),
        "other",
    )


def pss(pid: int) -> int:
    """Return the proportional share of a process in bytes."""
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return (
        int(next(line for line in rollup.splitlines() if line.startswith("Pss:")).split()[1]) * 1024
    )


@contextmanager
def serving(folder: Path, *options: str) -> Iterator[Samples]:
    """Serve a model, sampled from the start, while the block runs."""
    with starting_server(PORT, "--model", str(folder), *options) as server:
        samples, stopped = Samples(psutil.Process(server.pid)), threading.Event()

        def watch() -> None:
            while not stopped.wait(SAMPLE_EVERY_S):
                samples.take()

        thread = threading.Thread(target=watch)
        thread.start()
        try:
            when_ready(server)
            yield samples
        finally:
            stopped.set()
            thread.join()


def plan_of(args: ModelArgs, folder: Path, *options: str) -> PipelinePlan:
    settings = {
        name.removeprefix("--").replace("-", "_"): value
        for name, value in zip(options[::2], options[1::2], strict=True)
    }
    return plan_pipeline(
        EngineConfig.build(None, {"model": folder} | settings), args, probe_local()
    )


async def fill(length: int, slots: int, vocab_size: int) -> float:
    """Run a sequence in each slot, all of which end at ``length`` together; return the highest
    share of pages in use.

    A prompt that is computed later is longer, by the tokens that the first ones have got until
    then.
    """
    steps = slots * length // PER_ROUND + slots  # until all prompts are computed, and some more
    used = [0.0]

    async def run(client: httpx.AsyncClient, index: int) -> None:
        num_new = max(steps - index * length // PER_ROUND, 2)
        prompt = [
            (7 * index + 3 * position) % (vocab_size - 8) + 4
            for position in range(length - num_new)
        ]
        body = {"prompt": prompt, "max_tokens": num_new, "ignore_eos": True, "temperature": 0}
        (await client.post("/v1/completions", json=body)).raise_for_status()

    async def watch(client: httpx.AsyncClient) -> None:
        while True:
            page = (await client.get("/metrics")).text
            used.append(
                float(re.findall(r"^tramontane_kv_cache_usage_perc\S* (\S+)$", page, re.M)[-1])
            )
            await asyncio.sleep(SAMPLE_EVERY_S)

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(
        base_url=f"http://127.0.0.1:{PORT}", timeout=None, limits=limits
    ) as client:
        watching = asyncio.create_task(watch(client))
        await asyncio.gather(*(run(client, index) for index in range(slots)))
        watching.cancel()
    return max(used)


def measure(length: int, slots: int) -> Figures:
    with tempfile.TemporaryDirectory(prefix="tramontane-bench-") as home:
        folder, empty = Path(home) / "model", Path(home) / "empty"
        say("writing a random model")
        write_random_checkpoint(folder, MODEL_135M, Layout.HUGGING_FACE)
        write_random_checkpoint(empty, EMPTY, Layout.HUGGING_FACE)
        say("an idle server")
        with serving(folder) as idle:
            time.sleep(IDLE_S)
        options = ("--max-model-len", str(length), "--max-num-seqs", str(slots))
        say("stages of a model with hardly any weights")
        with serving(empty, "--max-num-seqs", str(BASE_SLOTS)) as small:
            asyncio.run(fill(length, BASE_SLOTS, EMPTY.vocab_size))
        say(f"{slots} sequences of {length} positions")
        plan = plan_of(MODEL_135M, folder, *options)
        began = time.perf_counter()
        with serving(folder, *options) as full:
            used = asyncio.run(fill(length, slots, MODEL_135M.vocab_size))
            time.sleep(2 * SAMPLE_EVERY_S)
        say(f"that took {time.perf_counter() - began:.0f} s")
        # Which process is which stage cannot be seen from outside; the larger one is of the larger
        # plan.
        planned = sorted(
            ((s.packed_bytes, s.cache_bytes) for s in plan.stages), key=sum, reverse=True
        )
        bases, most = (tuple(sorted(each.stages.values(), reverse=True)) for each in (small, full))
        return Figures(
            idle.most, idle.rays_most, sum(idle.last.values()), tuple(planned), bases, most, used
        )


def tables(figures: Figures) -> list[Table]:
    def mb(sizes: Iterable[float]) -> list[str]:
        return [f"{size / MB:.0f}" for size in sizes]

    def largest_first(sizes: dict[str, int], name: str = "") -> list[tuple[str, ...]]:
        found = sorted(sizes.items(), key=lambda each: -each[1])
        return [(f"{name}{role}", *mb([size])) for role, size in found]

    idle = [
        *largest_first(figures.idle),
        ("sum of these at its peak", *mb([figures.idle_peak])),
        ("sum of these, settled", *mb([figures.settled])),
        *largest_first(figures.rays_own, "Ray's own: "),
    ]
    planned = map(sum, figures.planned)
    stages = map(mb, zip(figures.full, figures.bases, planned, figures.wanted, strict=True))
    columns = ("all places used, MB", "without a model, MB", "planned, MB", "as far as used, MB")
    title = f"stages; share of the pages in use {figures.used:.1%}"
    return [table_of(("process", "idle, MB"), idle), table_of(columns, stages, title)]


def targets(figures: Figures) -> list[Target]:
    more = (figures.idle_peak - figures.weights) / GB
    found = [at_most("idle, in addition to the weights", more, MAX_MORE_GB, "GB")]
    found.append(at_least("share of the pages in use at one time", figures.used, MIN_USED, "%"))
    return found + [
        at_most(f"stage {number}: difference from the plan", abs(difference), MAX_DIFFERENCE, "%")
        for number, difference in enumerate(figures.differences, start=1)
    ]


def memory(options: argparse.Namespace) -> Report:
    figures = measure(options.length, options.slots)
    return Report(targets(figures), tables(figures), asdict(figures))


PARTS = {
    "memory": Part(
        memory,
        {
            "--length": {
                "default": 4096,
                "help": "positions of each sequence where all places are used",
            },
            "--slots": 64,
        },
    )
}


def main() -> None:
    conclude_part(__doc__, PARTS)


if __name__ == "__main__":
    main()
