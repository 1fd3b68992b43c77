"""The rows of a stored tensor, a piece at a time, on the way to their device.

From a file to a GPU: bytes are read into pinned memory, and while they travel the next are read.

safetensors' own way (0.8) hands the GPU a mapping of the file, page by page as it is read in, and waits for it. From
pinned memory a GPU fetches by itself; and reading into it is twice as fast as copying out of a mapping.
"""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

import torch
from torch import Tensor

from tramontane.proto.errors import CheckpointError
from tramontane.workers.model.rotary import deinterleave_rows
from tramontane.workers.weights.safetensors_file import TensorLocation, open_safetensors, read_header
from tramontane.workers.weights.tensor_specs import TensorSpec

READERS = 4  # threads that read parts of one piece: a GPU takes more than one of them reads
MIN_PART_BYTES = 2**20  # bytes that are worth a thread
Wait = Callable[[], None]


class TransferLane(Protocol):
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


class PinnedStagingBuffers:
    """Two buffers that are used in turn: what is read into one waits only for what it held two pieces ago."""

    def __init__(self, lane: TransferLane) -> None:
        self._lane = lane
        self._buffers = [torch.empty(0, dtype=torch.uint8)] * 2
        self._waits: list[Wait] = [_no_wait] * 2
        self._turn = 0
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="reading")

    def upload(self, file: int, start: int, num_bytes: int) -> Tensor:
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
        step = max(-(-len(target) // READERS), MIN_PART_BYTES)
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


def _no_wait() -> None:
    pass


DTYPES = MappingProxyType({"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16})


class TensorRows(Protocol):
    """Its rows in order, those of heads in halves; ``num_read`` counts the bytes that were read so far."""

    num_read: int

    def __iter__(self) -> Iterator[Tensor]: ...


RowsOf = Callable[[Path, TensorSpec], TensorRows]


@contextmanager
def open_reader(device: str) -> Iterator[RowsOf]:
    """How tensors are read for this device. All of it is there when the block ends."""
    if torch.device(device).type != "cuda":
        yield MmapRows
        return
    staging = PinnedStagingBuffers(GpuLane(device))
    try:
        yield PinnedReader(staging).rows
    finally:
        staging.close()


class MmapRows:
    """In host memory, as the system has mapped the file.

    The file is opened for one piece at a time: a mapping that stays open keeps every page that was read
    through it in this process's memory.
    """

    def __init__(self, path: Path, spec: TensorSpec) -> None:
        self._path, self._spec = path, spec
        self.num_read = 0

    def __iter__(self) -> Iterator[Tensor]:
        for rows in self._spec.row_chunks:
            with open_safetensors(self._path, framework="pt") as file:
                stored = file.get_slice(self._spec.name)[rows.start : rows.stop]
                self.num_read += stored.nbytes
                yield _deinterleave(stored, self._spec)


class PinnedRows:
    """On the device of ``staging``, where they are sorted as well."""

    def __init__(self, path: Path, spec: TensorSpec, stored: TensorLocation, staging: PinnedStagingBuffers) -> None:
        self._path, self._spec, self._stored, self._staging = path, spec, stored, staging
        self.num_read = 0

    def __iter__(self) -> Iterator[Tensor]:
        """[4096, 4096] in BF16 from byte 1024 on: rows of 8192 bytes, so row 2048 begins at 1024 + 2048 * 8192 = 16778240."""
        dtype = DTYPES[self._stored.dtype]
        row_bytes = self._spec.num_elements // self._spec.shape[0] * dtype.itemsize
        try:
            with self._path.open("rb") as file:
                for rows in self._spec.row_chunks:
                    start = self._stored.start + rows.start * row_bytes
                    there = self._staging.upload(file.fileno(), start, len(rows) * row_bytes)
                    self.num_read += there.nbytes
                    yield _deinterleave(there.view(dtype).view(len(rows), *self._spec.shape[1:]), self._spec)
        except EOFError as error:
            raise CheckpointError(f"weights file {self._path} is damaged or truncated: it ends too soon") from error
        except OSError as error:
            raise CheckpointError(f"weights file {self._path} cannot be read: {error.strerror or error}") from error


class PinnedReader:
    """Files whose tensors go through ``staging``; each header is read once."""

    def __init__(self, staging: PinnedStagingBuffers) -> None:
        self._staging = staging
        self._tensors: dict[Path, dict[str, TensorLocation]] = {}

    def rows(self, path: Path, spec: TensorSpec) -> PinnedRows:
        """Raises CheckpointError if the file has no such tensor."""
        if path not in self._tensors:
            self._tensors[path] = read_header(path)
        stored = self._tensors[path].get(spec.name)
        if stored is None or stored.shape != spec.shape or stored.dtype not in DTYPES:
            raise CheckpointError(f"weights file {path} has no tensor {spec.name} of shape {spec.shape} in {', '.join(DTYPES)}")
        return PinnedRows(path, spec, stored, self._staging)


def _deinterleave(stored: Tensor, spec: TensorSpec) -> Tensor:
    return deinterleave_rows(stored, spec.interleaved_heads) if spec.interleaved_heads else stored
