"""Elementwise operations of a layer between its matrix products, fused so that each tensor is read
and written once.

Eager PyTorch runs one kernel per operation. On a GPU ``torch.compile`` makes one kernel of each
function here; on a CPU ``fused_ops.c`` has one for each.

Shape letters: T tokens, H heads, d head_dim, D model width, F feed-forward width.
"""

import ctypes
import logging
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tramontane.proto.model_args import ModelArgs
from tramontane.workers.device.native_library import CompilerError, compile_library, last_failure
from tramontane.workers.device.self_test import assert_close_norm, try_or_reason

logger = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("fused_ops.c")
MAX_DIFFERENCE = 2e-2  # relative, by norms: more than 16-bit rounding causes
TEST_NUM_TOKENS = (1, 3, 5)
# One token is compiled separately; several numbers show the compiler that the length is dynamic.
# Inductor's code for sm_90 reads 16 bytes at a time if the first of these numbers is large, and 2
# bytes if it is 3.
GPU_TEST_NUM_TOKENS = (1, 2048, 64)


CosSin = Callable[[Tensor, Tensor, float, torch.dtype], tuple[Tensor, Tensor]]


def apply_rotary(x_THd: Tensor, cos_Td: Tensor, sin_Td: Tensor) -> Tensor:
    """Rotate every head by its position's angles: element i is paired with element i + d/2."""
    first, second = x_THd.chunk(2, dim=-1)
    return x_THd * cos_Td[:, None, :] + torch.cat((-second, first), dim=-1) * sin_Td[:, None, :]


def silu_and_mul(gate_up_T2F: Tensor) -> Tensor:
    """Return silu(gate) * up, [T, F], of gate and up side by side."""
    gate_TF, up_TF = gate_up_T2F.chunk(2, dim=-1)
    return F.silu(gate_TF) * up_TF


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Return the root-mean-square normalization (arXiv 1910.07467), [T, D], computed in float32."""
    return F.rms_norm(x_TD, weight_D.shape, weight_D, eps)


def fused_add_rms_norm(
    h_TD: Tensor, more_TD: Tensor, weight_D: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Return the sum and its root-mean-square normalization, both [T, D]."""
    sum_TD = h_TD + more_TD
    return sum_TD, rms_norm(sum_TD, weight_D, eps)


def cos_sin(
    positions_T: Tensor, frequencies: Tensor, magnitude: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return cosine and sine [T, d] of every position's angles times ``magnitude``, computed in
    float32.
    """
    angles = positions_T.float()[:, None] * frequencies[None, :]
    angles_Td = torch.cat((angles, angles), dim=-1)
    return (angles_Td.cos() * magnitude).to(dtype), (angles_Td.sin() * magnitude).to(dtype)


@dataclass(frozen=True, slots=True)
class FusedOps:
    """The functions of this module, or replacements that compute the same."""

    apply_rotary: Callable[[Tensor, Tensor, Tensor], Tensor] = apply_rotary
    silu_and_mul: Callable[[Tensor], Tensor] = silu_and_mul
    rms_norm: Callable[[Tensor, Tensor, float], Tensor] = rms_norm
    fused_add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]] = (
        fused_add_rms_norm
    )
    cos_sin: CosSin = cos_sin


EAGER = FusedOps()


def compile_ops(args: ModelArgs, device: torch.device, dtype: torch.dtype) -> FusedOps:
    """Compile the operations for this device and model, or return the eager ones and log why they
    cannot be compiled.

    On a GPU norms are a Triton kernel that reads a row once; the compiler's reads it twice.
    """
    fused = FusedOps(*(torch.compile(getattr(EAGER, field.name)) for field in fields(FusedOps)))
    if device.type == "cuda":
        fused = _with_triton_norms(fused)
    if reason := try_or_reason(lambda: try_ops(fused, args, device, dtype)):
        logger.warning(
            "operations between products are not fused: torch.compile or Triton fails (%s)", reason
        )
        return EAGER
    return fused


def _with_triton_norms(fused: FusedOps) -> FusedOps:
    try:
        # Triton is not on every platform
        from tramontane.workers.kernels.triton_norm import add_rms_norm, rms_norm
    except ImportError:
        return fused
    return replace(fused, rms_norm=rms_norm, fused_add_rms_norm=add_rms_norm)


def row_wise_ops() -> FusedOps:
    """Return operations on GPUs whose result for a token does not depend on other tokens. Raises
    ImportError without Triton.

    Rotary tables are computed by PyTorch, element by element. ``apply_rotary`` is to be replaced by
    the attention kernels' function, which agrees with the rotation inside these kernels.
    """
    # Triton is not on every platform
    from tramontane.workers.kernels.triton_silu import silu_and_mul

    return _with_triton_norms(replace(EAGER, silu_and_mul=silu_and_mul))


def native_ops(args: ModelArgs, dtype: torch.dtype) -> FusedOps:
    """Compile the operations in C for this CPU and model, or return the eager ones and log why they
    cannot be compiled.
    """
    try:
        fused = NativeOps(str(dtype).removeprefix("torch.")).fused_ops
        try_ops(fused, args, torch.device("cpu"), dtype)
    except (CompilerError, ArithmeticError) as error:
        logger.info("operations between products are computed by PyTorch, one by one: %s", error)
        return EAGER
    return fused


class NativeOps:
    """The functions of ``fused_ops.c``. Raises CompilerError."""

    def __init__(self, dtype: str) -> None:
        library = compile_library(SOURCE, dtype)
        pointer, size, threads = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
        self._rotary = ctypes.CFUNCTYPE(None, *[pointer] * 4, *[size] * 4, threads)(
            ("apply_rotary", library)
        )
        self._silu = ctypes.CFUNCTYPE(None, *[pointer] * 2, *[size] * 2, threads)(
            ("silu_and_mul", library)
        )
        norm_sizes = (size, size, ctypes.c_float, threads)
        self._norm = ctypes.CFUNCTYPE(None, *[pointer] * 3, *norm_sizes)(("rms_norm", library))
        self._add_norm = ctypes.CFUNCTYPE(None, *[pointer] * 5, *norm_sizes)(
            ("fused_add_rms_norm", library)
        )
        self.fused_ops = FusedOps(
            self._apply_rotary, self._silu_and_mul, self._rms_norm, self._fused_add_rms_norm
        )

    def _apply_rotary(self, x_THd: Tensor, cos_Td: Tensor, sin_Td: Tensor) -> Tensor:
        assert x_THd.stride()[1:] == (x_THd.shape[2], 1)
        assert cos_Td.is_contiguous()
        assert sin_Td.is_contiguous()
        out_THd = x_THd.new_empty(x_THd.shape)
        tensors = (x_THd, cos_Td, sin_Td, out_THd)
        self._rotary(
            *(each.data_ptr() for each in tensors),
            *x_THd.shape,
            x_THd.stride(0),
            torch.get_num_threads(),
        )
        return out_THd

    def _silu_and_mul(self, gate_up_T2F: Tensor) -> Tensor:
        num_rows, width = gate_up_T2F.shape[0], gate_up_T2F.shape[1] // 2
        gate_up_T2F, out_TF = gate_up_T2F.contiguous(), gate_up_T2F.new_empty(num_rows, width)
        self._silu(
            gate_up_T2F.data_ptr(), out_TF.data_ptr(), num_rows, width, torch.get_num_threads()
        )
        return out_TF

    def _rms_norm(self, x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        x_TD, out_TD = x_TD.contiguous(), x_TD.new_empty(x_TD.shape)
        tensors = (x_TD, weight_D, out_TD)
        self._norm(
            *(each.data_ptr() for each in tensors), *x_TD.shape, eps, torch.get_num_threads()
        )
        return out_TD

    def _fused_add_rms_norm(
        self, h_TD: Tensor, more_TD: Tensor, weight_D: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        h_TD, more_TD = h_TD.contiguous(), more_TD.contiguous()
        sum_TD, out_TD = torch.empty_like(h_TD), torch.empty_like(h_TD)
        tensors = (h_TD, more_TD, weight_D, sum_TD, out_TD)
        self._add_norm(
            *(each.data_ptr() for each in tensors), *h_TD.shape, eps, torch.get_num_threads()
        )
        return sum_TD, out_TD


def try_ops(fused: FusedOps, args: ModelArgs, device: torch.device, dtype: torch.dtype) -> None:
    """Compare with the eager operations, on the widths, strides and kinds of tensors that layers
    have.

    For tensors of other kinds the first step would compile again.
    """
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=dtype, device=device, generator=generator)

    num_rotated, num_heads, rotary_dim = (
        args.n_heads + args.n_kv_heads,
        args.n_heads + 2 * args.n_kv_heads,
        args.rotary_dim,
    )
    weight_D = nn.Parameter(random(args.dim))  # made as weights are: outside of inference mode
    with torch.inference_mode():
        for num_tokens in GPU_TEST_NUM_TOKENS if device.type == "cuda" else TEST_NUM_TOKENS:
            heads_THd, angles_Td = (
                random(num_tokens, num_heads, rotary_dim),
                random(num_tokens, rotary_dim),
            )
            gate_up_T2F, h_TD, more_TD = (
                random(num_tokens, width) for width in (2 * args.hidden_dim, args.dim, args.dim)
            )
            _compare(
                fused.apply_rotary,
                EAGER.apply_rotary,
                heads_THd[:, :num_rotated],
                angles_Td,
                -angles_Td,
            )
            _compare(fused.silu_and_mul, EAGER.silu_and_mul, gate_up_T2F)
            positions_T, frequencies = (
                torch.arange(1, num_tokens + 1, device=device),
                random(rotary_dim // 2).float().abs(),
            )
            _compare(fused.cos_sin, EAGER.cos_sin, positions_T, frequencies, 1.0, dtype)
            _compare(fused.rms_norm, EAGER.rms_norm, h_TD, weight_D, args.norm_eps)
            _compare(
                fused.fused_add_rms_norm,
                EAGER.fused_add_rms_norm,
                h_TD,
                more_TD,
                weight_D,
                args.norm_eps,
            )


def _compare(fused: Callable[..., Any], eager: Callable[..., Any], *inputs: object) -> None:
    out, expected = fused(*inputs), eager(*inputs)
    if isinstance(out, Tensor):
        out, expected = (out,), (expected,)
    for each, expected_each in zip(out, expected, strict=True):
        assert_close_norm(each, expected_each, MAX_DIFFERENCE)


def why_no_kernels() -> str:
    """Return why this process has no kernels in C, or what to ask where that is not known."""
    return last_failure() or "is there a C compiler?"
