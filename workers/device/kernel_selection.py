"""Choice of the fastest of some kernels, of those that run on a device and compute what they should."""

import logging
import time
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import TypeVar

import torch
from torch import Tensor

from tramontane.workers.device.events import DeviceEvent
from tramontane.workers.device.self_test import assert_close_norm, one_line

logger = logging.getLogger(__name__)

K = TypeVar("K")
Compute = Callable[[], Tensor]
Clock = Callable[[Compute], float]  # returns seconds

# Relative, by norms. 16-bit rounding causes a tenth of it; one key too many or too few far more.
MAX_DIFFERENCE = 2e-2
SLEEP_CYCLES = 50_000_000  # for which the GPU is kept busy, about 25 ms, while the host queues what is timed


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
    logger.log(level, "%s by %s (%s)", job, best or "PyTorch", "; ".join(reports))
    return kernels[best] if best else None


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
