"""The rows of a stored tensor, a piece at a time, on the way to their device."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

import torch
from torch import Tensor

from tramontane.proto.errors import CheckpointError
from tramontane.workers.model.rotary import rows_in_halves
from tramontane.workers.weights.safetensors_file import StoredAt, opened, tensors_in
from tramontane.workers.weights.staging import GpuLane, Staging
from tramontane.workers.weights.tensor_specs import TensorSpec

DTYPES = MappingProxyType({"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16})


class StoredRows(Protocol):
    """Its rows in order, those of heads in halves; ``num_read`` counts the bytes that were read so far."""

    num_read: int

    def __iter__(self) -> Iterator[Tensor]: ...


RowsOf = Callable[[Path, TensorSpec], StoredRows]


@contextmanager
def reading_for(device: str) -> Iterator[RowsOf]:
    """How tensors are read for this device. All of it is there when the block ends."""
    if torch.device(device).type != "cuda":
        yield MappedRows
        return
    staging = Staging(GpuLane(device))
    try:
        yield StagedFiles(staging).rows
    finally:
        staging.close()


class MappedRows:
    """In host memory, as the system has mapped the file.

    The file is opened for one piece at a time: a mapping that stays open keeps every page that was read
    through it in this process's memory.
    """

    def __init__(self, path: Path, spec: TensorSpec) -> None:
        self._path, self._spec = path, spec
        self.num_read = 0

    def __iter__(self) -> Iterator[Tensor]:
        for rows in self._spec.pieces:
            with opened(self._path, framework="pt") as file:
                stored = file.get_slice(self._spec.name)[rows.start : rows.stop]
                self.num_read += stored.nbytes
                yield _in_halves(stored, self._spec)


class StagedRows:
    """On the device of ``staging``, where they are sorted as well."""

    def __init__(self, path: Path, spec: TensorSpec, stored: StoredAt, staging: Staging) -> None:
        self._path, self._spec, self._stored, self._staging = path, spec, stored, staging
        self.num_read = 0

    def __iter__(self) -> Iterator[Tensor]:
        """[4096, 4096] in BF16 from byte 1024 on: rows of 8192 bytes, so row 2048 begins at 1024 + 2048 * 8192 = 16778240."""
        dtype = DTYPES[self._stored.dtype]
        row_bytes = self._spec.num_elements // self._spec.shape[0] * dtype.itemsize
        try:
            with self._path.open("rb") as file:
                for rows in self._spec.pieces:
                    start = self._stored.start + rows.start * row_bytes
                    there = self._staging.carry(file.fileno(), start, len(rows) * row_bytes)
                    self.num_read += there.nbytes
                    yield _in_halves(there.view(dtype).view(len(rows), *self._spec.shape[1:]), self._spec)
        except EOFError as error:
            raise CheckpointError(f"weights file {self._path} is damaged or truncated: it ends too soon") from error
        except OSError as error:
            raise CheckpointError(f"weights file {self._path} cannot be read: {error.strerror or error}") from error


class StagedFiles:
    """Files whose tensors go through ``staging``; each header is read once."""

    def __init__(self, staging: Staging) -> None:
        self._staging = staging
        self._tensors: dict[Path, dict[str, StoredAt]] = {}

    def rows(self, path: Path, spec: TensorSpec) -> StagedRows:
        """Raises CheckpointError if the file has no such tensor."""
        if path not in self._tensors:
            self._tensors[path] = tensors_in(path)
        stored = self._tensors[path].get(spec.name)
        if stored is None or stored.shape != spec.shape or stored.dtype not in DTYPES:
            raise CheckpointError(f"weights file {path} has no tensor {spec.name} of shape {spec.shape} in {', '.join(DTYPES)}")
        return StagedRows(path, spec, stored, self._staging)


def _in_halves(stored: Tensor, spec: TensorSpec) -> Tensor:
    return rows_in_halves(stored, spec.interleaved_heads) if spec.interleaved_heads else stored
