"""Checkpoints, the page cache and disk reads, for the benchmarks of loading."""

import os
from dataclasses import replace
from pathlib import Path

from tramontane.proto.model_folder import Layout
from tramontane.proto.presets import preset
from tramontane.workers.weights.random_checkpoint import write_random_checkpoint


def write_model(folder: Path, num_layers: int, layout: Layout) -> None:
    """Write random weights of Mistral 7B's width: 2.1 GiB with four layers."""
    whole = preset("mistral-7b-v0.1")
    write_random_checkpoint(
        folder, replace(whole, n_layers=num_layers, windows=whole.windows[:num_layers]), layout
    )


def read_from_disk() -> int:
    """Return the bytes that this process has read from the disk so far, including mapped pages."""
    lines = (line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return next(int(value) for name, value in lines if name == "read_bytes")


def evict_page_cache(folder: Path) -> None:
    """Evict a checkpoint from the system's page cache. The system may ignore this request."""
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def warm_page_cache(folder: Path) -> None:
    """Read a checkpoint into the system's page cache."""
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            while file.read(2**24):
                pass
