"""One safetensors file: opening it, and where in it the bytes of each tensor lie. Needs no torch."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from tramontane.proto.errors import CheckpointError

LFS_POINTER = b"version https://git-lfs"
STORED_TYPES = ("F32", "BF16", "F16")
LENGTH_BYTES = 8  # of the header, at the start of the file


@dataclass(frozen=True, slots=True)
class TensorLocation:
    """``start`` is in bytes from the start of the file; rows follow each other from there, without gaps."""

    dtype: str
    shape: tuple[int, ...]
    start: int


@contextmanager
def open_safetensors(path: Path, framework: str) -> Iterator[Any]:
    """By the library, which looks through the header first. Raises CheckpointError, also for what goes wrong inside the block."""
    if not path.is_file():
        raise CheckpointError(f"weights file {path} is missing")
    try:
        with path.open("rb") as plain:  # what may not be opened safetensors calls missing
            start = plain.read(len(LFS_POINTER))
        with safe_open(path, framework=framework) as file:
            yield file
    except SafetensorError as error:
        if start == LFS_POINTER:
            raise CheckpointError(f"weights file {path} is a pointer of Git LFS; fetch the weights with: git lfs pull") from error
        raise CheckpointError(f"weights file {path} is damaged or truncated: {error}") from error
    except OSError as error:
        raise CheckpointError(f"weights file {path} cannot be read: {error.strerror or error}") from error


def read_header(path: Path) -> dict[str, TensorLocation]:
    """By name. The file is the length of its header, the header as JSON, and the tensors, counted from the header's end.

    A header of 992 bytes and a tensor at 24: its first byte is byte 8 + 992 + 24 = 1024. Raises CheckpointError.
    """
    with (
        open_safetensors(path, framework="numpy"),
        path.open("rb") as plain,
    ):  # the library has checked that it holds what it says
        length = int.from_bytes(plain.read(LENGTH_BYTES), "little")
        header = json.loads(plain.read(length))
    first = LENGTH_BYTES + length
    return {
        name: TensorLocation(found["dtype"], tuple(found["shape"]), first + found["data_offsets"][0])
        for name, found in header.items()
        if name != "__metadata__"
    }
