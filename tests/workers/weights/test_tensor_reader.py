"""Pieces of tensors on their way to a GPU: what was stored arrives, whenever copies are done. Here
with the host's memory.
"""

import os
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from tiny_models import tiny_args
from torch import Tensor

from tramontane.proto.errors import CheckpointError
from tramontane.proto.model_folder import Layout
from tramontane.proto.weight_format import DTYPE_BYTES, Quantization, WeightFormat
from tramontane.workers.device.cuda import PinnedTransfer
from tramontane.workers.weights import tensor_reader as staging
from tramontane.workers.weights import tensor_specs
from tramontane.workers.weights.checkpoint import Checkpoint
from tramontane.workers.weights.quantize import load_tensor
from tramontane.workers.weights.random_checkpoint import write_random_checkpoint
from tramontane.workers.weights.safetensors_file import FP8, STORED_TYPES, read_header
from tramontane.workers.weights.tensor_reader import (
    DTYPES,
    MIN_PART_BYTES,
    PinnedReader,
    PinnedStagingBuffers,
    ReadRows,
    open_reader,
    read_mapped_rows,
)
from tramontane.workers.weights.tensor_specs import TensorSpec, largest_first, stage_tensors

ARGS = tiny_args(n_layers=2)
SIZES = (
    700,
    3 * MIN_PART_BYTES,
    1,
    9 * MIN_PART_BYTES + 5,
    40,
    2 * MIN_PART_BYTES,
    2 * MIN_PART_BYTES + 1,
    8,
)


class HostTransfer(PinnedTransfer):
    """Of a device whose memory is the host's, and that is quick."""

    def empty_pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype)

    def upload(self, pinned: Tensor, device: torch.device) -> Tensor:
        return pinned.clone()

    def record(self, device: torch.device) -> Callable[[], None]:
        return lambda: None


class LateTransfer(HostTransfer):
    """Of a device that fetches nothing before somebody waits for it."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.buffers: set[int] = set()
        self.newest: tuple[Tensor, Tensor] | None = None

    def upload(self, pinned: Tensor, device: torch.device) -> Tensor:
        there_B = torch.zeros_like(pinned)
        self.events.append(f"send {self._num_sent()}")
        self.buffers.add(pinned.data_ptr())
        self.newest = there_B, pinned
        return there_B

    def record(self, device: torch.device) -> Callable[[], None]:
        number = self._num_sent() - 1
        assert self.newest is not None
        there_B, pinned_B = self.newest

        def wait() -> None:
            self.events.append(f"wait {number}")
            there_B.copy_(pinned_B)

        return wait

    def _num_sent(self) -> int:
        return sum(event.startswith("send") for event in self.events)


def _buffers(transfer: HostTransfer) -> PinnedStagingBuffers:
    return PinnedStagingBuffers(torch.device("cpu"), transfer)


def _pieces(transfer: HostTransfer, path: Path, sizes: Sequence[int]) -> list[bytes]:
    """Carried one after the other, and looked at when all are there."""
    staging_ = _buffers(transfer)
    with path.open("rb") as file:
        there = [
            staging_.upload(file.fileno(), sum(sizes[:i]), size) for i, size in enumerate(sizes)
        ]
    staging_.close()
    return [piece.numpy().tobytes() for piece in there]


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    path = tmp_path / "bytes"
    path.write_bytes(random.Random(1).randbytes(sum(SIZES)))
    return path


def _cut(path: Path, sizes: Sequence[int]) -> list[bytes]:
    data = path.read_bytes()
    return [data[sum(sizes[:i]) :][:size] for i, size in enumerate(sizes)]


def test_every_byte_arrives_however_late_copies_are(stored: Path) -> None:
    assert _pieces(LateTransfer(), stored, SIZES) == _cut(stored, SIZES)


def test_a_piece_is_read_while_the_one_before_is_on_its_way(stored: Path) -> None:
    """And only two buffers are there, however many pieces."""
    late = LateTransfer()
    _pieces(late, stored, [100] * 5)
    assert late.events == [
        "send 0",
        "send 1",
        "wait 0",
        "send 2",
        "wait 1",
        "send 3",
        "wait 2",
        "send 4",
        "wait 4",
        "wait 3",
    ]
    assert len(late.buffers) == 2


def test_a_short_read_is_continued(stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = os.preadv
    monkeypatch.setattr(
        staging.os, "preadv", lambda file, to, start: read(file, [to[0][: 2**17 + 1]], start)
    )
    assert _pieces(HostTransfer(), stored, SIZES) == _cut(stored, SIZES)


# Tensors of a checkpoint


@pytest.fixture(params=list(Layout), ids=lambda layout: layout.name)
def folder(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of either layout, in several files, and tensors are read in several pieces."""
    write_random_checkpoint(tmp_path / "model", ARGS, request.param, part_bytes=30_000)
    monkeypatch.setattr(tensor_specs, "MAX_CHUNK_ELEMENTS", 300)
    return tmp_path / "model"


def _specs(found: Checkpoint) -> list[tuple[Path, TensorSpec]]:
    specs = largest_first(stage_tensors(ARGS, range(ARGS.n_layers), found.layout))
    return [(found.files[spec.name], spec) for spec in specs]


def _state(
    found: Checkpoint, rows_of: ReadRows, dtype: str, quantize: Quantization | None
) -> dict[str, Tensor]:
    state: dict[str, Tensor] = {}
    for path, spec in _specs(found):
        num_read = load_tensor(
            state,
            spec,
            rows_of(path, spec),
            WeightFormat(dtype, stored=ARGS.dtype, quantize=quantize),
            "cpu",
            {},
        )
        assert num_read == spec.num_elements * DTYPE_BYTES[ARGS.dtype]
    return state


def test_staged_rows_are_those_of_the_mapped_file(folder: Path) -> None:
    """Piece by piece, and in halves where they are stored as pairs."""
    found, staging_ = Checkpoint(folder), _buffers(HostTransfer())
    assert len(set(found.files.values())) > 1
    read_rows = PinnedReader(staging_).read_rows
    num_pieces = 0
    for path, spec in _specs(found):
        num_read = 0
        for here, there in zip(read_mapped_rows(path, spec), read_rows(path, spec), strict=True):
            num_pieces += 1
            assert (here.dtype, here.shape) == (there.dtype, there.shape)
            assert torch.equal(here, there)
            num_read += there.nbytes
        assert num_read == spec.num_elements * DTYPE_BYTES[ARGS.dtype]
    staging_.close()
    assert num_pieces > 2 * len(_specs(found))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("quantize", [None, Quantization.INT8])
def test_a_stage_is_the_same_however_it_is_read(
    folder: Path, dtype: str, quantize: Quantization | None
) -> None:
    found, staging_ = Checkpoint(folder), _buffers(HostTransfer())
    staged = _state(found, PinnedReader(staging_).read_rows, dtype, quantize)
    staging_.close()
    loaded = found.load(
        partial(stage_tensors, ARGS, range(2)),
        WeightFormat(dtype, stored=ARGS.dtype, quantize=quantize),
        "cpu",
    )
    assert staged.keys() == loaded.keys()
    assert all(torch.equal(staged[name], loaded[name]) for name in loaded)


def test_every_type_that_is_supported_is_known_to_both_ways() -> None:
    assert set(DTYPES) == {*STORED_TYPES, FP8}


@pytest.mark.parametrize("layout", Layout)
def test_fp8_numbers_are_the_same_however_they_are_read(
    tmp_path: Path, layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = replace(ARGS, dtype="bfloat16", quantization=Quantization.FP8)
    write_random_checkpoint(tmp_path / "model", args, layout)
    monkeypatch.setattr(tensor_specs, "MAX_CHUNK_ELEMENTS", 300)
    found, staging_ = Checkpoint(tmp_path / "model"), _buffers(HostTransfer())
    read_rows = PinnedReader(staging_).read_rows
    matrices = [spec for spec in stage_tensors(args, range(args.n_layers), layout) if spec.scale]
    assert matrices
    for spec in matrices:
        here = torch.cat(list(read_mapped_rows(found.files[spec.name], spec)))
        there = torch.cat(list(read_rows(found.files[spec.name], spec)))
        assert here.dtype == there.dtype == torch.float8_e4m3fn
        assert torch.equal(here.view(torch.uint8), there.view(torch.uint8))
    staging_.close()


def test_only_a_gpu_is_reached_by_way_of_buffers() -> None:
    """Nothing is asked of CUDA before there is something to read."""
    for device, kind in (
        ("cpu", "read_mapped_rows"),
        ("meta", "read_mapped_rows"),
        ("cuda", "read_rows"),
        ("cuda:1", "read_rows"),
    ):
        with open_reader(device) as rows_of:
            assert getattr(rows_of, "__name__", "") == kind


# What may be wrong with a file


def _first(folder: Path) -> tuple[Path, TensorSpec]:
    return _specs(Checkpoint(folder))[0]


def test_a_file_that_got_shorter_is_named(folder: Path) -> None:
    path, spec = _first(folder)
    staging_ = _buffers(HostTransfer())
    reader = PinnedReader(staging_)
    rows = reader.read_rows(path, spec)
    path.write_bytes(path.read_bytes()[: read_header(path)[spec.name].start + 100])
    with pytest.raises(
        CheckpointError, match=f"weights file {path} is damaged or truncated: it ends too soon"
    ):
        list(rows)
    path.unlink()
    with pytest.raises(CheckpointError, match=f"weights file {path} cannot be read: No such file"):
        list(reader.read_rows(path, spec))
    staging_.close()


@pytest.mark.parametrize("change", ["missing", "short", "misshapen", "unknown"])
def test_a_file_that_does_not_hold_the_tensor_is_named(folder: Path, change: str) -> None:
    path, spec = _first(folder)
    if change == "missing":
        path.unlink()
    elif change == "short":
        path.write_bytes(path.read_bytes()[:-1])
    elif change == "misshapen":
        spec = TensorSpec(spec.name, spec.parameter, (spec.shape[1], spec.shape[0]))
    else:
        spec = TensorSpec("another", spec.parameter, spec.shape)
    staging_ = _buffers(HostTransfer())
    with pytest.raises(
        CheckpointError, match=f"weights file {path} (is missing|is damaged|has no tensor)"
    ):
        PinnedReader(staging_).read_rows(path, spec)
    staging_.close()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("quantize", [None, Quantization.INT8])
def test_a_gpu_gets_what_a_processor_gets(
    folder: Path, dtype: str, quantize: Quantization | None
) -> None:
    wanted = partial(stage_tensors, ARGS, range(2))
    received: dict[str, list[tuple[int, int]]] = {"cpu": [], "cuda": []}
    here, there = (
        Checkpoint(folder).load(
            wanted,
            WeightFormat(dtype, stored=ARGS.dtype, quantize=quantize),
            device,
            lambda *sizes, received_of=received_of: received_of.append(sizes),
        )
        for device, received_of in received.items()
    )
    assert received["cuda"] == received["cpu"]
    assert {tensor.device.type for tensor in there.values()} == {"cuda"}
    for name, held in here.items():
        difference = (there[name].cpu().float() - held.float()).abs().max()
        # a scale's last bit, or a number where a quotient is rounded the other way
        assert difference <= (
            0
            if quantize is None
            else 1
            if held.dtype == torch.int8
            else 1e-2 * held.float().abs().max()
        )
