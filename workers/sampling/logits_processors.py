"""What sequences want changed in their logits before sampling: biases, penalties, no end yet.

The last stage keeps this for those that ask for any of it, and only for those.
Shape letters: S sampled rows, R those of them that change, V vocabulary.

Which tokens sequences have had, and how often: a row for each sequence whose sampling depends on it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tramontane.proto.request import SamplingParams
from tramontane.proto.step import Chunk, MicroBatch
from tramontane.workers.device.pinned_memory import tensor_on

FIRST_ROWS = 4


class TokenCounts:
    """Rows are taken and given back. Where none is left there are twice as many: 5 bytes per token of the vocabulary each."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._output_NV = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)
        self._prompt_NV = torch.zeros(0, vocab_size, dtype=torch.bool, device=device)
        self._free: list[int] = []

    def allocate(self) -> int:
        """A row where nothing has been counted."""
        if not self._free:
            self._grow()
        row = self._free.pop()
        self._output_NV[row] = 0
        self._prompt_NV[row] = False
        return row

    def free(self, row: int) -> None:
        self._free.append(row)

    def add_prompt(self, row: int, token_ids: tuple[int, ...]) -> None:
        self._prompt_NV[row, self._index(token_ids)] = True

    def add_output(self, rows: list[int], token_ids: list[int]) -> None:
        """One more of each of these tokens, in these rows; the same of both may come several times."""
        ones = torch.ones(len(rows), dtype=torch.int32, device=self._output_NV.device)
        self._output_NV.index_put_((self._index(rows), self._index(token_ids)), ones, accumulate=True)

    def counts(self, rows: list[int]) -> tuple[Tensor, Tensor]:
        """How often each token is in the output [R, V], and whether it is in prompt or output [R, V]."""
        index = self._index(rows)
        output_RV = self._output_NV[index]
        return output_RV, self._prompt_NV[index] | (output_RV > 0)

    def _grow(self) -> None:
        num_rows = len(self._output_NV)
        num_new = max(num_rows, FIRST_ROWS)
        self._output_NV = torch.cat([self._output_NV, self._output_NV.new_zeros(num_new, self._output_NV.shape[1])])
        self._prompt_NV = torch.cat([self._prompt_NV, self._prompt_NV.new_zeros(num_new, self._prompt_NV.shape[1])])
        self._free += range(num_rows, num_rows + num_new)

    def _index(self, numbers: list[int] | tuple[int, ...]) -> Tensor:
        return tensor_on(numbers, torch.int64, self._output_NV.device)


@dataclass(frozen=True, slots=True)
class LogitsState:
    """Of one sequence. ``row`` is its place among the token counts, None if it needs none."""

    sampling: SamplingParams
    num_prompt: int
    row: int | None
    bias_ids: Tensor
    biases: Tensor


class LogitsProcessor:
    """Tokens are counted as they come in to be computed: before token p is sampled, 0 to p-1 have come."""

    def __init__(self, vocab_size: int, eos_token_ids: Sequence[int], device: torch.device) -> None:
        self._eos = tensor_on(eos_token_ids, torch.int64, device)
        self._device = device
        self._counts = TokenCounts(vocab_size, device)
        self._wishes: dict[int, LogitsState] = {}

    @property
    def num_sequences(self) -> int:
        """That have asked for any change and live."""
        return len(self._wishes)

    def update(self, batch: MicroBatch) -> None:
        """Forget released sequences, meet new ones, count tokens."""
        for seq_id in batch.freed_seq_ids if self._wishes else ():
            self._forget(seq_id)
        for chunk in batch.chunks:
            if chunk.sampling is not None and chunk.sampling.needs_logits_processing:
                self._wishes[chunk.seq_id] = self._state(chunk.sampling, chunk.num_prompt)
        if self._wishes:
            self._count(batch)

    def clear(self) -> None:
        for seq_id in list(self._wishes):
            self._forget(seq_id)

    def apply(self, logits_SV: Tensor, seq_ids: Sequence[int], positions: Sequence[int]) -> Tensor:
        """The logits as each sequence wants them. ``positions`` are those of the tokens being chosen. What is given stays."""
        rows = [row for row, seq_id in enumerate(seq_ids) if seq_id in self._wishes] if self._wishes else []
        if not rows:  # nearly always
            return logits_SV
        wishes = [self._wishes[seq_ids[row]] for row in rows]
        index = tensor_on(rows, torch.int64, self._device)
        changed_RV = logits_SV[index]
        _add_biases(changed_RV, wishes)
        self._penalize(changed_RV, wishes)
        self._mask_eos(changed_RV, wishes, [positions[row] for row in rows])
        return logits_SV.index_copy(0, index, changed_RV)

    def _state(self, sampling: SamplingParams, num_prompt: int) -> LogitsState:
        token_ids, biases = [token_id for token_id, _ in sampling.logit_bias], [bias for _, bias in sampling.logit_bias]
        return LogitsState(
            sampling,
            num_prompt,
            self._counts.allocate() if sampling.needs_token_counts else None,
            tensor_on(token_ids, torch.int64, self._device),
            tensor_on(biases, torch.float32, self._device),
        )

    def _forget(self, seq_id: int) -> None:
        wish = self._wishes.pop(seq_id, None)
        if wish is not None and wish.row is not None:
            self._counts.free(wish.row)

    def _count(self, batch: MicroBatch) -> None:
        rows: list[int] = []
        token_ids: list[int] = []
        for chunk in batch.chunks:
            if (wish := self._wishes.get(chunk.seq_id)) is not None and wish.row is not None:
                output_ids = self._count_prompt(wish.row, wish.num_prompt, chunk)
                rows += [wish.row] * len(output_ids)
                token_ids += output_ids
        for seq_id, token_id in zip(batch.decodes.seq_ids, batch.decodes.token_ids, strict=True):
            if (wish := self._wishes.get(seq_id)) is not None and wish.row is not None:
                rows.append(wish.row)
                token_ids.append(token_id)
        if rows:
            self._counts.add_output(rows, token_ids)

    def _count_prompt(self, row: int, num_prompt: int, chunk: Chunk) -> tuple[int, ...]:
        """Returns what is output. A chunk of positions 4 to 8, where the prompt has 6: 4 and 5 are prompt, 6 to 8 output."""
        num_of_prompt = max(num_prompt - chunk.start, 0)
        if num_of_prompt:
            self._counts.add_prompt(row, chunk.token_ids[:num_of_prompt])
        return chunk.token_ids[num_of_prompt:]

    def _penalize(self, logits_RV: Tensor, wishes: Sequence[LogitsState]) -> None:
        counting = [(place, wish.row, wish.sampling) for place, wish in enumerate(wishes) if wish.row is not None]
        if not counting:
            return

        def column(values: list[float]) -> Tensor:
            return tensor_on(values, torch.float32, self._device)[:, None]

        index = tensor_on([place for place, _, _ in counting], torch.int64, self._device)
        num_output, is_known = self._counts.counts([row for _, row, _ in counting])
        logits = logits_RV[index]
        repetition = column([sampling.repetition_penalty for _, _, sampling in counting])
        logits = torch.where(is_known, torch.where(logits > 0, logits / repetition, logits * repetition), logits)
        logits -= column([sampling.frequency_penalty for _, _, sampling in counting]) * num_output
        logits -= column([sampling.presence_penalty for _, _, sampling in counting]) * (num_output > 0)
        logits_RV[index] = logits

    def _mask_eos(self, logits_RV: Tensor, wishes: Sequence[LogitsState], positions: Sequence[int]) -> None:
        """A prompt of 5 and min_tokens 2: none at positions 5 and 6."""
        early = [place for place, wish in enumerate(wishes) if positions[place] - wish.num_prompt < wish.sampling.min_tokens]
        if early:
            logits_RV[tensor_on(early, torch.int64, self._device)[:, None], self._eos] = -torch.inf


def _add_biases(logits_RV: Tensor, wishes: Sequence[LogitsState]) -> None:
    lengths = [len(wish.bias_ids) for wish in wishes]
    if not any(lengths):
        return
    places = tensor_on([place for place, length in enumerate(lengths) for _ in range(length)], torch.int64, logits_RV.device)
    token_ids = torch.cat([wish.bias_ids for wish in wishes])
    logits_RV.index_put_((places, token_ids), torch.cat([wish.biases for wish in wishes]), accumulate=True)
