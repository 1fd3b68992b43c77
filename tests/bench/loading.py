"""Benchmark of loading a stage: bytes read and memory used, and for a GPU also the speed.

    python tests/bench/loading.py stages [--layers 4] [--stages 2] [--json]
    python tests/bench/loading.py gpu [--device cuda] [--layers 4] [--rounds 3] [--json]

A random checkpoint of Mistral 7B's width in a temporary folder, 2.1 GiB with four layers.

**Stages** on CPUs are loaded by stage actors over Ray (``loading_stages``): in its own dtype,
converted to float16, in float32 with matrices in their own dtype, in int8, and with random weights
instead. It is evicted from the page cache before, so that disk reads can be counted (``read_bytes``
of ``/proc/PID/io``, which includes mapped pages). Memory is the peak of samples every 2 ms of
``RssAnon`` (private memory) and of ``RssAnon`` + ``RssFile`` (with mapped files), less the value
before. Figures are relative to the bytes of the weights.

A **GPU** is loaded in this process, without Ray, in three ways:

* ``mapped``: chunks of the mapped file, reordered on the CPU and copied to the GPU as they are.
* ``safetensors``: the same chunks by the library's own ``safe_open(device=...)``; all further work
  on the GPU.
* ``staged``: the engine's way: read into pinned memory and copied from there while the next chunk
  is read; all further work on the GPU.

The checkpoint has either layout (Mistral's rows of W_q and W_k have to be reordered); as stored,
converted to float16, and in int8. ``cached``: all of it is in the page cache before; otherwise it
was evicted. The bytes from the disk are counted: 1.00 is all of them, and much less means that the
system has another cache. Every round uses every way once; figures are those of the fastest round.
``extra`` is the peak of the GPU's memory in addition to the weights.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import torch
from bench_parts import Part, Report, conclude_part, say, table_of
from page_cache import evict_page_cache, read_from_disk, warm_page_cache, write_model
from safetensors import safe_open
from targets import at_most
from torch import Tensor

from tramontane.proto.model_folder import Layout, read_model_args
from tramontane.proto.weight_format import Quantization, WeightFormat
from tramontane.workers.model.rotary import deinterleave_rows
from tramontane.workers.weights.checkpoint import Checkpoint
from tramontane.workers.weights.quantize import load_tensor
from tramontane.workers.weights.tensor_reader import ReadRows, open_reader, read_mapped_rows
from tramontane.workers.weights.tensor_specs import TensorSpec, largest_first, stage_tensors

# chunks as stored, reordered, and in float32; independent of the number of layers
EXTRA_LIMIT = 512 * 2**20
TARGETS: dict[str, tuple[str, Quantization | None]] = {
    "as stored": ("bfloat16", None),
    "to float16": ("float16", None),
    "to int8": ("bfloat16", Quantization.INT8),
}
Way = Callable[[str], AbstractContextManager[ReadRows]]


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


def _read_by_library(device: str, path: Path, spec: TensorSpec) -> Iterator[Tensor]:
    """Yield rows of a tensor, read by safetensors onto a device."""
    heads = spec.interleaved_heads
    for rows in spec.row_chunks:
        with safe_open(path, framework="pt", device=device) as file:
            piece = file.get_slice(spec.name)[rows.start : rows.stop]
        yield deinterleave_rows(piece, heads) if heads else piece


@contextmanager
def _mapped(_device: str) -> Iterator[ReadRows]:
    yield read_mapped_rows


@contextmanager
def _by_library(device: str) -> Iterator[ReadRows]:
    yield partial(_read_by_library, device)


WAYS: dict[str, Way] = {"mapped": _mapped, "safetensors": _by_library, "staged": open_reader}


def measure_gpu(device: str, num_layers: int, rounds: int) -> list[Figures]:
    figures = []
    for layout in Layout:
        with tempfile.TemporaryDirectory(prefix="tramontane-bench-") as home:
            folder = Path(home) / "model"
            say(f"writing a random checkpoint with a {layout.value}")
            write_model(folder, num_layers, layout)
            for target, cached in product(TARGETS, (False, True)):
                say(f"loading it {target}, {'' if cached else 'not '}cached")
                figures += fastest_rounds(folder, layout, target, device, cached, rounds)
    return figures


def fastest_rounds(
    folder: Path, layout: Layout, target: str, device: str, cached: bool, rounds: int
) -> list[Figures]:
    """Return the fastest round of each way. A first round is not counted: it initializes the GPU
    and pins memory for reuse.
    """
    best: dict[str, Figures] = {}
    for number in range(rounds + 1):
        for name, way in WAYS.items():
            (warm_page_cache if cached else evict_page_cache)(folder)
            found = _load(folder, layout, target, name, way, device, cached)
            if number and (name not in best or found.seconds < best[name].seconds):
                best[name] = found
    return list(best.values())


def _load(
    folder: Path, layout: Layout, target: str, name: str, way: Way, device: str, cached: bool
) -> Figures:
    found, args = Checkpoint(folder), read_model_args(folder)
    specs = largest_first(stage_tensors(args, range(args.n_layers), found.layout))
    dtype, quantize = TARGETS[target]
    weights = WeightFormat(dtype, stored=args.dtype, quantize=quantize)
    state: dict[str, Tensor] = {}
    _reset_memory_stats(device)
    before, read_before, started = _in_use(device), read_from_disk(), time.perf_counter()
    num_read = 0
    with way(device) as rows_of:
        for spec in specs:
            num_read += load_tensor(
                state, spec, rows_of(found.files[spec.name], spec), weights, device, {}
            )
    _wait(device)
    seconds = time.perf_counter() - started
    held = sum(tensor.nbytes for tensor in state.values())
    extra = max(_peak_in_use(device) - before - held, 0)
    return Figures(
        layout.value, target, name, cached, num_read, read_from_disk() - read_before, seconds, extra
    )


def _reset_memory_stats(device: str) -> None:
    _wait(device)
    if torch.device(device).type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def _wait(device: str) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def _in_use(device: str) -> int:
    return torch.cuda.memory_allocated(device) if torch.device(device).type == "cuda" else 0


def _peak_in_use(device: str) -> int:
    return torch.cuda.max_memory_allocated(device) if torch.device(device).type == "cuda" else 0


def gpu(options: argparse.Namespace) -> Report:
    """weights onto a GPU, in three ways"""
    if not torch.cuda.is_available():
        sys.exit("no GPU is available")
    figures = measure_gpu(options.device, options.layers, options.rounds)
    extra = max(f.extra for f in figures if f.way == "staged") / 2**20
    columns = ("configuration", "loaded", "cached", "way", "GiB", "from disk", "s", "GB/s")
    rows = [
        (
            *(f.layout, f.target, "yes" if f.cached else "no", f.way, f"{f.stored / 2**30:.2f}"),
            *(f"{f.from_disk / f.stored:.2f}", f"{f.seconds:.2f}"),
            *(f"{f.stored / f.seconds / 1e9:.2f}", f"{f.extra / 2**20:.0f}"),
        )
        for f in figures
    ]
    what = "GPU memory in addition to the weights, staged"
    return Report(
        [at_most(what, extra, EXTRA_LIMIT / 2**20, "MiB")],
        [table_of((*columns, "extra MiB"), rows)],
        {"rows": [asdict(f) for f in figures]},
    )


def stages(options: argparse.Namespace) -> Report:
    """stages on CPUs, by actors over Ray"""
    import loading_stages  # imports Ray

    figures, targets = loading_stages.run(options.layers, options.stages), []
    for name, loaded in figures.items():
        read, memory = (
            max(getattr(f, ratio) for f in loaded) for ratio in ("read_ratio", "memory_ratio")
        )
        limit = loading_stages.READ_LIMIT
        targets += [
            at_most(f"{name}: bytes read, of those stored", read, limit, "x"),
            at_most(f"{name}: peak memory, of what is allowed", memory, 1.0, "x"),
        ]
    data = {name: [asdict(f) for f in loaded] for name, loaded in figures.items()}
    return Report(targets, [loading_stages.table(figures)], data)


PARTS = {
    "stages": Part(stages, {"--layers": 4, "--stages": 2}),
    "gpu": Part(
        gpu,
        {
            "--device": "cuda",
            "--layers": 4,
            "--rounds": {"default": 3, "help": "for each way of loading"},
        },
    ),
}


def main() -> None:
    conclude_part(__doc__, PARTS)


if __name__ == "__main__":
    main()
