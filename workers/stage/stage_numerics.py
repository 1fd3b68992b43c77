"""The numerics of a stage."""

import torch

from tramontane.proto.plan import KvCacheDtype
from tramontane.workers.attention import native_backend
from tramontane.workers.device.numerics import Numerics
from tramontane.workers.kernels.kernel_names import describe_kernel, name_in_c, name_kernels
from tramontane.workers.model.transformer import StageModel
from tramontane.workers.stage.device_backend import DeviceBackend


def stage_numerics(
    model: StageModel,
    backend: DeviceBackend,
    device: torch.device,
    dtype: torch.dtype,
    kv_cache_dtype: KvCacheDtype = "auto",
    *,
    is_batch_invariant: bool,
) -> Numerics:
    """Return the numerics of a stage with this backend. Threads, caches and page sizes are not part
    of them.
    """
    prefill, decode = backend.kernels.prefill, backend.kernels.decode
    in_c = isinstance(prefill, native_backend.NativePrefill) and isinstance(
        decode, native_backend.NativeDecode
    )
    attention = (
        name_in_c(native_backend.SOURCE)
        if in_c
        else f"{describe_kernel(prefill)}, {describe_kernel(decode)}"
    )
    parts = {"attention": attention, **name_kernels(model, backend.fused_ops, device, dtype)}
    if kv_cache_dtype != "auto":
        parts["keys and values"] = kv_cache_dtype
    if device.type == "cuda" and model.experts is not None:  # on CPUs all ways give the same bits
        parts["experts"] = model.experts.kernel_name
    return Numerics.of(parts, str(device), is_batch_invariant=is_batch_invariant)
