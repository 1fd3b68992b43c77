"""Does each thing that a stage needs of a GPU work at all: each by itself, so that one failure does
not hide another.

    python tests/bench/gpu_smoke.py [--device cuda] [--small] [--json FILE]

The exit status is 1 if one of them raises an error. On a CPU what needs CUDA is not tried.
"""

import argparse
import json
import logging
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
sys.path.insert(0, str(Path(__file__).parent))

import torch
from gpu_stage import MISTRAL_7B, MIXTRAL_8X7B, running, shrunk
from targets import exit_status, none_of
from torch.nn import functional as F

from tramontane.proto.model_args import ModelArgs
from tramontane.workers.device.kernel_selection import WITHOUT_MEMORY
from tramontane.workers.kernels.fused_ops import EAGER, compile_ops
from tramontane.workers.model.expert_kernels import (
    ProductBySize,
    StackedExperts,
    select_gpu_kernels,
)

Attempt = Callable[[torch.device], object]  # returns what was found, which is reported
BF16 = torch.bfloat16


def cuda(device: torch.device) -> object:
    free, total = torch.cuda.mem_get_info(device)
    assert (
        float(
            (
                torch.ones(64, 64, device=device, dtype=BF16)
                @ torch.ones(64, 64, device=device, dtype=BF16)
            ).sum()
        )
        == 64**3
    )
    return (
        torch.cuda.get_device_name(device),
        torch.cuda.get_device_capability(device),
        free,
        total,
        torch.__version__,
    )


def xformers_operators(_device: torch.device) -> object:
    from xformers.ops.fmha import cutlass, flash, flash3

    # it makes xformers accept its operators
    from tramontane.workers.attention import xformers_backend  # noqa: F401

    return {
        operator.NAME: operator.is_available()
        for operator in (cutlass.FwOp, flash.FwOp, flash3.FwOp)
    }


def fused_ops(device: torch.device) -> object:
    assert compile_ops(MISTRAL_7B, device, BF16) is not EAGER, "torch.compile fails, see the log"
    return "compiled"


def cuda_graph(device: torch.device) -> object:
    from tramontane.workers.stage.cuda_graphs import CudaGraphCapture

    x, w = (
        torch.randn(4, 256, device=device, dtype=BF16),
        torch.randn(256, 256, device=device, dtype=BF16),
    )
    replay = CudaGraphCapture()(lambda: F.linear(x, w))
    x.copy_(torch.randn_like(x))
    return float((replay() - F.linear(x, w)).abs().max())


def expert_kernels(device: torch.device) -> object:
    w13, w2 = (
        torch.randn(8, *shape, device=device, dtype=BF16) for shape in ((1024, 256), (256, 512))
    )
    stack = select_gpu_kernels({0: StackedExperts(w13, w2)}, BF16, WITHOUT_MEMORY)[0]
    assert stack.has_small_batch_kernel, "it fails its test, see the log"
    return [
        each.name
        for each in (stack.w13_product, stack.w2_product)
        if isinstance(each, ProductBySize)
    ]


def quantized_kernels(device: torch.device) -> object:
    from tramontane.workers.kernels.quantized_linear import probe_kernels

    kernels = [probe_kernels(device, dtype, BF16) for dtype in (torch.int8, torch.float8_e4m3fn)]
    assert all(each.fused for each in kernels), kernels
    assert kernels[1].fp8, kernels
    return kernels


def row_products(device: torch.device) -> object:
    from tramontane.proto.weight_format import WeightFormat
    from tramontane.workers.kernels.row_invariance import triton_products

    return triton_products(device, WeightFormat("bfloat16", stored="bfloat16"))


def ipc_handles(device: torch.device) -> object:
    from tramontane.workers.links.ipc_cuda import CudaIpc

    ipc = CudaIpc(device)
    memory, event = ipc.memory(2**21), ipc.event()
    sizes = len(memory.handle), len(event.handle)
    memory.close()
    return sizes


def dense_stage(device: torch.device) -> object:
    return _decode(MISTRAL_7B, device)


def expert_stage(device: torch.device) -> object:
    return _decode(MIXTRAL_8X7B, device)


def _decode(args: ModelArgs, device: torch.device) -> object:
    """Run prompts and recorded decodes of two layers."""
    args = (
        replace(args, n_layers=2, windows=args.windows[:2])
        if device.type == "cuda"
        else shrunk(args)
    )
    with running(args, str(device), max_num_seqs=4, max_len=512) as runner:
        runner.prefill(3, 100, 256)
        times = runner.decode(4)
        graphs = runner.worker.graphs
        assert device.type == "cpu" or (graphs is not None and graphs.sizes), (
            "no CUDA graph was recorded"
        )
        return graphs.sizes if graphs else None, times.device


ON_CUDA: dict[str, Attempt] = {
    "CUDA": cuda,
    "xformers' operators": xformers_operators,
    "torch.compile of what is between products": fused_ops,
    "a CUDA graph": cuda_graph,
    "kernels for experts": expert_kernels,
    "products of quantized weights": quantized_kernels,
    "batch-invariant products": row_products,
    "CUDA IPC handles": ipc_handles,
}
ANYWHERE: dict[str, Attempt] = {
    "prompts and decodes, dense": dense_stage,
    "prompts and decodes, experts": expert_stage,
}


def attempt(name: str, run: Attempt, device: torch.device) -> dict[str, object]:
    """Return the row of one attempt."""
    began = time.perf_counter()
    print(f"{name} ...", flush=True)  # if it hangs, or compiles for longer than there is time
    try:
        with torch.inference_mode():
            found, holds = str(run(device)), True
    except Exception as error:
        found, holds = f"{type(error).__name__}: {error}", False
        traceback.print_exc()
    row = {
        "name": name,
        "holds": holds,
        "detail": found[:400],
        "seconds": round(time.perf_counter() - began, 2),
    }
    print(row, flush=True)
    return row


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--small", action="store_true", help="all of it is small")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    device = torch.device(options.device, 0 if options.device == "cuda" else None)
    attempts = (ON_CUDA if device.type == "cuda" else {}) | ANYWHERE
    rows = []
    for name, run in attempts.items():
        rows.append(attempt(name, run, device))
        if options.json:
            options.json.write_text(json.dumps(rows, indent=1))
    return exit_status([none_of("attempts that failed", [row for row in rows if not row["holds"]])])


if __name__ == "__main__":
    sys.exit(main())
