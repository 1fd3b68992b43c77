"""What layers do number by number between their products: a GPU should read and write it once.

Plain PyTorch makes a kernel of every operation. ``torch.compile`` makes one of each function here.

Shape letters: T tokens, H heads, d head_dim, D model width, F feed-forward width.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tramontane.proto.model_args import ModelArgs
from tramontane.workers.device.self_test import assert_close_norm, try_or_reason

logger = logging.getLogger(__name__)

MAX_DIFFERENCE = 2e-2  # relative, by norms: more than rounding of 16-bit floats
TRIED = (1, 3, 5)  # tokens: one has code of its own, and of others the compiler learns that there are any number of them


def apply_rotary(x_THd: Tensor, cos_Td: Tensor, sin_Td: Tensor) -> Tensor:
    """Every head by its position's angles: element i with element i + d/2."""
    first, second = x_THd.chunk(2, dim=-1)
    return x_THd * cos_Td[:, None, :] + torch.cat((-second, first), dim=-1) * sin_Td[:, None, :]


def silu_and_mul(gate_up_T2F: Tensor) -> Tensor:
    """silu(gate) * up, [T, F], of both side by side."""
    gate_TF, up_TF = gate_up_T2F.chunk(2, dim=-1)
    return F.silu(gate_TF) * up_TF


def fused_add_rms_norm(h_TD: Tensor, more_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The sum, and its root-mean-square normalisation. Both [T, D]."""
    sum_TD = h_TD + more_TD
    return sum_TD, F.rms_norm(sum_TD, weight_D.shape, weight_D, eps)


@dataclass(frozen=True, slots=True)
class FusedOps:
    """These functions, or what computes the same."""

    apply_rotary: Callable[[Tensor, Tensor, Tensor], Tensor] = apply_rotary
    silu_and_mul: Callable[[Tensor], Tensor] = silu_and_mul
    fused_add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]] = fused_add_rms_norm


EAGER = FusedOps()


def compile_ops(args: ModelArgs, device: torch.device, dtype: torch.dtype) -> FusedOps:
    """For this device and model; the plain ones, and a line in the log, where nothing can be compiled."""
    fused = FusedOps(*(torch.compile(getattr(EAGER, field.name)) for field in fields(FusedOps)))
    if why := try_or_reason(lambda: _try(fused, args, device, dtype)):
        logger.warning("operations between products are not fused: torch.compile fails (%s)", why)
        return EAGER
    return fused


def _try(fused: FusedOps, args: ModelArgs, device: torch.device, dtype: torch.dtype) -> None:
    """With the widths, strides and kinds of tensors that layers have, or the first step would compile again."""
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=dtype, device=device, generator=generator)

    num_turned, num_heads = args.n_heads + args.n_kv_heads, args.n_heads + 2 * args.n_kv_heads
    weight_D = nn.Parameter(random(args.dim))  # made as weights are: outside of inference mode
    with torch.inference_mode():
        for num_tokens in TRIED:
            heads_THd, angles_Td = random(num_tokens, num_heads, args.head_dim), random(num_tokens, args.head_dim)
            _compare(fused, "turned", heads_THd[:, :num_turned], angles_Td, -angles_Td)
            _compare(fused, "gated", random(num_tokens, 2 * args.hidden_dim))
            _compare(
                fused, "fused_add_rms_norm", random(num_tokens, args.dim), random(num_tokens, args.dim), weight_D, args.norm_eps
            )


def _compare(fused: FusedOps, name: str, *given: object) -> None:
    ours, plain = (getattr(pointwise, name)(*given) for pointwise in (fused, EAGER))
    for out, expected in zip(_several(ours), _several(plain), strict=True):
        assert_close_norm(out, expected, MAX_DIFFERENCE)


def _several(outcome: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return outcome if isinstance(outcome, tuple) else (outcome,)
