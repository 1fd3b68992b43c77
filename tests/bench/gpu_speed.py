"""Speed of a GPU as shares of what its memory and its matrix products allow: rows of gpu_rows.py
with a figure.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from gpu_stage import (
    MISTRAL_7B,
    MIXTRAL_8X7B,
    Runner,
    StepTimes,
    running,
    shrunk,
    that_fits,
    weight_bytes_read,
)

from tramontane.proto.model_args import ModelArgs
from tramontane.proto.weight_format import Quantization
from tramontane.workers.device.probe import memory_bandwidth

Clock = Callable[[], float]

WARM_STEPS, STEPS = 6, 40
PREFILL_BUDGET = 4096  # tokens in a micro-batch


@dataclass(frozen=True, slots=True)
class Size:
    """The device, and whether models are shrunk (``--small``) so that a CPU can run them."""

    device: str
    small: bool

    def model(self, args: ModelArgs) -> ModelArgs:
        return shrunk(args) if self.small else args

    def tokens(self, number: int) -> int:
        return max(number // 32, 8) if self.small else number


@dataclass(frozen=True, slots=True)
class Figure:
    """A measured row: ``share`` of ``of``, or a plain ratio if that is "1". ``target`` is the
    minimum aimed at.
    """

    name: str
    share: float
    of: str
    target: float | None
    detail: str


@dataclass(frozen=True, slots=True)
class Walls:
    """Limits measured first, in the same run: bytes per second of a copy (read and written), FLOP/s
    of matrix products.
    """

    bytes_per_s: float
    flops: float


def walls(size: Size) -> Walls:
    width = size.tokens(8192)
    a, b = (torch.randn(width, width, device=size.device, dtype=torch.bfloat16) for _ in range(2))
    seconds = _seconds(lambda: a @ b, size.device)
    return Walls(
        float(memory_bandwidth(size.device, copied_bytes(size.device, size.small))),
        2 * width**3 / seconds,
    )


def copied_bytes(device: str, small: bool = False) -> int:
    """Return how many bytes to copy so that the host's overhead is negligible.

    At 4.3 TB/s, read and written, 2**28 bytes take 125 us and 2**32 take 2 ms. Fewer if two buffers
    do not fit: with 6 GiB free 2**31.
    """
    if small or device == "cpu":
        return 2**26
    free, _ = torch.cuda.mem_get_info(device)
    return min(2**32, 1 << ((free // 2).bit_length() - 1))


def _seconds(
    compute: Callable[[], object], device: str, rounds: int = 10, clock: Clock = time.perf_counter
) -> float:
    """Return the median seconds of some rounds, each synchronized as a step is, after three that
    warm up.
    """
    times = []
    for _ in range(3 + rounds):
        _wait_for(device)
        began = clock()
        compute()
        _wait_for(device)
        times.append(clock() - began)
    return statistics.median(times[3:])


def _wait_for(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def mistral_decode(size: Size, wall: Walls) -> Iterator[Figure]:
    """Measure decodes of Mistral 7B with a context of 1k, and its prefill."""
    with running(
        size.model(MISTRAL_7B), size.device, max_num_seqs=64, max_len=size.tokens(2304)
    ) as runner:
        for batch, target in ((1, 0.75), (16, 0.75), (64, 0.70)):
            runner.prefill(batch, size.tokens(1024), PREFILL_BUDGET)
            yield _decode_row(
                f"Mistral 7B, decode, batch {batch}, context 1k", runner, wall, target
            )
        yield _prefill_row(size, runner, wall)


def _decode_row(name: str, runner: Runner, wall: Walls, target: float | None) -> Figure:
    """Measure decodes against the bytes that the timed steps read: weights, experts in use, and the
    middle step's keys.

    Steps are launched before the ones before them have been read, as a server does it with one
    stage. Experts in use are counted in as many steps before that, whose tokens are waited for.
    """
    runner.decode(WARM_STEPS)
    waiting, touched, num_steps = [], [], min(STEPS, runner.room // 2)
    for _ in range(num_steps):
        before = _expert_tokens(runner)
        waiting += runner.decode(1).whole
        touched.append(_touched(before, _expert_tokens(runner)))
    live_before = runner.live_bytes()
    steps = runner.decode(num_steps, ahead=True)
    experts = statistics.mean(touched) if runner.plan.args.moe else None
    live = (live_before + runner.live_bytes()) / 2
    needed_s = (weight_bytes_read(runner, experts) + live) / wall.bytes_per_s
    detail = (
        f"{_describe(steps, len(runner.sequences))}; {statistics.median(waiting) * 1e3:.2f} ms"
        " where tokens are waited for"
    )
    detail += f"; {experts:.1f} experts a layer" if experts else ""
    return Figure(name, needed_s / statistics.median(steps.whole), "memory wall", target, detail)


def _expert_tokens(runner: Runner) -> dict[int, list[int]]:
    return {layer: list(tokens) for layer, tokens in runner.worker.model.expert_load.items()}


def _touched(before: dict[int, list[int]], after: dict[int, list[int]]) -> float:
    """Return the number of experts that got any token in the step between, as a mean over
    layers.
    """
    return (
        statistics.mean(
            sum(n > m for n, m in zip(after[i], before[i], strict=True)) for i in before
        )
        if before
        else 0.0
    )


def _describe(times: StepTimes, batch: int) -> str:
    whole, device = statistics.median(times.whole), statistics.median(times.device)
    return (
        f"{whole * 1e3:.2f} ms a step, {device * 1e3:.2f} of it on the device; {batch / whole:.0f}"
        " tokens/s"
    )


def _prefill_row(size: Size, runner: Runner, wall: Walls) -> Figure:
    length = size.tokens(2048)
    seconds = statistics.median(runner.prefill(16, length, PREFILL_BUDGET) for _ in range(3))
    args = runner.plan.args
    per_token = 2 * sum(
        p.numel()
        for n, p in runner.worker.model.named_parameters()
        if "layers." in n and p.dim() > 1
    )
    pairs = sum(_visible_pairs(length, window) for window in args.windows)
    flops = 16 * (length * per_token + 4 * args.n_heads * args.head_dim * pairs)
    detail = (
        f"{seconds:.2f} s, {16 * length / seconds:.0f} tokens/s, {PREFILL_BUDGET} tokens a"
        " micro-batch"
    )
    return Figure(
        "Mistral 7B, prefill of 16 x 2k", flops / seconds / wall.flops, "matrix rate", 0.70, detail
    )


def _visible_pairs(length: int, window: int | None) -> int:
    """Count the pairs of queries and visible keys in one layer. 5 tokens, W = 3: 1 + 2 + 3 + 3 + 3
    = 12.
    """
    seen = min(window or length, length)
    return seen * (seen + 1) // 2 + (length - seen) * seen


def mixtral_decode(size: Size, wall: Walls) -> Iterator[Figure]:
    """Measure decodes of Mixtral 8x7B: in 16 bits if they fit, or else in fp8, and then of as many
    layers as fit.
    """
    args, max_len, quantize = size.model(MIXTRAL_8X7B), size.tokens(1280), None
    if size.device != "cpu":
        args, quantize = that_fits(args, torch.cuda.mem_get_info(size.device)[0], 64, max_len)
    name = "Mixtral 8x7B in fp8" if quantize else "Mixtral 8x7B"
    name += (
        "" if args.n_layers == MIXTRAL_8X7B.n_layers or size.small else f", {args.n_layers} layers"
    )
    with running(args, size.device, max_num_seqs=64, max_len=max_len, quantize=quantize) as runner:
        for batch, target in ((1, 0.65), (64, 0.65)):
            runner.prefill(batch, size.tokens(1024), PREFILL_BUDGET)
            yield _decode_row(f"{name}, decode, batch {batch}, context 1k", runner, wall, target)


def rolling(size: Size, _wall: Walls) -> Iterator[Figure]:
    """Compare a decode step at 32k tokens with one at 4k: with a window of 4096 both read the same
    bytes.
    """
    times = {}
    with running(
        size.model(MISTRAL_7B), size.device, max_num_seqs=8, max_len=size.tokens(32_768)
    ) as runner:
        for length in (size.tokens(4096 + 512), size.tokens(32_768 - 512)):
            runner.prefill(8, length, PREFILL_BUDGET)
            runner.decode(WARM_STEPS)
            times[length] = statistics.median(runner.decode(min(STEPS, size.tokens(256))).whole)
    short, long = times.values()
    detail = f"{short * 1e3:.2f} ms at 4.5k, {long * 1e3:.2f} ms at 32k"
    yield Figure(
        "rolling cache: a step at 4k over one at 32k, window 4096", short / long, "1", 0.95, detail
    )


def quantized(size: Size, wall: Walls) -> Iterator[Figure]:
    """Measure quantized weights at batch 1 and 64."""
    for quantize in Quantization:
        args = size.model(MISTRAL_7B)
        with running(
            args, size.device, max_num_seqs=64, max_len=size.tokens(1280), quantize=quantize
        ) as runner:
            for batch in (1, 64):
                runner.prefill(batch, size.tokens(1024), PREFILL_BUDGET)
                yield _decode_row(
                    f"Mistral 7B {quantize}, decode, batch {batch}, context 1k", runner, wall, None
                )


def page_sizes(size: Size, wall: Walls) -> Iterator[Figure]:
    """Measure page sizes; a kernel's block of keys has to divide the page."""
    for page_size in (16, 32, 64, 128):
        args = size.model(replace(MISTRAL_7B, n_layers=8, windows=(4096,) * 8))
        with running(
            args, size.device, max_num_seqs=64, max_len=size.tokens(2304), page_size=page_size
        ) as runner:
            runner.prefill(64, size.tokens(1024), PREFILL_BUDGET)
            yield _decode_row(
                f"8 layers, decode, batch 64, pages of {page_size}", runner, wall, None
            )
