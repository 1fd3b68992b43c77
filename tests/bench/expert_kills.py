"""Benchmark of expert actors that are killed while requests run: failures, differences and pauses.

    python tests/bench/expert_kills.py [--kills 20] [--json]

The demo model in float32: two stages, two expert actors, eight streams. For every combination of
link and replicas all prompts run once without kills, then while one expert actor after the other is
killed with SIGKILL, each when the one before serves again. Greedy tokens must be the same, except
for close calls (``close_calls``); a request that fails ends the benchmark. The longest time between
two tokens of any stream is reported for both.
"""

import argparse
import asyncio
import random
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from close_calls import close_call
from expert_kills import kill_under_load
from harness import running_chain
from local_expert_actors import expert_plan, without_experts
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from targets import Target, at_most, conclude

from tramontane.cluster.actors.pipeline_spec import PipelineSpec
from tramontane.cluster.config.engine_config import DEMO_MODEL
from tramontane.cluster.pipeline.ray_cluster import local_ray_cluster
from tramontane.cluster.planning.planner import PlanRequest, StageBudget, make_plan
from tramontane.proto.model_folder import read_model_args
from tramontane.proto.plan import Link
from tramontane.proto.request import SamplingParams

PROMPTS, STAGES, ACTORS = 12, 2, 2
SAMPLING = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
MAX_PAUSE_S = 1.0  # with a replica
console = Console(stderr=True)


@dataclass(frozen=True)
class Figures:
    link: Link
    replicas: int
    kills: int
    requests: int  # that ran while actors were killed
    different: int  # of these, with other tokens than without kills that rounding does not explain
    close_calls: int
    longest_pause_s: float
    undisturbed_pause_s: float


def measure(link: Link, replicas: int, kills: int) -> Figures:
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
    return Figures(link, replicas, kills, len(outcome.outputs), len(parted) - close, close, *pauses)


def is_close(prompt: tuple[int, ...], got: list[int], wanted: list[int]) -> bool:
    """Return True if rounding explains the first token that differs."""
    first = next(
        (n for n, (a, b) in enumerate(zip(got, wanted, strict=False)) if a != b),
        min(len(got), len(wanted)),
    )
    return bool(
        close_call({"prompt": list(prompt), "temperature": 0.0, "seed": 0}, 0, first, got, wanted)
    )


def targets(figures: list[Figures]) -> list[Target]:
    found = []
    for f in figures:
        row = f"{f.link}, replicas {f.replicas}"
        found.append(at_most(f"requests with other tokens, {row}", f.different, 0))
        if f.replicas > 1:
            found.append(at_most(f"longest pause, {row}", f.longest_pause_s, MAX_PAUSE_S, "s"))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    links: tuple[Link, ...] = ("direct", "object-store")
    with local_ray_cluster(num_cpus=STAGES + ACTORS):
        figures = [measure(link, replicas, options.kills) for replicas in (1, 2) for link in links]
    table = Table(
        "link",
        "replicas",
        "kills",
        "requests",
        "different",
        "close calls",
        "longest pause",
        "without kills",
    )
    for f in figures:
        pauses = f"{f.longest_pause_s:.2f} s", f"{f.undisturbed_pause_s:.2f} s"
        numbers = f.replicas, f.kills, f.requests, f.different, f.close_calls
        table.add_row(f.link, *map(str, numbers), *pauses)
    conclude(
        targets(figures),
        table,
        data={"rows": [asdict(each) for each in figures]},
        as_json=options.json,
    )


if __name__ == "__main__":
    main()
