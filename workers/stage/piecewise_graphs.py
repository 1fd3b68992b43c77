"""Piecewise CUDA graphs, as vLLM calls them: in steps with prompts, everything but attention is
captured and replayed.

The composition of a step from chunks and single tokens matters only to attention, which is launched
eagerly. A piece is the computation between the attention of two layers: output projection, norm,
feed-forward network or experts, norm, query, key and value projections, rotary embedding. The first
piece begins with tokens or hidden states, the last one ends with hidden states. So a stage of 32
layers has 33 pieces for each number of tokens in ``piece_sizes``, to which steps are padded.

Steps pass through fixed memory that all sizes share: before the first piece their tokens or hidden
states, positions and number of tokens, then from each piece queries, keys and values for attention,
and attention's result for the next piece. Padding never leaves a piece: attention and the cache get
only the step's own rows.

100 tokens, padded to 128: rows 0 to 99 are the step's. Rows 100 to 127 are left from an earlier
step. Experts skip these rows, and all other operations compute each row by itself.

Shape letters: M tokens of the largest size, S of one size, T of a step, D model width, H query
heads, G key/value heads, d and c numbers of a key and of a value that attention returns.
"""

import logging
import time
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from tramontane.proto.plan import StagePlan
from tramontane.workers.device.kernel_selection import MAX_DIFFERENCE
from tramontane.workers.device.self_test import assert_close_norm, try_or_reason
from tramontane.workers.model.grouped_query_attention import AttentionFn
from tramontane.workers.model.rotary import rotary_tables
from tramontane.workers.model.transformer import StageModel
from tramontane.workers.stage.cuda_graphs import Compute, Cut, PiecewiseCapture

logger = logging.getLogger(__name__)

# of a replayed step: with more tokens the device takes longer than the host needs to launch kernels
MAX_TOKENS = 512
STEP = 64  # sizes are multiples of it


def padded_tokens(num_tokens: int) -> int:
    """Round up to a number of tokens for which there are pieces: 1 -> 64, 65 -> 128.

    Products compute tiles of 64 or 128 rows, so most of the padding would be computed without it
    too.
    """
    return -(-num_tokens // STEP) * STEP


def piece_sizes(max_num_batched_tokens: int) -> range:
    """Return the sizes that a stage captures, 64, 128, ... 512 at most. Where steps have up to 100
    tokens: 64 and 128.
    """
    return range(STEP, padded_tokens(min(max_num_batched_tokens, MAX_TOKENS)) + 1, STEP)


class AttendInto(Protocol):
    """Attention that writes its result, see ``CachedAttention.into``."""

    def into(
        self, out_THc: Tensor, layer: int, q_THd: Tensor, k_TGd: Tensor, v_TGd: Tensor
    ) -> None:
        """Compute one layer."""


class _Memory(NamedTuple):
    """Tensors with the same address in every step.

    ``tokens_M`` and ``positions_M``: see above; ``hidden_MD``: the input of a stage after the
    first, and the output of every stage; ``num_tokens``: [], the number of rows without padding;
    ``attended_MHc``: the result of attention.
    """

    tokens_M: Tensor
    positions_M: Tensor
    num_tokens: Tensor
    hidden_MD: Tensor
    q_MHd: Tensor
    k_MGd: Tensor
    v_MGd: Tensor
    attended_MHc: Tensor

    @classmethod
    def of(cls, plan: StagePlan, max_tokens: int, device: torch.device) -> "_Memory":
        """Make the tensors, filled with zeros. The values of latent attention are its keys."""
        args, dtype = plan.args, getattr(torch, plan.dtype)
        number, zeros = (
            partial(torch.zeros, dtype=torch.int64, device=device),
            partial(torch.zeros, dtype=dtype, device=device),
        )
        k_MGd = zeros(max_tokens, args.n_kv_heads, args.head_dim)
        return cls(
            tokens_M=number(max_tokens if plan.is_first else 0),
            positions_M=number(max_tokens),
            num_tokens=number(()),
            hidden_MD=zeros(max_tokens, args.dim),
            q_MHd=zeros(max_tokens, args.n_heads, args.head_dim),
            k_MGd=k_MGd,
            v_MGd=k_MGd if args.latent else torch.zeros_like(k_MGd),
            attended_MHc=zeros(
                max_tokens, args.n_heads, args.latent.kv_lora_rank if args.latent else args.head_dim
            ),
        )


class _BetweenPieces:
    """The ``AttentionFn`` during capture: each piece ends with the inputs of attention, and the
    next one begins with its result.
    """

    def __init__(self, memory: _Memory, size: int, cut: Cut) -> None:
        self._memory, self._size, self._cut = memory, size, cut

    def __call__(
        self,
        _layer: int,
        q_SHd: Tensor,
        k_SGd: Tensor | None,
        v_SGd: Tensor | None,
        index: object = None,
        /,
    ) -> Tensor:
        assert index is None
        assert k_SGd is not None
        assert v_SGd is not None
        memory, size = self._memory, self._size
        memory.q_MHd[:size].copy_(q_SHd)
        memory.k_MGd[:size].copy_(k_SGd)
        if memory.v_MGd is not memory.k_MGd:
            memory.v_MGd[:size].copy_(v_SGd)
        self._cut()
        return memory.attended_MHc[:size]

    def rotate_and_write(self, *_: object) -> None:
        """Leave the rotation to the layer: a step with chunks needs their own keys."""


class PiecewiseGraphRunner:
    """The pieces of one stage. ``prepare`` captures all of them: a step's bits must not depend on
    which pieces exist yet.
    """

    def __init__(
        self, plan: StagePlan, model: StageModel, capture: PiecewiseCapture, device: torch.device
    ) -> None:
        self._plan, self._model, self._capture, self._device = plan, model, capture, device
        self._dtype = getattr(torch, plan.dtype)
        self._frequencies = model.rotary_frequencies.to(device)
        self._memory: _Memory | None = None  # from ``prepare`` on
        self._pieces: dict[int, list[Compute]] = {}  # by size

    @property
    def sizes(self) -> list[int]:
        """The numbers of tokens for which there are pieces."""
        return sorted(self._pieces)

    def prepare(self) -> None:
        """Capture the pieces of all sizes and try each. If one fails, all are dropped and the
        reason is logged. Changes no cache.

        The largest size comes first, so that the others fit into its memory.
        """
        begin, sizes = time.monotonic(), piece_sizes(self._plan.max_num_batched_tokens)
        self._memory = _Memory.of(self._plan, sizes[-1], self._device)
        # the device cannot capture it, or has no memory left, or computes other numbers
        reason = try_or_reason(partial(self._record, sizes)) or try_or_reason(self._try_sizes)
        self._model.clear_expert_load()  # counts of the trial
        if reason:
            self._pieces, self._memory = {}, None
            text = (
                "%s launches steps with prompts kernel by kernel: their CUDA graphs cannot be used"
                " (%s)"
            )
            logger.warning(text, self._plan.label, reason)
            return
        text = "%s recorded %d CUDA graphs in %.1f s, for steps with prompts of up to %d tokens"
        number = sum(map(len, self._pieces.values()))
        logger.info(text, self._plan.label, number, time.monotonic() - begin, sizes[-1])

    def _record(self, sizes: range) -> None:
        for size in reversed(sizes):
            self._pieces[size] = self._capture(partial(self._compute, size))

    def has_size_for(self, num_tokens: int) -> bool:
        """Return whether a step of this number of tokens can be computed."""
        return padded_tokens(num_tokens) in self._pieces

    def run(self, begin_T: Tensor, positions_T: Tensor, attend: AttendInto) -> Tensor:
        """Return the hidden states [T, D] after the last layer.

        ``begin_T``: token ids [T] in the first stage, hidden states [T, D] in others.
        """
        assert self._memory is not None
        memory, num_tokens = self._memory, len(positions_T)
        pieces = self._pieces[padded_tokens(num_tokens)]
        self._begin(begin_T, positions_T)
        own = [
            each[:num_tokens]
            for each in (memory.attended_MHc, memory.q_MHd, memory.k_MGd, memory.v_MGd)
        ]
        out_THc, q_THd, k_TGd, v_TGd = own
        for layer, piece in zip(self._plan.layers, pieces[:-1], strict=True):
            piece()
            attend.into(out_THc, layer, q_THd, k_TGd, v_TGd)
        pieces[-1]()
        return memory.hidden_MD[:num_tokens].clone()  # the next step overwrites it

    def _begin(self, begin_T: Tensor, positions_T: Tensor) -> None:
        """Copy a step's input to the memory of the first piece."""
        assert self._memory is not None
        memory, num_tokens = self._memory, len(positions_T)
        (memory.tokens_M if self._plan.is_first else memory.hidden_MD)[:num_tokens] = begin_T
        memory.positions_M[:num_tokens] = positions_T
        if self._plan.args.moe is not None:
            memory.num_tokens.fill_(num_tokens)

    def _compute(self, size: int, cut: Cut) -> Tensor:
        """Compute the layers for the inputs in memory, which are padding during capture."""
        assert self._memory is not None
        memory = self._memory
        hidden_SD = (
            self._model.embed(memory.tokens_M[:size])
            if self._plan.is_first
            else memory.hidden_MD[:size]
        )
        done_SD = self._run_layers(
            hidden_SD,
            memory.positions_M[:size],
            _BetweenPieces(memory, size, cut),
            memory.num_tokens,
        )
        return memory.hidden_MD[:size].copy_(done_SD)

    def _run_layers(
        self, hidden_SD: Tensor, positions_S: Tensor, attend: AttentionFn, num_tokens: Tensor
    ) -> Tensor:
        cos_sin = self._model.fused_ops.cos_sin
        rotary = rotary_tables(
            positions_S, self._plan.args, self._dtype, self._frequencies, cos_sin
        )
        is_padding_S = None
        if self._plan.args.moe is not None:
            is_padding_S = torch.arange(len(positions_S), device=self._device) >= num_tokens
        out_SD: Tensor = self._model(hidden_SD, rotary, attend, is_padding_T=is_padding_S)
        return out_SD

    def _try_sizes(self) -> None:
        """Compare the pieces of each size with the layers, for a step with one row of NaN padding,
        and without a cache.

        Raises ArithmeticError if they differ. Kernels are chosen by the number of rows, so the
        layers get the padding too, unless the stage is to be batch-invariant: then the bits must
        equal the bits of the step alone.
        """
        memory, args = self._memory, self._plan.args
        assert memory is not None
        generator = torch.Generator().manual_seed(0)
        for size in self.sizes:
            positions_S = torch.arange(size, device=self._device)
            begin_S = hidden_SD = torch.randn(size, args.dim, generator=generator).to(
                self._device, self._dtype
            )
            if self._plan.is_first:
                begin_S = positions_S % args.vocab_size
                hidden_SD = self._model.embed(begin_S)
            for each in (memory.hidden_MD, memory.attended_MHc):
                each.fill_(torch.nan)
            found_TD = self.run(begin_S[:-1], positions_S[:-1], _NoCache())
            rows = slice(size - 1 if self._plan.batch_invariant else size)
            expected_SD = self._run_layers(
                hidden_SD[rows], positions_S[rows], _NoCache(), memory.num_tokens
            )
            assert_close_norm(found_TD, expected_SD[: size - 1], MAX_DIFFERENCE)
            if self._plan.batch_invariant and not torch.equal(found_TD, expected_SD):
                raise ArithmeticError(
                    f"with {size} rows a step of {size - 1} tokens has other bits than alone"
                )


class _NoCache:
    """Replaces attention in the trial of pieces: a mean of each token's own queries, keys and
    values.
    """

    def __call__(
        self,
        _layer: int,
        q_THd: Tensor,
        k_TGd: Tensor | None,
        v_TGd: Tensor | None,
        index: object = None,
        /,
    ) -> Tensor:
        assert index is None
        assert k_TGd is not None
        assert v_TGd is not None
        return (q_THd + k_TGd.mean(dim=1, keepdim=True) + v_TGd.mean(dim=1, keepdim=True)) / 3

    def into(
        self, out_THc: Tensor, layer: int, q_THd: Tensor, k_TGd: Tensor, v_TGd: Tensor
    ) -> None:
        out_THc.copy_(self(layer, q_THd, k_TGd, v_TGd)[..., : out_THc.shape[2]])

    def rotate_and_write(self, *_: object) -> None:
        """Leave the rotation to the layer."""
