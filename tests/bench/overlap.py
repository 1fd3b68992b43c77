"""Benchmark of the overlap of a pipeline's stages, and of its effect on throughput.

    python tests/bench/overlap.py [--stages 4] [--sequences 8] [--rounds 3] [--json]

The demo model on Ray stage actors, one thread each. Two kinds of traffic: long prompts in chunks of
128 tokens with few new tokens, and short prompts with many. Each runs with 1, stages and stages + 1
micro-batches in flight (M), and with as many as the router's policy chooses from its measurements.
Configurations alternate, so that a slow moment of the machine affects all of them. Figures are
medians over the rounds; speed is relative to M = 1.
"""

import argparse
import asyncio
import statistics
import sys
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from harness import run_prompts, running_chain, scheduler_for
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from stage_overlap import overlap_share
from targets import Target, conclude

from tramontane.cluster.actors.pipeline_spec import PipelineSpec
from tramontane.cluster.config.engine_config import DEMO_MODEL
from tramontane.cluster.pipeline.ray_cluster import local_ray_cluster
from tramontane.cluster.pipeline.stage_chain import ObjectStoreStageChain
from tramontane.cluster.planning.hardware import probe_local
from tramontane.cluster.planning.planner import PlanRequest, StageBudget, make_plan
from tramontane.proto.model_folder import read_model_args
from tramontane.proto.request import SamplingParams
from tramontane.proto.step import StageTiming, StepResult
from tramontane.router.engine.stats import UsageMeter
from tramontane.router.scheduling.balanced_policy import BalancedPolicy
from tramontane.router.scheduling.policy import FixedInFlightPolicy, Policy
from tramontane.router.tokenization.backends import SentencePieceTokenizer

BUDGET = 128
TEXT = (
    "Now is the winter of our discontent made glorious summer by this sun of York; and all the"
    " clouds "
)
console = Console(stderr=True)


@dataclass(frozen=True)
class Traffic:
    name: str
    prompt_tokens: int
    new_tokens: int


TRAFFIC = (Traffic("long prompts", 400, 8), Traffic("decoding", 16, 64))


@dataclass(frozen=True)
class Figures:
    tokens_per_s: float  # in and out
    bubble: float
    overlap: float


def measure(
    chain: ObjectStoreStageChain,
    spec: PipelineSpec,
    traffic: Traffic,
    sequences: int,
    policy: Policy,
) -> Figures:
    usage, timings = UsageMeter(len(spec.plan.stages)), list[StageTiming]()

    def observe(result: StepResult) -> None:
        usage.observe(result)
        timings.extend(result.timings)

    prompt_ids = list(SentencePieceTokenizer(DEMO_MODEL / "tokenizer.model").encode(TEXT * 20))[
        : traffic.prompt_tokens
    ]
    sampling = SamplingParams(max_tokens=traffic.new_tokens, temperature=0.0, ignore_eos=True)
    scheduler = scheduler_for(spec.plan, BUDGET, policy)
    asyncio.run(run_prompts(chain, scheduler, [prompt_ids] * sequences, sampling, observe=observe))
    return Figures(usage.stages[0].num_tokens / usage.span_s, usage.bubble, overlap_share(timings))


def run(stages: int, sequences: int, rounds: int) -> dict[tuple[str, str], Figures]:
    """Return the median figures by traffic and M."""
    args = read_model_args(DEMO_MODEL)
    memory = probe_local().stage_memory(stages)
    plan = make_plan(
        args,
        PlanRequest((StageBudget(memory),) * stages, args.dtype, args.max_seq_len, sequences, 16),
    )
    spec = PipelineSpec("bench", plan, DEMO_MODEL, threads_per_stage=1, use_gpus=False)
    policies: dict[str, Policy] = {
        str(m): FixedInFlightPolicy(m, BUDGET) for m in sorted({1, stages, stages + 1})
    }
    policies["measured"] = BalancedPolicy(stages, BUDGET)  # keeps its cost model over all runs
    cases = [(traffic, m) for traffic in TRAFFIC for m in policies]
    found: dict[tuple[str, str], list[Figures]] = defaultdict(list)
    with (
        local_ray_cluster(num_cpus=stages),
        running_chain(spec, console.print) as chain,
        Progress(console=console) as progress,
    ):
        task = progress.add_task("measuring", total=(rounds + 1) * len(cases))
        for number in range((rounds + 1) * len(cases)):
            traffic, m = cases[number % len(cases)]
            figures = measure(chain, spec, traffic, sequences, policies[m])
            if number >= len(cases):  # the first round warms up
                found[traffic.name, m].append(figures)
            progress.advance(task)
    return {case: _median(figures) for case, figures in found.items()}


def _median(figures: list[Figures]) -> Figures:
    rows = [tuple(asdict(f).values()) for f in figures]
    return Figures(*(statistics.median(column) for column in zip(*rows, strict=True)))


def targets(figures: dict[tuple[str, str], Figures]) -> list[Target]:
    """Require that overlapping stages are faster on long prompts."""
    measured, alone = (figures["long prompts", m].tokens_per_s for m in ("measured", "1"))
    return [
        Target("long prompts: tokens/s, measured M against M = 1", measured / alone, ">", 1.0, "x")
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    figures = run(options.stages, options.sequences, options.rounds)
    table = Table(title=f"{options.stages} stages, {options.sequences} sequences at once")
    for name in (
        "traffic",
        "in flight (M)",
        "tokens/s in+out",
        "against M = 1",
        "bubble",
        "overlap",
    ):
        table.add_column(name, justify="right")
    for (name, m), f in figures.items():
        relative = f"{f.tokens_per_s / figures[name, '1'].tokens_per_s:.2f} x"
        table.add_row(
            name, m, f"{f.tokens_per_s:.0f}", relative, f"{f.bubble:.0%}", f"{f.overlap:.0%}"
        )
    rows = [{"traffic": name, "in_flight": m} | asdict(f) for (name, m), f in figures.items()]
    conclude(targets(figures), table, data={"rows": rows}, as_json=options.json)


if __name__ == "__main__":
    main()
