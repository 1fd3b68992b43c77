"""How fast a checkpoint gets onto a GPU, by three ways in turn.

* ``mapped``: pieces of the mapped file, sorted on the processor and handed to the GPU as they are.
* ``safetensors``: the same pieces by the library's own ``safe_open(device=...)``; everything else on the GPU.
* ``staged``: what the engine does: read into pinned memory, sent from there while the next piece is read; the rest on the GPU.

A random checkpoint of Mistral 7B's width in a temporary folder, in both layouts (Mistral's rows of W_q and W_k have to be
sorted); as stored, converted to float32, and in int8. ``cached``: all of it is in the system's cache before; else nothing of it
was to be. What then came from the disk is counted: 1.00 is all, much less says that the system keeps a cache of its own.
Every round does every way once; figures are of the quickest round. ``extra`` is the most of the GPU's memory that was in use
beside the weights.
"""

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from disk import forget, read_from_disk, remember, write_model
from rich.console import Console
from rich.table import Table
from safetensors import safe_open
from torch import Tensor

from tramontane.proto.model_args import Quantization
from tramontane.proto.model_folder import Layout, read_model_args
from tramontane.workers.model.rotary import deinterleave_rows
from tramontane.workers.weights.checkpoint import Checkpoint
from tramontane.workers.weights.quantize import load_tensor
from tramontane.workers.weights.tensor_reader import MmapRows, ReadRows, open_reader
from tramontane.workers.weights.tensor_specs import TensorSpec, largest_first, stage_tensors

EXTRA_LIMIT = 512 * 2**20  # pieces as they are stored, sorted, in float32; not more with more layers
TARGETS: dict[str, tuple[str, Quantization | None]] = {
    "as stored": ("bfloat16", None),
    "to float32": ("float32", None),
    "to int8": ("bfloat16", Quantization.INT8),
}
Way = Callable[[str], AbstractContextManager[ReadRows]]
console = Console(stderr=True)


@dataclass(frozen=True)
class Figures:
    """Bytes and seconds."""

    layout: str
    target: str
    way: str
    cached: bool
    stored: int
    from_disk: int
    seconds: float
    extra: int

    @property
    def is_within_limits(self) -> bool:
        return self.way != "staged" or self.extra <= EXTRA_LIMIT


class LibraryRows:
    """As safetensors hands them to a device."""

    def __init__(self, device: str, path: Path, spec: TensorSpec) -> None:
        self._device, self._path, self._spec = device, path, spec
        self.num_read = 0

    def __iter__(self) -> Iterator[Tensor]:
        heads = self._spec.interleaved_heads
        for rows in self._spec.row_chunks:
            with safe_open(self._path, framework="pt", device=self._device) as file:
                piece = file.get_slice(self._spec.name)[rows.start : rows.stop]
            self.num_read += piece.nbytes
            yield deinterleave_rows(piece, heads) if heads else piece


@contextmanager
def _mapped(_device: str) -> Iterator[ReadRows]:
    yield MmapRows


@contextmanager
def _by_library(device: str) -> Iterator[ReadRows]:
    yield partial(LibraryRows, device)


WAYS: dict[str, Way] = {"mapped": _mapped, "safetensors": _by_library, "staged": open_reader}


def run(device: str, num_layers: int, rounds: int) -> list[Figures]:
    figures = []
    for layout in Layout:
        with tempfile.TemporaryDirectory(prefix="tramontane-bench-") as home:
            folder = Path(home) / "model"
            console.print(f"writing a random checkpoint with a {layout.value} ...")
            write_model(folder, num_layers, layout)
            for target in TARGETS:
                for cached in (False, True):
                    console.print(f"loading it {target}, {'' if cached else 'not '}cached ...")
                    figures += measure(folder, layout, target, device, cached, rounds)
    return figures


def measure(folder: Path, layout: Layout, target: str, device: str, cached: bool, rounds: int) -> list[Figures]:
    """Of each way the quickest round. One before counts for nothing: it makes the GPU ready, and pins memory that stays so."""
    best: dict[str, Figures] = {}
    for number in range(rounds + 1):
        for name, way in WAYS.items():
            (remember if cached else forget)(folder)
            found = _load(folder, layout, target, name, way, device, cached)
            if number and (name not in best or found.seconds < best[name].seconds):
                best[name] = found
    return list(best.values())


def _load(folder: Path, layout: Layout, target: str, name: str, way: Way, device: str, cached: bool) -> Figures:
    found, args = Checkpoint(folder), read_model_args(folder)
    specs = largest_first(stage_tensors(args, range(args.n_layers), found.layout))
    dtype, quantize = TARGETS[target]
    state: dict[str, Tensor] = {}
    _settle(device)
    before, read_before, started = _in_use(device), read_from_disk(), time.perf_counter()
    num_read = 0
    with way(device) as rows_of:
        for spec in specs:
            rows = rows_of(found.files[spec.name], spec)
            load_tensor(state, spec, rows, dtype, device, quantize)
            num_read += rows.num_read
    _wait(device)
    seconds = time.perf_counter() - started
    held = sum(tensor.nbytes for tensor in state.values())
    extra = max(_most_in_use(device) - before - held, 0)
    return Figures(layout.value, target, name, cached, num_read, read_from_disk() - read_before, seconds, extra)


def _settle(device: str) -> None:
    _wait(device)
    if torch.device(device).type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def _wait(device: str) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def _in_use(device: str) -> int:
    return torch.cuda.memory_allocated(device) if torch.device(device).type == "cuda" else 0


def _most_in_use(device: str) -> int:
    return torch.cuda.max_memory_allocated(device) if torch.device(device).type == "cuda" else 0


def table(figures: list[Figures]) -> Table:
    made = Table("configuration", "loaded", "cached", "way", "GiB", "from disk", "s", "GB/s", "extra MiB")
    for f in figures:
        sizes = (
            f"{f.stored / 2**30:.2f}",
            f"{f.from_disk / f.stored:.2f}",
            f"{f.seconds:.2f}",
            f"{f.stored / f.seconds / 1e9:.2f}",
        )
        made.add_row(f.layout, f.target, "yes" if f.cached else "no", f.way, *sizes, f"{f.extra / 2**20:.0f}")
    return made
