"""Choice of a stage's attention kernels, of those that run on its device and agree with PyTorch's attention, by their speed.

Shape letters: T tokens, B single tokens, S keys of a packed row, H query heads, G key/value heads, d head_dim.
"""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import TypeVar

import torch
from torch import Tensor

from tramontane.proto.plan import StagePlan, WindowClass, ring_pages
from tramontane.workers.attention.backend import AttentionKernels, DecodeKernel, PrefillKernel
from tramontane.workers.attention.metadata import DecodeMetadata, PrefillMetadata, build_decode_metadata, num_cached_keys
from tramontane.workers.attention.native_backend import native_kernels
from tramontane.workers.attention.rolling_cache import LayerCache, PageRings, padded_width
from tramontane.workers.attention.sdpa_backend import BatchSizeDispatch, PagedDecode, SdpaPrefill, cpu_kernels
from tramontane.workers.device.events import DeviceEvent
from tramontane.workers.device.native_library import CompilerError
from tramontane.workers.device.self_test import assert_close_norm, one_line

logger = logging.getLogger(__name__)

K = TypeVar("K")
Compute = Callable[[], Tensor]
Clock = Callable[[Compute], float]  # returns seconds

# Relative, by norms. 16-bit rounding causes a tenth of it; one key too many or too few far more.
MAX_DIFFERENCE = 2e-2
TABLE_KEYS = 2048  # of a token's page ring without a window
# Timed with the stage's own windows and with partly filled tables, as most are while a sequence grows: 80 pages of 16 in a
# table of 96, and 65 of the 32nd token.
TIMING_KEYS = 1280
CPU_TOKENS = 2  # single tokens of a case for CPUs, whose kernels compute one after the other
FEW_TOKENS, MANY_TOKENS = 4, 32  # on GPUs: numbers of single tokens for which different kernels may be the fastest
ADVANTAGE = 1.5  # PyTorch's attention must be so many times as fast as the kernels in C; mostly it takes 2 to 4 times as long
SLEEP_CYCLES = 50_000_000  # for which the GPU is kept busy, about 25 ms, while the host queues what is timed


@dataclass(frozen=True, slots=True)
class CaseSize:
    """Chunks and their tokens in a prefill case, and keys cached before each chunk or single token that shows correctness.

    With few keys errors show more clearly.
    """

    chunks: int
    chunk_tokens: int
    correctness_keys: int

    @property
    def max_correctness_window(self) -> int:
        """Window that replaces wider ones: it ends within the keys, and kernels do not distinguish them."""
        return self.correctness_keys // 4


GPU_SIZE, CPU_SIZE = CaseSize(4, 128, 1024), CaseSize(2, 32, 128)  # on CPUs the larger would take 7 s of the loading of a stage


@dataclass(frozen=True, slots=True)
class KernelCase:
    """Random inputs for kernels, of one window class and the stage's own geometry."""

    q_THd: Tensor
    k_SGd: Tensor
    v_SGd: Tensor
    prefill_index: PrefillMetadata
    q_BHd: Tensor
    cached: LayerCache
    decode_index: DecodeMetadata

    def prefill(self, kernel: PrefillKernel) -> Compute:
        """Return the prefill of this case by a kernel, with its mask built."""
        mask = kernel.build_mask(self.prefill_index)
        return lambda: kernel.attend(self.q_THd, self.k_SGd, self.v_SGd, mask)

    def decode(self, kernel: DecodeKernel) -> Compute:
        """Return the decode of this case by a kernel, with its mask built."""
        mask = kernel.build_mask(self.decode_index)
        return lambda: kernel.attend(self.q_BHd, self.cached, mask)

    @property
    def expected(self) -> tuple[Tensor, Tensor]:
        """Outputs of prefill and decode by PyTorch in float32."""
        q_THd, k_SGd, v_SGd, q_BHd, k_NGd, v_NGd = (
            x.float() for x in (self.q_THd, self.k_SGd, self.v_SGd, self.q_BHd, self.cached.k_NGd, self.cached.v_NGd)
        )
        prefill, decode = SdpaPrefill(), PagedDecode()
        out_THd = prefill.attend(q_THd, k_SGd, v_SGd, prefill.build_mask(self.prefill_index))
        return out_THd, decode.attend(q_BHd, LayerCache(k_NGd, v_NGd), decode.build_mask(self.decode_index))


def correctness_cases(plan: StagePlan, device: torch.device, num_tokens: int) -> list[KernelCase]:
    """Return a case per window class, with so many single tokens, that shows which kernels are correct."""
    windows, size = [window_class.window for window_class in plan.cache.classes], _size(device)
    return [
        _case(plan, device, num_tokens, window and min(window, size.max_correctness_window), size.correctness_keys)
        for window in windows
    ]


def timing_cases(plan: StagePlan, device: torch.device, num_tokens: int) -> list[KernelCase]:
    """Return a case per window class, with so many single tokens, that shows which kernels are fast."""
    return [_case(plan, device, num_tokens, window_class.window, TIMING_KEYS) for window_class in plan.cache.classes]


def _size(device: torch.device) -> CaseSize:
    return GPU_SIZE if device.type == "cuda" else CPU_SIZE


def _case(plan: StagePlan, device: torch.device, num_tokens: int, window: int | None, keys: int) -> KernelCase:
    args, dtype, page_size = plan.args, getattr(torch, plan.dtype), plan.cache.page_size
    num_cached = num_cached_keys(keys, window)
    size = _size(device)
    num_keys = size.chunk_tokens + num_cached
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=dtype, device=device, generator=generator)

    none = torch.empty(0, dtype=torch.int64, device=device)
    lens = ((size.chunk_tokens,) * size.chunks, (num_keys,) * size.chunks, (num_cached,) * size.chunks)
    prefill_index = PrefillMetadata(window, *lens, none, none, none, none)
    ring = _filled_ring(window, page_size, num_tokens, device)
    rows = (ring.num_pages + 1) * page_size, args.n_kv_heads, args.head_dim
    starts = [keys - 1 - 8 * (i % 100) for i in range(num_tokens)]
    slots_B, positions_B = torch.arange(num_tokens, device=device), torch.tensor(starts, device=device)
    return KernelCase(
        random(size.chunks * size.chunk_tokens, args.n_heads, args.head_dim),
        random(size.chunks * num_keys, args.n_kv_heads, args.head_dim),
        random(size.chunks * num_keys, args.n_kv_heads, args.head_dim),
        prefill_index,
        random(num_tokens, args.n_heads, args.head_dim),
        LayerCache(random(*rows), random(*rows)),
        build_decode_metadata(ring, slots_B, positions_B, padded_width(starts, ring), starts),
    )


def _filled_ring(window: int | None, page_size: int, num_tokens: int, device: torch.device) -> PageRings:
    """Return a full page ring per token, from a pool in which the pages of no sequence are in order."""
    entries = ring_pages(window, page_size, TABLE_KEYS)
    ring = PageRings(WindowClass(window, entries, entries * num_tokens), page_size, num_tokens, device)
    pages = torch.randperm(entries * num_tokens, generator=torch.Generator().manual_seed(0)).tolist()
    for slot in range(num_tokens):
        ring.append_pages(slot, tuple(pages[slot * entries : (slot + 1) * entries]))
    ring.flush()
    return ring


def select_fastest(
    job: str,
    kernels: Mapping[str, K],
    prepare: Callable[[K], Compute],
    prepare_timed: Callable[[K], Compute],
    expected: Tensor,
    clock: Clock,
    advantage: float = 1,
) -> K | None:
    """Return the fastest of the kernels that run and agree with ``expected``, or None; log one line with the outcome of each.

    The first of them is returned unless another is more than ``advantage`` times as fast: with 1.5, and 30 and 21 us, the first.
    """
    seconds: dict[str, float] = {}
    reports = []
    for name, kernel in kernels.items():
        try:
            assert_close_norm(prepare(kernel)(), expected, MAX_DIFFERENCE)
            seconds[name] = clock(prepare_timed(kernel))
            reports.append(f"{name} {seconds[name] * 1e6:.0f} us")
        except Exception as error:  # libraries raise errors of any kind where a kernel does not fit
            reports.append(f"{name} {one_line(error)}")
    best = min(seconds, key=seconds.__getitem__) if seconds else None
    if best and seconds[first := next(iter(seconds))] <= advantage * seconds[best]:
        best = first
    level = logging.INFO if best else logging.WARNING
    logger.log(level, "%s by %s (%s)", job, best or "PyTorch's attention", "; ".join(reports))
    return kernels[best] if best else None


def select_kernels(plan: StagePlan, device: torch.device) -> AttentionKernels:
    """Choose the kernels of a stage: by speed on its device, or PyTorch's without a C compiler or without xformers."""
    if device.type == "cpu":
        return _select_for_cpu(plan)
    try:
        # xformers is not installed on every platform.
        from tramontane.workers.attention.xformers_backend import decode_kernels, prefill_kernels
    except (ImportError, OSError) as error:
        logger.warning("attention is computed by PyTorch, because xformers cannot be imported (%s)", error)
        return AttentionKernels(SdpaPrefill(), PagedDecode())
    with torch.inference_mode():
        correctness, timing = correctness_cases(plan, device, 1), timing_cases(plan, device, 1)
        prefill = _choose_prefill(correctness, timing, prefill_kernels(), cuda_seconds)
        few, many = (
            _choose_decode(
                correctness_cases(plan, device, num_tokens),
                timing_cases(plan, device, num_tokens),
                decode_kernels(plan.cache.page_size, num_tokens),
                cuda_seconds,
            )
            for num_tokens in (FEW_TOKENS, MANY_TOKENS)
        )
    return AttentionKernels(prefill, BatchSizeDispatch(few, many, FEW_TOKENS))


@cache  # for tests, which start many equal stages in one process
def _select_for_cpu(plan: StagePlan) -> AttentionKernels:
    """Choose between the kernels in C and PyTorch's attention, which needs keys in one piece.

    Prefill and decode are chosen together: the kernels in C compute the same bits for a token in either way. A stage that
    replaces another should choose what that had chosen: noise decides only if PyTorch's are about 1.5 times as fast.
    """
    device, others = torch.device("cpu"), cpu_kernels()
    try:
        native = native_kernels(plan)
    except CompilerError as error:
        logger.info("attention is computed by PyTorch, two to four times as slow as the kernels in C: %s", error)
        return others
    with torch.inference_mode():
        correctness, timing = (cases(plan, device, CPU_TOKENS) for cases in (correctness_cases, timing_cases))
        expected = [_concat([case.expected[job] for case in correctness]) for job in (0, 1)]
        compute, compute_timed = _both_on_all(correctness), _both_on_all(timing)

        def prepare(kernels: AttentionKernels) -> Compute:
            outs = compute(kernels)()
            for out, wanted in zip(outs, expected, strict=True):
                assert_close_norm(out, wanted, MAX_DIFFERENCE)
            return lambda: torch.cat(outs)

        def prepare_timed(kernels: AttentionKernels) -> Compute:
            both = compute_timed(kernels)
            return lambda: torch.cat(both())

        kernels = {"C": native, "PyTorch": others}
        return select_fastest("attention", kernels, prepare, prepare_timed, torch.cat(expected), cpu_seconds, ADVANTAGE) or others


def _both_on_all(cases: list[KernelCase]) -> Callable[[AttentionKernels], Callable[[], list[Tensor]]]:
    """Return a function that prepares prefill and decode for all cases."""
    prepare_prefill, prepare_decode = _on_all(cases, KernelCase.prefill), _on_all(cases, KernelCase.decode)

    def prepare(kernels: AttentionKernels) -> Callable[[], list[Tensor]]:
        prefill, decode = prepare_prefill(kernels.prefill), prepare_decode(kernels.decode)
        return lambda: [prefill(), decode()]

    return prepare


def _choose_prefill(
    correctness: list[KernelCase], timing: list[KernelCase], kernels: Mapping[str, PrefillKernel], clock: Clock
) -> PrefillKernel:
    """Return the fastest kernel over all window classes, or PyTorch's if none can be used."""
    expected = _concat([case.expected[0] for case in correctness])
    prepare, prepare_timed = (_on_all(cases, KernelCase.prefill) for cases in (correctness, timing))
    return select_fastest("prefill", kernels, prepare, prepare_timed, expected, clock) or SdpaPrefill()


def _choose_decode(
    correctness: list[KernelCase], timing: list[KernelCase], kernels: Mapping[str, DecodeKernel], clock: Clock
) -> DecodeKernel:
    """Return the fastest kernel over all window classes, or PyTorch's if none can be used."""
    job, expected = f"decode of {len(correctness[0].q_BHd)}", _concat([case.expected[1] for case in correctness])
    prepare, prepare_timed = (_on_all(cases, KernelCase.decode) for cases in (correctness, timing))
    return select_fastest(job, kernels, prepare, prepare_timed, expected, clock) or PagedDecode()


def _on_all(cases: list[KernelCase], prepare: Callable[[KernelCase, K], Compute]) -> Callable[[K], Compute]:
    """Return a function that prepares a kernel for all cases."""

    def prepare_all(kernel: K) -> Compute:
        computes = [prepare(case, kernel) for case in cases]
        return lambda: _concat([compute() for compute in computes])

    return prepare_all


def _concat(outs: list[Tensor]) -> Tensor:
    return torch.cat([out.flatten() for out in outs])


def cpu_seconds(compute: Compute, rounds: int = 3) -> float:
    """Return the shortest of several rounds, after one that does not count: other processes only add to it."""
    compute()
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        compute()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def cuda_seconds(compute: Compute, rounds: int = 10) -> float:
    """Return the median of several rounds, after three that do not count.

    The GPU sleeps until all rounds are queued; otherwise the speed of the host would be measured.
    """
    for _ in range(3):
        compute()
    torch.cuda._sleep(SLEEP_CYCLES)  # type: ignore[no-untyped-call]
    events = [DeviceEvent()]
    for _ in range(rounds):
        compute()
        events.append(DeviceEvent())
    events[-1].wait()
    return sorted(second.seconds_since(first) for first, second in pairwise(events))[rounds // 2]
