"""From a file to a GPU: bytes are read into pinned memory, and while they travel the next are read.

safetensors' own way (0.8) hands the GPU a mapping of the file, page by page as it is read in, and waits for it. From
pinned memory a GPU fetches by itself; and reading into it is twice as fast as copying out of a mapping.
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

READERS = 4  # threads that read parts of one piece: a GPU takes more than one of them reads
LEAST_PART = 2**20  # bytes that are worth a thread
Wait = Callable[[], None]


class Lane(Protocol):
    """How bytes get to a device."""

    def new_buffer(self, num_bytes: int) -> Tensor:
        """In host memory, uint8 [num_bytes], as the lane wants it."""

    def send(self, staged_B: Tensor) -> tuple[Tensor, Wait]:
        """Begin to copy a part of such a buffer. What will be the copy, and what waits until the buffer is free again."""


class GpuLane:
    """Pinned memory, and copies on the device's current stream: whatever is done there with one comes after it."""

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)

    def new_buffer(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def send(self, staged_B: Tensor) -> tuple[Tensor, Wait]:
        there_B = staged_B.to(self._device, non_blocking=True)
        sent = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        sent.record(torch.cuda.current_stream(self._device))
        return there_B, sent.synchronize


class Staging:
    """Two buffers that are used in turn: what is read into one waits only for what it held two pieces ago."""

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self._buffers = [torch.empty(0, dtype=torch.uint8)] * 2
        self._waits: list[Wait] = [_for_nothing] * 2
        self._turn = 0
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="reading")

    def carry(self, file: int, start: int, num_bytes: int) -> Tensor:
        """These bytes of an open file, uint8 [num_bytes] on the device. Raises EOFError if they are not all there."""
        turn, self._turn = self._turn, 1 - self._turn
        self._waits[turn]()
        if len(self._buffers[turn]) < num_bytes:
            self._buffers[turn] = self._lane.new_buffer(num_bytes)
        staged_B = self._buffers[turn][:num_bytes]
        self._read(file, start, staged_B.numpy().data)
        there_B, self._waits[turn] = self._lane.send(staged_B)
        return there_B

    def close(self) -> None:
        """Waits for what is on its way."""
        self._readers.shutdown()
        for wait in self._waits:
            wait()

    def _read(self, file: int, start: int, target: memoryview) -> None:
        """In parts: of 32 MiB bytes 0 to 8 Mi - 1, 8 Mi to 16 Mi - 1, ... at the same time."""
        step = max(-(-len(target) // READERS), LEAST_PART)
        parts = [(start + at, target[at : at + step]) for at in range(0, len(target), step)]
        for _ in self._readers.map(partial(_read_part, file), *zip(*parts, strict=True)):
            pass


def _read_part(file: int, start: int, target: memoryview) -> None:
    """The system may give less than it is asked for."""
    while target:
        number = os.preadv(file, [target], start)
        if not number:
            raise EOFError
        start, target = start + number, target[number:]


def _for_nothing() -> None:
    pass
