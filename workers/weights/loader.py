"""Loading of modules: weights are read, or made at random, directly in their dtype and on their device."""

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import nn

from tramontane.proto.model_args import ModelArgs, Quantization
from tramontane.proto.model_folder import Layout, RandomWeights, WeightSource
from tramontane.workers.kernels.quantized_linear import warm_up_kernels
from tramontane.workers.weights.checkpoint import Checkpoint
from tramontane.workers.weights.expert_placement import allocate_contiguous
from tramontane.workers.weights.quantize import quantize_linears
from tramontane.workers.weights.random_weights import random_state
from tramontane.workers.weights.tensor_specs import ProgressCallback, TensorsOf

M = TypeVar("M", bound=nn.Module)


def load_module(
    make: Callable[[], M],
    args: ModelArgs,
    tensors_of: TensorsOf,
    weights: WeightSource,
    dtype: str,
    quantize: Quantization | None,
    device: str,
    on_tensor: ProgressCallback,
    contiguous_experts: bool = False,
) -> M:
    """Build a module with ``make`` and load its weights. It has the parameters of ``tensors_of`` and no others.

    ``contiguous_experts`` puts the experts of a layer into one block of memory, for grouped GEMMs.
    """
    with torch.device("meta"):
        module = make()
        if quantize:
            quantize_linears(module, tensors_of(Layout.HUGGING_FACE), dtype, quantize)
    specs = tensors_of(Layout.HUGGING_FACE) if contiguous_experts else ()
    allocated = allocate_contiguous(specs, getattr(torch, dtype), device)
    if isinstance(weights, RandomWeights):
        state = random_state(tensors_of, args.dtype, dtype, device, quantize, on_tensor, allocated)
    else:
        state = Checkpoint(weights).load(tensors_of, dtype, device, quantize, on_tensor, allocated)
    module.load_state_dict(state, assign=True)
    warm_up_kernels(module, getattr(torch, dtype))
    return module.eval()
