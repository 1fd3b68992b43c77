"""Benchmark of products with quantized matrices by every kernel of this device, against bfloat16.

    python tests/bench/quantized_products.py [--tokens 1,16,17,64,65,512,4096] [--width 4096]
    [--rows 28672]

Each kernel is first compared with the exact product of the quantized weights; "off by" is relative,
by norms, and has a limit. Several matrices alternate, so that none is in a cache; milliseconds are
medians. ``*`` marks the kernel that a stage uses.
"""

import argparse
import math
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import torch
from rich.table import Table
from targets import Target, at_most, conclude
from torch import Tensor
from torch.nn import functional as F

from tramontane.proto.weight_format import Quantization
from tramontane.workers.kernels.quantized_linear import (
    FUSED_TOKENS,
    Product,
    dequantized_linear,
    probe_kernels,
)
from tramontane.workers.weights.quantize import NUMBER_DTYPES, quantize_weight

ROUNDS, PRODUCTS = 30, 8  # products in a round
OUT_OF_CACHE = 2**28  # total bytes of the matrices of one kernel
# Results are rounded to bfloat16, which alone is off by 0.2 %; "in fp8" also rounds the activations
# to three bits of mantissa.
MAX_ERROR = {"fused": 0.01, "blocks": 0.01, "in fp8": 0.05}


def median_ms(run: Callable[[int], object]) -> float:
    """Return the median of synchronized rounds. On a GPU each is a CUDA graph, as a stage's decode
    steps are.
    """
    run_round = _capture(run) if torch.cuda.is_available() else lambda: _round(run)
    times = []
    for _ in range(ROUNDS + 3):
        _wait()
        started = time.perf_counter()
        run_round()
        _wait()
        times.append((time.perf_counter() - started) / PRODUCTS * 1000)
    return statistics.median(times[3:])


def _round(run: Callable[[int], object]) -> None:
    for number in range(PRODUCTS):
        run(number)


def _capture(run: Callable[[int], object]) -> Callable[[], None]:
    _round(run)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _round(run)
    return graph.replay


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def kernels_for(quantize: Quantization, device: torch.device) -> dict[str, Product]:
    found = probe_kernels(device, NUMBER_DTYPES[quantize], torch.bfloat16)
    kernels = {"fused": found.fused, "in fp8": found.fp8, "blocks": dequantized_linear}
    return {name: product for name, product in kernels.items() if product is not None}


def measure(weight_NK: Tensor, lengths: list[int]) -> tuple[Table, list[Target]]:
    """Return all figures, and the largest error of each kernel."""
    device, copies = weight_NK.device, max(OUT_OF_CACHE // weight_NK.numel(), 1)
    table = Table("tokens", "weights", "kernel", "off by", "ms", "of bfloat16", "GB/s of weights")
    errors: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    halves = [weight_NK.bfloat16() for _ in range(copies)]
    quantized = {
        q: [quantize_weight(weight_NK, q, device) for _ in range(copies)] for q in Quantization
    }
    for num_tokens in lengths:
        x_TK = torch.randn(num_tokens, weight_NK.shape[1], device=device).bfloat16()
        plain = median_ms(lambda i, x_TK=x_TK: F.linear(x_TK, halves[i % copies]))  # type: ignore[misc]
        table.add_row(
            str(num_tokens),
            "bfloat16",
            "",
            "",
            f"{plain:.3f}",
            "",
            f"{halves[0].nbytes / plain / 1e6:.0f}",
        )
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
                ms = median_ms(lambda i, p=product, x=x_TK, m=matrices: p(x, *m[i % copies]))  # type: ignore[misc]
                figures = (
                    f"{error:.2%}",
                    f"{ms:.3f}",
                    f"{ms / plain:.2f} x",
                    f"{weight_NK.numel() / ms / 1e6:.0f}",
                )
                table.add_row("", str(quantize), f"{name}{' *' * (product is chosen)}", *figures)
    worst = {
        kernel: math.nan if any(map(math.isnan, found)) else max(found)
        for kernel, found in errors.items()
    }
    return table, [
        at_most(f"{weights}, {name}: off by", e, MAX_ERROR[name], "%")
        for (weights, name), e in worst.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", default="1,4,16,17,32,64,65,128,512,4096")
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--rows", type=int, default=28672)
    options = parser.parse_args()
    device = (
        torch.device("cuda", torch.cuda.current_device())
        if torch.cuda.is_available()
        else torch.device("cpu")
    )
    if device.type == "cpu":
        print(
            "no GPU is available: GPU kernels are measured as far as they run on a CPU",
            file=sys.stderr,
        )
    weight_NK = torch.randn(options.rows, options.width, device=device) * options.width**-0.5
    with torch.inference_mode():
        table, targets = measure(weight_NK, [int(number) for number in options.tokens.split(",")])
    conclude(targets, table)


if __name__ == "__main__":
    main()
