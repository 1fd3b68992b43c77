"""Selection of the fastest of several kernels that run on a device and compute correct results."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Self, TypeVar

import torch
from torch import Tensor

from tramontane.workers.device.cuda import DeviceEvent
from tramontane.workers.device.kernel_choices import KeptChoice, KernelChoices
from tramontane.workers.device.kernel_table import TABLE, Row
from tramontane.workers.device.self_test import assert_close_norm, one_line, try_or_reason

logger = logging.getLogger(__name__)

K = TypeVar("K")
Compute = Callable[[], Tensor]
Clock = Callable[[Compute], float]  # returns seconds

# Relative, by norms. 16-bit rounding causes a tenth of it; a missing or extra key causes far more.
MAX_DIFFERENCE = 2e-2
# cycles for which the GPU is kept busy, about 25 ms, while the host queues the timed work
SLEEP_CYCLES = 50_000_000
IN_TABLE, CHOSEN_BEFORE = "measured on such GPUs", "chosen before on this machine"


@dataclass(frozen=True, slots=True)
class KernelSelector:
    """Chooses the fastest of some kernels by ``clock``.

    Choices are stored in ``choices``, unless that is None. ``table``: kernels for jobs that need no
    choice, see ``TABLE``.
    """

    clock: Clock
    choices: KernelChoices | None = None
    table: Mapping[Row, str] = field(default_factory=dict)

    @classmethod
    def of_device(cls, device: torch.device) -> Self:
        """Return a selector that stores its choices, for all GPUs of this kind on this machine."""
        capability = torch.cuda.get_device_capability(device)
        return cls(cuda_seconds, KernelChoices.of_device(str(device)), TABLE.get(capability, {}))

    def fastest(
        self,
        job: str,
        shapes: str,
        kernels: Mapping[str, K],
        prepare: Callable[[K], Compute],
        prepare_timed: Callable[[], Callable[[K], Compute]],
        expected: Tensor,
        advantage: float = 1,
        row: Row | None = None,
    ) -> K | None:
        """Return the fastest of the kernels that run and agree with ``expected``, or None.

        The first kernel is returned unless another is more than ``advantage`` times as fast: with
        1.5, and 30 and 21 us, the first. The table's kernel for ``row``, or a kernel chosen before
        for the same job, ``shapes`` and kernels, is compared with ``expected`` and not timed; if it
        fails, all kernels are tried and timed. ``prepare_timed`` is called only where kernels are
        timed. Logs one line, with the outcome of each kernel.
        """
        known = self.table.get(row, "") if row else ""
        if known in kernels and _is_right(job, known, IN_TABLE, kernels, prepare, expected):
            return kernels[known]
        if self.choices is None or len(kernels) < 2:
            name = self._compare(job, kernels, prepare, prepare_timed, expected, advantage)
            return kernels[name] if name else None
        kept = self.choices.of(job, shapes, list(kernels))
        name = _recall(kept, job, kernels, prepare, expected)
        if name is None:
            with kept.locked():
                # another process may have chosen
                name = _recall(kept, job, kernels, prepare, expected)
                if name is None and (
                    name := self._compare(job, kernels, prepare, prepare_timed, expected, advantage)
                ):
                    kept.keep(name)
        return kernels[name] if name else None

    def _compare(
        self,
        job: str,
        kernels: Mapping[str, K],
        prepare: Callable[[K], Compute],
        prepare_timed: Callable[[], Callable[[K], Compute]],
        expected: Tensor,
        advantage: float,
    ) -> str | None:
        """Try all kernels, and time them if there are several; return the name of the fastest."""
        prepare_clocked = prepare_timed() if len(kernels) > 1 else None
        seconds: dict[str, float] = {}
        reports = []
        for name, kernel in kernels.items():
            try:
                assert_close_norm(prepare(kernel)(), expected, MAX_DIFFERENCE)
                seconds[name] = self.clock(prepare_clocked(kernel)) if prepare_clocked else 0.0
                reports.append(
                    f"{name} {seconds[name] * 1e6:.0f} us"
                    if prepare_clocked
                    else "there is no other"
                )
            # libraries raise errors of any kind where a kernel does not fit
            except Exception as error:
                reports.append(f"{name} {one_line(error)}")
        best = min(seconds, key=seconds.__getitem__) if seconds else None
        if best and seconds[first := next(iter(seconds))] <= advantage * seconds[best]:
            best = first
        level = logging.INFO if best else logging.WARNING
        logger.log(level, "%s by %s (%s)", job, best or "PyTorch", "; ".join(reports))
        return best


def _recall(
    kept: KeptChoice,
    job: str,
    kernels: Mapping[str, K],
    prepare: Callable[[K], Compute],
    expected: Tensor,
) -> str | None:
    """Return the name of the stored choice, if this kernel still runs and is correct."""
    name = kept.recall()
    if name is None or _is_right(job, name, CHOSEN_BEFORE, kernels, prepare, expected):
        return name
    kept.forget()
    return None


def _is_right(
    job: str,
    name: str,
    origin: str,
    kernels: Mapping[str, K],
    prepare: Callable[[K], Compute],
    expected: Tensor,
) -> bool:
    """Return whether this kernel runs and agrees with ``expected``; logs one line with the result.

    ``origin``: the source of the choice.
    """
    reason = try_or_reason(
        lambda: assert_close_norm(prepare(kernels[name])(), expected, MAX_DIFFERENCE)
    )
    if reason:
        logger.warning(
            "%s: %s was %s and is not used, all are tried again: %s", job, name, origin, reason
        )
    else:
        logger.info("%s by %s, as %s", job, name, origin)
    return not reason


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


WITHOUT_MEMORY = KernelSelector(cuda_seconds)
