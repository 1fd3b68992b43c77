"""A checkpoint folder: which file holds which tensor, and reading a stage's own.

Only safetensors is ever opened. Looking (``check``) reads headers and needs no torch.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tramontane.proto.errors import CheckpointError
from tramontane.proto.model_args import ModelArgs, Quantization
from tramontane.proto.model_folder import Layout, detect_layout
from tramontane.workers.weights.fingerprint import Fingerprint, compute_fingerprint
from tramontane.workers.weights.safetensors_file import STORED_TYPES, open_safetensors
from tramontane.workers.weights.tensor_specs import NAMES, ProgressCallback, TensorsOf, TensorSpec, largest_first, stage_tensors

if TYPE_CHECKING:
    from torch import Tensor

SINGLE_NAMES = {Layout.HUGGING_FACE: "model.safetensors", Layout.MISTRAL: "consolidated.safetensors"}
SHARD_GLOBS = {Layout.HUGGING_FACE: "model-*.safetensors", Layout.MISTRAL: "consolidated*.safetensors"}
INDEX_SUFFIX = ".index.json"
OTHER_FILES = (
    "tokenizer.model*",
    "tekken.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "generation_config.json",
)
PICKLES = ("*.bin", "*.pth", "*.pt")
ROTARY_BUFFER = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")  # old transformers stored what is computed


class Checkpoint:
    """Where every tensor of a folder lies."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.layout = detect_layout(folder)
        self.files = _tensor_files(folder, self.layout)

    def fingerprint(self) -> Fingerprint:
        """Of all that is read of the folder, by stages and by doors."""
        return compute_fingerprint(self.folder, {*self.files.values(), *_metadata_files(self.folder, self.layout)})

    def check(self, args: ModelArgs) -> None:
        """Raise ``CheckpointError`` naming the first tensor that is missing, misshapen or too many, or the damaged file."""
        specs = list(stage_tensors(args, range(args.n_layers), self.layout))
        for path, wanted in self._by_file(specs):
            with open_safetensors(path, framework="numpy") as file:
                for spec in wanted:
                    _check_tensor(path, spec, file.get_slice(spec.name), needs=self.layout.value)
        for name in sorted(self.files.keys() - {spec.name for spec in specs}):
            if not ROTARY_BUFFER.fullmatch(name) and not (args.tied_embeddings and name == NAMES[self.layout].head):
                raise CheckpointError(
                    f"{self.files[name]} holds the tensor {name}, which the model of {self.layout.value} does not have"
                )

    def load(
        self,
        tensors_of: TensorsOf,
        dtype: str,
        device: str,
        quantize: Quantization | None = None,
        on_tensor: ProgressCallback = lambda _read, _loaded: None,
        places: "Mapping[str, Tensor] | None" = None,
    ) -> dict[str, "Tensor"]:
        """Read these tensors and no others, by parameter name, in the wanted dtype on the wanted device.

        Parameters that have a place already are written there; all places are of parameters that are read.

        Each is quantised as it is read, so that beside what is quantised there is never more than a piece of a tensor
        as it is stored.
        """
        from tramontane.workers.weights.quantize import (
            load_tensor,  # here, not above: checking a checkpoint must not cost the import of torch
        )
        from tramontane.workers.weights.tensor_reader import open_reader

        state = dict(places or {})
        specs = [(spec, self._file_of(spec)) for spec in largest_first(tensors_of(self.layout))]
        with open_reader(device) as rows_of:
            for spec, path in specs:
                stored = rows_of(path, spec)
                load_tensor(state, spec, stored, dtype, device, quantize)
                on_tensor(stored.num_read, spec.num_bytes(dtype, quantize))
        return state

    def _by_file(self, specs: Iterable[TensorSpec]) -> Iterator[tuple[Path, list[TensorSpec]]]:
        groups: dict[Path, list[TensorSpec]] = {}
        for spec in specs:
            groups.setdefault(self._file_of(spec), []).append(spec)
        yield from groups.items()

    def _file_of(self, spec: TensorSpec) -> Path:
        if spec.name not in self.files:
            raise CheckpointError(f"{self.folder} lacks the tensor {spec.name}, which {self.layout.value} calls for")
        return self.files[spec.name]


def fingerprint_without_weights(folder: Path) -> Fingerprint:
    """Of what is read of a folder whose weights are not. Raises CheckpointError if it is none."""
    return compute_fingerprint(folder, _metadata_files(folder, detect_layout(folder)))


def _metadata_files(folder: Path, layout: Layout) -> Iterator[Path]:
    return (path for name in (layout.value, *OTHER_FILES) for path in folder.glob(name) if path.is_file())


def _check_tensor(path: Path, spec: TensorSpec, stored: Any, needs: str) -> None:  # noqa: ANN401 - safetensors' slice has no type
    shape = tuple(stored.get_shape())
    if stored.get_dtype() not in STORED_TYPES:
        raise CheckpointError(
            f"tensor {spec.name} in {path} is of type {stored.get_dtype()}; only {', '.join(STORED_TYPES)} "
            "weights are supported, not quantised ones"
        )
    if shape != spec.shape:
        raise CheckpointError(f"tensor {spec.name} in {path} has shape {shape}; {needs} needs {spec.shape}")


def _tensor_files(folder: Path, layout: Layout) -> dict[str, Path]:
    """By name of the tensor. An index is believed only as far as the files bear it out."""
    single = folder / SINGLE_NAMES[layout]
    index = single.with_name(single.name + INDEX_SUFFIX)
    if index.is_file():
        names = _index(index)
        return _indexed_files(folder, index, names, SHARD_GLOBS[layout])
    if single.is_file():
        return dict.fromkeys(_tensor_names(single), single)
    parts = sorted(folder.glob(SHARD_GLOBS[layout]))
    if not parts:
        if pickles := sorted(path.name for pattern in PICKLES for path in folder.glob(pattern)):
            raise CheckpointError(
                f"{folder} has only {pickles[0]} for weights; pickles are never opened, convert them to safetensors"
            )
        raise CheckpointError(f"{folder} has neither {single.name} nor {index.name}; only safetensors weights are loaded")
    files: dict[str, Path] = {}
    for path in parts:
        for name in _tensor_names(path):
            if name in files:
                raise CheckpointError(
                    f"tensor {name} is both in {files[name]} and in {path.name}; one of the files does not belong here"
                )
            files[name] = path
    return files


def _indexed_files(folder: Path, index: Path, names: dict[str, str], parts: str) -> dict[str, Path]:
    """What the index says and the files bear out. Anything more is of another checkpoint, half of which may be here."""
    paths = sorted({folder / file for file in names.values()})
    if strays := sorted(path.name for path in folder.glob(parts) if path not in paths):
        raise CheckpointError(f"{folder / strays[0]} is not named by {index.name}; one of the two does not belong here")
    held = {path: _tensor_names(path) for path in paths}
    for path in paths:
        for name in sorted(held[path]):
            if (file := names.get(name)) != path.name:
                where = f"says it is in {file}" if file else "does not name it"
                raise CheckpointError(
                    f"{path} holds the tensor {name}, but {index.name} {where}; one of them does not belong here"
                )
    return {name: folder / file for name, file in names.items() if name in held[folder / file]}


def _index(path: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        names = {str(name): str(file) for name, file in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} is not a safetensors index") from error
    for file in names.values():
        if Path(file).name != file:
            raise CheckpointError(f"{path} names the file {file!r:.100}, which is not in its folder")
        if not file.endswith(".safetensors") or not file.isprintable():
            raise CheckpointError(f"{path} names the file {file!r:.100}; only safetensors is ever opened")
    return names


def _tensor_names(path: Path) -> frozenset[str]:
    with open_safetensors(path, framework="numpy") as file:
        return frozenset(file.keys())
