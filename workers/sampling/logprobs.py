"""Log-probabilities of sampled tokens and of prompts, for the sequences that ask.

Shape letters: T rows of a chunk, S sampled rows, R rows that are told, V vocabulary, D model width.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tramontane.proto.request import Logprobs
from tramontane.proto.step import Chunk, MicroBatch
from tramontane.workers.device.pinned_memory import tensor_on

LEAST_LOGPROB = -9999.0  # as OpenAI has it, for what has no probability; infinity is not JSON
MAX_LOGITS = 2**22  # of a prompt's at once, in float32: 16 MiB

Top = tuple[tuple[int, float], ...]
Head = Callable[[Tensor], Tensor]


def token_logprobs(logits_RV: Tensor, token_ids: Sequence[int], num_top: Sequence[int]) -> list[tuple[float, Top]]:
    """Of each row: the log-probability of one token, and its ``num_top`` likeliest ones."""
    totals_R1 = logits_RV.logsumexp(-1, keepdim=True)
    chosen_R1 = logits_RV.gather(1, tensor_on(token_ids, torch.int64, logits_RV.device)[:, None])
    best = logits_RV.topk(min(max(num_top), logits_RV.shape[1]), dim=-1)
    told = torch.cat([chosen_R1, best.values], dim=1) - totals_R1
    told = told.nan_to_num(nan=LEAST_LOGPROB).clamp(min=LEAST_LOGPROB, max=0.0)
    rows = zip(told.tolist(), best.indices.tolist(), num_top, strict=True)
    return [(own[0], tuple(zip(ids[:most], own[1:][:most], strict=True))) for own, ids, most in rows]


@dataclass(slots=True)
class PendingPromptLogprobs:
    """One that is being told. ``last_row_1D``: of its hidden states so far, which the next chunk's first token is judged by."""

    num_top: int
    num_prompt: int
    last_row_1D: Tensor


class LogprobTracker:
    """What the last stage keeps of the sequences that ask; of the others nothing."""

    def __init__(self, vocab_size: int) -> None:
        self._rows_at_once = max(MAX_LOGITS // vocab_size, 1)
        self._num_top: dict[int, int] = {}  # of sampled tokens, by sequence
        self._prompts: dict[int, PendingPromptLogprobs] = {}

    @property
    def num_sequences(self) -> int:
        """That ask for sampled tokens, or whose prompt is not told to its end."""
        return len(self._num_top.keys() | self._prompts.keys())

    def update(self, batch: MicroBatch) -> None:
        """Forget released sequences, meet new ones."""
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
        self._num_top.clear()
        self._prompts.clear()

    def sampled(
        self, logits_SV: Tensor, token_ids: Sequence[int], seq_ids: Sequence[int], positions: Sequence[int]
    ) -> Iterator[Logprobs]:
        """Of tokens that have just been chosen for these positions; ``logits_SV`` as the model gave them."""
        rows = [row for row, seq_id in enumerate(seq_ids) if seq_id in self._num_top] if self._num_top else []
        if not rows:  # nearly always
            return
        num_top = [self._num_top[seq_ids[row]] for row in rows]
        logits_RV = logits_SV[tensor_on(rows, torch.int64, logits_SV.device)]
        told = token_logprobs(logits_RV, [token_ids[row] for row in rows], num_top)
        for row, (logprob, top) in zip(rows, told, strict=True):
            yield Logprobs(seq_ids[row], positions[row], (logprob,), (top,))

    def prompts(self, batch: MicroBatch, hidden_TD: Tensor, head: Head) -> Iterator[Logprobs]:
        """Of the prompts' tokens that a micro-batch has brought."""
        row = 0
        for chunk in batch.chunks if self._prompts else ():
            if chunk.seq_id in self._prompts:
                yield from self._of_chunk(chunk, hidden_TD[row : row + chunk.num_tokens], head)
            row += chunk.num_tokens

    def _of_chunk(self, chunk: Chunk, hidden_TD: Tensor, head: Head) -> Iterator[Logprobs]:
        """A token's probability comes from the row before it, which may have been the last one of the chunk before.

        A prompt of 6 in chunks of 4 and 2: tokens 1, 2, 3 by rows 0, 1, 2; row 3 is kept; then tokens 4 and 5 by rows 3 and 4.
        Row 5 says what is sampled.
        """
        prompt = self._prompts[chunk.seq_id]
        token_ids = chunk.token_ids[: prompt.num_prompt - chunk.start]
        if chunk.start == 0:
            token_ids, rows_RD = token_ids[1:], hidden_TD[: len(token_ids) - 1]
        else:
            rows_RD = torch.cat([prompt.last_row_1D, hidden_TD[: len(token_ids) - 1]])
        prompt.last_row_1D = hidden_TD[-1:].clone()  # not all the others with it
        if chunk.start + chunk.num_tokens >= prompt.num_prompt:
            del self._prompts[chunk.seq_id]
        told: list[tuple[float, Top]] = []
        for first in range(0, len(token_ids), self._rows_at_once):
            some_ids = token_ids[first : first + self._rows_at_once]
            logits_RV = head(rows_RD[first : first + self._rows_at_once])
            told += token_logprobs(logits_RV, some_ids, [prompt.num_top] * len(some_ids))
        if told:
            logprobs, top = zip(*told, strict=True)
            yield Logprobs(chunk.seq_id, max(chunk.start, 1), logprobs, top)
