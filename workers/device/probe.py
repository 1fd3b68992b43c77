"""What a process can find out about its GPUs without loading a model. torch is imported only if a GPU is asked."""

import time
from collections.abc import Callable

COPY_BYTES = 2**28  # far more than any cache between processor and memory


def visible_gpus() -> list[tuple[str, int]]:
    """Return name and bytes of memory of every GPU that CUDA shows this process, in CUDA's order."""
    import torch

    properties = (torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count()))
    return [(gpu.name, gpu.total_memory) for gpu in properties]


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
