"""Folder of a downloaded checkpoint: its layout and its configuration; and the alternatives to a
folder.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

from tramontane.proto.config_pair import join_configs
from tramontane.proto.end_tokens import tokenizer_eos_ids
from tramontane.proto.errors import CheckpointError, InvalidModelConfigError, did_you_mean
from tramontane.proto.foreign_folders import (
    read_tensor_names,
    refuse_draft_head,
    refuse_draft_tensors,
    refuse_other_weights,
)
from tramontane.proto.hf_config import checkpoint_errors, from_hf_config, parse_eos_token_ids
from tramontane.proto.mistral_params import from_mistral_params
from tramontane.proto.model_args import ModelArgs
from tramontane.proto.presets import PRESETS
from tramontane.proto.quantization_config import (
    QUANTIZATION_FILES,
    check_quantization_file,
    check_tensor_names,
    describe_quantization,
    unsupported_quantization,
)


@dataclass(frozen=True, slots=True)
class RandomWeights:
    """Random weights of full size, which every stage generates instead of reading a checkpoint."""


WeightSource = Path | RandomWeights

LFS_POINTER = b"version https://git-lfs"
# fine-tuned models may name further end-of-sequence tokens here
GENERATION_CONFIG = "generation_config.json"

_FOLDER_NEEDED = "give the folder that it was made of, with safetensors weights"

# a model's name on Hugging Face: mistralai/Mistral-7B-v0.1
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


class Layout(Enum):
    """Layout of a folder; the value is the name of its configuration."""

    HUGGING_FACE = "config.json"
    MISTRAL = "params.json"


def refuse_lfs_pointer(path: Path) -> None:
    """Raise CheckpointError for a Git LFS pointer in place of a large file, and for an unreadable
    file.
    """
    try:
        with path.open("rb") as file:
            start = file.read(len(LFS_POINTER))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    if start == LFS_POINTER:
        raise CheckpointError(
            f"{path} is a pointer of Git LFS; fetch what it stands for with: git lfs pull"
        )


def detect_layout(folder: Path) -> Layout:
    """Return the layout of a folder's weights; of both, Hugging Face's. Raises CheckpointError."""
    try:
        if folder.is_file():
            if folder.suffix == ".gguf":
                raise CheckpointError(
                    f"{folder} is a file in GGUF, llama.cpp's format, which is not supported;"
                    f" {_FOLDER_NEEDED}"
                )
            raise CheckpointError(
                f"model folder {folder} is a file; --model takes a downloaded checkpoint's folder"
            )
        if not folder.is_dir():
            raise CheckpointError(
                f"model folder {folder} does not exist; {_how_to_get(str(folder))}"
            )
        has_hf, has_mistral = ((folder / layout.value).is_file() for layout in Layout)
        if has_hf and not (has_mistral and _has_only_mistrals_weights(folder)):
            return Layout.HUGGING_FACE
        if has_mistral:
            return Layout.MISTRAL
        if (folder / "adapter_config.json").is_file():
            raise CheckpointError(
                f"{folder} holds an adapter, not a model; merge it into its base model first"
            )
        if not any(folder.glob("*.safetensors")):
            refuse_other_weights(folder, Layout.HUGGING_FACE.value)
    except OSError as error:
        raise CheckpointError(
            f"model folder {str(folder)[:200]} cannot be read: {error.strerror}"
        ) from error
    raise CheckpointError(
        f"{folder} has neither config.json (Hugging Face's layout) nor params.json (Mistral's); "
        "--model takes a downloaded checkpoint's folder"
    )


def _how_to_get(name: str) -> str:
    if not HUB_ID.fullmatch(name):
        return "--model takes a downloaded checkpoint's folder"
    return (
        "--model takes a local folder, and nothing is downloaded; "
        f"for a model of Hugging Face, first run: hf download {name} --local-dir {name}"
    )


def read_model_args(folder: Path) -> ModelArgs:
    """Read a folder's configuration. Raises CheckpointError, naming the file, for missing,
    malformed or unsupported values.

    If both files exist, both are read, with the same result in either layout; see ``join_configs``.
    This decides for every command, for plans and servers alike, whether a folder's layout,
    architecture and format of weights are supported. Only the names of weight files and tensors are
    checked, if there are any.
    """
    layout = detect_layout(folder)
    files = {each: folder / each.value for each in Layout if (folder / each.value).is_file()}
    contents = {each: _json_object(path) for each, path in files.items()}
    refuse_draft_head(contents[layout], str(files[layout]))
    reader = from_hf_config if layout is Layout.HUGGING_FACE else from_mistral_params
    args = reader(contents[layout], source=str(files[layout]))
    if len(files) == len(Layout):
        args = _join(folder, args, layout, contents)
    try:
        _check_formats(folder, layout, contents[layout], args)
    except OSError as error:
        raise CheckpointError(f"model folder {folder} cannot be read: {error.strerror}") from error
    return _with_end_tokens(args, folder)


def _check_formats(
    folder: Path, layout: Layout, config: Mapping[str, Any], args: ModelArgs
) -> None:
    """Raise CheckpointError for quantization that is defined outside the configuration, and for
    weights of other programs.
    """
    if layout is Layout.HUGGING_FACE and (given := config.get("quantization")):
        name = describe_quantization(given, "MLX") if isinstance(given, dict) else f"{given!r:.100}"
        raise unsupported_quantization(name, str(folder / layout.value))
    if args.quantization is None:
        for name in QUANTIZATION_FILES:
            if (path := folder / name).is_file():
                with checkpoint_errors(str(path)):
                    check_quantization_file(_json_object(path), name, str(path))
    refuse_other_weights(folder, layout.value)
    if found := read_tensor_names(folder, layout.value):
        source, names = str(found[0]), found[1]
        refuse_draft_tensors(names, source)
        check_tensor_names(names, args.quantization is not None, source)


def _join(
    folder: Path, args: ModelArgs, layout: Layout, contents: Mapping[Layout, Mapping[str, Any]]
) -> ModelArgs:
    """Return the combined values of both files. With weights in Mistral's layout, an unsupported
    config.json is not compared.
    """
    config, params = contents[Layout.HUGGING_FACE], contents[Layout.MISTRAL]
    if layout is Layout.HUGGING_FACE:
        return join_configs(args, config, params, str(folder))
    # of the other layout's weights
    config = {key: value for key, value in config.items() if key != "quantization_config"}
    try:
        described = from_hf_config(config)
    except CheckpointError:
        return args
    joined = join_configs(described, config, params, str(folder))
    eos_token_ids = tuple(dict.fromkeys((*args.eos_token_ids, *joined.eos_token_ids)))
    names = ("rope_theta", "windows", "rope_scaling", "max_seq_len")  # params.json may lack these
    return replace(
        args, eos_token_ids=eos_token_ids, **{name: getattr(joined, name) for name in names}
    )


def _with_end_tokens(args: ModelArgs, folder: Path) -> ModelArgs:
    """Add the end-of-sequence tokens of ``generation_config.json`` and of the tokenizer to the
    configuration's.
    """
    path = folder / GENERATION_CONFIG
    generation: tuple[int, ...] = ()
    try:
        if path.is_file():
            generation = parse_eos_token_ids(_json_object(path).get("eos_token_id"))
        ids = (*args.eos_token_ids, *generation, *tokenizer_eos_ids(folder, args.vocab_size))
        return replace(args, eos_token_ids=tuple(dict.fromkeys(ids)))
    except (TypeError, InvalidModelConfigError) as error:
        raise CheckpointError(f"{path}: {error}") from error


def is_preset(model: Path) -> bool:
    """Return whether ``model`` names a published geometry; a folder of that name takes
    precedence.
    """
    return str(model) in PRESETS and not model.is_dir()


def resolve_model_args(model: Path) -> ModelArgs:
    """Return the geometry of a folder, as ``read_model_args`` does, or of a preset. Raises
    CheckpointError.
    """
    if is_preset(model):
        return PRESETS[str(model)]
    if not model.exists() and len(model.parts) == 1:
        raise CheckpointError(
            f"model folder {model} does not exist, and no published geometry has this"
            f" name{did_you_mean(str(model).lower(), PRESETS)}; --model takes a downloaded"
            " checkpoint's folder, or a name that tramontane plan --help lists"
        )
    return read_model_args(model)


def _has_only_mistrals_weights(folder: Path) -> bool:
    names = [path.name for path in folder.glob("*.safetensors*")]
    return any(name.startswith("consolidated") for name in names) and not any(
        name.startswith("model") for name in names
    )


def _json_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds no JSON object")
    return value
