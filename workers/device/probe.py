"""Properties of devices that a process can read without loading a model. torch is imported only to
query a GPU.
"""

import ctypes
import itertools
import os
import platform
import re
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from tramontane.workers.device import nvml
from tramontane.workers.device.native_library import (
    VECTOR_MACROS,
    CompilerError,
    vector_instructions,
)

COPY_BYTES = 2**28  # far more than any cache between processor and memory
MAX_PANEL_ROWS = 32  # of any processor
KERNEL_MODULE = Path("/proc/driver/nvidia/gpus")  # a folder for each GPU


class VisibleGpu(NamedTuple):
    """A GPU that CUDA shows: its name, its memory in bytes, and how many bytes are free now, None
    if unknown.
    """

    name: str
    memory: int
    free: int | None = None


def visible_gpus() -> list[VisibleGpu]:
    """Return every GPU that CUDA shows this process, in CUDA's order."""
    import torch

    # By their UUIDs: NVML lists GPUs in the order of their buses, CUDA the fastest first.
    free = {gpu.uuid.removeprefix("GPU-"): gpu.free for gpu in nvml.list_gpus() or ()}
    properties = (torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count()))
    return [VisibleGpu(gpu.name, gpu.total_memory, free.get(str(gpu.uuid))) for gpu in properties]


def num_visible_gpus() -> int:
    """Return how many GPUs of this machine CUDA should show, without torch if the driver reports
    the number.

    The driver's management library counts them, as it does for Ray and PyTorch, else the kernel
    module's files. If neither exists, as in some containers, but CUDA's library does, PyTorch
    counts them.
    """
    selected, gpus = os.environ.get("CUDA_VISIBLE_DEVICES"), nvml.list_gpus()
    if gpus is not None:
        return count_selected(selected, len(gpus), [gpu.uuid for gpu in gpus])
    if num_gpus := len(list(KERNEL_MODULE.glob("*"))):
        return count_selected(selected, num_gpus)
    if _has_cuda_driver():
        import torch

        return torch.cuda.device_count()
    return 0


def count_selected(selected: str | None, num_gpus: int, uuids: Sequence[str] | None = None) -> int:
    """Return how many of the GPUs CUDA_VISIBLE_DEVICES selects; without ``uuids``, the UUIDs that
    it names are assumed to be valid.

    The rules are CUDA's: names are numbers, or UUIDs which may be cut short; the first invalid name
    ends the list, and a duplicate empties it. Of 2 GPUs "1,0" selects 2, "0,-1,1" and "0,2,1"
    select 1, and "0,0" selects 0.
    """
    if selected is None:
        return num_gpus
    names = [name.strip() for name in selected.split(",")]
    if names[0].startswith("MIG-"):  # a part of a GPU; CUDA shows only one
        return min(num_gpus, 1)
    are_uuids = names[0].startswith("GPU-")
    if are_uuids and uuids is None:
        return min(num_gpus, len(names))
    ordinals = []
    for name in names:
        ordinal = _uuid_ordinal(name, uuids or ()) if are_uuids else _number(name)
        if not 0 <= ordinal < num_gpus:
            break
        ordinals.append(ordinal)
    return len(ordinals) if len(set(ordinals)) == len(ordinals) else 0


def _number(name: str) -> int:
    """Return the number that a name begins with, as C's strtoul reads it; -1 without a number."""
    found = re.match(r"[+-]?\d+", name)
    return int(found[0]) if found else -1


def _uuid_ordinal(name: str, uuids: Sequence[str]) -> int:
    """Return the number of the only GPU whose UUID begins with this; -1 if there is not exactly
    one.
    """
    found = [ordinal for ordinal, uuid in enumerate(uuids) if uuid.startswith(name)]
    return found[0] if len(found) == 1 else -1


def _has_cuda_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


@cache
def device_name(device: str) -> str:
    """Return the name of a kind of device: devices of the same name are equally fast.

    Processors of one name may differ where a virtual machine hides the model, so a CPU's name
    includes all known properties: ``AMD EPYC, family 23, model 1, avx2``.
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
    fields = {
        key.strip(): value.strip() for key, _, value in (line.partition(":") for line in first)
    }
    flags = fields.get("flags", fields.get("Features", "")).split()
    numbers = {"family": "cpu family", "model": "model", "part": "CPU part"}
    known = [f"{name} {fields[key]}" for name, key in numbers.items() if key in fields]
    best = [name for name in VECTOR_MACROS if name in flags][:1]
    return ", ".join([fields.get("model name", platform.machine()), *known, *best])


def panel_rows() -> int:
    """Return how many rows of a packed matrix a panel has here: ``COLUMNS`` of ``tile.h``, without
    compiling it.

    1 without a C compiler, where matrices are not packed.
    """
    try:
        instructions = vector_instructions()
    except CompilerError:
        return 1
    return 32 if instructions.startswith("avx512") else 16 if instructions.startswith("avx") else 8


def memory_bandwidth(
    device: str,
    num_bytes: int = COPY_BYTES,
    rounds: int = 5,
    clock: Callable[[], float] = time.perf_counter,
) -> int:
    """Measure the bytes per second that a copy within the device's memory reads and writes.
    Decoding is bound by it.

    Returns the fastest of several rounds, because other users of the device slow some of them; the
    first does not count.
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
