"""A checkpoint folder in the Hugging Face layout: which file holds which tensor, and reading a stage's own.

Only safetensors is ever opened. Looking (``check``) reads headers and needs no torch.
"""

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from tramontane.proto.errors import CheckpointError
from tramontane.workers.fingerprint import Fingerprint, fingerprint_of
from tramontane.workers.tensor_names import TensorSpec

if TYPE_CHECKING:
    from torch import Tensor

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
STORED_TYPES = ("F32", "BF16", "F16")
OTHER_FILES = ("config.json", "tokenizer.model")


class Checkpoint:
    """Where every tensor of a folder lies."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files = _tensor_files(folder)
        self.bytes_read = 0  # of tensors, by ``load``

    def fingerprint(self) -> Fingerprint:
        """Of all that is read of the folder, by stages and by doors."""
        others = (self.folder / name for name in OTHER_FILES)
        return fingerprint_of(self.folder, {*self.files.values(), *(path for path in others if path.is_file())})

    def check(self, specs: Iterable[TensorSpec]) -> None:
        """Raise ``CheckpointError`` naming the first tensor that is missing or misshapen, or the damaged file."""
        for path, wanted in self._by_file(specs):
            with _opened(path, framework="numpy") as file:
                for spec in wanted:
                    stored = file.get_slice(spec.name)
                    shape = tuple(stored.get_shape())
                    if stored.get_dtype() not in STORED_TYPES:
                        raise CheckpointError(
                            f"tensor {spec.name} in {path} is of type {stored.get_dtype()}; only {', '.join(STORED_TYPES)} "
                            "weights are supported, not quantised ones"
                        )
                    if shape != spec.shape:
                        raise CheckpointError(f"tensor {spec.name} in {path} has shape {shape}; config.json needs {spec.shape}")

    def load(self, specs: Iterable[TensorSpec], dtype: str, device: str) -> dict[str, "Tensor"]:
        """Read these tensors and no others, by parameter name, in the wanted dtype on the wanted device."""
        import torch  # here, not above: checking a checkpoint must not cost the import of torch

        state = {}
        for path, wanted in self._by_file(specs):
            with _opened(path, framework="pt") as file:
                for spec in wanted:
                    stored = file.get_tensor(spec.name)
                    self.bytes_read += stored.nbytes
                    state[spec.parameter] = stored.to(device=device, dtype=getattr(torch, dtype))
        return state

    def _by_file(self, specs: Iterable[TensorSpec]) -> Iterator[tuple[Path, list[TensorSpec]]]:
        groups: dict[Path, list[TensorSpec]] = {}
        for spec in specs:
            if spec.name not in self.files:
                raise CheckpointError(f"{self.folder} lacks the tensor {spec.name}, which config.json calls for")
            groups.setdefault(self.files[spec.name], []).append(spec)
        yield from groups.items()


def _tensor_files(folder: Path) -> dict[str, Path]:
    index, single = folder / INDEX_NAME, folder / SINGLE_NAME
    if index.is_file():
        try:
            weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            names = {str(name): str(file) for name, file in weight_map.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{index} is not a safetensors index") from error
        paths = {folder / file for file in names.values()}
        held = {path: _names_in(path) for path in sorted(paths)}
        return {name: folder / file for name, file in names.items() if name in held[folder / file]}
    if single.is_file():
        return dict.fromkeys(_names_in(single), single)
    raise CheckpointError(f"{folder} has neither {SINGLE_NAME} nor {INDEX_NAME}; only safetensors weights are loaded")


def _names_in(path: Path) -> frozenset[str]:
    with _opened(path, framework="numpy") as file:
        return frozenset(file.keys())


@contextmanager
def _opened(path: Path, framework: str) -> Iterator[Any]:
    if not path.is_file():
        raise CheckpointError(f"weights file {path} is missing")
    try:
        with safe_open(path, framework=framework) as file:
            yield file
    except SafetensorError as error:
        raise CheckpointError(f"weights file {path} is damaged or truncated: {error}") from error
    except OSError as error:
        raise CheckpointError(f"weights file {path} cannot be read: {error}") from error
