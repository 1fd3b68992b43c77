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

logger = logging.getLogger(__name__)

TRIED = (1, 3, 5)  # tokens: one has code of its own, and of others the compiler learns that there are any number of them


def turned(x_THd: Tensor, cos_Td: Tensor, sin_Td: Tensor) -> Tensor:
    """Every head by its position's angles: element i with element i + d/2."""
    first, second = x_THd.chunk(2, dim=-1)
    return x_THd * cos_Td[:, None, :] + torch.cat((-second, first), dim=-1) * sin_Td[:, None, :]


def gated(gate_up_T2F: Tensor) -> Tensor:
    """silu(gate) * up, [T, F], of both side by side."""
    gate_TF, up_TF = gate_up_T2F.chunk(2, dim=-1)
    return F.silu(gate_TF) * up_TF


def added_and_normed(h_TD: Tensor, more_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The sum, and its root-mean-square normalisation. Both [T, D]."""
    sum_TD = h_TD + more_TD
    return sum_TD, F.rms_norm(sum_TD, weight_D.shape, weight_D, eps)


@dataclass(frozen=True, slots=True)
class Pointwise:
    """These functions, or what computes the same."""

    turned: Callable[[Tensor, Tensor, Tensor], Tensor] = turned
    gated: Callable[[Tensor], Tensor] = gated
    added_and_normed: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]] = added_and_normed


PLAIN = Pointwise()


def compiled(args: ModelArgs, device: torch.device, dtype: torch.dtype) -> Pointwise:
    """For this device and model; the plain ones, and a line in the log, where nothing can be compiled."""
    fused = Pointwise(*(torch.compile(getattr(PLAIN, field.name)) for field in fields(Pointwise)))
    try:
        with torch.inference_mode():
            for num_tokens in TRIED:
                _try(fused, args, torch.ones(num_tokens, args.dim, dtype=dtype, device=device))
    except Exception as error:  # a compiler that is missing, or anything that goes wrong in one
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        logger.warning("operations between products are not fused: torch.compile fails (%s)", reason)
        return PLAIN
    return fused


def _try(pointwise: Pointwise, args: ModelArgs, h_TD: Tensor) -> None:
    """With the widths, strides and kinds of tensors that layers have. Raises ArithmeticError for a wrong result."""
    num_turned, num_values = args.n_heads + args.n_kv_heads, args.n_kv_heads
    heads_THd = h_TD.new_ones(len(h_TD), num_turned + num_values, args.head_dim)[:, :num_turned]
    angles_Td = torch.linspace(0, 3, args.head_dim, dtype=h_TD.dtype, device=h_TD.device).expand(len(h_TD), -1).contiguous()
    gate_up_T2F = torch.linspace(-3, 3, 2 * args.hidden_dim, dtype=h_TD.dtype, device=h_TD.device).expand(len(h_TD), -1)
    weight_D = nn.Parameter(h_TD[0].clone(), requires_grad=False)
    for name, given in (
        ("turned", (heads_THd, angles_Td, angles_Td)),
        ("gated", (gate_up_T2F.contiguous(),)),
        ("added_and_normed", (h_TD, h_TD, weight_D, args.norm_eps)),
    ):
        _compare(getattr(pointwise, name)(*given), getattr(PLAIN, name)(*given), name)


def _compare(ours: Tensor | tuple[Tensor, ...], plain: Tensor | tuple[Tensor, ...], name: str) -> None:
    for a, b in zip(_several(ours), _several(plain), strict=True):
        if not torch.allclose(a.float(), b.float(), rtol=2e-2, atol=2e-2):
            raise ArithmeticError(f"{name} computes something else")


def _several(outcome: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return outcome if isinstance(outcome, tuple) else (outcome,)
