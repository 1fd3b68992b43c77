"""Which kernels a stage attends with: on a GPU the fastest of those that are there and compute what the plain ones do.

Shape letters: T tokens, B single tokens, S keys of a packed row, H query heads, G key/value heads, d head_dim.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

import torch
from torch import Tensor

from tramontane.proto.plan import StagePlan, WindowClass, ring_pages
from tramontane.workers.attention.backend import AttentionKernels, DecodeKernel, PrefillKernel
from tramontane.workers.attention.metadata import DecodeMetadata, PrefillMetadata, build_decode_metadata, num_cached_keys
from tramontane.workers.attention.page_table import padded_width
from tramontane.workers.attention.rolling_cache import LayerCache, PageRings
from tramontane.workers.attention.sdpa_backend import BatchSizeDispatch, PagedDecode, SdpaPrefill, cpu_kernels
from tramontane.workers.device.events import CudaDeviceEvent
from tramontane.workers.device.self_test import assert_close_norm, one_line

logger = logging.getLogger(__name__)

K = TypeVar("K")
Compute = Callable[[], Tensor]
Clock = Callable[[Compute], float]  # seconds that it takes

# Rounding of 16-bit floats makes a tenth of it; a key too many, or one too few, far more.
MAX_DIFFERENCE = 2e-2  # relative, by norms
CHUNKS, CHUNK_TOKENS, KEYS = 4, 128, 1024  # what is tried of prompts: chunks, and keys before each
# With so many, and with a stage's own windows, the right ones are timed: tables are partly filled then, as most are while a
# sequence grows. 80 pages of 16 in a table of 96, and 65 of the 32nd token. To tell right from wrong fewer keys are better.
TIMED_KEYS = 1280
FEW_TOKENS, MANY_TOKENS = 4, 32  # for either number of single tokens other kernels may be the fastest
WIDEST = 256  # window that is tried in the place of a wider one: kernels cannot tell, and this one ends within the keys
CYCLES = 50_000_000  # for which the GPU is kept waiting, some 25 ms, while the host asks for what is timed


@dataclass(frozen=True, slots=True)
class KernelCase:
    """The problems of one window class that kernels are tried on: of a stage's own geometry, with random numbers."""

    q_THd: Tensor
    k_SGd: Tensor
    v_SGd: Tensor
    prefill_index: PrefillMetadata
    q_BHd: Tensor
    cached: LayerCache
    decode_index: DecodeMetadata

    def prefill(self, kernel: PrefillKernel) -> Compute:
        mask = kernel.build_mask(self.prefill_index)
        return lambda: kernel.attend(self.q_THd, self.k_SGd, self.v_SGd, mask)

    def decode(self, kernel: DecodeKernel) -> Compute:
        mask = kernel.build_mask(self.decode_index)
        return lambda: kernel.attend(self.q_BHd, self.cached, mask)

    @property
    def expected(self) -> tuple[Tensor, Tensor]:
        """Of prefill and decode, in float32."""
        q_THd, k_SGd, v_SGd, q_BHd, k_NGd, v_NGd = (
            x.float() for x in (self.q_THd, self.k_SGd, self.v_SGd, self.q_BHd, self.cached.k_NGd, self.cached.v_NGd)
        )
        prefill, decode = SdpaPrefill(), PagedDecode()
        out_THd = prefill.attend(q_THd, k_SGd, v_SGd, prefill.build_mask(self.prefill_index))
        return out_THd, decode.attend(q_BHd, LayerCache(k_NGd, v_NGd), decode.build_mask(self.decode_index))


def correctness_cases(plan: StagePlan, device: torch.device, num_tokens: int) -> list[KernelCase]:
    """One for each window class, with so many single tokens: to see what is right."""
    windows = [window_class.window for window_class in plan.cache.classes]
    return [_trial(plan, device, num_tokens, window and min(window, WIDEST), KEYS) for window in windows]


def timing_cases(plan: StagePlan, device: torch.device, num_tokens: int) -> list[KernelCase]:
    """The same to see what is fast."""
    return [_trial(plan, device, num_tokens, window_class.window, TIMED_KEYS) for window_class in plan.cache.classes]


def _trial(plan: StagePlan, device: torch.device, num_tokens: int, window: int | None, keys: int) -> KernelCase:
    args, dtype, page_size = plan.args, getattr(torch, plan.dtype), plan.cache.page_size
    num_keys = CHUNK_TOKENS + num_cached_keys(keys, window)
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=dtype, device=device, generator=generator)

    none = torch.empty(0, dtype=torch.int64, device=device)
    prefill_index = PrefillMetadata(window, (CHUNK_TOKENS,) * CHUNKS, (num_keys,) * CHUNKS, none, none, none, none)
    ring = _filled_ring(window, page_size, num_tokens, device)
    rows = (ring.num_pages + 1) * page_size, args.n_kv_heads, args.head_dim
    starts = [keys - 1 - 8 * (i % 100) for i in range(num_tokens)]
    slots_B, positions_B = torch.arange(num_tokens, device=device), torch.tensor(starts, device=device)
    return KernelCase(
        random(CHUNKS * CHUNK_TOKENS, args.n_heads, args.head_dim),
        random(CHUNKS * num_keys, args.n_kv_heads, args.head_dim),
        random(CHUNKS * num_keys, args.n_kv_heads, args.head_dim),
        prefill_index,
        random(num_tokens, args.n_heads, args.head_dim),
        LayerCache(random(*rows), random(*rows)),
        build_decode_metadata(ring, slots_B, positions_B, padded_width(starts, ring), starts),
    )


def _filled_ring(window: int | None, page_size: int, num_tokens: int, device: torch.device) -> PageRings:
    """Of a pool in which no sequence's pages lie in order."""
    entries = ring_pages(window, page_size, 2 * KEYS)
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
) -> tuple[str, K] | None:
    """Of those that run and agree with what is expected; None if there is none. One line in the log says what was seen."""
    seconds: dict[str, float] = {}
    reports = []
    for name, kernel in kernels.items():
        try:
            assert_close_norm(prepare(kernel)(), expected, MAX_DIFFERENCE)
            seconds[name] = clock(prepare_timed(kernel))
            reports.append(f"{name} {seconds[name] * 1e6:.0f} us")
        except Exception as error:  # whatever a library's kernels raise where they do not fit
            reports.append(f"{name} {one_line(error)}")
    best = min(seconds, key=seconds.__getitem__) if seconds else None
    level = logging.INFO if best else logging.WARNING
    logger.log(level, "%s by %s (%s)", job, best or "PyTorch's attention", "; ".join(reports))
    return (best, kernels[best]) if best else None


def select_kernels(plan: StagePlan, device: torch.device) -> AttentionKernels:
    if device.type == "cpu":
        return cpu_kernels()
    try:
        from tramontane.workers.attention.xformers_backend import (  # not installed on every platform
            decode_kernels,
            prefill_kernels,
        )
    except (ImportError, OSError) as error:
        logger.warning("attention by PyTorch's: xformers cannot be used (%s)", error)
        return AttentionKernels(SdpaPrefill(), PagedDecode())
    with torch.inference_mode():
        prefill = _chosen_prefill(
            correctness_cases(plan, device, 1), timing_cases(plan, device, 1), prefill_kernels(), cuda_seconds
        )
        few, many = (
            _chosen_decode(
                correctness_cases(plan, device, num_tokens),
                timing_cases(plan, device, num_tokens),
                decode_kernels(plan.cache.page_size, num_tokens),
                cuda_seconds,
            )
            for num_tokens in (FEW_TOKENS, MANY_TOKENS)
        )
    return AttentionKernels(prefill, BatchSizeDispatch(few, many, FEW_TOKENS))


def _chosen_prefill(
    trials: list[KernelCase], timed: list[KernelCase], kernels: Mapping[str, PrefillKernel], clock: Clock
) -> PrefillKernel:
    """The fastest over all window classes, or PyTorch's where none can be used."""

    def prepare(kernel: PrefillKernel, among: list[KernelCase] = trials) -> Compute:
        return _run_all([trial.prefill(kernel) for trial in among])

    expected = _concat([trial.expected[0] for trial in trials])
    best = select_fastest("prefill", kernels, prepare, lambda kernel: prepare(kernel, timed), expected, clock)
    return best[1] if best else SdpaPrefill()


def _chosen_decode(
    trials: list[KernelCase], timed: list[KernelCase], kernels: Mapping[str, DecodeKernel], clock: Clock
) -> DecodeKernel:
    def prepare(kernel: DecodeKernel, among: list[KernelCase] = trials) -> Compute:
        return _run_all([trial.decode(kernel) for trial in among])

    job = f"decode of {len(trials[0].q_BHd)}"
    expected = _concat([trial.expected[1] for trial in trials])
    best = select_fastest(job, kernels, prepare, lambda kernel: prepare(kernel, timed), expected, clock)
    return best[1] if best else PagedDecode()


def _run_all(computes: list[Compute]) -> Compute:
    return lambda: _concat([compute() for compute in computes])


def _concat(outs: list[Tensor]) -> Tensor:
    return torch.cat([out.flatten() for out in outs])


def cuda_seconds(compute: Compute, rounds: int = 10) -> float:
    """The median of some rounds, after three that count for nothing. The GPU waits until all have been asked for, or the host's
    pace would be what is measured.
    """
    for _ in range(3):
        compute()
    torch.cuda._sleep(CYCLES)  # type: ignore[no-untyped-call]
    marks = [CudaDeviceEvent()]
    for _ in range(rounds):
        compute()
        marks.append(CudaDeviceEvent())
    marks[-1].wait()
    return sorted(second.seconds_since(first) for first, second in pairwise(marks))[rounds // 2]
