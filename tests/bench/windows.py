"""Benchmark of a sliding window's attention against full attention, of one layer on a CPU.

    python tests/bench/windows.py [--tokens 8192] [--window 512] [--chunk 512] [--threads 1]
    [--rounds 3]

A prompt is computed in chunks through the real rolling cache, gathers and writes included, with
random queries, keys and values of Mistral-300M's heads in float32: by the kernel in C, and by
PyTorch's as on machines without a C compiler. The four variants alternate in rounds; figures are
medians.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import torch
from rich.table import Table
from targets import at_most, conclude
from tiny_models import tiny_args, tiny_plan

from tramontane.proto.plan import StagePlan
from tramontane.proto.request import SamplingParams
from tramontane.proto.step import Chunk, MicroBatch
from tramontane.workers.attention.backend import AttentionKernels, CachedAttention
from tramontane.workers.attention.metadata import build_attention_metadata
from tramontane.workers.attention.native_backend import native_kernels
from tramontane.workers.attention.rolling_cache import RollingCache, StageSequences
from tramontane.workers.attention.sdpa_backend import cpu_kernels

CPU = torch.device("cpu")
HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE = 16, 4, 64, 16
MAX_SHARE = 1 / 3  # of full attention's time


def main() -> None:
    options = _options()
    torch.set_num_threads(options.threads)
    seconds = measure(options.tokens, options.window, options.chunk, options.rounds)
    table = Table(
        "kernel",
        "full, s",
        f"W = {options.window}, s",
        "share",
        title=f"attention of {options.tokens} tokens, one layer",
    )
    targets = []
    for kernel, (full_s, window_s) in seconds.items():
        table.add_row(kernel, f"{full_s:.3f}", f"{window_s:.3f}", f"{window_s / full_s:.2f}")
        targets.append(
            at_most(f"window's share of full attention, {kernel}", window_s / full_s, MAX_SHARE)
        )
    conclude(targets, table, data={"seconds": seconds}, as_json=options.json)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in (
        ("tokens", 8192),
        ("window", 512),
        ("chunk", 512),
        ("threads", 1),
        ("rounds", 3),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--json", action="store_true", help="figures as JSON on standard output")
    return parser.parse_args()


def measure(
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


if __name__ == "__main__":
    main()
