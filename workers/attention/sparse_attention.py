"""Sparse attention over the rolling cache: a token attends to the ``index_topk`` earlier tokens
that an indexer scores highest.

A token at position p has p + 1 keys, and sees all of them while they are at most ``index_topk``.
Then attention is dense, by the usual kernels. If a micro-batch has a token with more keys, all of
its tokens attend to lists of cache rows, in the order of their positions. C kernels compute the
same bits in both ways.

Shape letters: T tokens of a micro-batch, n tokens of one sequence in it, S keys of a sequence, K
selected keys, N rows of a cache, H query heads, d width of a query, I heads of the indexer, i width
of an indexer's query and key.
"""

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from tramontane.proto.model_args import ModelArgs
from tramontane.proto.step import MicroBatch
from tramontane.workers.attention.backend import AttentionKernels, CachedAttention, ChosenKeys
from tramontane.workers.attention.metadata import AttentionMetadata
from tramontane.workers.attention.rolling_cache import (
    LayerCache,
    PageRings,
    RollingCache,
    StageSequences,
)
from tramontane.workers.attention.sdpa_backend import GatheredKeys, attend_gathered

# index scores (per head), and numbers of gathered keys, in memory at a time
MAX_SCORES = 2**24


class TorchSparseKernels:
    """The ``SparseKernels`` by PyTorch, on any device."""

    def score(self, q_nIi: Tensor, weights_nI: Tensor, keys_Ni: Tensor, rows_S: Tensor) -> Tensor:
        """See ``SparseKernels``."""
        keys_iS = keys_Ni[rows_S].float().T
        step = max(MAX_SCORES // (q_nIi.shape[1] * len(rows_S)), 1)
        pairs = zip(torch.split(q_nIi, step), torch.split(weights_nI, step), strict=True)
        return torch.cat(
            [(weights[:, None] @ (q.float() @ keys_iS).relu_())[:, 0] for q, weights in pairs]
        )

    def attend(self, q_THd: Tensor, cached: LayerCache, chosen: ChosenKeys) -> Tensor:
        """Gather the keys of a limited number of tokens at a time.

        Entries past a token's keys repeat its first key: a row of another sequence would be
        multiplied by 0, which leaves NaN and infinity as NaN.
        """
        seen_TK = (
            torch.arange(chosen.rows_TK.shape[1], device=q_THd.device) < chosen.counts_T[:, None]
        )
        rows_TK = torch.where(seen_TK, chosen.rows_TK, chosen.rows_TK[:, :1]).long()
        step = max(MAX_SCORES // (chosen.rows_TK.shape[1] * q_THd.shape[2]), 1)
        pieces = (torch.split(each, step) for each in (q_THd, rows_TK, seen_TK[:, None, None, :]))
        return torch.cat(
            [
                attend_gathered(q, cached, GatheredKeys(rows, seen))
                for q, rows, seen in zip(*pieces, strict=True)
            ]
        )


@dataclass(frozen=True, slots=True)
class SequenceSpan:
    """A sequence's tokens in a micro-batch: their location in the packed row, their positions, and
    the rows of all its keys.
    """

    tokens: slice
    positions_n: Tensor
    rows_S: Tensor


class SparseAttention:
    """The ``AttentionFn`` of a micro-batch of a model with sparse attention, over layers without
    windows.
    """

    def __init__(
        self,
        args: ModelArgs,
        cache: RollingCache,
        metadata: AttentionMetadata,
        kernels: AttentionKernels,
        batch: MicroBatch,
        table: StageSequences,
    ) -> None:
        assert args.sparse is not None
        self._args, self._topk, self._cache = args, args.sparse.index_topk, cache
        self._kernels = kernels.sparse or TorchSparseKernels()
        parts = (
            part.write_rows
            for part in (metadata.prefill[0], metadata.decode[0])
            if part is not None
        )
        # of all tokens: without a window every one is written
        self._rows_T = torch.cat(list(parts))
        ends = [
            *(c.start + c.num_tokens for c in batch.chunks),
            *(start + 1 for start in batch.decodes.starts),
        ]
        is_long = max(ends) > self._topk
        self._full = None if is_long else CachedAttention(cache, metadata, kernels)
        self._spans = (
            sequence_spans(batch, table.slots, table.rings[0], metadata.positions)
            if is_long
            else []
        )
        self._counts_T = (metadata.positions + 1).clamp(max=self._topk)
        self._chosen: dict[int, ChosenKeys] = {}  # by the layer of the indexer

    def __call__(
        self,
        layer: int,
        q_THd: Tensor,
        k_TGd: Tensor | None,
        v_TGd: Tensor | None,
        index: tuple[Tensor, Tensor, Tensor] | None = None,
        /,
    ) -> Tensor:
        """Attend in one layer, with its own keys or the keys of the layer whose cache it uses, [T,
        H, d].
        """
        cached = self._cache.layers[layer]
        if index is not None:
            self._choose(layer, *index)
        if self._full is not None:
            k_TGd = cached.read(self._rows_T)[0] if k_TGd is None else k_TGd
            return self._full(layer, q_THd, k_TGd, k_TGd)
        if k_TGd is not None:
            cached.write(self._rows_T, k_TGd, k_TGd)
        source = self._args.index_source(layer)
        assert source is not None
        return self._kernels.attend(q_THd, cached, self._chosen[source])

    def _choose(self, layer: int, q_TIi: Tensor, k_Ti: Tensor, weights_TI: Tensor) -> None:
        """Keep the indexer's keys, and choose for each token of a sequence that has more keys than
        are to be chosen.
        """
        keys_Ni = self._cache.index_keys[layer]
        keys_Ni.index_copy_(0, self._rows_T, k_Ti)
        if self._full is not None:
            return
        rows_TK = torch.zeros(len(q_TIi), self._topk, dtype=torch.int32, device=q_TIi.device)
        for span in self._spans:
            step = max(MAX_SCORES // len(span.rows_S), 1)
            pieces = (
                torch.split(each, step)
                for each in (q_TIi[span.tokens], weights_TI[span.tokens], span.positions_n)
            )
            first = span.tokens.start
            for q_nIi, weights_nI, positions_n in zip(*pieces, strict=True):
                scores_nS = self._kernels.score(q_nIi, weights_nI, keys_Ni, span.rows_S)
                rows_nK = chosen_rows(scores_nS, positions_n, span.rows_S, self._topk)
                rows_TK[first : first + len(q_nIi), : rows_nK.shape[1]] = rows_nK
                first += len(q_nIi)
        self._chosen[layer] = ChosenKeys(rows_TK, self._counts_T)


def make_attention_fn(
    args: ModelArgs,
    cache: RollingCache,
    metadata: AttentionMetadata,
    kernels: AttentionKernels,
    batch: MicroBatch,
    table: StageSequences,
) -> CachedAttention | SparseAttention:
    """Return the ``AttentionFn`` of a micro-batch for the model's attention."""
    if args.sparse is None:
        return CachedAttention(cache, metadata, kernels)
    return SparseAttention(args, cache, metadata, kernels, batch, table)


def sequence_spans(
    batch: MicroBatch, slots: dict[int, int], ring: PageRings, positions_T: Tensor
) -> list[SequenceSpan]:
    """Return the sequences of a micro-batch in the order of its packed row. Chunks of 3 and 1
    tokens, one decode: 0-2, 3, 4.
    """
    chunks = [(chunk.seq_id, chunk.start, chunk.num_tokens) for chunk in batch.chunks]
    parts = [
        *chunks,
        *(
            (seq_id, start, 1)
            for seq_id, start in zip(batch.decodes.seq_ids, batch.decodes.starts, strict=True)
        ),
    ]
    firsts = accumulate((num_tokens for _, _, num_tokens in parts), initial=0)
    spans = []
    for first, (seq_id, start, num_tokens) in zip(firsts, parts, strict=False):
        tokens, keys_S = (
            slice(first, first + num_tokens),
            torch.arange(start + num_tokens, device=positions_T.device),
        )
        rows_S = ring.rows(torch.full_like(keys_S, slots[seq_id]), keys_S)
        spans.append(SequenceSpan(tokens, positions_T[tokens], rows_S))
    return spans


def chosen_rows(scores_nS: Tensor, positions_n: Tensor, rows_S: Tensor, topk: int) -> Tensor:
    """Return the cache rows [n, min(topk, S)] of the keys with the highest scores, earlier ones
    first; the rest of a row is 0.

    Of equal scores, earlier keys are taken, so that the selection depends only on the scores.
    Scores 5 1 3 3 9 of a token at position 3, two to be selected: 5 and the first 3, which are the
    keys 0 and 2. A score that is NaN counts as the lowest, so that every row belongs to the token's
    own sequence.
    """
    num_keys, device = scores_nS.shape[1], scores_nS.device
    is_earlier_nS = torch.arange(num_keys, device=device) <= positions_n[:, None]
    scores_nS = scores_nS.masked_fill(scores_nS.isnan() | ~is_earlier_nS, -torch.inf)
    num_chosen = min(topk, num_keys)
    lowest_n1 = scores_nS.topk(num_chosen, dim=1).values[:, -1:]
    is_higher_nS, is_equal_nS = scores_nS > lowest_n1, (scores_nS == lowest_n1) & is_earlier_nS
    num_missing_n1 = num_chosen - is_higher_nS.sum(dim=1, keepdim=True)
    is_chosen_nS = is_higher_nS | (is_equal_nS & (is_equal_nS.cumsum(dim=1) <= num_missing_n1))
    tokens, keys = is_chosen_nS.nonzero(as_tuple=True)
    places = is_chosen_nS.cumsum(dim=1)[tokens, keys] - 1
    rows_nK = torch.zeros(len(scores_nS), num_chosen, dtype=torch.int32, device=device)
    rows_nK[tokens, places] = rows_S[keys].int()
    return rows_nK
