"""Readers of stored tensors: their rows, a chunk at a time, on the way to their device.

For a host they are read from a mapping of the file. For a GPU they are read into pinned memory, and
while one buffer is copied to the GPU the next one is read. safetensors (0.8) would copy from a
mapping to the GPU and wait for it; reading into pinned memory is twice as fast as copying out of a
mapping, and the GPU copies from it without the host.
"""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor

from tramontane.proto.errors import CheckpointError
from tramontane.workers.device.cuda import PinnedTransfer
from tramontane.workers.model.rotary import deinterleave_rows
from tramontane.workers.weights.safetensors_file import (
    FP8,
    TensorLocation,
    open_safetensors,
    read_header,
)
from tramontane.workers.weights.tensor_specs import TensorSpec

DTYPES = MappingProxyType(
    {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, FP8: torch.float8_e4m3fn}
)
# threads that read parts of one chunk: a single thread is slower than the copy to the GPU
NUM_READERS = 4
MIN_PART_BYTES = 2**20  # worth a thread

# yields the rows in order, interleaved heads sorted into halves
ReadRows = Callable[[Path, TensorSpec], Iterator[Tensor]]


@contextmanager
def open_reader(device: str) -> Iterator[ReadRows]:
    """Yield a function that reads tensors for this device. All copies are complete when the block
    ends.
    """
    if torch.device(device).type != "cuda":
        yield read_mapped_rows
        return
    staging = PinnedStagingBuffers(torch.device(device), PinnedTransfer())
    try:
        yield PinnedReader(staging).read_rows
    finally:
        staging.close()


def read_mapped_rows(path: Path, spec: TensorSpec) -> Iterator[Tensor]:
    """Yield rows in host memory, from a mapping of the file.

    The file is opened for one chunk at a time: a mapping that stays open keeps every page that was
    read in the memory of this process.
    """
    for rows in spec.row_chunks:
        with open_safetensors(path, framework="pt") as file:
            stored = file.get_slice(spec.name)
            if spec.stack is None:
                yield _deinterleave(stored[rows.start : rows.stop], spec)
            else:
                first = spec.stack.first_row
                yield stored[spec.stack.index, first + rows.start : first + rows.stop]


def _deinterleave(stored: Tensor, spec: TensorSpec) -> Tensor:
    return (
        deinterleave_rows(stored, spec.interleaved_heads, spec.plain_rows)
        if spec.interleaved_heads
        else stored
    )


# ---- from a file to a GPU


class PinnedStagingBuffers:
    """Two pinned buffers that are used alternately: reading into one waits only for the copy from
    two chunks ago.
    """

    def __init__(self, device: torch.device, transfer: PinnedTransfer) -> None:
        self._device, self._transfer = device, transfer
        self._buffers = [torch.empty(0, dtype=torch.uint8)] * 2
        self._waits: list[Callable[[], None]] = [lambda: None] * 2
        self._turn = 0
        self._readers = ThreadPoolExecutor(NUM_READERS, thread_name_prefix="reading")

    def upload(self, file: int, start: int, num_bytes: int) -> Tensor:
        """Read bytes of an open file to the device, uint8 [num_bytes]. Raises EOFError if the file
        ends too early.
        """
        turn, self._turn = self._turn, 1 - self._turn
        self._waits[turn]()
        if len(self._buffers[turn]) < num_bytes:
            self._buffers[turn] = self._transfer.empty_pinned((num_bytes,), torch.uint8)
        staged_B = self._buffers[turn][:num_bytes]
        self._read(file, start, staged_B.numpy().data)
        device_B = self._transfer.upload(staged_B, self._device)
        self._waits[turn] = self._transfer.record(self._device)
        return device_B

    def close(self) -> None:
        """Wait for pending copies and end the threads."""
        self._readers.shutdown()
        for wait in self._waits:
            wait()

    def _read(self, file: int, start: int, target: memoryview) -> None:
        """Read parts at the same time: of 32 MiB bytes 0 to 8 Mi - 1, 8 Mi to 16 Mi - 1, ..."""
        step = max(-(-len(target) // NUM_READERS), MIN_PART_BYTES)
        parts = [(start + at, target[at : at + step]) for at in range(0, len(target), step)]
        for _ in self._readers.map(partial(_read_part, file), *zip(*parts, strict=True)):
            pass


def _read_part(file: int, start: int, target: memoryview) -> None:
    """Read until ``target`` is full: one call may return fewer bytes."""
    while target:
        num_bytes = os.preadv(file, [target], start)
        if not num_bytes:
            raise EOFError
        start, target = start + num_bytes, target[num_bytes:]


class PinnedReader:
    """Reader of tensors through ``staging``; its device sorts interleaved heads. Each file's header
    is read once.
    """

    def __init__(self, staging: PinnedStagingBuffers) -> None:
        self._staging = staging
        self._tensors: dict[Path, dict[str, TensorLocation]] = {}

    def read_rows(self, path: Path, spec: TensorSpec) -> Iterator[Tensor]:
        """Return the rows of a tensor. Raises CheckpointError if the file does not have it."""
        if path not in self._tensors:
            self._tensors[path] = read_header(path)
        stored = self._tensors[path].get(spec.name)
        shape = spec.stored_shape
        if stored is None or stored.shape != shape or stored.dtype not in DTYPES:
            raise CheckpointError(
                f"weights file {path} has no tensor {spec.name} of shape {shape} in"
                f" {', '.join(DTYPES)}"
            )
        return self._chunks(path, spec, stored)

    def _chunks(self, path: Path, spec: TensorSpec, stored: TensorLocation) -> Iterator[Tensor]:
        """Yield chunks. [4096, 4096] in BF16 from byte 1024 on: row 2048 begins at 1024 + 2048 *
        8192 = 16778240.

        Row 7 of matrix 3 of a stack [8, 32, 4096] is row 3 * 32 + 7 = 103.
        """
        dtype = DTYPES[stored.dtype]
        row_bytes = spec.num_elements // spec.shape[0] * dtype.itemsize
        first = spec.stack.index * spec.stack.shape[1] + spec.stack.first_row if spec.stack else 0
        try:
            with path.open("rb") as file:
                for rows in spec.row_chunks:
                    start = stored.start + (first + rows.start) * row_bytes
                    chunk_B = self._staging.upload(file.fileno(), start, len(rows) * row_bytes)
                    yield _deinterleave(chunk_B.view(dtype).view(len(rows), *spec.shape[1:]), spec)
        except EOFError as error:
            raise CheckpointError(
                f"weights file {path} is damaged or truncated: it ends too soon"
            ) from error
        except OSError as error:
            raise CheckpointError(
                f"weights file {path} cannot be read: {error.strerror or error}"
            ) from error
