"""Rotary position embedding: the angle by which each pair of a head's elements is rotated at a
position.

Shape letters: T tokens, P positions, H heads, d head_dim.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tramontane.proto.model_args import ModelArgs, YarnScaling
from tramontane.workers.kernels.fused_ops import EAGER, CosSin

BLOCK_POSITIONS = 1024  # positions whose tables are computed at a time


@dataclass(frozen=True, slots=True)
class RotaryTables:
    """Cosines and sines of T tokens, and the scales of queries: the same for all heads, or per
    head.

    ``query_scale_T`` is None if the model does not scale queries by position; ``log_position_T``,
    the logarithms of position + 1, is None if it does not scale each head.
    """

    cos_Td: Tensor
    sin_Td: Tensor
    query_scale_T: Tensor | None = None
    log_position_T: Tensor | None = None

    def scale_queries(self, q_THd: Tensor) -> Tensor:
        """Scale rotated queries by position, as some models do before attention."""
        return q_THd if self.query_scale_T is None else q_THd * self.query_scale_T[:, None, None]

    def select(self, rows: Tensor) -> "RotaryTables":
        """Return these rows."""
        scales = (self.query_scale_T, self.log_position_T)
        return RotaryTables(
            self.cos_Td[rows],
            self.sin_Td[rows],
            *(None if each is None else each[rows] for each in scales),
        )

    def append(self, more: "RotaryTables") -> "RotaryTables":
        """Return these rows followed by the rows of ``more``."""
        pairs = (
            (self.query_scale_T, more.query_scale_T),
            (self.log_position_T, more.log_position_T),
        )
        scales = (
            None if own is None or other is None else torch.cat((own, other))
            for own, other in pairs
        )
        return RotaryTables(
            torch.cat((self.cos_Td, more.cos_Td)), torch.cat((self.sin_Td, more.sin_Td)), *scales
        )


MakeRotaryTables = Callable[[Tensor], RotaryTables]  # of the positions of T tokens


def rotary_tables(
    positions_T: Tensor,
    args: ModelArgs,
    dtype: torch.dtype,
    frequencies: Tensor | None = None,
    cos_sin: CosSin = EAGER.cos_sin,
) -> RotaryTables:
    """Return cosine and sine of every position's angles (RoFormer, arXiv 2104.09864, eq. 15).

    Heads are rotated in *halves*, as Hugging Face stores them: element i pairs with i + d/2, and
    both are rotated by position * frequency i. Angles are computed in float32. ``frequencies``: of
    the stage's model on the device of the positions; ``rotary_frequencies`` if not given.
    """
    if frequencies is None:
        frequencies = rotary_frequencies(args).to(positions_T.device)
    scaling = args.rope_scaling
    cos_Td, sin_Td = cos_sin(
        positions_T, frequencies, scaling.attention_factor if scaling else 1.0, dtype
    )
    log_position_T = torch.log1p(positions_T.float()) if args.sparse else None
    if scaling is None or not scaling.llama4_beta:
        return RotaryTables(cos_Td, sin_Td, log_position_T=log_position_T)
    lengths_T = torch.floor(positions_T.float() / scaling.original_max_seq_len)
    return RotaryTables(
        cos_Td, sin_Td, (1 + scaling.llama4_beta * torch.log1p(lengths_T)).to(dtype), log_position_T
    )


class RotaryCache:
    """The rotary tables of all positions used so far, from 0 on. For CPUs.

    On CPUs, PyTorch may round the cosines of a tensor's last elements, and of elements at the
    boundaries of threads, differently from the others: a position's angles would depend on its
    place in the micro-batch. Here every position is computed once, in blocks that are always the
    same, and by NumPy, which uses one thread.
    """

    def __init__(
        self, args: ModelArgs, dtype: torch.dtype, frequencies: Tensor | None = None
    ) -> None:
        self._args, self._dtype = args, dtype
        self._frequencies = (
            rotary_frequencies(args) if frequencies is None else frequencies
        ).numpy()
        self._tables_P = self._block(0)

    def tables(self, positions_T: Tensor) -> RotaryTables:
        """Return the tables of T positions."""
        highest = int(positions_T.max()) if len(positions_T) else 0
        while (num_cached := len(self._tables_P.cos_Td)) <= highest:
            self._tables_P = self._tables_P.append(self._block(num_cached))
        return self._tables_P.select(positions_T)

    def _block(self, start: int) -> RotaryTables:
        positions_P = np.arange(start, start + BLOCK_POSITIONS, dtype=np.float32)
        angles = (positions_P[:, None] * self._frequencies).astype(np.float64)
        angles_Pd = np.concatenate((angles, angles), axis=-1)
        scaling = self._args.rope_scaling
        magnitude = scaling.attention_factor if scaling else 1.0
        cos_Pd, sin_Pd = (
            torch.from_numpy(function(angles_Pd) * magnitude).to(self._dtype)
            for function in (np.cos, np.sin)
        )
        positions_P = positions_P.astype(np.float64)
        log_position_P = (
            torch.from_numpy(np.log1p(positions_P)).float() if self._args.sparse else None
        )
        if scaling is None or not scaling.llama4_beta:
            return RotaryTables(cos_Pd, sin_Pd, log_position_T=log_position_P)
        scales = 1 + scaling.llama4_beta * np.log1p(positions_P // scaling.original_max_seq_len)
        return RotaryTables(
            cos_Pd, sin_Pd, torch.from_numpy(scales).to(self._dtype), log_position_P
        )


def make_rotary_tables(
    args: ModelArgs, dtype: torch.dtype, frequencies: Tensor, cos_sin: CosSin = EAGER.cos_sin
) -> MakeRotaryTables:
    """Return a function that makes tables from ``frequencies``, on their device; these are the
    frequencies of the stage's model.
    """
    if frequencies.device.type == "cpu":
        return RotaryCache(args, dtype, frequencies).tables
    return lambda positions_T: rotary_tables(positions_T, args, dtype, frequencies, cos_sin)


def rotary_frequencies(args: ModelArgs) -> Tensor:
    """Return radians per position of each of the d/2 pairs, float32: theta^(-2i/d), lower for a
    scaled model.
    """
    pairs = torch.arange(0, args.rotary_dim, 2, dtype=torch.float32)
    frequencies = 1.0 / args.rope_theta ** (pairs / args.rotary_dim)
    if args.rope_scaling is None:
        return frequencies
    kept = _yarn_ramp(args.rope_scaling, args.rotary_dim, args.rope_theta)
    return frequencies * kept + frequencies / args.rope_scaling.factor * (1 - kept)


def _yarn_ramp(scaling: YarnScaling, head_dim: int, theta: float) -> Tensor:
    """Return the unscaled share of every pair's frequency: a ramp from 1 to 0 (YaRN, arXiv
    2309.00071, eq. 17 to 19).

    Pair i rotates r times within L positions if theta^(2i/d) = L / (2 pi r), so i = d ln(L / (2 pi
    r)) / (2 ln theta). d 128, theta 1e6, L 16384: r = 32 at i = 20.4, r = 1 at i = 36.4. Pairs up
    to 20 keep their frequency, pairs from 37 on are fully scaled.
    """

    def pair_with_rotations(rotations: float) -> float:
        return (
            head_dim
            * math.log(scaling.original_max_seq_len / (2 * math.pi * rotations))
            / (2 * math.log(theta))
        )

    first = max(math.floor(pair_with_rotations(scaling.beta_fast)), 0)
    last = min(math.ceil(pair_with_rotations(scaling.beta_slow)), head_dim - 1)
    ramp = (torch.arange(head_dim // 2, dtype=torch.float32) - first) / max(last - first, 0.001)
    return 1 - ramp.clamp(0, 1)


def deinterleave_rows(stored_RD: Tensor, num_heads: int, plain_rows: int = 0) -> Tensor:
    """Reorder rows of heads from adjacent rotary pairs, the stored order, to halves, the order of
    use.

    A head of 6 rows 0 1 | 2 3 | 4 5 becomes 0 2 4 | 1 3 5: pair i is then rows i and i + 3. The
    first ``plain_rows`` of each head are not rotated and come before the rotated ones of all heads:
    of two heads with one plain row and a pair each, p0 0 1 and p1 2 3, the rows become p0 p1 | 0 1
    | 2 3.
    """
    width = stored_RD.shape[1]
    stored_HRD = stored_RD.view(num_heads, -1, width)
    plain, rotated = stored_HRD[:, :plain_rows], stored_HRD[:, plain_rows:]
    halves = rotated.reshape(num_heads, -1, 2, width).transpose(1, 2)
    return torch.cat((plain.reshape(-1, width), halves.reshape(-1, width)))


def interleave_rows(used_RD: Tensor, num_heads: int, plain_rows: int = 0) -> Tensor:
    """Reorder rows from halves to pairs, the inverse of ``deinterleave_rows``: 0 2 4 | 1 3 5
    becomes 0 1 | 2 3 | 4 5.
    """
    width = used_RD.shape[1]
    plain = used_RD[: num_heads * plain_rows].view(num_heads, -1, width)
    pairs = used_RD[num_heads * plain_rows :].view(num_heads, 2, -1, width).transpose(1, 2)
    return torch.cat((plain, pairs.reshape(num_heads, -1, width)), dim=1).reshape(-1, width)
