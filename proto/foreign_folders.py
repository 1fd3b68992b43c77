"""Detection of other programs' folders by their files and names: their contents, why they are not
supported, and what to do.

All readers of a model's folder use this module, whether or not they need the weights, so that a
plan refuses the same folders as a server.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tramontane.proto.errors import CheckpointError

INDEX_SUFFIX = ".index.json"
# The single file of weights and the parts, by the name of the configuration.
SINGLE_NAMES = MappingProxyType(
    {"config.json": "model.safetensors", "params.json": "consolidated.safetensors"}
)
SHARD_GLOBS = MappingProxyType(
    {"config.json": "model-*.safetensors", "params.json": "consolidated*.safetensors"}
)
MAX_HEADER_BYTES = 2**27  # of a safetensors file; the library's limit is 100 MB
PICKLES = "pickles are never opened, convert them to safetensors"
# Weights of other programs, by the suffix of the file's name, and advice on what to do.
OTHER_WEIGHTS = MappingProxyType(
    {
        ".gguf": (
            "GGUF, llama.cpp's format, is not supported; use the folder that it was made of, with"
            " safetensors weights"
        ),
        ".bin": PICKLES,
        ".pth": PICKLES,
        ".pt": PICKLES,
        ".npz": (
            "MLX's old format is not supported; use the folder that it was made of, with"
            " safetensors weights"
        ),
        ".safetensors": (
            "these are not the names of a whole model's files; fetch the folder again, with all its"
            " files"
        ),
    }
)
# files that trainers also write
NO_WEIGHTS = re.compile(r"(training_args|optimizer|scheduler|scaler|rng_state|adapter_)")
PICKLE_INDEX = "pytorch_model.bin.index.json"
# Networks that guess tokens for a model: EAGLE's have a layer or two and read its hidden states,
# Medusa's have only heads.
DRAFT_HEAD = re.compile(r"eagle|medusa|speculator|draft", re.IGNORECASE)
DRAFT_KEYS = (
    "medusa_num_heads",
    "speculators_config",
    "speculators_model_type",
    "draft_vocab_size",
    "eagle_config",
)
DRAFT_TENSORS = re.compile(
    r"(model\.)?fc\.weight|eagle_linear\.weight|midlayer\..*|\d+\.\d+\.linear\.weight|medusa_head\..*"
)


def refuse_draft_head(config: Mapping[str, Any], source: str) -> None:
    """Raise CheckpointError for a configuration of a draft head."""
    given = config.get("architectures")
    names = [
        str(name)
        for name in (*(given if isinstance(given, list) else [given]), config.get("model_type"))
    ]
    if what := next((name for name in names if DRAFT_HEAD.search(name)), None) or next(
        filter(config.get, DRAFT_KEYS), None
    ):
        raise _draft_head(source, what)


def refuse_other_weights(folder: Path, configuration: str) -> None:
    """Raise CheckpointError if the folder has only weights of other programs, and none of this
    configuration's layout.

    A folder without any weights is not refused: plans and random weights need none.
    """
    if _has_weights(folder, configuration):
        return
    files = sorted(path.name for path in folder.iterdir() if not NO_WEIGHTS.match(path.name))
    for end, advice in OTHER_WEIGHTS.items():
        if found := next((name for name in files if name.endswith(end)), None):
            raise CheckpointError(f"{folder} has only {found} for weights; {advice}")
    if PICKLE_INDEX in files:
        raise CheckpointError(
            f"{folder} is of a model whose weights are .bin files, as {PICKLE_INDEX} says;"
            f" {PICKLES}"
        )


def read_tensor_names(folder: Path, configuration: str) -> tuple[Path, tuple[str, ...]] | None:
    """Return the names of tensors in an index, or in the header of a single file, and that file;
    None if neither exists.

    Also None for a damaged file: the error is reported when it is loaded.
    """
    single = folder / SINGLE_NAMES[configuration]
    index = single.with_name(single.name + INDEX_SUFFIX)
    try:
        if index.is_file():
            return index, tuple(
                map(str, json.loads(index.read_text(encoding="utf-8"))["weight_map"])
            )
        if single.is_file():
            with single.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                return single, tuple(json.loads(file.read(min(length, MAX_HEADER_BYTES))))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return None


def refuse_draft_tensors(names: tuple[str, ...], source: str) -> None:
    """Raise CheckpointError for tensors of a draft head, whose configuration may look like a model
    with one layer.
    """
    if tensor := next((name for name in names if DRAFT_TENSORS.fullmatch(name)), None):
        raise _draft_head(source, tensor)


def _has_weights(folder: Path, configuration: str) -> bool:
    single = folder / SINGLE_NAMES[configuration]
    is_there = single.is_file() or single.with_name(single.name + INDEX_SUFFIX).is_file()
    return is_there or any(folder.glob(SHARD_GLOBS[configuration]))


def _draft_head(source: str, what: str) -> CheckpointError:
    return CheckpointError(
        f"{source} describes a draft head ({what:.100}), as EAGLE and Medusa have, and no model;"
        " draft heads are not supported; give the folder of the model itself; drafts are made by"
        " n-grams or by a small model, see --speculative-config"
    )
