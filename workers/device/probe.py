"""What a process can find out about its devices without loading a model. torch is imported only if a GPU is asked."""

import itertools
import platform
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

from tramontane.workers.device.native_library import VECTOR_MACROS, CompilerError, vector_instructions

COPY_BYTES = 2**28  # far more than any cache between processor and memory
MAX_PANEL_ROWS = 32  # of any processor


def visible_gpus() -> list[tuple[str, int]]:
    """Return name and bytes of memory of every GPU that CUDA shows this process, in CUDA's order."""
    import torch

    properties = (torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count()))
    return [(gpu.name, gpu.total_memory) for gpu in properties]


@cache
def device_name(device: str) -> str:
    """Return the name of a kind of device: of two with one name neither is faster.

    Processors of one name may differ where a virtual machine hides the model, so theirs has all that is known:
    ``AMD EPYC, family 23, model 1, avx2``.
    """
    if device != "cpu":
        import torch

        return torch.cuda.get_device_name(device)
    try:
        return processor_name(Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    except OSError:
        return platform.processor() or platform.machine()


def processor_name(cpuinfo: str) -> str:
    """Return the name of the first processor in the text of ``/proc/cpuinfo``."""
    first = itertools.takewhile(str.strip, cpuinfo.splitlines())
    fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in first)}
    flags = fields.get("flags", fields.get("Features", "")).split()
    numbers = {"family": "cpu family", "model": "model", "part": "CPU part"}
    known = [f"{name} {fields[key]}" for name, key in numbers.items() if key in fields]
    best = [name for name in VECTOR_MACROS if name in flags][:1]
    return ", ".join([fields.get("model name", platform.machine()), *known, *best])


def panel_rows() -> int:
    """Return how many rows of a matrix a panel of packed ones has here: ``COLUMNS`` of ``tile.h``, without compiling it.

    1 without a C compiler, where matrices are not packed.
    """
    try:
        instructions = vector_instructions()
    except CompilerError:
        return 1
    return 32 if instructions.startswith("avx512") else 16 if instructions.startswith("avx") else 8


def memory_bandwidth(
    device: str, num_bytes: int = COPY_BYTES, rounds: int = 5, clock: Callable[[], float] = time.perf_counter
) -> int:
    """Measure the bytes per second that a copy within the device's memory reads and writes. Decoding is bound by it.

    Takes the fastest of several rounds, because other users of the device slow some of them; the first does not count.
    """
    import torch

    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    times = []
    for _ in range(rounds + 1):
        _synchronize(device)
        started = clock()
        target.copy_(source)
        _synchronize(device)
        times.append(clock() - started)
    return int(2 * num_bytes / min(times[1:]))


def _synchronize(device: str) -> None:
    """Wait for the device: CUDA calls return before the work is done."""
    import torch

    if device != "cpu":
        torch.cuda.synchronize(device)
