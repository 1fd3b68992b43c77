"""Loading of modules: weights are read, or made at random, directly in their dtype, on their device
and in their place.

A layer's experts are placed in memory so that a grouped GEMM can read them as one block.
"""

import logging
from collections.abc import Callable, Iterable
from typing import TypeVar

import torch
from torch import Tensor, nn

from tramontane.proto.model_folder import Layout, RandomWeights, WeightSource
from tramontane.proto.plan import ExpertPlan, StagePlan
from tramontane.proto.weight_format import WeightFormat
from tramontane.workers.kernels.packed_linear import pack_linears
from tramontane.workers.kernels.quantized_linear import warm_up_kernels
from tramontane.workers.model.expert_kernels import KERNEL_CAPABILITIES, KERNEL_STEP
from tramontane.workers.weights.checkpoint import Checkpoint
from tramontane.workers.weights.quantize import NUMBER_DTYPES, quantize_linears
from tramontane.workers.weights.random_checkpoint import random_state
from tramontane.workers.weights.tensor_specs import ProgressCallback, TensorsOf, TensorSpec

logger = logging.getLogger(__name__)

M = TypeVar("M", bound=nn.Module)


def load_module(
    make: Callable[[], M],
    tensors_of: TensorsOf,
    plan: StagePlan | ExpertPlan,
    weights: WeightSource,
    device: str,
    on_tensor: ProgressCallback,
    contiguous_experts: bool = False,
    on_activity: Callable[[str], None] = lambda _: None,
) -> M:
    """Build a module with ``make`` and load its weights: exactly the parameters of ``tensors_of``.

    ``contiguous_experts`` puts the experts of a layer into one block of memory, for grouped GEMMs.
    ``on_activity`` is called with the names of later phases.
    """
    dtype: torch.dtype = getattr(torch, plan.dtype)
    with torch.device("meta"):
        module = make()
        quantize_linears(module, tensors_of(Layout.HUGGING_FACE), plan.weight_format)
    matrix_dtype = getattr(torch, plan.weight_format.matrix_dtype)
    packed = pack_linears(module, dtype, matrix_dtype) if torch.device(device).type == "cpu" else {}
    specs = tensors_of(Layout.HUGGING_FACE) if contiguous_experts else ()
    allocated = allocate_contiguous(specs, plan.weight_format, device)
    if isinstance(weights, RandomWeights):
        state = random_state(tensors_of, plan.weight_format, device, on_tensor, allocated, packed)
    else:
        state = Checkpoint(weights).load(
            tensors_of, plan.weight_format, device, on_tensor, allocated, packed
        )
    module.load_state_dict(state, assign=True)
    # these kernels are not used there
    if not (plan.batch_invariant and torch.device(device).type == "cuda"):
        if plan.weight_format.quantize and torch.device(device).type != "cpu":
            on_activity("trying products with quantized weights")
        warm_up_kernels(module, dtype)
    return module.eval()


def allocate_contiguous(
    specs: Iterable[TensorSpec], weights: WeightFormat, device: str | torch.device
) -> dict[str, Tensor]:
    """Allocate experts' matrices, by parameter name: one block per layer for w13, and one for w2;
    and one for the scales of each.

    ``experts.layers.3.0.w13.weight`` to ``experts.layers.3.7.w13.weight`` are a block of 8.
    """
    blocks: dict[tuple[str, ...], dict[str, TensorSpec]] = {}
    for spec in specs:
        path = spec.parameter.split(".")
        if path[0] == "experts":
            _, _, layer, _, matrix, _ = path
            blocks.setdefault((layer, matrix), {}).setdefault(spec.parameter, spec)
    allocated: dict[str, Tensor] = {}
    for block in blocks.values():
        first = next(iter(block.values()))
        quantize = first.quantized_as(weights)
        dtype = NUMBER_DTYPES[quantize] if quantize else getattr(torch, weights.matrix_dtype)
        block_ENK = torch.empty(len(block), *first.parameter_shape, dtype=dtype, device=device)
        allocated |= dict(zip(block, block_ENK, strict=True))
        if quantize:
            scales_EN = torch.empty(block_ENK.shape[:2], dtype=torch.float32, device=device)
            allocated |= dict(
                zip([spec.scale_parameter for spec in block.values()], scales_EN, strict=True)
            )
    return allocated


def supports_grouped_gemm(plan: StagePlan, device: str) -> bool:
    """Return whether a stage's experts are loaded for grouped GEMMs. If not, logs the reason on a
    GPU.
    """
    if not (plan.experts_inside and plan.args.moe and torch.device(device).type == "cuda"):
        return False
    if reason := _unsupported_reason(plan, torch.device(device)):
        logger.warning(
            "%s: experts run one after the other, and each layer waits for their sizes: %s",
            plan.label,
            reason,
        )
    return not reason


def _unsupported_reason(plan: StagePlan, device: torch.device) -> str:
    capability = torch.cuda.get_device_capability(device)
    if plan.batch_invariant:  # with a grouped product for all GPUs and dtypes
        return ""
    if plan.weight_format.quantize:  # with a Triton kernel, if it works
        return "activations are float32" if plan.dtype == "float32" else ""
    if plan.dtype != "bfloat16":
        return f"activations are {plan.dtype}, not bfloat16"
    if capability[0] not in KERNEL_CAPABILITIES:
        return "the GPU's capability is {}.{}, and torch's grouped product needs 9 or 10".format(
            *capability
        )
    if plan.args.dim % KERNEL_STEP or plan.args.expert_dim % KERNEL_STEP:
        return (
            f"widths {plan.args.dim} and {plan.args.expert_dim} are not multiples of {KERNEL_STEP}"
        )
    return ""
