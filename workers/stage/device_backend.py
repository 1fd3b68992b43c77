"""Kernels, graphs and events of a device for a stage."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch

from tramontane.proto.errors import ConfigError
from tramontane.proto.plan import StagePlan
from tramontane.proto.weight_format import Quantization
from tramontane.workers.attention.autotune import (
    kernels_for_cpu,
    select_kernels,
    select_working_kernels,
)
from tramontane.workers.attention.backend import AttentionKernels
from tramontane.workers.attention.native_backend import native_kernels
from tramontane.workers.device.cuda import DeviceEvent, RecordEvent
from tramontane.workers.device.kernel_selection import WITHOUT_MEMORY, KernelSelector
from tramontane.workers.device.self_test import try_or_reason
from tramontane.workers.kernels.fused_ops import (
    EAGER,
    FusedOps,
    NativeOps,
    compile_ops,
    native_ops,
    row_wise_ops,
    try_ops,
)
from tramontane.workers.kernels.packed_linear import PackedMatmul
from tramontane.workers.kernels.quantized_linear import FP8_CAPABILITY
from tramontane.workers.kernels.row_invariance import (
    RowProducts,
    refusal,
    triton_products,
    triton_refusal,
)
from tramontane.workers.sampling.integer_sampler import ChooseTokens
from tramontane.workers.sampling.sampler import kernel_for
from tramontane.workers.stage.cuda_graphs import CudaGraphCapture, GraphCapture, PiecewiseCapture
from tramontane.workers.weights.quantize import NUMBER_DTYPES


@dataclass(frozen=True, slots=True)
class DeviceBackend:
    """The kernels, fused operations, graph capture and events of a device.

    ``graph_capture`` is None if decode-only steps are computed eagerly, ``piecewise_capture`` if
    the layers of steps with prompts are, ``make_event`` if the device is synchronous.
    ``row_products`` replace the products of linear layers and experts; without them ``selector``
    chooses the products, on a GPU. ``has_exact_sums``: see ``token_logprobs``; ``choose_tokens``:
    see ``sample``, for the last stage.
    """

    kernels: AttentionKernels
    fused_ops: FusedOps = EAGER
    graph_capture: GraphCapture | None = None
    make_event: RecordEvent | None = None
    row_products: RowProducts | None = None
    has_exact_sums: bool = False
    selector: KernelSelector = WITHOUT_MEMORY
    choose_tokens: ChooseTokens | None = None
    piecewise_capture: PiecewiseCapture | None = None

    @property
    def pads_decodes(self) -> bool:
        """Whether decodes are padded, which needs a scratch page in the caches."""
        return self.graph_capture is not None or self.make_event is not None


def compile_native_kernels(plan: StagePlan) -> None:
    """Compile the C kernels of a stage on a CPU in parallel; kernels compiled earlier are cached on
    disk.

    Compile errors are ignored here: the user of a kernel requests it again and reports them.
    """
    dtype, weights = getattr(torch, plan.dtype), plan.weight_format
    jobs: list[Callable[[], object]] = [
        lambda: PackedMatmul(dtype, getattr(torch, weights.matrix_dtype)),
        lambda: native_kernels(plan),
        lambda: NativeOps(plan.dtype),
    ]
    if weights.quantize:
        number_dtype, is_w8a8 = (
            NUMBER_DTYPES[weights.quantize],
            weights.quantize is Quantization.W8A8,
        )
        jobs.append(lambda: PackedMatmul(dtype, number_dtype, is_w8a8))
    if plan.args.moe and plan.args.moe.float32_gate:
        jobs.append(lambda: PackedMatmul(torch.float32, torch.float32))
    with ThreadPoolExecutor(len(jobs)) as pool:
        for job in jobs:
            pool.submit(try_or_reason, job)


def select_backend(plan: StagePlan, device: torch.device) -> DeviceBackend:
    """Choose the backend of a stage on this device.

    This compiles kernels, and on a GPU times them unless this machine has stored choices. Raises
    ConfigError if the plan requires batch invariance on a GPU without kernels for it, or an FP8
    cache on a GPU without FP8.
    """
    if device.type == "cuda" and plan.kv_cache_dtype == "fp8":
        check_fp8_support(plan.label, torch.cuda.get_device_capability(device))
    dtype = getattr(torch, plan.dtype)
    if device.type != "cuda":
        return DeviceBackend(kernels_for_cpu(plan), native_ops(plan.args, dtype))
    with torch.cuda.device(device):  # events and graphs belong to the current device
        capture = CudaGraphCapture()
        if plan.batch_invariant:
            return row_wise_backend(plan, device, capture, DeviceEvent, capture.in_pieces)
        selector = KernelSelector.of_device(device)
        kernels, ops = select_kernels(plan, device, selector), compile_ops(plan.args, device, dtype)
        return DeviceBackend(
            kernels,
            ops,
            capture,
            DeviceEvent,
            selector=selector,
            choose_tokens=_sampler(plan, device),
            piecewise_capture=capture.in_pieces,
        )


def _sampler(plan: StagePlan, device: torch.device) -> ChooseTokens | None:
    return kernel_for(device, plan.args.vocab_size) if plan.is_last else None


def check_fp8_support(label: str, capability: tuple[int, int]) -> None:
    """Raise ConfigError if a GPU of this compute capability does not convert numbers in FP8
    (e4m3).
    """
    if capability < FP8_CAPABILITY:
        have, need = (".".join(map(str, each)) for each in (capability, FP8_CAPABILITY))
        raise ConfigError(
            f"{label} is on a GPU of compute capability {have}, and --kv-cache-dtype fp8 needs"
            f" {need} or later; leave it out"
        )


def row_wise_backend(
    plan: StagePlan,
    device: torch.device,
    graph_capture: GraphCapture | None = None,
    make_event: RecordEvent | None = None,
    piecewise_capture: PiecewiseCapture | None = None,
) -> DeviceBackend:
    """Return a backend of Triton kernels whose result for a token does not depend on the other
    tokens.

    No kernel is chosen by speed. Raises ConfigError if the kernels do not run here, or are not
    correct.
    """
    if plan.args.sparse:
        raise refusal(
            plan.label,
            "there are no kernels for sparse attention on GPUs that do not depend on the other"
            " tokens",
        )
    try:
        # Triton is not installed on every platform.
        from tramontane.workers.attention import triton_cache
        from tramontane.workers.attention.triton_attention import triton_kernels
        from tramontane.workers.attention.triton_latent import invariant_kernels

        products = triton_products(device, plan.weight_format)
        if plan.args.latent:  # whose keys are not heads of a product
            kernels, rotates = invariant_kernels(plan, device), None
        else:
            kernels, rotates = triton_kernels(plan), triton_cache.rotate_and_write
        kernels = replace(
            kernels,
            read=triton_cache.read_rows,
            read_back=triton_cache.read_back,
            write=triton_cache.write_rows,
        )
        kernels = replace(kernels, cache_rows=triton_cache.cache_rows, rotate_and_write=rotates)
        kernels = select_working_kernels(plan, device, kernels)
        ops = replace(row_wise_ops(), apply_rotary=triton_cache.apply_rotary)
        try_ops(ops, plan.args, device, getattr(torch, plan.dtype))
        return DeviceBackend(
            kernels,
            ops,
            graph_capture,
            make_event,
            products,
            has_exact_sums=True,
            choose_tokens=_sampler(plan, device),
            piecewise_capture=piecewise_capture,
        )
    except Exception as error:  # compilers, drivers and imports raise errors of any kind
        raise triton_refusal(plan.label, error) from error
