"""Random weights of full size, for benchmarks, plans and tests: in memory, or as a complete
checkpoint in either layout.
"""

import json
import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from zlib import crc32

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from tramontane.proto.errors import ConfigError
from tramontane.proto.foreign_folders import INDEX_SUFFIX, SINGLE_NAMES
from tramontane.proto.model_args import ModelArgs
from tramontane.proto.model_folder import Layout
from tramontane.proto.units import format_bytes
from tramontane.proto.weight_format import WeightFormat
from tramontane.workers.kernels.packed_linear import PackedMatmul
from tramontane.workers.kernels.quantized_linear import MAX_FP8
from tramontane.workers.model.rotary import interleave_rows
from tramontane.workers.weights.config_writer import to_hf_config, to_mistral_params
from tramontane.workers.weights.quantize import load_tensor
from tramontane.workers.weights.tensor_names import NAMES
from tramontane.workers.weights.tensor_specs import (
    ProgressCallback,
    TensorsOf,
    TensorSpec,
    largest_first,
    stage_tensors,
)

PART_BYTES = 2**28  # size of one file, which is in memory at a time
EMBEDDINGS = {names.embedding for names in NAMES.values()}


def random_parameter(spec: TensorSpec, dtype: str, device: str = "cpu") -> Tensor:
    """Return the pieces of ``random_pieces`` in one tensor."""
    return torch.cat(list(random_pieces(spec, dtype, device)))


def random_scale(spec: TensorSpec) -> float:
    """Return the scale of a matrix that is quantized in the checkpoint; the largest number is eight
    standard deviations.
    """
    return 8 / math.sqrt(spec.shape[1]) / MAX_FP8


def random_pieces(spec: TensorSpec, dtype: str, device: str) -> Iterator[Tensor]:
    """Yield the rows of a random tensor, the same for every split of the model and every layout on
    one kind of device.

    Norms are near one and all different, so that a mix-up shows. Embeddings have variance one, and
    other matrices preserve the variance of their inputs.
    """
    is_embedding = spec.name in EMBEDDINGS  # a tied head too
    name = "tok_embeddings.weight" if is_embedding else spec.parameter
    for rows in replace(spec, interleaved_heads=0).row_chunks:
        generator = torch.Generator(device).manual_seed(
            crc32(name.encode()) + spec.first_row + rows.start
        )
        shape = (len(rows), *spec.shape[1:])
        numbers = torch.empty(shape, dtype=getattr(torch, dtype), device=device).normal_(
            generator=generator
        )
        if len(shape) == 1:
            yield numbers.mul_(0.1).add_(1)
        elif is_embedding:
            yield numbers
        elif not spec.scale:
            yield numbers.mul_(spec.shape[1] ** -0.5)
        else:
            scaled = numbers.float().mul_(spec.shape[1] ** -0.5 / random_scale(spec))
            yield scaled.clamp_(-MAX_FP8, MAX_FP8).to(torch.float8_e4m3fn)


def random_state(
    tensors_of: TensorsOf,
    weights: WeightFormat,
    device: str,
    on_tensor: ProgressCallback = lambda _read, _made: None,
    allocated: Mapping[str, Tensor] | None = None,
    packed: Mapping[str, PackedMatmul] | None = None,
) -> dict[str, Tensor]:
    """Return the parameters that ``Checkpoint.load`` would read from a random checkpoint of this
    model, without any file.

    Numbers are drawn in the dtype ``weights.stored``, and then converted or quantized.
    ``allocated`` and ``packed`` are as in ``Checkpoint.load``.
    """
    state = dict(allocated or {})
    for spec in largest_first(tensors_of(Layout.HUGGING_FACE)):
        pieces, scale = (
            random_pieces(spec, weights.stored, device),
            random_scale(spec) if spec.scale else 1.0,
        )
        load_tensor(state, spec, pieces, weights, device, packed or {}, scale)
        on_tensor(0, spec.num_bytes(weights))
    return state


def write_random_checkpoint(
    folder: Path,
    args: ModelArgs,
    layout: Layout,
    on_written: Callable[[int], None] = lambda _: None,
    part_bytes: int = PART_BYTES,
    on_start: Callable[[], None] = lambda: None,
) -> None:
    """Write configuration and weights; the model is the same in both layouts.

    ``on_start`` is called before the first file, ``on_written`` with the bytes of each file's
    tensors. Raises ConfigError, and leaves nothing behind, if the layout cannot describe the model,
    the folder is not empty or its disk has too little space.
    """
    config = to_hf_config(args) if layout is Layout.HUGGING_FACE else to_mistral_params(args)
    is_new = not folder.exists()
    try:
        if not is_new and any(folder.iterdir()):
            raise ConfigError(f"--out {folder} is not empty; give a folder that does not exist yet")
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise ConfigError(f"--out {folder} cannot be made: {error.strerror}") from error
    parts = list(_parts(args, layout, part_bytes))
    needed = sum(spec.stored_bytes(args.dtype) for part in parts for spec in part)
    try:
        if needed > free:
            raise ConfigError(
                f"--out {folder} needs {format_bytes(needed)}, and {format_bytes(free)} are free"
                " there"
            )
        on_start()
        _write(folder, args, layout, parts, on_written)
        # last: without it the folder is not a model
        (folder / layout.value).write_text(json.dumps(config, indent=2) + "\n")
    # also Ctrl-C: half a checkpoint is useless and would block the next attempt
    except BaseException:
        for path in folder.iterdir():
            path.unlink()
        if is_new:
            folder.rmdir()
        raise


def _write(
    folder: Path,
    args: ModelArgs,
    layout: Layout,
    parts: Sequence[Sequence[TensorSpec]],
    on_written: Callable[[int], None],
) -> None:
    weight_map: dict[str, str] = {}
    for number, specs in enumerate(parts, start=1):
        name = _file_name(layout, number, len(parts))
        tensors = _as_stored(specs, args.dtype)
        _save(tensors, folder / name)
        weight_map |= dict.fromkeys(tensors, name)
        on_written(sum(spec.stored_bytes(args.dtype) for spec in specs))
    if len(parts) > 1:
        total_size = sum(spec.stored_bytes(args.dtype) for part in parts for spec in part)
        index = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
        (folder / (SINGLE_NAMES[layout.value] + INDEX_SUFFIX)).write_text(
            json.dumps(index, indent=1)
        )


def _save(tensors: dict[str, Tensor], path: Path) -> None:
    try:
        save_file(tensors, path, metadata={"format": "pt"})
        path.chmod(0o644)  # safetensors creates files that only their owner may read
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{path} cannot be written: {error}") from error


def _parts(args: ModelArgs, layout: Layout, part_bytes: int) -> Iterator[Sequence[TensorSpec]]:
    """Yield the tensors of each file in the order of the model, up to ``part_bytes``, but at least
    one.
    """
    part: list[TensorSpec] = []
    # a tied head is stored once
    specs = {spec.name: spec for spec in stage_tensors(args, range(args.n_layers), layout)}
    for _, group in groupby(specs.values(), _group):
        together = list(group)
        if part and sum(spec.stored_bytes(args.dtype) for spec in (*part, *together)) > part_bytes:
            yield part
            part = []
        part += together
    yield part


def _group(spec: TensorSpec) -> str:
    """Return the same name for tensors of one file: the experts of a layer, if they are stored as
    one tensor.
    """
    return spec.stack.name.rpartition(".")[0] if _is_stacked(spec) and spec.stack else spec.name


def _is_stacked(spec: TensorSpec) -> bool:
    """Return whether a matrix is stored together with the other experts', as transformers stores it
    unless it is quantized.
    """
    return spec.stack is not None and not spec.scale


def _file_name(layout: Layout, number: int, num_parts: int) -> str:
    """Return the name of a file in both layouts' style: model-00002-of-00007.safetensors."""
    single = SINGLE_NAMES[layout.value]
    return (
        single
        if num_parts == 1
        else f"{Path(single).stem}-{number:05}-of-{num_parts:05}.safetensors"
    )


def _as_stored(specs: Sequence[TensorSpec], dtype: str) -> dict[str, Tensor]:
    """Return random tensors and their scales by name."""
    tensors: dict[str, Tensor] = {}
    for spec in specs:
        tensor, heads = random_parameter(spec, dtype), spec.interleaved_heads
        if spec.stack and _is_stacked(spec):
            stacked = tensors.setdefault(
                spec.stack.name, torch.empty(spec.stack.shape, dtype=tensor.dtype)
            )
            stacked[spec.stack.index, spec.stack.first_row :][: len(tensor)] = tensor
            continue
        tensors[spec.name] = interleave_rows(tensor, heads, spec.plain_rows) if heads else tensor
        if spec.scale:
            tensors[spec.scale] = torch.tensor(random_scale(spec))
    return tensors
