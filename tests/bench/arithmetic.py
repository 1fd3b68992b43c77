"""Benchmark of one stage's computation, without Ray, router and channels.

    python tests/bench/arithmetic.py [--models mistral-300m mixtral-200m] [--threads 1 2] [--rounds
    5] [--prompts N] [--profile]

A complete model with random weights runs in one ``StageWorker`` in this process. The phases
alternate in rounds: a prefill of 512 tokens (four prompts of 128), and decode steps of 1, 16, 32
and 64 sequences with a context of about 160 tokens. Figures are medians. With ``--prompts N`` N
prompts of 128 tokens with 64 new ones each also run through scheduler and router, once.
``--profile`` shows instead how a phase's time is spent, by torch's operators and by Python's
functions.
"""

import argparse
import cProfile
import pstats
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import torch
from harness import random_ids, run_in_process
from rich.table import Table
from targets import conclude
from torch.profiler import ProfilerActivity, profile

from tramontane.cluster.planning.planner import PlanRequest, StageBudget, make_plan
from tramontane.proto.model_args import GateScores, LatentArgs, ModelArgs, MoeArgs, YarnScaling
from tramontane.proto.model_folder import RandomWeights
from tramontane.proto.request import SamplingParams
from tramontane.proto.step import Chunk, MicroBatch
from tramontane.proto.units import GIB
from tramontane.workers.stage.stage_worker import StageWorker

CONTEXT, STEPS = 156, 8  # decode steps have contexts of 156 to 163 tokens
PROMPT, NEW_TOKENS = 128, 64
GREEDY = SamplingParams(temperature=0.0)
MISTRAL_300M = ModelArgs(
    dim=1024,
    n_layers=16,
    head_dim=64,
    hidden_dim=3584,
    n_heads=16,
    n_kv_heads=4,
    norm_eps=1e-5,
    vocab_size=32000,
    rope_theta=1e4,
    max_seq_len=1024,
    windows=(512,) * 16,
)
MIXTRAL_200M = replace(
    MISTRAL_300M,
    dim=512,
    n_layers=8,
    hidden_dim=1792,
    n_heads=8,
    n_kv_heads=2,
    windows=(512,) * 8,
    moe=MoeArgs(8, 2),
)
# Mistral Small 4 with an eighth of its width, heads and layers. A token is in the cache as there,
# and has as many experts.
_SMALL_4_LATENT = LatentArgs(
    q_lora_rank=128, kv_lora_rank=256, qk_nope_head_dim=64, qk_rope_head_dim=64, v_head_dim=128
)
SMALL_4_200M = replace(
    MISTRAL_300M,
    dim=512,
    n_layers=4,
    head_dim=_SMALL_4_LATENT.cached_dim,
    hidden_dim=1536,
    n_heads=4,
    n_kv_heads=1,
    norm_eps=1e-6,
    max_seq_len=8192,
    windows=(None,) * 4,
    moe=MoeArgs(128, 4, expert_dim=256, n_shared_experts=1, scores=GateScores.SOFTMAX),
    rope_scaling=YarnScaling(factor=128.0, original_max_seq_len=8192, llama4_beta=0.1),
    latent=_SMALL_4_LATENT,
)
MODELS = {"mistral-300m": MISTRAL_300M, "mixtral-200m": MIXTRAL_200M, "small4-200m": SMALL_4_200M}


@dataclass(frozen=True)
class Phase:
    name: str
    num_seqs: int
    num_tokens: int  # of each sequence in a step
    context_len: int  # tokens of each sequence before the first step
    num_steps: int

    @property
    def tokens_per_step(self) -> int:
        return self.num_seqs * self.num_tokens


PHASES = (
    Phase("prefill 4 x 128", 4, PROMPT, 0, 1),
    *(Phase(f"decode {n}", n, 1, CONTEXT, STEPS) for n in (1, 16, 32, 64)),
)


class Bench:
    """One model in one stage, with sequences whose cached keys are all zero; their values do not
    affect the time.

    The caches are written once: memory that never was is one page of zeros, which a processor keeps
    in its own caches.
    """

    def __init__(self, args: ModelArgs, dtype: str, *, experts_inside: bool = True) -> None:
        request = PlanRequest(
            (StageBudget(64 * GIB),), dtype, args.max_seq_len, 64, 16, experts_inside=experts_inside
        )
        self.plan = make_plan(args, request)
        self.worker = StageWorker.load(self.plan.stages[0], RandomWeights())
        for cached in self.worker.cache.layers.values():
            cached.k_NGd.zero_()
            cached.v_NGd.zero_()

    def step_s(self, phase: Phase) -> float:
        """Return the median seconds of the phase's steps."""
        batches = self.batches(phase)
        return statistics.median([self._seconds(batch) for batch in batches])

    def batches(self, phase: Phase) -> list[MicroBatch]:
        """Return the phase's steps, after the sequences' contexts have been entered into the
        stage's page table.
        """
        epoch, ring = self.worker.epoch + 1, self.plan.cache.classes[0].ring_pages
        self.worker.fence(epoch)
        pages = [(tuple(range(ring * s, ring * (s + 1))),) for s in range(phase.num_seqs)]
        if phase.context_len:
            contexts = (
                Chunk(s, 0, (0,) * phase.context_len, pages[s], GREEDY, False)
                for s in range(phase.num_seqs)
            )
            self.worker.table.update(MicroBatch(epoch, 0, tuple(contexts)))
        batches = []
        for step in range(phase.num_steps):
            start = phase.context_len + step * phase.num_tokens
            new = [(((),), None) if start else (pages[s], GREEDY) for s in range(phase.num_seqs)]
            chunks = (
                Chunk(s, start, tuple(range(s, s + phase.num_tokens)), *new[s], needs_sample=True)
                for s in range(phase.num_seqs)
            )
            batches.append(MicroBatch(epoch, step, tuple(chunks)))
        return batches

    def _seconds(self, batch: MicroBatch) -> float:
        started = time.perf_counter()
        self.worker.step(batch, None)
        return time.perf_counter() - started


def measure(bench: Bench, phases: Sequence[Phase], rounds: int) -> dict[Phase, float]:
    """Return the seconds of a step by phase: medians over the rounds, after one that warms up."""
    results = [{phase: bench.step_s(phase) for phase in phases} for _ in range(rounds + 1)][1:]
    return {phase: statistics.median(result[phase] for result in results) for phase in phases}


def whole_run_s(bench: Bench, num_prompts: int) -> float:
    """Return the seconds for prompts that are submitted at once, with one micro-batch in flight."""
    prompts = [random_ids(PROMPT, seed, bench.plan.args.vocab_size) for seed in range(num_prompts)]
    sampling = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
    started = time.perf_counter()
    run_in_process(bench.plan, [bench.worker], prompts, sampling, max_in_flight=1)
    return time.perf_counter() - started


def show_profile(bench: Bench, phases: Sequence[Phase]) -> None:
    for phase in phases:
        bench.step_s(phase)
        batches = bench.batches(phase)
        with profile(activities=[ProfilerActivity.CPU]) as operators:
            for batch in batches:
                bench.worker.step(batch, None)
        batches = bench.batches(phase)
        with cProfile.Profile() as functions:
            for batch in batches:
                bench.worker.step(batch, None)
        print(phase.name)
        print(
            operators.key_averages().table(
                sort_by="self_cpu_time_total", row_limit=25, max_name_column_width=50
            )
        )
        pstats.Stats(functions, stream=sys.stdout).sort_stats("tottime").print_stats(25)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument(
        "--phases", nargs="*", choices=[p.name for p in PHASES], default=[p.name for p in PHASES]
    )
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=0)
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    phases = [phase for phase in PHASES if phase.name in options.phases]
    table = Table("model", "threads", "phase", "ms per step", "tokens/s")
    for model in options.models:
        bench = Bench(MODELS[model], options.dtype)
        for threads in options.threads:
            torch.set_num_threads(threads)
            if options.profile:
                show_profile(bench, phases)
                continue
            for phase, step_s in measure(bench, phases, options.rounds).items():
                table.add_row(
                    model,
                    str(threads),
                    phase.name,
                    f"{step_s * 1e3:.1f}",
                    f"{phase.tokens_per_step / step_s:.0f}",
                )
            if options.prompts:
                speed = (
                    options.prompts * (PROMPT + NEW_TOKENS) / whole_run_s(bench, options.prompts)
                )
                table.add_row(
                    model,
                    str(threads),
                    f"{options.prompts} x ({PROMPT} in, {NEW_TOKENS} out)",
                    "",
                    f"{speed:.0f}",
                )
    conclude([], *([] if options.profile else [table]))


if __name__ == "__main__":
    main()
