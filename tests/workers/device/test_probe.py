"""What GPUs are queried for, in the form that it has without one."""

import itertools

import torch

from tramontane.workers.device.probe import memory_bandwidth, visible_gpus


def test_the_quickest_copy_after_the_first_counts() -> None:
    """Four copies that take 0.25, 8, 2 and 4 s by this clock; 1000 bytes are read and as many written."""
    ticks = itertools.accumulate([0, 0.25, 1, 8, 1, 2, 1, 4])
    assert memory_bandwidth("cpu", num_bytes=1000, rounds=3, clock=lambda: next(ticks)) == 2 * 1000 // 2


def test_a_real_clock_says_something() -> None:
    assert memory_bandwidth("cpu", num_bytes=2**20) > 0


def test_what_is_seen_is_what_cuda_shows() -> None:
    assert len(visible_gpus()) == torch.cuda.device_count()
