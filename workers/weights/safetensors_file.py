"""One safetensors file: how it is opened, and where in it the bytes of each tensor are. Does not
import torch.
"""

import json
import math
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from tramontane.proto.errors import CheckpointError
from tramontane.proto.model_folder import LFS_POINTER

STORED_TYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
FP8 = "F8_E4M3"  # of matrices that are quantized in the checkpoint
TYPE_BYTES = {"F32": 4, "BF16": 2, "F16": 2, FP8: 1}
COMPARED_BYTES = 2**24  # at a time
LENGTH_BYTES = 8  # size of the length of the header, at the start of the file


@dataclass(frozen=True, slots=True)
class TensorLocation:
    """Location of a tensor, whose rows are contiguous from ``start``, in bytes from the start of
    the file.
    """

    dtype: str
    shape: tuple[int, ...]
    start: int


@contextmanager
def open_safetensors(path: Path, framework: str) -> Iterator[Any]:
    """Open a file with the library, which validates the header. Raises CheckpointError, also for
    errors inside the block.
    """
    if not path.is_file():
        raise CheckpointError(f"weights file {path} is missing")
    try:
        # safetensors reports a file without read permission as missing
        with path.open("rb") as plain:
            start = plain.read(len(LFS_POINTER))
        with safe_open(path, framework=framework) as file:
            yield file
    except SafetensorError as error:
        if start == LFS_POINTER:
            raise CheckpointError(
                f"weights file {path} is a pointer of Git LFS; fetch the weights with: git lfs pull"
            ) from error
        raise CheckpointError(f"weights file {path} is damaged or truncated: {error}") from error
    except OSError as error:
        raise CheckpointError(
            f"weights file {path} cannot be read: {error.strerror or error}"
        ) from error


def read_header(path: Path) -> dict[str, TensorLocation]:
    """Return the location of each tensor by name. Raises CheckpointError.

    The file has the length of its header, the header as JSON, and the tensors, whose offsets count
    from the header's end. A header of 992 bytes and a tensor at 24: its first byte is byte 8 + 992
    + 24 = 1024.
    """
    # The library checks that the file has the tensors that its header names.
    with open_safetensors(path, framework="numpy"), path.open("rb") as plain:
        length = int.from_bytes(plain.read(LENGTH_BYTES), "little")
        header = json.loads(plain.read(length))
    first = LENGTH_BYTES + length
    return {
        name: TensorLocation(
            found["dtype"], tuple(found["shape"]), first + found["data_offsets"][0]
        )
        for name, found in header.items()
        if name != "__metadata__"
    }


def have_same_bytes(one: tuple[Path, str], other: tuple[Path, str]) -> bool:
    """Return whether two tensors, by file and name, have the same type, shape and bytes. Reads up
    to the first difference.
    """
    locations = [read_header(path)[name] for path, name in (one, other)]
    if len({(each.dtype, each.shape) for each in locations}) > 1:
        return False
    remaining = math.prod(locations[0].shape) * TYPE_BYTES[locations[0].dtype]
    with one[0].open("rb") as first, other[0].open("rb") as second:
        first.seek(locations[0].start)
        second.seek(locations[1].start)
        while remaining:
            size = min(COMPARED_BYTES, remaining)
            if first.read(size) != second.read(size):
                return False
            remaining -= size
    return True


def read_scales(path: Path, num_matrices: Mapping[str, int]) -> dict[str, tuple[float, ...]]:
    """Read tensors of one positive number per matrix, by name. For several matrices there may be
    two each, as one may be two matrices.

    Raises CheckpointError for any other tensor.
    """
    header = read_header(path)
    scales = {}
    with path.open("rb") as file:
        for name, count in num_matrices.items():
            stored, counts = header[name], (1,) if count == 1 else (count, 2 * count)
            if stored.dtype not in STORED_TYPES or math.prod(stored.shape) not in counts:
                raise CheckpointError(
                    f"tensor {name} in {path} is of type {stored.dtype} and has shape"
                    f" {stored.shape}; only FP8 weights with one scale for each matrix are"
                    f" supported, which is a single number in {', '.join(STORED_TYPES)}"
                )
            file.seek(stored.start)
            numbers = scales[name] = _decode(
                file.read(math.prod(stored.shape) * TYPE_BYTES[stored.dtype]), stored.dtype
            )
            for scale in numbers:
                if not (math.isfinite(scale) and scale > 0):
                    raise CheckpointError(
                        f"tensor {name} in {path} is {scale}; a scale must be a positive number"
                    )
    return scales


def _decode(data: bytes, dtype: str) -> tuple[float, ...]:
    """Return the numbers of ``data``. BF16 is the upper half of F32: 80 3f is 00 00 80 3f, which is
    1.
    """
    if dtype == "BF16":
        data, dtype = b"".join(b"\0\0" + data[i : i + 2] for i in range(0, len(data), 2)), "F32"
    return tuple(
        float(number) for (number,) in struct.iter_unpack("<f" if dtype == "F32" else "<e", data)
    )
