"""Benchmark of products by the kernels of this device: with quantized matrices, and of the experts
of one layer.

    python tests/bench/products.py quantized [--tokens 1,16,17,64,65,512,4096] [--width 4096]
    [--rows 28672]
    python tests/bench/products.py experts [--experts 8] [--dim 4096] [--hidden 14336]
    [--rows 2 4 8 16 32 128 1024]

On a GPU rounds are CUDA graphs, as a stage's decode steps are, so that launches cost nothing.

**Quantized** matrices by every kernel, against bfloat16. Each kernel is first compared with the
exact product of the quantized weights; "off by" is relative, by norms, and has a limit. Several
matrices alternate, so that none is in a cache; milliseconds are medians. ``*`` marks the kernel
that a stage uses.

**Experts** on a GPU: the kernels for small batches against torch's grouped product. The defaults
are Mixtral 8x7B's sizes, in bfloat16. ``expert_kernels.MAX_SMALL_BATCH_ROWS`` should be the largest
number of rows for which those for small batches (row by row) are faster. Tokens choose two experts
each at random, several times; rows are choices. The share is of the memory wall: the bytes of all
experts that have rows, at the speed of a copy. With ``--cpu`` only small sizes finish quickly.
"""

import argparse
import math
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import torch
from bench_parts import Part, Report, conclude_part, numbers, say, table_of
from gpu_speed import copied_bytes
from targets import at_most
from torch import Tensor
from torch.nn import functional as F

from tramontane.proto.weight_format import Quantization
from tramontane.workers.device.probe import memory_bandwidth
from tramontane.workers.kernels.quantized_linear import (
    FUSED_TOKENS,
    Product,
    dequantized_linear,
    probe_kernels,
)
from tramontane.workers.model.expert_kernels import StackedExperts, small_batch_kernel_works
from tramontane.workers.weights.quantize import NUMBER_DTYPES, quantize_weight

ROUNDS, PRODUCTS = 30, 8  # products in a round
NUM_SAMPLES, EXPERT_ROUNDS = 16, 5
OUT_OF_CACHE = 2**28  # total bytes of the matrices of one kernel
# Results are rounded to bfloat16, which alone is off by 0.2 %; "in fp8" also rounds the activations
# to three bits of mantissa.
MAX_ERROR = {"fused": 0.01, "blocks": 0.01, "in fp8": 0.05}
Run = Callable[[], object]


def round_seconds(run: Run, device: str, rounds: int) -> list[float]:
    """Return the seconds of synchronized rounds; on a GPU each is a CUDA graph."""
    run = _capture(run) if device == "cuda" else run
    times = []
    for _ in range(rounds):
        _wait(device)
        began = time.perf_counter()
        run()
        _wait(device)
        times.append(time.perf_counter() - began)
    return times


def _capture(run: Run) -> Run:
    side_stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side_stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side_stream):
        run()
    torch.cuda.current_stream().wait_stream(side_stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


# ---- quantized matrices


def median_ms(run: Callable[[int], object], device: str) -> float:
    """Return the milliseconds of a product; three rounds warm up."""
    times = round_seconds(lambda: [run(i) for i in range(PRODUCTS)], device, ROUNDS + 3)
    return statistics.median(times[3:]) / PRODUCTS * 1000


def kernels_for(quantize: Quantization, device: torch.device) -> dict[str, Product]:
    found = probe_kernels(device, NUMBER_DTYPES[quantize], torch.bfloat16)
    kernels = {"fused": found.fused, "in fp8": found.fp8, "blocks": dequantized_linear}
    return {name: product for name, product in kernels.items() if product is not None}


@torch.inference_mode()
def measure_products(weight_NK: Tensor, lengths: list[int]) -> Report:
    """Return all figures, and the largest error of each kernel."""
    device, copies = weight_NK.device, max(OUT_OF_CACHE // weight_NK.numel(), 1)
    rows = list[tuple[object, ...]]()
    errors: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    halves = [weight_NK.bfloat16() for _ in range(copies)]
    quantized = {
        q: [quantize_weight(weight_NK, q, device) for _ in range(copies)] for q in Quantization
    }
    for num_tokens in lengths:
        x_TK = torch.randn(num_tokens, weight_NK.shape[1], device=device).bfloat16()
        plain = median_ms(lambda i, x_TK=x_TK: F.linear(x_TK, halves[i % copies]), device.type)
        speed = f"{halves[0].nbytes / plain / 1e6:.0f}"
        rows.append((num_tokens, "bfloat16", "", "", f"{plain:.3f}", "", speed))
        for quantize, matrices in quantized.items():
            chosen = probe_kernels(device, matrices[0][0].dtype, torch.bfloat16).choose(num_tokens)
            exact_TN = (
                x_TK.double() @ (matrices[0][0].double() * matrices[0][1].double()[:, None]).T
            )
            for name, product in kernels_for(quantize, device).items():
                if name == "fused" and num_tokens > FUSED_TOKENS:
                    continue
                error = (
                    (product(x_TK, *matrices[0]).double() - exact_TN).norm() / exact_TN.norm()
                ).item()
                errors[str(quantize), name].append(error)
                ms = median_ms(
                    lambda i, p=product, x=x_TK, m=matrices: p(x, *m[i % copies]), device.type
                )  # type: ignore[misc]
                figures = (
                    f"{error:.2%}",
                    f"{ms:.3f}",
                    f"{ms / plain:.2f} x",
                    f"{weight_NK.numel() / ms / 1e6:.0f}",
                )
                rows.append(("", quantize, f"{name}{' *' * (product is chosen)}", *figures))
    worst = {
        kernel: math.nan if any(map(math.isnan, found)) else max(found)
        for kernel, found in errors.items()
    }
    targets = [
        at_most(f"{weights}, {name}: off by", e, MAX_ERROR[name], "%")
        for (weights, name), e in worst.items()
    ]
    columns = ("tokens", "weights", "kernel", "off by", "ms", "of bfloat16", "GB/s of weights")
    off_by = {", ".join(kernel): error for kernel, error in worst.items()}
    return Report(targets, [table_of(columns, rows)], {"off_by": off_by})


def quantized(options: argparse.Namespace) -> Report:
    """quantized matrices by every kernel, against bfloat16"""
    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if has_gpu else torch.device("cpu")
    if not has_gpu:
        say("no GPU is available: GPU kernels are measured as far as they run on a CPU")
    weight_NK = torch.randn(options.rows, options.width, device=device) * options.width**-0.5
    return measure_products(weight_NK, options.tokens)


# ---- experts


def experts(options: argparse.Namespace) -> Report:
    """experts of few rows on a GPU, two ways"""
    if not (torch.cuda.is_available() or options.cpu):
        sys.exit("no GPU is available; --cpu --dim 64 --hidden 96 tries the program on a CPU")
    device = "cpu" if options.cpu else "cuda"
    speed = memory_bandwidth(device, copied_bytes(device))
    stack = _stack(options.experts, options.dim, options.hidden, device)
    with torch.inference_mode():
        rows = [_row(stack, num_rows, device, speed) for num_rows in options.rows]
    columns = ("rows", "experts", "grouped, us", "of the wall", "row by row, us", "of the wall")
    return Report([], [table_of(columns, rows, f"{speed / 1e12:.2f} TB/s")], {"rows": rows})


def _row(stack: StackedExperts, num_rows: int, device: str, speed: float) -> list[Any]:
    num_experts, _, dim = stack.w13_E2FD.shape
    chosen = [_sample_choices(num_rows // 2, num_experts, seed) for seed in range(NUM_SAMPLES)]
    ends = [
        each.flatten().bincount(minlength=num_experts).cumsum(0).int().to(device) for each in chosen
    ]
    rows_CD = torch.randn(num_rows, dim, device=device).to(stack.w13_E2FD.dtype)
    touched = sum(len(each.unique()) for each in chosen) / NUM_SAMPLES
    wall_s = touched * (stack.w13_E2FD[0].nbytes + stack.w2_EDF[0].nbytes) / speed
    cells = _cells([partial(stack.run, rows_CD, ends_E) for ends_E in ends], device, wall_s)
    if device == "cuda" and small_batch_kernel_works(stack, stack.w13_E2FD.dtype):
        x_TD, weights_Tk = rows_CD[: num_rows // 2], torch.rand(num_rows // 2, 2, device=device)
        few = [partial(stack.mix_small, x_TD, ids_Tk.to(device), weights_Tk) for ids_Tk in chosen]
        cells += _cells(few, device, wall_s)
    return [num_rows, f"{touched:.1f}", *cells]


def _stack(num_experts: int, dim: int, hidden: int, device: str) -> StackedExperts:
    shapes = (num_experts, 2 * hidden, dim), (num_experts, dim, hidden)
    w13_E2FD, w2_EDF = (
        torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(std=shape[-1] ** -0.5)
        for shape in shapes
    )
    return StackedExperts(w13_E2FD, w2_EDF)


def _sample_choices(num_tokens: int, num_experts: int, seed: int) -> Tensor:
    """Return two different experts of each token."""
    return (
        torch.rand(num_tokens, num_experts, generator=torch.Generator().manual_seed(seed))
        .argsort(-1)[:, :2]
        .contiguous()
    )


def _cells(runs: Sequence[Run], device: str, wall_s: float) -> list[str]:
    rounds = round_seconds(lambda: [run() for run in runs], device, EXPERT_ROUNDS)
    took_s = min(rounds) / len(runs)
    return [f"{took_s * 1e6:.0f}", f"{wall_s / took_s:.0%}"]


PARTS = {
    "quantized": Part(
        quantized,
        {
            "--tokens": {"type": numbers, "default": [1, 4, 16, 17, 32, 64, 65, 128, 512, 4096]},
            "--width": 4096,
            "--rows": 28672,
        },
    ),
    "experts": Part(
        experts,
        {
            "--cpu": False,
            "--experts": 8,
            "--dim": 4096,
            "--hidden": 14336,
            "--rows": {"type": int, "nargs": "+", "default": [2, 4, 8, 16, 32, 128, 1024]},
        },
    ),
}


def main() -> None:
    conclude_part(__doc__, PARTS)


if __name__ == "__main__":
    main()
