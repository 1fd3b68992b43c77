"""Times of single kernels on a GPU, and profiles of steps: what one needs to know to make steps
faster elsewhere.

    python tests/bench/gpu_kernels.py linear|prefill|experts|sampling|profile|host [--device cuda]
    [--small] [--json FILE]

Times of kernels are of CUDA graphs over buffers that no cache holds together; microseconds are
medians. ``tb_per_s`` counts the bytes that have to be read once. ``profile`` adds up the kernels of
steps, ``host`` the Python functions of decode steps.
"""

import cProfile
import json
import pstats
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
sys.path.insert(0, str(Path(__file__).parent))

import torch
from bench_parts import gpu_parser
from gpu_stage import MISTRAL_7B, MIXTRAL_8X7B, StepTimes, running, shrunk
from targets import exit_status
from torch import Tensor
from torch.nn import functional as F

from tramontane.proto.model_args import ModelArgs
from tramontane.proto.request import SamplingParams
from tramontane.workers.model.expert_kernels import StackedExperts
from tramontane.workers.sampling.integer_sampler import choose_plainly, row_params

Compute = Callable[[], object]
DTYPE = torch.bfloat16
# bytes of all buffers that alternate; the GPUs meant have 50 to 60 MB of cache
OUT_OF_CACHE = 2**28
ROUNDS = 12
NUM_FUNCTIONS = 25  # of the host, those with the largest own time


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
    """Time the products of a Mistral 7B layer and head by torch, and by the kernel for experts with
    few rows.
    """
    from tramontane.workers.kernels.triton_moe import down_gemv, gate_up_gemv

    x, weight = rows.random(1, 4096), rows.random(4096)
    rows.add(
        what="a small kernel in a graph", us=rows.us([lambda: F.rms_norm(x, (4096,), weight)] * 200)
    )
    rows.add(what="a chain of small kernels", us=rows.us([lambda: x.add_(1)] * 200))
    shapes = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (32000, 4096)]
    for n, k in ((rows.size(n), rows.size(k)) for n, k in shapes):
        weights = [
            rows.random(n, k) * k**-0.5
            for _ in range(max(OUT_OF_CACHE // (2 * n * k), 3) if not rows.small else 3)
        ]
        for m in (1, 2, 4, 8, 16, 32, 64, 128, 256):
            x_mk = rows.random(m, k)
            _add_product(rows, "F.linear", (m, n, k), [partial(F.linear, x_mk, w) for w in weights])
            if m <= 4 and rows.device != "cpu":
                ids, ones = (
                    torch.zeros(m, 1, dtype=torch.int64, device=rows.device),
                    torch.ones(m, 1, device=rows.device),
                )
                _add_product(
                    rows,
                    "down_gemv",
                    (m, n, k),
                    [partial(down_gemv, x_mk, w[None], ids, ones) for w in weights],
                )
                if n == 28672:
                    gated = [partial(gate_up_gemv, x_mk, w[None], ids) for w in weights]
                    _add_product(rows, "gate_up_gemv (with silu)", (m, n, k), gated)


def _add_product(
    rows: Rows, what: str, shape: tuple[int, int, int], calls: Sequence[Compute]
) -> None:
    m, n, k = shape
    took = rows.us(calls)
    rows.add(
        what=what,
        m=m,
        n=n,
        k=k,
        us=took,
        tb_per_s=2 * n * k / took / 1e6,
        tflops=2 * m * n * k / took / 1e6,
    )


def _add_or_error(
    rows: Rows, case: dict[str, object], call: Compute, rate: str, amount: float
) -> None:
    """Add a row with ``amount`` per microsecond, in units of 10**12 per second, as ``rate``."""
    try:
        took = rows.us([call] * 4)
    except Exception as error:  # kernels refuse sizes with errors of any kind
        rows.add(**case, error=str(error)[:80])
    else:
        rows.add(**case, us=took, **{rate: amount / took / 1e6})


def prefill(rows: Rows) -> None:
    """Time attention of one long prompt by torch's own kernels and by xformers'."""
    if rows.device == "cpu":  # these kernels are for GPUs
        return
    for tokens, window in ((2048, None), (8192, 4096), (8192, None)):
        qkv = [rows.random(tokens, heads, 128) for heads in (32, 8, 8)]
        seen = min(window or tokens, tokens)
        flops = 4 * 32 * 128 * (seen * (seen + 1) // 2 + (tokens - seen) * seen)
        for name, call in _prefill_calls(qkv, tokens, window).items():
            _add_or_error(
                rows, {"what": name, "tokens": tokens, "window": window}, call, "tflops", flops
            )


def _prefill_calls(qkv: Sequence[Tensor], tokens: int, window: int | None) -> dict[str, Compute]:
    """Return the ways to attend from a prompt of ``tokens`` to itself."""
    from torch.nn.attention.varlen import varlen_attn

    from tramontane.workers.attention.metadata import PrefillMetadata
    from tramontane.workers.attention.xformers_backend import prefill_kernels

    device = qkv[0].device
    none = torch.empty(0, dtype=torch.int64, device=device)
    ends = torch.tensor([0, tokens], dtype=torch.int32, device=device)
    index = PrefillMetadata(window, (tokens,), (tokens,), (0,), none, none, none, none)

    def attend_varlen(q: Tensor, k: Tensor, v: Tensor) -> object:
        sizes = (window - 1, 0) if window else (-1, 0)
        return varlen_attn(q, k, v, ends, ends, tokens, tokens, window_size=sizes)

    def attend_repeated(q: Tensor, k: Tensor, v: Tensor) -> object:
        return attend_varlen(q, k.repeat_interleave(4, 1), v.repeat_interleave(4, 1))

    calls: dict[str, Compute] = {
        "varlen_attn": partial(attend_varlen, *qkv),
        "varlen_attn, keys repeated": partial(attend_repeated, *qkv),
    }
    return calls | {
        name: partial(kernel.attend, *qkv, kernel.build_mask(index))
        for name, kernel in prefill_kernels().items()
    }


def experts(rows: Rows) -> None:
    """Time the experts of a Mixtral 8x7B layer: as a grouped product by torch and in tiles, and
    without sorting the choices.
    """
    dim, hidden = rows.size(4096), rows.size(14336)
    stacks = [
        StackedExperts(rows.random(8, 2 * hidden, dim), rows.random(8, dim, hidden))
        for _ in range(2)
    ]
    for num_rows in (2, 4, 8, 16, 32, 64, 128, 256, 512):
        generator = torch.Generator().manual_seed(num_rows)
        ids_Tk = torch.rand(num_rows // 2, 8, generator=generator).argsort(-1)[:, :2]
        groups = ids_Tk.flatten().bincount(minlength=8)
        ends_E, touched = groups.cumsum(0).int().to(rows.device), int((groups > 0).sum())
        num_bytes = touched * 6 * hidden * dim
        calls = _grouped_calls(rows, stacks, ends_E, num_rows)
        if num_rows <= 32 and rows.device != "cpu":
            calls |= _few_calls(rows, stacks, ids_Tk.to(rows.device))
        for name, each in calls.items():
            case = {"what": name, "rows": num_rows, "experts": touched}
            try:
                took = rows.us(each * 2)
            except Exception as error:  # a tile may need more shared memory than there is
                rows.add(**case, error=str(error)[:80])
                continue
            rows.add(**case, us=took, tb_per_s=num_bytes / took / 1e6)


def _grouped_calls(
    rows: Rows, stacks: Sequence[StackedExperts], ends_E: Tensor, num_rows: int
) -> dict[str, list[Compute]]:
    """Return both products by torch; and, of more than 8 rows, each product by torch and in each
    kind of tile.
    """
    from tramontane.workers.model.expert_kernels import candidates

    w13, w2 = ([getattr(stack, name) for stack in stacks] for name in ("w13_E2FD", "w2_EDF"))
    x_CD, h_CF = rows.random(num_rows, w13[0].shape[2]), rows.random(num_rows, w2[0].shape[2])
    calls: dict[str, list[Compute]] = {
        "grouped": [partial(stack.run, x_CD, ends_E) for stack in stacks]
    }
    if rows.device != "cpu" and num_rows > 8:
        for name, product in candidates().items():
            both = [stack._replace(w13_product=product, w2_product=product) for stack in stacks]
            calls[f"both, {name}"] = [partial(stack.run, x_CD, ends_E) for stack in both]
            calls[f"w13, {name}"] = [partial(product, x_CD, each, ends_E) for each in w13]
            calls[f"w2, {name}"] = [partial(product, h_CF, each, ends_E) for each in w2]
    return calls


def _few_calls(
    rows: Rows, stacks: Sequence[StackedExperts], ids_Tk: Tensor
) -> dict[str, list[Compute]]:
    """Return the three kernels for few choices, apart and together, and what they replace."""
    from tramontane.workers.kernels.triton_moe import choose_experts, down_gemv, gate_up_gemv
    from tramontane.workers.model.moe import ExpertPermutation

    num_tokens, num_experts = len(ids_Tk), len(stacks[0].w2_EDF)
    x_TD, logits_TE = (
        rows.random(num_tokens, stacks[0].w13_E2FD.shape[2]),
        rows.random(num_tokens, num_experts),
    )
    h_CF, weights_Tk = (
        rows.random(ids_Tk.numel(), stacks[0].w2_EDF.shape[2]),
        rows.random(*ids_Tk.shape),
    )
    is_padding_T = torch.zeros(num_tokens, dtype=torch.bool, device=rows.device)
    total_ends_E = torch.zeros(num_experts, dtype=torch.int64, device=rows.device)

    def route() -> tuple[Tensor, Tensor]:
        return choose_experts(logits_TE, 2, DTYPE, is_padding_T, total_ends_E)

    def sorted_experts(stack: StackedExperts) -> Tensor:
        logits_Tk, chosen_Tk = torch.topk(logits_TE, 2, dim=-1)
        softmax_Tk = torch.softmax(logits_Tk, dim=-1, dtype=torch.float32).to(DTYPE)
        groups = ExpertPermutation.of(
            chosen_Tk.masked_fill(is_padding_T[:, None], num_experts), num_experts
        )
        total_ends_E.add_(groups.offsets_E)
        done_CD = stack.run(groups.permute(x_TD), groups.offsets_E)
        return groups.combine(done_CD, softmax_Tk).masked_fill(is_padding_T[:, None], 0)

    return {
        "few: route": [route] * len(stacks),
        "few: gate and up": [
            partial(gate_up_gemv, x_TD, stack.w13_E2FD, ids_Tk) for stack in stacks
        ],
        "few: down": [
            partial(down_gemv, h_CF, stack.w2_EDF, ids_Tk, weights_Tk) for stack in stacks
        ],
        "few: both": [partial(stack.mix_small, x_TD, ids_Tk, weights_Tk) for stack in stacks],
        "few: all, random choices": [
            lambda stack=stack: stack.mix_small(x_TD, *route()) for stack in stacks
        ],  # type: ignore[misc]
        "sorted: all, random choices": [partial(sorted_experts, stack) for stack in stacks],
    }


def sampling(rows: Rows) -> None:
    """Time the choice of tokens from random logits by the kernel, and by PyTorch, which sorts
    them.
    """
    from tramontane.workers.sampling.triton_sampler import choose_tokens

    plain = SamplingParams(temperature=0.8)
    kinds = {
        "greedy": replace(plain, temperature=0.0),
        "all tokens": plain,
        "top-p": replace(plain, top_p=0.95),
    }
    kinds |= {"top-k": replace(plain, top_k=50), "both": replace(plain, top_k=50, top_p=0.95)}
    ways = (
        {"PyTorch": choose_plainly}
        if rows.device == "cpu"
        else {"kernel": choose_tokens, "PyTorch": choose_plainly}
    )
    for vocab, num_rows in (
        (vocab, num_rows) for vocab in (32_000, 131_072) for num_rows in (1, 64, 256)
    ):
        logits_SV = rows.random(num_rows, rows.size(vocab)).float() * 4
        for kind, params in kinds.items():
            params_S5 = row_params([params] * num_rows, [0.4] * num_rows, logits_SV.device)
            for way, choose in ways.items():
                took = rows.us([partial(choose, logits_SV, params_S5)] * 4)
                rows.add(what=way, kind=kind, vocab=logits_SV.shape[1], rows=num_rows, us=took)


def profile(rows: Rows) -> None:
    """Add up the time of each kernel in recorded decode steps, and in a prefill, of eight
    layers.
    """
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiling

    kinds = (
        [ProfilerActivity.CPU]
        if rows.device == "cpu"
        else [ProfilerActivity.CUDA, ProfilerActivity.CPU]
    )
    for name, whole in (("Mistral 7B", MISTRAL_7B), ("Mixtral 8x7B", MIXTRAL_8X7B)):
        args = _first_layers(rows, whole, 8)
        with running(args, rows.device, max_num_seqs=64, max_len=rows.size(2304)) as runner:
            for batch in (1, 16, 64):
                runner.prefill(batch, rows.size(1024), 4096)
                runner.decode(6)
                with profiling(activities=kinds) as seen:
                    times = runner.decode(4)
                rows.add(
                    what="decode",
                    model=name,
                    batch=batch,
                    step_ms=_medians_ms(times),
                    kernels=_kernels(seen),
                )
            with profiling(activities=kinds) as seen:
                seconds = runner.prefill(2, rows.size(2048), 4096)
            rows.add(
                what="prefill of 2 x 2048", model=name, seconds=seconds, kernels=_kernels(seen)
            )


def _kernels(profiled: torch.profiler.profile) -> list[tuple[str, int, float]]:
    """Return the kernels that took longest: name, launches and microseconds."""
    found = [
        (each.key[:110], each.count, each.self_device_time_total)
        for each in profiled.key_averages()
    ]
    return sorted((each for each in found if each[2]), key=lambda each: -each[2])[:40]


def host(rows: Rows) -> None:
    """Add up the time of the host's functions in recorded decode steps of four layers; the steps
    are timed without profiling.
    """
    num_steps = 4 if rows.small else 60
    with running(
        _first_layers(rows, MISTRAL_7B, 4), rows.device, max_num_seqs=64, max_len=rows.size(2304)
    ) as runner:
        for batch in (1, 64):
            runner.prefill(batch, rows.size(1024), 4096)
            runner.decode(4 if rows.small else 10)
            rows.add(
                what="decode",
                model="Mistral 7B, 4 layers",
                batch=batch,
                step_ms=_medians_ms(runner.decode(num_steps)),
            )
            profiler = cProfile.Profile()
            profiler.runcall(runner.decode, num_steps)
            for function in _functions(profiler, num_steps):
                rows.add(what="function", batch=batch, **function)


def _functions(profiler: cProfile.Profile, num_steps: int) -> list[dict[str, object]]:
    """Return the functions with the largest own time, in microseconds per step."""
    entries = pstats.Stats(profiler).stats.items()  # type: ignore[attr-defined]
    longest = sorted(entries, key=lambda entry: -entry[1][2])[:NUM_FUNCTIONS]
    return [
        {
            "name": name if file == "~" else f"{'/'.join(Path(file).parts[-2:])}:{line} {name}",
            "calls": calls,
            "own_us": own_s / num_steps * 1e6,
            "cumulative_us": cumulative_s / num_steps * 1e6,
        }
        for (file, line, name), (_, calls, own_s, cumulative_s, _) in longest
    ]


def _first_layers(rows: Rows, args: ModelArgs, n: int) -> ModelArgs:
    first = replace(args, n_layers=n, windows=args.windows[:n])
    return shrunk(first) if rows.small else first


def _medians_ms(times: StepTimes) -> dict[str, float]:
    return {kind: statistics.median(getattr(times, kind)) * 1e3 for kind in ("whole", "device")}


JOBS = {
    "linear": linear,
    "prefill": prefill,
    "experts": experts,
    "sampling": sampling,
    "profile": profile,
    "host": host,
}


def main() -> int:
    parser = gpu_parser(__doc__)
    parser.add_argument("job", choices=JOBS)
    options = parser.parse_args()
    with torch.inference_mode():
        JOBS[options.job](Rows(options.device, options.small, options.json))
    return exit_status([])


if __name__ == "__main__":
    sys.exit(main())
