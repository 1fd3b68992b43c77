"""Log-probabilities of sampled tokens and of prompts, for the sequences that ask for them.

Shape letters: T rows of a chunk, S sampled rows, R rows with log-probabilities, V vocabulary, D
model width.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tramontane.proto.request import NOT_FINITE_TOKEN, Logprobs
from tramontane.proto.step import NO_TOKEN, Chunk, MicroBatch
from tramontane.workers.device.cuda import tensor_on

# Sums of probabilities that are exact, and so do not depend on the order in which a device adds.
#
# On GPUs PyTorch's sums and running sums of a row depend on how many rows there are. Here every
# probability is a whole number in float64, the best token's ``UNITS``: all sums up to 2**53 are
# exact.
#
# Shape letters: S rows, V vocabulary.

UNITS = 2.0**34  # of the likeliest token: 2**19 tokens that are as likely add up to 2**53


def exact_weights(logits_SV: Tensor) -> Tensor:
    """Return weights proportional to the probabilities, [S, V]: integers in float64, ``UNITS`` for
    the best token.

    Logits [0, -1, -30]: e^-1 of 2**34 is 6320120674.8, so 6320120675; e^-30 of 2**34 is 0.0016, so
    0.
    """
    best_S1 = logits_SV.amax(-1, keepdim=True)
    return ((logits_SV.double() - best_S1.double()).exp() * UNITS).round()


def exact_logsumexp(logits_SV: Tensor) -> Tensor:
    """Return the logarithm of the sum of each row's exponentials, [S, 1]."""
    best_S1 = logits_SV.amax(-1, keepdim=True).double()
    return (best_S1 + (exact_weights(logits_SV).sum(-1, keepdim=True) / UNITS).log()).to(
        logits_SV.dtype
    )


MIN_LOGPROB = -9999.0  # for tokens of probability zero, as OpenAI does: infinity is not JSON
MAX_LOGITS = 2**22  # that are scored or sorted at a time, in float32: 16 MiB

Top = tuple[tuple[int, float], ...]
# The log-probabilities of a sampled row, by its number, or of a prompt, by its sequence; None: its
# logits are not finite.
Scored = tuple[int, Logprobs | None]
Head = Callable[[Tensor], Tensor]


def token_logprobs(
    logits_RV: Tensor,
    token_ids: Sequence[int],
    num_top: Sequence[int],
    has_exact_sums: bool = False,
) -> list[tuple[float, Top] | None]:
    """Return, for each row, the log-probability of one token, and the ``num_top`` likeliest tokens
    with their log-probabilities.

    The entry is None for a row whose logits are not finite, see ``sample``. Log-probabilities and
    the choice between equal logits do not depend on the other rows; on GPUs this holds only with
    ``has_exact_sums``.
    """
    totals_R1 = exact_logsumexp(logits_RV) if has_exact_sums else _logsumexp(logits_RV)
    totals_R1 = torch.where(totals_R1.isfinite(), totals_R1, torch.nan)
    chosen_R1 = logits_RV.gather(1, tensor_on(token_ids, torch.int64, logits_RV.device)[:, None])
    most = min(max(num_top), logits_RV.shape[1])
    if has_exact_sums:
        values_RV, ids_RV = logits_RV.sort(dim=-1, descending=True, stable=True)
        best_Rn, best_ids_Rn = values_RV[:, :most], ids_RV[:, :most]
    else:
        best_Rn, best_ids_Rn = _likeliest(logits_RV, [min(count, most) for count in num_top])
    logprobs = torch.cat([chosen_R1, best_Rn], dim=1) - totals_R1
    rows = zip(
        logprobs.clamp(min=MIN_LOGPROB, max=0.0).tolist(),
        best_ids_Rn.tolist(),
        num_top,
        strict=True,
    )
    return [
        None if math.isnan(chosen) else (chosen, tuple(zip(ids[:n], top[:n], strict=True)))
        for (chosen, *top), ids, n in rows
    ]


def _logsumexp(logits_RV: Tensor) -> Tensor:
    """Return the logarithm of the sum of each row's exponentials, [R, 1].

    On a CPU, PyTorch splits the sum of a single row between threads, but not the sums of several
    rows: two copies are summed like other rows.
    """
    is_single = len(logits_RV) == 1 and logits_RV.device.type == "cpu"
    return (logits_RV.repeat(2, 1) if is_single else logits_RV).logsumexp(-1, keepdim=True)[
        : len(logits_RV)
    ]


def _likeliest(logits_RV: Tensor, counts: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return the largest logits of each row and their tokens, [R, n]; the first ``counts`` entries
    of a row are defined.

    PyTorch's choice between equal logits, and their order, depend on the number that it has to
    find. In bfloat16 many logits are equal. So rows with equal counts are computed together,
    separately from the others.
    """
    if len(set(counts)) == 1:
        best = logits_RV.topk(counts[0], dim=-1)
        return best.values, best.indices
    best_Rn = logits_RV.new_zeros(len(counts), max(counts))
    ids_Rn = torch.zeros_like(best_Rn, dtype=torch.int64)
    for count in set(counts):
        rows = tensor_on(
            [row for row, own in enumerate(counts) if own == count], torch.int64, logits_RV.device
        )
        best_Rn[rows, :count], ids_Rn[rows, :count] = logits_RV[rows].topk(count, dim=-1)
    return best_Rn, ids_Rn


@dataclass(slots=True)
class PendingPromptLogprobs:
    """A prompt whose log-probabilities are not complete.

    ``last_row_1D`` is the last row of hidden states so far, which predicts the first token of the
    next chunk.
    """

    num_top: int
    num_prompt: int
    last_row_1D: Tensor


class LogprobTracker:
    """State of the last stage for sequences that request log-probabilities; other sequences have
    none.
    """

    def __init__(self, vocab_size: int, has_exact_sums: bool = False) -> None:
        self._has_exact_sums = has_exact_sums  # see ``token_logprobs``
        self._max_rows = max(MAX_LOGITS // vocab_size, 1)
        self._num_top: dict[int, int] = {}  # of sampled tokens, by sequence
        self._prompts: dict[int, PendingPromptLogprobs] = {}

    @property
    def num_sequences(self) -> int:
        """Sequences that request log-probabilities of sampled tokens, or whose prompt is not
        complete.
        """
        return len(self._num_top.keys() | self._prompts.keys())

    def update(self, batch: MicroBatch) -> None:
        """Remove freed sequences, add new ones."""
        for seq_id in batch.freed_seq_ids:
            self._num_top.pop(seq_id, None)
            self._prompts.pop(seq_id, None)
        for chunk in batch.chunks:
            if chunk.sampling is None:
                continue
            if chunk.sampling.logprobs is not None:
                self._num_top[chunk.seq_id] = chunk.sampling.logprobs
            if chunk.sampling.prompt_logprobs is not None:
                self._prompts[chunk.seq_id] = PendingPromptLogprobs(
                    chunk.sampling.prompt_logprobs, chunk.num_prompt, torch.empty(0)
                )

    def clear(self) -> None:
        """Remove all sequences."""
        self._num_top.clear()
        self._prompts.clear()

    def sampled(
        self,
        logits_SV: Tensor,
        token_ids: Sequence[int],
        seq_ids: Sequence[int],
        positions: Sequence[int],
    ) -> Iterator[Scored]:
        """Yield the log-probabilities of tokens that were just chosen, by the unprocessed logits of
        the model.
        """
        asked = (
            [row for row, seq_id in enumerate(seq_ids) if seq_id in self._num_top]
            if self._num_top
            else []
        )
        rows = [row for row in asked if token_ids[row] not in (NO_TOKEN, NOT_FINITE_TOKEN)]
        if not rows:  # nearly always
            return
        for first in range(0, len(rows), self._max_rows):
            some = rows[first : first + self._max_rows]
            num_top = [self._num_top[seq_ids[row]] for row in some]
            logits_RV = logits_SV[tensor_on(some, torch.int64, logits_SV.device)]
            logprobs = token_logprobs(
                logits_RV, [token_ids[row] for row in some], num_top, self._has_exact_sums
            )
            for row, found in zip(some, logprobs, strict=True):
                yield (
                    row,
                    found and Logprobs(seq_ids[row], positions[row], (found[0],), (found[1],)),
                )

    def prompts(self, batch: MicroBatch, hidden_TD: Tensor, head: Head) -> Iterator[Scored]:
        """Yield the log-probabilities of the prompt tokens of a micro-batch."""
        row = 0
        for chunk in batch.chunks if self._prompts else ():
            if chunk.seq_id in self._prompts:
                yield from self._of_chunk(chunk, hidden_TD[row : row + chunk.num_tokens], head)
            row += chunk.num_tokens

    def _of_chunk(self, chunk: Chunk, hidden_TD: Tensor, head: Head) -> Iterator[Scored]:
        """Yield the log-probabilities of one chunk. A token is predicted by the previous row, which
        may be in the previous chunk.

        A prompt of 6 in chunks of 4 and 2: tokens 1, 2, 3 by rows 0, 1, 2; row 3 is kept; then
        tokens 4 and 5 by rows 3 and 4. Row 5 predicts the first sampled token.
        """
        prompt = self._prompts[chunk.seq_id]
        token_ids = chunk.token_ids[: prompt.num_prompt - chunk.start]
        if chunk.start == 0:
            token_ids, rows_RD = token_ids[1:], hidden_TD[: len(token_ids) - 1]
        else:
            rows_RD = torch.cat([prompt.last_row_1D, hidden_TD[: len(token_ids) - 1]])
        prompt.last_row_1D = hidden_TD[-1:].clone()  # a view would keep all rows in memory
        if chunk.start + chunk.num_tokens >= prompt.num_prompt:
            del self._prompts[chunk.seq_id]
        found: list[tuple[float, Top] | None] = []
        for first in range(0, len(token_ids), self._max_rows):
            some_ids = token_ids[first : first + self._max_rows]
            logits_RV = head(rows_RD[first : first + self._max_rows])
            found += token_logprobs(
                logits_RV, some_ids, [prompt.num_top] * len(some_ids), self._has_exact_sums
            )
        pairs = [pair for pair in found if pair is not None]
        if len(pairs) < len(found):
            self._prompts.pop(chunk.seq_id, None)  # the sequence ends
            yield chunk.seq_id, None
        elif pairs:
            logprobs, top = zip(*pairs, strict=True)
            yield chunk.seq_id, Logprobs(chunk.seq_id, max(chunk.start, 1), logprobs, top)
