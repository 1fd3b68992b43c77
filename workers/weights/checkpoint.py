"""Checkpoint folder: which file holds which tensor, how the tensors of a stage are read, and its
fingerprint.

Only safetensors files are opened. ``Checkpoint.check`` reads headers only and does not import
torch.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import filterfalse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tramontane.proto.errors import CheckpointError
from tramontane.proto.foreign_folders import (
    INDEX_SUFFIX,
    SHARD_GLOBS,
    SINGLE_NAMES,
    refuse_other_weights,
)
from tramontane.proto.model_args import ModelArgs
from tramontane.proto.model_folder import Layout, detect_layout
from tramontane.proto.weight_format import WeightFormat
from tramontane.workers.weights.safetensors_file import (
    FP8,
    STORED_TYPES,
    have_same_bytes,
    open_safetensors,
    read_scales,
)
from tramontane.workers.weights.tensor_names import (
    canonical_name,
    is_unused,
    is_vision,
    names_of,
    stack_scale_name,
)
from tramontane.workers.weights.tensor_specs import (
    ProgressCallback,
    TensorsOf,
    TensorSpec,
    largest_first,
    stage_tensors,
)

if TYPE_CHECKING:
    from torch import Tensor

    from tramontane.workers.kernels.packed_linear import PackedMatmul

CheckpointDigest = tuple[
    tuple[str, str], ...
]  # file names relative to the folder, and their digests

NUM_SAMPLES, SAMPLE_BYTES = 64, 4096  # of a digest's files
METADATA_GLOBS = (
    *(layout.value for layout in Layout),
    "tokenizer.model*",
    "tekken.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "generation_config.json",
)


class Checkpoint:
    """The files of a folder, by the tensors of the text model that they hold. Raises
    CheckpointError if they contradict.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.layout = detect_layout(folder)
        self.files = _tensor_files(folder, self.layout)
        self._stored_names = {canonical_name(name): name for name in self.files}
        if twice := next(
            (name for name in self.files if self._stored_names[canonical_name(name)] != name), None
        ):
            other = self._stored_names[canonical_name(twice)]
            raise CheckpointError(
                f"{folder} has the tensor {twice}, and as {other}, too; one of them does not belong"
                " here"
            )

    def digest(self) -> CheckpointDigest:
        """Return the digest of all files that are read, by stages and by ingress replicas."""
        return compute_checkpoint_digest(
            self.folder, {*self.files.values(), *_metadata_files(self.folder)}
        )

    def with_stored_head(self, args: ModelArgs) -> ModelArgs:
        """Return ``args`` without tied embeddings if the files have an output head with other
        numbers than the embeddings.

        This overrides the configuration: a model's head may have been trained separately later.
        """
        names = names_of(args, self.layout)
        if (
            not args.tied_embeddings
            or not {names.head, names.embedding} <= self._stored_names.keys()
        ):
            return args
        places = [
            (self.files[name], name)
            for name in map(self._stored_name, (names.head, names.embedding))
        ]
        return args if have_same_bytes(*places) else replace(args, tied_embeddings=False)

    def check(self, args: ModelArgs) -> str:
        """Return the dtype of the matrices, regardless of the configuration; float32 if there are
        several, since it can represent all.

        Matrices that are float32 in every model, such as gates, do not count.

        Raises CheckpointError naming the first tensor that is missing, misshapen or superfluous, or
        the damaged file.
        """
        dtypes: set[str] = set()
        specs = list(stage_tensors(args, range(args.n_layers), self.layout))
        located = [self._locate(spec) for spec in specs]
        by_file: dict[Path, list[TensorSpec]] = {}
        for spec, path in located:
            by_file.setdefault(path, []).append(spec)
        for path, specs_of_file in by_file.items():
            with open_safetensors(path, framework="numpy") as file:
                for spec in specs_of_file:
                    dtype = _check_tensor(path, spec, file.get_slice(spec.name), self.layout)
                    if len(spec.shape) > 1 and not spec.scale and not spec.is_float32:
                        dtypes.add(dtype)
        self._read_scales(spec for spec, _ in located)
        known = {spec.name for spec in specs} | {spec.scale for spec in specs}
        known |= {
            name
            for spec in specs
            if spec.stack
            for name in (spec.stack.name, stack_scale_name(spec.stack.name))
        }
        unknown = self._stored_names.keys() - known
        for name in sorted(unknown):
            if not is_unused(name, self.layout) and not (
                args.tied_embeddings and name == names_of(args, self.layout).head
            ):
                stored_name = self._stored_names[name]
                raise CheckpointError(
                    f"{self.files[stored_name]} holds the tensor {stored_name}, "
                    f"which the model of {self.layout.value} does not have"
                )
        return dtypes.pop() if len(dtypes) == 1 else "float32"

    def load(
        self,
        tensors_of: TensorsOf,
        weights: WeightFormat,
        device: str,
        on_tensor: ProgressCallback = lambda _read, _loaded: None,
        allocated: "Mapping[str, Tensor] | None" = None,
        packed: "Mapping[str, PackedMatmul] | None" = None,
    ) -> dict[str, "Tensor"]:
        """Read only these tensors; return parameters by name, in the format ``weights``, on
        ``device``.

        Parameters in ``allocated`` are written there; it has only parameters that are read. Tensors
        are quantized, and packed according to ``packed``, while they are read, so that at most a
        chunk of one is in memory in its stored form.
        """
        # Imported here because a check of a checkpoint must not import torch.
        from tramontane.workers.weights.quantize import load_tensor
        from tramontane.workers.weights.tensor_reader import open_reader

        state = dict(allocated or {})
        specs = [self._locate(spec) for spec in largest_first(tensors_of(self.layout))]
        scales = self._read_scales(spec for spec, _ in specs)
        with open_reader(device) as read_rows:
            for spec, path in specs:
                scale = scales.get(spec.scale, 1.0)
                num_read = load_tensor(
                    state, spec, read_rows(path, spec), weights, device, packed or {}, scale
                )
                on_tensor(num_read, spec.num_bytes(weights))
        return state

    def _locate(self, spec: TensorSpec) -> tuple[TensorSpec, Path]:
        """Return the tensor with its name in the files, and its file. It has a stack only if it is
        stored in one.
        """
        stack = None if spec.name in self._stored_names or spec.stack is None else spec.stack
        if stack and stack.name not in self._stored_names:
            stack = None
        name = self._stored_name(stack.name if stack else spec.name)
        return replace(spec, name=name, stack=stack), self.files[name]

    def _stored_name(self, name: str) -> str:
        if name not in self._stored_names:
            raise CheckpointError(
                f"{self.folder} lacks the tensor {name}, which {self.layout.value} calls for"
            )
        return self._stored_names[name]

    def _read_scales(self, specs: Iterable[TensorSpec]) -> dict[str, float]:
        """Return the numbers by which quantized tensors, as ``_locate`` returns them, are
        multiplied, by ``scale``.

        Raises CheckpointError.
        """
        wanted = [spec for spec in specs if spec.scale]
        names = {
            s.scale: self._stored_name(stack_scale_name(s.stack.name) if s.stack else s.scale)
            for s in wanted
        }
        counts = {names[spec.scale]: spec.stack.shape[0] if spec.stack else 1 for spec in wanted}
        by_file: dict[Path, dict[str, int]] = {}
        for name, count in counts.items():
            by_file.setdefault(self.files[name], {})[name] = count
        numbers = {
            name: scales
            for path, own in by_file.items()
            for name, scales in read_scales(path, own).items()
        }
        return {spec.scale: _scale_of(spec, numbers[names[spec.scale]]) for spec in wanted}


def _scale_of(spec: TensorSpec, scales: Sequence[float]) -> float:
    """Return a matrix's scale. Among the 8 scales of 4 experts' gate and up rows, number 7 is the
    scale of expert 3's up rows.
    """
    if spec.stack is None:
        return scales[0]
    per_expert = len(scales) // spec.stack.shape[0]
    return scales[spec.stack.index * per_expert + (per_expert == 2 and spec.stack.first_row > 0)]


# safetensors' slice has no type
def _check_tensor(path: Path, spec: TensorSpec, stored: Any, layout: Layout) -> str:
    """Return the tensor's dtype."""
    shape, dtype = tuple(stored.get_shape()), stored.get_dtype()
    if spec.scale and dtype != FP8:
        raise CheckpointError(
            f"tensor {spec.name} in {path} is of type {dtype}; {layout.value} says that matrices"
            f" are FP8 ({FP8}), and layers of which only some are quantized are not supported"
        )
    if not spec.scale and dtype not in STORED_TYPES:
        reason = f"and {layout.value} does not say how it is quantized"
        if dtype == FP8 and (spec.is_head or not spec.quantizable):
            reason = "which only matrices of layers may be"
        raise CheckpointError(
            f"tensor {spec.name} in {path} is of type {dtype}, {reason}; supported are"
            f" {', '.join(STORED_TYPES)}, and FP8 with one scale for each matrix of a layer, as"
            " Mistral publishes it"
        )
    if shape != spec.stored_shape:
        raise CheckpointError(
            f"tensor {spec.name} in {path} has shape {shape}; {layout.value} needs"
            f" {spec.stored_shape}"
        )
    return STORED_TYPES.get(dtype, "fp8")


def _tensor_files(folder: Path, layout: Layout) -> dict[str, Path]:
    """Return the file of each tensor outside the vision encoder. An index is compared with the
    files that it names.
    """
    single = folder / SINGLE_NAMES[layout.value]
    index = single.with_name(single.name + INDEX_SUFFIX)
    if index.is_file():
        return _indexed_files(folder, index, _index(index), SHARD_GLOBS[layout.value])
    if single.is_file():
        return dict.fromkeys(filterfalse(is_vision, _tensor_names(single)), single)
    parts = sorted(folder.glob(SHARD_GLOBS[layout.value]))
    if not parts:
        refuse_other_weights(folder, layout.value)
        raise CheckpointError(
            f"{folder} has neither {single.name} nor {index.name}; only safetensors weights are"
            " loaded"
        )
    files: dict[str, Path] = {}
    for path in parts:
        for name in filterfalse(is_vision, _tensor_names(path)):
            if name in files:
                raise CheckpointError(
                    f"tensor {name} is both in {files[name]} and in {path.name}; one of the files"
                    " does not belong here"
                )
            files[name] = path
    return files


def _indexed_files(folder: Path, index: Path, names: dict[str, str], parts: str) -> dict[str, Path]:
    """Return the tensors that both index and files have. Other files in the folder may belong to
    another checkpoint.

    Files with only a vision encoder are not opened.
    """
    named = {folder / file for file in names.values()}
    paths = sorted({folder / file for name, file in names.items() if not is_vision(name)})
    if strays := sorted(path.name for path in folder.glob(parts) if path not in named):
        raise CheckpointError(
            f"{folder / strays[0]} is not named by {index.name}; one of the two does not belong"
            " here"
        )
    names_by_path = {path: _tensor_names(path) for path in paths}
    for path in paths:
        for name in sorted(names_by_path[path]):
            if (file := names.get(name)) != path.name:
                where = f"says it is in {file}" if file else "does not name it"
                raise CheckpointError(
                    f"{path} holds the tensor {name}, but {index.name} {where}; one of them does"
                    " not belong here"
                )
    needed = {name: folder / file for name, file in names.items() if not is_vision(name)}
    return {name: path for name, path in needed.items() if name in names_by_path[path]}


def _index(path: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        names = {str(name): str(file) for name, file in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} is not a safetensors index") from error
    for file in names.values():
        if Path(file).name != file:
            raise CheckpointError(
                f"{path} names the file {file!r:.100}, which is not in its folder"
            )
        if not file.endswith(".safetensors") or not file.isprintable():
            raise CheckpointError(
                f"{path} names the file {file!r:.100}; only safetensors is ever opened"
            )
    return names


def _tensor_names(path: Path) -> frozenset[str]:
    with open_safetensors(path, framework="numpy") as file:
        return frozenset(file.keys())


# ---- digest


def checkpoint_digest_without_weights(folder: Path) -> CheckpointDigest:
    """Return the digest of a folder whose weights are not read. Raises CheckpointError if it is not
    a model folder.
    """
    detect_layout(folder)
    return compute_checkpoint_digest(folder, _metadata_files(folder))


def compute_checkpoint_digest(folder: Path, files: Iterable[Path]) -> CheckpointDigest:
    """Compute a digest of each file's size and of samples of its bytes, to compare nodes without
    reading gigabytes.
    """
    return tuple((str(path.relative_to(folder)), _digest(path)) for path in sorted(files))


def short_digest(checkpoint_digest: CheckpointDigest) -> str:
    """Return one short digest of a whole checkpoint, tokenizer included."""
    return hashlib.sha256(repr(checkpoint_digest).encode()).hexdigest()[:16]


def check_checkpoint_digest(folder: Path, expected: CheckpointDigest) -> None:
    """Raise CheckpointError naming the first file that is missing or differs from the digest
    of another node.
    """
    for name, digest in expected:
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder / name} is missing, but other nodes have it")
        if _digest(folder / name) != digest:
            raise CheckpointError(f"{folder / name} differs from the same file on other nodes")


def _digest(path: Path) -> str:
    """Hash a file of up to NUM_SAMPLES * SAMPLE_BYTES completely; of a longer one, evenly spaced
    blocks, both ends included.

    1,000,000 bytes in 64 blocks of 4096: block 1 starts at 1 * 995,904 // 63 = 15,808, the last at
    63 * 995,904 // 63 = 995,904.
    """
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        if size <= NUM_SAMPLES * SAMPLE_BYTES:
            digest.update(file.read())
        else:
            for sample in range(NUM_SAMPLES):
                file.seek(sample * (size - SAMPLE_BYTES) // (NUM_SAMPLES - 1))
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()


def _metadata_files(folder: Path) -> Iterator[Path]:
    return (path for name in METADATA_GLOBS for path in folder.glob(name) if path.is_file())
