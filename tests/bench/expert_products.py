"""Benchmark of the experts of one layer on a GPU: the kernels for small batches against torch's
grouped product.

    python tests/bench/expert_products.py [--experts 8] [--dim 4096] [--hidden 14336] [--rows 2 4 8
    16 32 128 1024]

The defaults are Mixtral 8x7B's sizes, in bfloat16. ``expert_kernels.MAX_SMALL_BATCH_ROWS`` should
be the largest number of rows for which those for small batches (row by row) are faster. Tokens
choose two experts each at random, several times, in a CUDA graph, so that launches cost nothing;
rows are choices. The share is of the memory wall: the bytes of all experts that have rows, at the
speed of a copy. With ``--cpu`` only small sizes finish quickly.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import torch
from gpu_speed import copied_bytes
from rich.table import Table
from targets import conclude
from torch import Tensor

from tramontane.workers.device.probe import memory_bandwidth
from tramontane.workers.model.expert_kernels import StackedExperts, small_batch_kernel_works

NUM_SAMPLES, ROUNDS = 16, 5
Run = Callable[[], object]


def main() -> None:
    options = _options()
    if not (torch.cuda.is_available() or options.cpu):
        sys.exit("no GPU is available; --cpu --dim 64 --hidden 96 tries the program on a CPU")
    device = "cpu" if options.cpu else "cuda"
    speed = memory_bandwidth(device, copied_bytes(device))
    stack = _stack(options.experts, options.dim, options.hidden, device)
    has_few = device == "cuda" and small_batch_kernel_works(stack, stack.w13_E2FD.dtype)
    table = Table(
        "rows",
        "experts",
        "grouped, us",
        "of the wall",
        "row by row, us",
        "of the wall",
        title=f"{speed / 1e12:.2f} TB/s",
    )
    with torch.inference_mode():
        for num_rows in options.rows:
            chosen = [
                _sample_choices(num_rows // 2, options.experts, seed) for seed in range(NUM_SAMPLES)
            ]
            ends = [
                each.flatten().bincount(minlength=options.experts).cumsum(0).int().to(device)
                for each in chosen
            ]
            rows_CD = torch.randn(num_rows, options.dim, device=device).to(stack.w13_E2FD.dtype)
            touched = sum(len(each.unique()) for each in chosen) / NUM_SAMPLES
            wall_s = touched * (stack.w13_E2FD[0].nbytes + stack.w2_EDF[0].nbytes) / speed
            cells = _cells([partial(stack.run, rows_CD, ends_E) for ends_E in ends], device, wall_s)
            if has_few:
                x_TD, weights_Tk = (
                    rows_CD[: num_rows // 2],
                    torch.rand(num_rows // 2, 2, device=device),
                )
                few = [
                    partial(stack.mix_small, x_TD, ids_Tk.to(device), weights_Tk)
                    for ids_Tk in chosen
                ]
                cells += _cells(few, device, wall_s)
            table.add_row(str(num_rows), f"{touched:.1f}", *cells)
    conclude([], table)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--dim", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=14336)
    parser.add_argument("--rows", type=int, nargs="+", default=[2, 4, 8, 16, 32, 128, 1024])
    return parser.parse_args()


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
    took_s = _seconds(lambda: [run() for run in runs], device) / len(runs)
    return [f"{took_s * 1e6:.0f}", f"{wall_s / took_s:.0%}"]


def _seconds(run: Run, device: str) -> float:
    """Return the seconds of the fastest of some rounds."""
    run = _capture(run) if device == "cuda" else run
    times = []
    for _ in range(ROUNDS):
        _wait(device)
        began = time.perf_counter()
        run()
        _wait(device)
        times.append(time.perf_counter() - began)
    return min(times)


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


if __name__ == "__main__":
    main()
