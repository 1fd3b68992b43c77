"""Random weights of full size, for benchmarks, plans and tests."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from zlib import crc32

import torch
from torch import Tensor

from tramontane.proto.model_args import Quantization
from tramontane.proto.model_folder import Layout
from tramontane.workers.weights.quantize import load_tensor
from tramontane.workers.weights.tensor_specs import NAMES, ProgressCallback, TensorsOf, TensorSpec, largest_first

EMBEDDINGS = {names.embedding for names in NAMES.values()}


def random_parameter(spec: TensorSpec, dtype: str, device: str = "cpu") -> Tensor:
    """Return the pieces of ``random_pieces`` in one tensor."""
    return torch.cat(list(random_pieces(spec, dtype, device)))


def random_pieces(spec: TensorSpec, dtype: str, device: str) -> Iterator[Tensor]:
    """Yield the rows of a random tensor, the same for every split of the model and every layout on one kind of device.

    Norms are near one and all different, so that a mix-up shows. Embeddings have variance one, and other matrices keep
    the variance of what they multiply.
    """
    is_embedding = spec.name in EMBEDDINGS  # a tied head too
    name = "tok_embeddings.weight" if is_embedding else spec.parameter
    for rows in replace(spec, interleaved_heads=0).row_chunks:
        generator = torch.Generator(device).manual_seed(crc32(name.encode()) + spec.first_row + rows.start)
        shape = (len(rows), *spec.shape[1:])
        numbers = torch.empty(shape, dtype=getattr(torch, dtype), device=device).normal_(generator=generator)
        if len(shape) == 1:
            yield numbers.mul_(0.1).add_(1)
        else:
            yield numbers if is_embedding else numbers.mul_(spec.shape[1] ** -0.5)


def random_state(
    tensors_of: TensorsOf,
    stored_dtype: str,
    dtype: str,
    device: str,
    quantize: Quantization | None = None,
    on_tensor: ProgressCallback = lambda _read, _made: None,
    allocated: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """Return what ``Checkpoint.load`` would read from a random checkpoint of this model, without any file.

    Numbers are drawn in ``stored_dtype``, and then converted or quantized. ``allocated`` is as in ``Checkpoint.load``.
    """
    state = dict(allocated or {})
    for spec in largest_first(tensors_of(Layout.HUGGING_FACE)):
        load_tensor(state, spec, random_pieces(spec, stored_dtype, device), dtype, device, quantize)
        on_tensor(0, spec.num_bytes(dtype, quantize))
    return state
