"""Times of single kernels on a GPU, and profiles of steps: what one needs to know to make steps faster elsewhere.

    python tests/bench/gpu_kernels.py linear|attention|prefill|experts|profile [--device cuda] [--small] [--json FILE]

All times are of CUDA graphs over buffers that no cache holds together; microseconds are medians. ``tb_per_s`` counts the bytes
that have to be read once.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
sys.path.insert(0, str(Path(__file__).parent))

import torch
from gpu_stage import MISTRAL_7B, MIXTRAL_8X7B, running, shrunk
from torch import Tensor
from torch.nn import functional as F

Compute = Callable[[], object]
DTYPE = torch.bfloat16
OUT_OF_CACHE = 2**28  # bytes of all buffers that alternate; the GPUs meant have 50 to 60 MB of cache
ROUNDS = 12


@dataclass(slots=True)
class Rows:
    """The rows measured so far, saved after each."""

    device: str
    small: bool
    file: Path | None
    rows: list[dict[str, object]] = field(default_factory=list)

    def add(self, **row: object) -> None:
        self.rows.append(row)
        print(row, flush=True)
        if self.file:
            self.file.write_text(json.dumps(self.rows))

    def size(self, number: int) -> int:
        return max(number // 32, 16) if self.small else number

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device, dtype=DTYPE)

    def us(self, calls: Sequence[Compute]) -> float:
        """Return the microseconds of one call, of all of them in one CUDA graph, replayed."""
        if self.device == "cpu":
            return _host_us(calls)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for call in calls[:2]:
                call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls:
                call()
        times = []
        for _ in range(ROUNDS + 3):
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            graph.replay()
            last.record()
            last.synchronize()
            times.append(first.elapsed_time(last) * 1000 / len(calls))
        return statistics.median(times[3:])


def _host_us(calls: Sequence[Compute]) -> float:
    began = time.perf_counter()
    for call in calls:
        call()
    return (time.perf_counter() - began) / len(calls) * 1e6


def linear(rows: Rows) -> None:
    """Time the products of a Mistral 7B layer and head by torch, and by the kernel for experts with few rows."""
    from tramontane.workers.kernels.triton_moe import down_gemv, gate_up_gemv

    x, weight = rows.random(1, 4096), rows.random(4096)
    rows.add(what="a small kernel in a graph", us=rows.us([lambda: F.rms_norm(x, (4096,), weight)] * 200))
    rows.add(what="a chain of small kernels", us=rows.us([lambda: x.add_(1)] * 200))
    shapes = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (32000, 4096)]
    for n, k in ((rows.size(n), rows.size(k)) for n, k in shapes):
        weights = [rows.random(n, k) * k**-0.5 for _ in range(max(OUT_OF_CACHE // (2 * n * k), 3) if not rows.small else 3)]
        for m in (1, 2, 4, 8, 16, 32, 64, 128, 256):
            x_mk = rows.random(m, k)
            _add_product(rows, "F.linear", (m, n, k), [lambda w=w: F.linear(x_mk, w) for w in weights])  # type: ignore[misc]
            if m <= 4 and rows.device != "cpu":
                ends = torch.full((1,), m, dtype=torch.int32, device=rows.device)
                _add_product(rows, "down_gemv", (m, n, k), [lambda w=w: down_gemv(x_mk, w[None], ends) for w in weights])  # type: ignore[misc]
                if n == 28672:
                    gated = [lambda w=w: gate_up_gemv(x_mk, w[None], ends) for w in weights]  # type: ignore[misc]
                    _add_product(rows, "gate_up_gemv (with silu)", (m, n, k), gated)


def _add_product(rows: Rows, what: str, shape: tuple[int, int, int], calls: Sequence[Compute]) -> None:
    m, n, k = shape
    took = rows.us(calls)
    rows.add(what=what, m=m, n=n, k=k, us=took, tb_per_s=2 * n * k / took / 1e6, tflops=2 * m * n * k / took / 1e6)


def attention(rows: Rows) -> None:
    """Time split-K decode kernels by page size, block, parts, stages and warps."""
    from xformers.ops.fmha import triton_splitk

    from tramontane.workers.attention.rolling_cache import PageTable
    from tramontane.workers.attention.xformers_backend import attend, paged_mask

    if rows.device == "cpu":  # these kernels are for GPUs
        return
    for batch, keys in ((1, 1100), (16, 1100), (64, 1100), (8, 4096), (1, 32000)):
        for page, block in ((16, 16), (64, 64), (128, 128)):
            width = -(-keys // page) * 5 // 4 + 1
            pages = torch.randperm(batch * width, device=rows.device).int().view(batch, width)
            k_NGd, v_NGd = (rows.random(batch * width * page, 8, 128) for _ in range(2))
            q_BHd = rows.random(batch, 32, 128)
            zeros, ends = (torch.full((batch,), n, dtype=torch.int32, device=rows.device) for n in (0, keys))
            mask = paged_mask(PageTable(pages, zeros, ends), page)
            for parts in (1, 4, 8, 16, 32, 64) if batch <= 8 else (1, 2, 4, 8):
                for stages, warps in ((1, 2), (3, 2), (2, 4)):
                    sizes = {"BLOCK_N": block, "SPLIT_K": parts, "NUM_STAGES": stages, "NUM_WARPS": warps}
                    operator = type("SplitK", (triton_splitk.FwOp,), sizes)
                    case = {"what": "split-K", "batch": batch, "keys": keys, "page": page, **sizes}
                    try:
                        took = rows.us([lambda o=operator: attend(q_BHd, k_NGd, v_NGd, mask, o)] * 4)  # type: ignore[misc]
                    except Exception as error:  # kernels refuse sizes with errors of any kind
                        rows.add(**case, error=str(error)[:80])
                        continue
                    rows.add(**case, us=took, tb_per_s=batch * keys * 4096 / took / 1e6)


def prefill(rows: Rows) -> None:
    """Time attention of one long prompt by torch's own kernels and by xformers'."""
    from torch.nn.attention.varlen import varlen_attn

    from tramontane.workers.attention.metadata import PrefillMetadata
    from tramontane.workers.attention.xformers_backend import prefill_kernels

    if rows.device == "cpu":  # as above
        return
    none = torch.empty(0, dtype=torch.int64, device=rows.device)
    for tokens, window in ((2048, None), (8192, 4096), (8192, None)):
        q, k, v = (rows.random(tokens, heads, 128) for heads in (32, 8, 8))
        ends = torch.tensor([0, tokens], dtype=torch.int32, device=rows.device)
        sizes = (window - 1, 0) if window else (-1, 0)
        seen = min(window or tokens, tokens)
        flops = 4 * 32 * 128 * (seen * (seen + 1) // 2 + (tokens - seen) * seen)
        index = PrefillMetadata(window, (tokens,), (tokens,), (0,), none, none, none, none)
        calls: dict[str, Compute] = {
            "varlen_attn": lambda: varlen_attn(q, k, v, ends, ends, tokens, tokens, window_size=sizes),  # noqa: B023
            "varlen_attn, keys repeated": lambda: varlen_attn(  # noqa: B023
                q,
                *(x.repeat_interleave(4, 1) for x in (k, v)),
                ends,
                ends,
                tokens,
                tokens,
                window_size=sizes,  # noqa: B023
            ),
        }
        for name, kernel in prefill_kernels().items():
            calls[name] = lambda kernel=kernel, mask=kernel.build_mask(index): kernel.attend(q, k, v, mask)  # type: ignore[misc]  # noqa: B023
        for name, call in calls.items():
            case = {"what": name, "tokens": tokens, "window": window}
            try:
                took = rows.us([call] * 4)
            except Exception as error:  # as above
                rows.add(**case, error=str(error)[:80])
                continue
            rows.add(**case, us=took, tflops=flops / took / 1e6)


def experts(rows: Rows) -> None:
    """Time the experts of a Mixtral 8x7B layer: grouped, and row by row."""
    from tramontane.workers.model.grouped_gemm import StackedExperts

    dim, hidden = rows.size(4096), rows.size(14336)
    stacks = [StackedExperts(rows.random(8, 2 * hidden, dim), rows.random(8, dim, hidden)) for _ in range(2)]
    for num_rows in (2, 4, 8, 16, 32, 64, 128, 512):
        generator = torch.Generator().manual_seed(num_rows)
        groups = torch.randint(0, 8, (num_rows,), generator=generator).bincount(minlength=8)
        ends_E, touched = groups.cumsum(0).int().to(rows.device), int((groups > 0).sum())
        x_CD, num_bytes = rows.random(num_rows, dim), touched * 6 * hidden * dim
        calls = {"grouped": [lambda s=s: s.run(x_CD, ends_E) for s in stacks]}  # type: ignore[misc]  # noqa: B023
        if rows.device != "cpu":
            calls["row by row"] = [lambda s=s: s.run_small_batch(x_CD, ends_E) for s in stacks]  # type: ignore[misc]  # noqa: B023
        for name, each in calls.items():
            took = rows.us(each * 2)
            rows.add(what=name, rows=num_rows, experts=touched, us=took, tb_per_s=num_bytes / took / 1e6)


def profile(rows: Rows) -> None:
    """Add up the time of each kernel in recorded decode steps, and in a prefill, of eight layers."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiling

    kinds = [ProfilerActivity.CPU] if rows.device == "cpu" else [ProfilerActivity.CUDA, ProfilerActivity.CPU]
    for name, whole in (("Mistral 7B", MISTRAL_7B), ("Mixtral 8x7B", MIXTRAL_8X7B)):
        args = replace(whole, n_layers=8, windows=whole.windows[:8])
        args = shrunk(args) if rows.small else args
        with running(args, rows.device, max_num_seqs=64, max_len=rows.size(2304)) as runner:
            for batch in (1, 16, 64):
                runner.prefill(batch, rows.size(1024), 4096)
                runner.decode(6)
                with profiling(activities=kinds) as seen:
                    times = runner.decode(4)
                ms = {kind: statistics.median(getattr(times, kind)) * 1e3 for kind in ("whole", "device")}
                rows.add(what="decode", model=name, batch=batch, step_ms=ms, kernels=_kernels(seen))
            with profiling(activities=kinds) as seen:
                seconds = runner.prefill(2, rows.size(2048), 4096)
            rows.add(what="prefill of 2 x 2048", model=name, seconds=seconds, kernels=_kernels(seen))


def _kernels(profiled: torch.profiler.profile) -> list[tuple[str, int, float]]:
    """Return the kernels that took longest: name, launches and microseconds."""
    found = [(each.key[:110], each.count, each.self_device_time_total) for each in profiled.key_averages()]
    return sorted((each for each in found if each[2]), key=lambda each: -each[2])[:40]


JOBS = {"linear": linear, "attention": attention, "prefill": prefill, "experts": experts, "profile": profile}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job", choices=JOBS)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with torch.inference_mode():
        JOBS[options.job](Rows(options.device, options.small, options.json))


if __name__ == "__main__":
    main()
