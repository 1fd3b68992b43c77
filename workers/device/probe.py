"""What a process can find out about its GPUs without loading anything onto them."""

import time
from collections.abc import Callable

COPY_BYTES = 2**28  # far more than any cache on the way


def visible_gpus() -> list[tuple[str, int]]:
    """Name and bytes of memory of every GPU that CUDA shows this process, in its order."""
    import torch  # only where there is a GPU to ask

    properties = (torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count()))
    return [(gpu.name, gpu.total_memory) for gpu in properties]


def memory_bandwidth(
    device: str, num_bytes: int = COPY_BYTES, rounds: int = 5, clock: Callable[[], float] = time.perf_counter
) -> int:
    """Bytes per second that a copy inside the device's memory reads and writes: decoding waits for memory.

    The quickest of some rounds, after one that counts for nothing; whoever shares the device slows the others.
    """
    import torch

    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    times = []
    for _ in range(rounds + 1):
        _wait_for(device)
        started = clock()
        target.copy_(source)
        _wait_for(device)
        times.append(clock() - started)
    return int(2 * num_bytes / min(times[1:]))


def _wait_for(device: str) -> None:
    """CUDA answers before it has worked."""
    import torch

    if device != "cpu":
        torch.cuda.synchronize(device)
