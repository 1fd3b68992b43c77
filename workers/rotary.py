"""Rotary position embedding: how far each pair of a head's elements turns at a position.

Shape letters: T tokens, H heads, d head_dim.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tramontane.proto.model_args import ModelArgs, YarnScaling


@dataclass(frozen=True, slots=True)
class Rotary:
    """What turns the heads of T tokens: all alike, so that there is a 1 in place of their number.

    ``sin_T1d`` is negative in its first half. ``query_scale_T11`` is None where queries are not scaled by position.
    """

    cos_T1d: Tensor
    sin_T1d: Tensor
    query_scale_T11: Tensor | None = None

    def turn(self, heads_TAd: Tensor, num_heads: tuple[int, int, int]) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, which lie side by side; the first two turned by their position's angles, together.

        first * cos - second * sin, second * cos + first * sin: halves change places for the second term.
        """
        queries, keys, values = num_heads
        x_TAd, v_TGd = torch.split(heads_TAd, [queries + keys, values], dim=1)
        turned_TAd = torch.addcmul(x_TAd * self.cos_T1d, x_TAd.roll(x_TAd.shape[-1] // 2, dims=-1), self.sin_T1d)
        q_THd, k_TGd = torch.split(turned_TAd, [queries, keys], dim=1)
        return q_THd if self.query_scale_T11 is None else q_THd * self.query_scale_T11, k_TGd, v_TGd


def rotary_tables(positions_T: Tensor, args: ModelArgs, dtype: torch.dtype) -> Rotary:
    """Cosine and sine of every position's angles (RoFormer, arXiv 2104.09864, eq. 15).

    Heads are rotated in *halves*, as Hugging Face stores them: element i pairs with
    i + d/2, and both turn by position * frequency i. Angles are computed in float32.
    """
    frequencies = rotary_frequencies(args).to(positions_T.device)
    angles = positions_T.float()[:, None] * frequencies[None, :]
    scaling = args.rope_scaling
    magnitude = scaling.magnitude if scaling else 1.0
    cos, sin = angles.cos() * magnitude, angles.sin() * magnitude
    cos_T1d, sin_T1d = (torch.cat(halves, dim=-1).to(dtype)[:, None, :] for halves in ((cos, cos), (-sin, sin)))
    if scaling is None or not scaling.query_beta:
        return Rotary(cos_T1d, sin_T1d)
    times_T = torch.floor(positions_T.float() / scaling.original_max_seq_len)
    return Rotary(cos_T1d, sin_T1d, (1 + scaling.query_beta * torch.log1p(times_T)).to(dtype)[:, None, None])


def rotary_frequencies(args: ModelArgs) -> Tensor:
    """Radians per position of each of the d/2 pairs, float32: theta^(-2i/d), slowed down where the model is scaled."""
    pairs = torch.arange(0, args.head_dim, 2, dtype=torch.float32)
    frequencies = 1.0 / args.rope_theta ** (pairs / args.head_dim)
    if args.rope_scaling is None:
        return frequencies
    kept = _kept_share(args.rope_scaling, args.head_dim, args.rope_theta)
    return frequencies * kept + frequencies / args.rope_scaling.factor * (1 - kept)


def _kept_share(scaling: YarnScaling, head_dim: int, theta: float) -> Tensor:
    """Of every pair's frequency, how much stays as it was: a ramp from 1 to 0 (YaRN, arXiv 2309.00071, eq. 17 to 19).

    Pair i turns r times within L positions if theta^(2i/d) = L / (2 pi r), so i = d ln(L / (2 pi r)) / (2 ln theta).
    d 128, theta 1e6, L 16384: r = 32 at i = 20.4, r = 1 at i = 36.4. Pairs up to 20 keep theirs, from 37 on none does.
    """

    def pair_that_turns(times: float) -> float:
        return head_dim * math.log(scaling.original_max_seq_len / (2 * math.pi * times)) / (2 * math.log(theta))

    first = max(math.floor(pair_that_turns(scaling.beta_fast)), 0)
    last = min(math.ceil(pair_that_turns(scaling.beta_slow)), head_dim - 1)
    ramp = (torch.arange(head_dim // 2, dtype=torch.float32) - first) / max(last - first, 0.001)
    return 1 - ramp.clamp(0, 1)


def rows_in_halves(stored_RD: Tensor, num_heads: int) -> Tensor:
    """Rows of W_q or W_k with rotary pairs side by side, as Mistral stores them, sorted into halves, as they are used.

    A head of 6 rows 0 1 | 2 3 | 4 5 becomes 0 2 4 | 1 3 5: pair i is then rows i and i + 3.
    """
    rows, width = stored_RD.shape
    return stored_RD.view(num_heads, rows // num_heads // 2, 2, width).transpose(1, 2).reshape(rows, width)


def rows_in_pairs(used_RD: Tensor, num_heads: int) -> Tensor:
    """Back from halves: 0 2 4 | 1 3 5 becomes 0 1 | 2 3 | 4 5."""
    rows, width = used_RD.shape
    return used_RD.view(num_heads, 2, rows // num_heads // 2, width).transpose(1, 2).reshape(rows, width)
