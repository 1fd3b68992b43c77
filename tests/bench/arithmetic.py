"""Benchmark of one stage's computation, without Ray, router and channels.

    python tests/bench/arithmetic.py phases [--models mistral-300m mixtral-200m] [--threads 1 2]
    [--rounds 5] [--prompts N] [--profile]
    python tests/bench/arithmetic.py latent [--threads 2] [--rounds 5]
    python tests/bench/arithmetic.py windows [--tokens 8192] [--window 512] [--chunk 512]
    [--threads 1] [--rounds 3]

All alternate in rounds; figures are medians.

**Phases**: a complete model with random weights runs in one ``StageWorker`` in this process: a
prefill of 512 tokens (four prompts of 128), and decode steps of 1, 16, 32 and 64 sequences with a
context of about 160 tokens. With ``--prompts N`` N prompts of 128 tokens with 64 new ones each also
run through scheduler and router, once. ``--profile`` shows instead how a phase's time is spent, by
torch's operators and by Python's functions.

**Latent attention**: what a decode step costs at a long context, against a short one: the random
model in the shape of Mistral Small 4 with about 200 million parameters, decode steps of 1, 4 and 16
sequences with 512 and with 4,096 tokens of context.

**Windows**: a sliding window's attention against full attention, of one layer. A prompt is computed
in chunks through the real rolling cache, gathers and writes included, with random queries, keys and
values of Mistral-300M's heads in float32: by the kernel in C, and by PyTorch's as on machines
without a C compiler.
"""

import argparse
import cProfile
import pstats
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import torch
from bench_models import MISTRAL_300M, MIXTRAL_200M, SMALL_4_200M
from bench_parts import Part, Report, conclude_part, table_of
from harness import random_ids, run_in_process
from stage_batches import PROMPT, OneStage, Phase, decode
from targets import at_most
from tiny_models import tiny_args, tiny_plan
from torch.profiler import ProfilerActivity, profile

from tramontane.proto.plan import StagePlan
from tramontane.proto.request import SamplingParams
from tramontane.proto.step import Chunk, MicroBatch
from tramontane.workers.attention.backend import AttentionKernels, CachedAttention
from tramontane.workers.attention.metadata import build_attention_metadata
from tramontane.workers.attention.native_backend import native_kernels
from tramontane.workers.attention.rolling_cache import RollingCache, StageSequences
from tramontane.workers.attention.sdpa_backend import cpu_kernels

NEW_TOKENS = 64
MODELS = {
    "mistral-300m": replace(MISTRAL_300M, max_seq_len=1024),
    "mixtral-200m": replace(MIXTRAL_200M, max_seq_len=1024, windows=(512,) * 8),
    "small4-200m": SMALL_4_200M,
}
PHASES = {
    phase.name: phase
    for phase in (Phase("prefill 4 x 128", 4, PROMPT, 0, 1), *map(decode, (1, 16, 32, 64)))
}
CONTEXTS, SEQUENCES = (512, 4096), (1, 4, 16)
MAX_RATIO = 1.3  # of the step at the longer context to that at the shorter one
CPU = torch.device("cpu")
HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE = 16, 4, 64, 16
MAX_SHARE = 1 / 3  # of full attention's time


def measure(bench: OneStage, phases: Sequence[Phase], rounds: int) -> dict[Phase, float]:
    """Return the seconds of a step by phase: medians over the rounds, after one that warms up."""
    results = [{phase: bench.step_s(phase) for phase in phases} for _ in range(rounds + 1)][1:]
    return {phase: statistics.median(result[phase] for result in results) for phase in phases}


# ---- phases


def whole_run_s(bench: OneStage, num_prompts: int) -> float:
    """Return the seconds for prompts that are submitted at once, with one micro-batch in flight."""
    prompts = [random_ids(PROMPT, seed, bench.plan.args.vocab_size) for seed in range(num_prompts)]
    sampling = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
    started = time.perf_counter()
    run_in_process(bench.plan, [bench.worker], prompts, sampling, max_in_flight=1)
    return time.perf_counter() - started


def show_profile(bench: OneStage, phases: Sequence[Phase]) -> None:
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


def phases(options: argparse.Namespace) -> Report:
    """prefill and decode steps of some models"""
    chosen, rows = [PHASES[name] for name in options.phases], list[tuple[object, ...]]()
    for model in options.models:
        bench = OneStage(MODELS[model], options.dtype)
        for threads in options.threads:
            torch.set_num_threads(threads)
            if options.profile:
                show_profile(bench, chosen)
                continue
            for phase, step_s in measure(bench, chosen, options.rounds).items():
                speed = phase.tokens_per_step / step_s
                rows.append((model, threads, phase.name, f"{step_s * 1e3:.1f}", f"{speed:.0f}"))
            if number := options.prompts:
                speed = number * (PROMPT + NEW_TOKENS) / whole_run_s(bench, number)
                name = f"{number} x ({PROMPT} in, {NEW_TOKENS} out)"
                rows.append((model, threads, name, "", f"{speed:.0f}"))
    columns = ("model", "threads", "phase", "ms per step", "tokens/s")
    data = {"rows": [dict(zip(columns, row, strict=True)) for row in rows]}
    return Report([], [table_of(columns, rows)] * bool(rows), data)


# ---- latent attention


def latent(options: argparse.Namespace) -> Report:
    """decode steps of latent attention at a long context, against a short one"""
    torch.set_num_threads(options.threads)
    cases = [decode(number, length) for number in SEQUENCES for length in CONTEXTS]
    steps_s = {
        (phase.num_seqs, phase.context_len): seconds
        for phase, seconds in measure(
            OneStage(SMALL_4_200M, "bfloat16"), cases, options.rounds
        ).items()
    }
    (short, long), rows, targets = CONTEXTS, list[tuple[object, ...]](), []
    for number in SEQUENCES:
        ratio = steps_s[number, long] / steps_s[number, short]
        ms = (f"{steps_s[number, length] * 1e3:.2f}" for length in CONTEXTS)
        rows.append((number, *ms, f"{ratio:.2f}"))
        targets.append(
            at_most(f"decode of {number} at {long} tokens, against {short}", ratio, MAX_RATIO, "x")
        )
    columns = ("sequences", f"{short} tokens of context, ms", f"{long}, ms", "ratio")
    data = [
        {"sequences": n, "context": length, "step_ms": s * 1e3}
        for (n, length), s in steps_s.items()
    ]
    return Report(targets, [table_of(columns, rows, "a decode step")], {"steps": data})


# ---- windows


def measure_windows(
    num_tokens: int, window: int, chunk: int, rounds: int
) -> dict[str, tuple[float, float]]:
    """Return the median seconds of full attention and of the window's, by kernel."""
    plans = [stage_plan(each, num_tokens) for each in (None, window)]
    kernels = {"C": native_kernels(plans[0]), "PyTorch": cpu_kernels()}
    times: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in kernels}
    with torch.inference_mode():
        for _ in range(rounds):
            for name, kernel in kernels.items():
                for plan, own in zip(plans, times[name], strict=True):
                    own.append(prefill_s(plan, kernel, num_tokens, chunk))
    return {
        name: (statistics.median(full), statistics.median(windowed))
        for name, (full, windowed) in times.items()
    }


def stage_plan(window: int | None, num_tokens: int) -> StagePlan:
    """Return the plan of a stage with one layer and a cache for one sequence."""
    heads = {"n_heads": HEADS, "n_kv_heads": KV_HEADS, "head_dim": HEAD_DIM}
    args = tiny_args(n_layers=1, windows=(window,), max_seq_len=num_tokens, **heads)
    return tiny_plan(args, 1, PAGE_SIZE, 1).stages[0]


def prefill_s(plan: StagePlan, kernels: AttentionKernels, num_tokens: int, chunk: int) -> float:
    """Return the seconds that a prompt's attention takes in chunks of ``chunk`` tokens."""
    table, cache = StageSequences(plan.cache, 1, CPU), RollingCache(plan, torch.float32, CPU)
    generator, seconds = torch.Generator().manual_seed(0), 0.0
    pages = tuple(tuple(range(window_class.ring_pages)) for window_class in plan.cache.classes)
    for step, start in enumerate(range(0, num_tokens, chunk)):
        size = min(chunk, num_tokens - start)
        q_THd, k_TGd, v_TGd = (
            torch.randn(size, heads, HEAD_DIM, generator=generator)
            for heads in (HEADS, KV_HEADS, KV_HEADS)
        )
        batch = MicroBatch(
            0, step, (_chunk(start, size, pages if start == 0 else ((),) * len(pages)),)
        )
        table.update(batch)
        started = time.perf_counter()
        CachedAttention(
            cache, build_attention_metadata(batch, table, CPU, kernels.reads_pages), kernels
        )(0, q_THd, k_TGd, v_TGd)
        seconds += time.perf_counter() - started
    return seconds


def _chunk(start: int, size: int, pages: tuple[tuple[int, ...], ...]) -> Chunk:
    return Chunk(0, start, (0,) * size, pages, SamplingParams() if start == 0 else None, False)


def windows(options: argparse.Namespace) -> Report:
    """attention of a prompt with a sliding window, against full attention"""
    torch.set_num_threads(options.threads)
    seconds = measure_windows(options.tokens, options.window, options.chunk, options.rounds)
    rows = [
        (kernel, f"{full_s:.3f}", f"{window_s:.3f}", f"{window_s / full_s:.2f}")
        for kernel, (full_s, window_s) in seconds.items()
    ]
    targets = [
        at_most(f"window's share of full attention, {kernel}", window_s / full_s, MAX_SHARE)
        for kernel, (full_s, window_s) in seconds.items()
    ]
    columns = ("kernel", "full, s", f"W = {options.window}, s", "share")
    title = f"attention of {options.tokens} tokens, one layer"
    return Report(targets, [table_of(columns, rows, title)], {"seconds": seconds})


PARTS = {
    "phases": Part(
        phases,
        {
            "--models": {"nargs": "+", "choices": MODELS, "default": list(MODELS)},
            "--phases": {"nargs": "*", "choices": PHASES, "default": list(PHASES)},
            "--threads": {"nargs": "+", "type": int, "default": [1, 2]},
            "--dtype": "bfloat16",
            "--rounds": 5,
            "--prompts": 0,
            "--profile": False,
        },
    ),
    "latent": Part(latent, {"--threads": 2, "--rounds": 5}),
    "windows": Part(
        windows,
        {"--tokens": 8192, "--window": 512, "--chunk": 512, "--threads": 1, "--rounds": 3},
    ),
}


def main() -> None:
    conclude_part(__doc__, PARTS)


if __name__ == "__main__":
    main()
