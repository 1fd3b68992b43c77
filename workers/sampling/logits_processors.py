"""Logits processors: biases, penalties and ``min_tokens``. The last stage has state for sequences
that use any of these.

Shape letters: S sampled rows, R changed rows, V vocabulary, N rows of counts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tramontane.proto.request import SamplingParams
from tramontane.proto.step import PLACEHOLDER_TOKEN, Chunk, MicroBatch
from tramontane.workers.device.cuda import tensor_on

# The last token of every sequence, on the device: the input of a decode if the router does not know
# it yet.
#
# With asynchronous scheduling the router submits a step before the tokens of the previous step have
# been read. Its columns then have a ``PLACEHOLDER_TOKEN``, which the device replaces with the token
# that it has sampled, without a copy to the host and back.
#
# Shape letters: N slots of sequences, S sampled rows, B single tokens.


class LastSampledTokens:
    """The token id that was last sampled for each slot, [N]. ``slots``: the slot of each sequence,
    by its id; only read.
    """

    def __init__(self, num_slots: int, slots: Mapping[int, int], device: torch.device) -> None:
        self._ids_N = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self._slots, self._device = slots, device

    def put(self, seq_ids: Sequence[int], token_ids_S: Tensor) -> None:
        """Keep the tokens sampled for these sequences, each of which occurs once.

        A sequence without a token has ended (NOT_FINITE_TOKEN). Its rows are wasted until the
        router knows of the end, but need a token of the vocabulary as input: 0.
        """
        self._ids_N[self._index(seq_ids)] = token_ids_S.clamp(min=0)

    def of(self, seq_ids: Sequence[int]) -> Tensor:
        """Return the last tokens of the given sequences, [S]."""
        return self._ids_N[self._index(seq_ids)]

    def fill_in(self, token_ids_B: Tensor, slots_B: Tensor) -> Tensor:
        """Return the tokens [B]; placeholders are replaced by the last tokens of their slots.

        Last tokens [7, 8, 9], tokens [40, -1], slots [0, 2]: [40, 9].
        """
        return torch.where(token_ids_B < 0, self._ids_N[slots_B], token_ids_B)

    def _index(self, seq_ids: Sequence[int]) -> Tensor:
        return tensor_on([self._slots[seq_id] for seq_id in seq_ids], torch.int64, self._device)


INITIAL_ROWS = 4  # of token counts


class TokenCounts:
    """Tokens of sequences and their counts: a row per sequence, of 5 bytes per token of the
    vocabulary.

    Rows are reused; when no row is free their number doubles.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._output_NV = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)
        self._prompt_NV = torch.zeros(0, vocab_size, dtype=torch.bool, device=device)
        self._free: list[int] = []

    def allocate(self) -> int:
        """Return a row of zeros."""
        if not self._free:
            self._grow()
        row = self._free.pop()
        self._output_NV[row] = 0
        self._prompt_NV[row] = False
        return row

    def free(self, row: int) -> None:
        """Give a row back for reuse."""
        self._free.append(row)

    def add_prompt(self, row: int, token_ids: tuple[int, ...]) -> None:
        """Mark tokens as part of the prompt of a row."""
        self._prompt_NV[row, self._index(token_ids)] = True

    def add_output(self, rows: list[int], token_ids: Tensor) -> None:
        """Count one more of each token (on the device) in its row. Pairs of row and token may
        repeat.
        """
        ones = torch.ones(len(rows), dtype=torch.int32, device=self._output_NV.device)
        self._output_NV.index_put_((self._index(rows), token_ids), ones, accumulate=True)

    def counts(self, rows: list[int]) -> tuple[Tensor, Tensor]:
        """Return how often each token is in the output [R, V], and whether it is in prompt or
        output [R, V].
        """
        index = self._index(rows)
        output_RV = self._output_NV[index]
        return output_RV, self._prompt_NV[index] | (output_RV > 0)

    def _grow(self) -> None:
        num_rows = len(self._output_NV)
        num_new = max(num_rows, INITIAL_ROWS)
        self._output_NV = torch.cat(
            [self._output_NV, self._output_NV.new_zeros(num_new, self._output_NV.shape[1])]
        )
        self._prompt_NV = torch.cat(
            [self._prompt_NV, self._prompt_NV.new_zeros(num_new, self._prompt_NV.shape[1])]
        )
        self._free += range(num_rows, num_rows + num_new)

    def _index(self, numbers: list[int] | tuple[int, ...]) -> Tensor:
        return tensor_on(numbers, torch.int64, self._output_NV.device)


@dataclass(frozen=True, slots=True)
class LogitsState:
    """The changes of one sequence to its logits. ``row`` is its row of token counts, None if it
    needs none.
    """

    sampling: SamplingParams
    num_prompt: int
    row: int | None
    bias_ids: Tensor
    biases: Tensor


class LogitsProcessor:
    """Processor of the logits of all sequences that request changes.

    Tokens are counted when they enter the stage: before token p is sampled, tokens 0 to p-1 have
    been counted. Drafts are counted once they are known to be right (``count_draft``).
    """

    def __init__(self, vocab_size: int, eos_token_ids: Sequence[int], device: torch.device) -> None:
        self._eos = tensor_on(eos_token_ids, torch.int64, device)
        self._device = device
        self._counts = TokenCounts(vocab_size, device)
        self._states: dict[int, LogitsState] = {}

    def update(
        self, batch: MicroBatch, last_sampled_tokens: LastSampledTokens | None = None
    ) -> None:
        """Remove freed sequences, add new ones, count tokens; ``last_sampled_tokens`` has the
        tokens for the batch's placeholders.
        """
        for seq_id in batch.freed_seq_ids if self._states else ():
            self._forget(seq_id)
        for chunk in batch.chunks:
            if chunk.sampling is not None and chunk.sampling.needs_logits_processing:
                self._states[chunk.seq_id] = self._new_state(chunk.sampling, chunk.num_prompt)
        if self._states:
            self._count(batch, last_sampled_tokens)

    def clear(self) -> None:
        """Remove all sequences."""
        for seq_id in list(self._states):
            self._forget(seq_id)

    def apply(self, logits_SV: Tensor, seq_ids: Sequence[int], positions: Sequence[int]) -> Tensor:
        """Return the changed logits, or the input if no row changes. ``positions``: of the new
        tokens.
        """
        rows = (
            [row for row, seq_id in enumerate(seq_ids) if seq_id in self._states]
            if self._states
            else []
        )
        if not rows:  # nearly always
            return logits_SV
        states = [self._states[seq_ids[row]] for row in rows]
        index = tensor_on(rows, torch.int64, self._device)
        changed_RV = logits_SV[index]
        _add_biases(changed_RV, states)
        self._penalize(changed_RV, states)
        self._mask_eos(changed_RV, states, [positions[row] for row in rows])
        return logits_SV.index_copy(0, index, changed_RV)

    def count_draft(self, seq_id: int, token_id: int) -> None:
        """Count a draft that is right, before the token after it is sampled."""
        if (state := self._states.get(seq_id)) is not None and state.row is not None:
            self._counts.add_output([state.row], tensor_on([token_id], torch.int64, self._device))

    def _new_state(self, sampling: SamplingParams, num_prompt: int) -> LogitsState:
        token_ids, biases = (
            [token_id for token_id, _ in sampling.logit_bias],
            [bias for _, bias in sampling.logit_bias],
        )
        return LogitsState(
            sampling,
            num_prompt,
            self._counts.allocate() if sampling.needs_token_counts else None,
            tensor_on(token_ids, torch.int64, self._device),
            tensor_on(biases, torch.float32, self._device),
        )

    def _forget(self, seq_id: int) -> None:
        state = self._states.pop(seq_id, None)
        if state is not None and state.row is not None:
            self._counts.free(state.row)

    def _count(self, batch: MicroBatch, last_sampled_tokens: LastSampledTokens | None) -> None:
        rows: list[int] = []
        token_ids: list[int] = []
        for chunk in batch.chunks:
            if (state := self._states.get(chunk.seq_id)) is not None and state.row is not None:
                output_ids = self._count_prompt(state.row, state.num_prompt, chunk)
                rows += [state.row] * len(output_ids)
                token_ids += output_ids
        # rows of counts, by sequence, whose tokens are on the device
        previous, sampled = None, dict[int, int]()
        for seq_id, token_id in zip(batch.decodes.seq_ids, batch.decodes.token_ids, strict=True):
            is_draft, previous = seq_id == previous, seq_id
            if is_draft or (state := self._states.get(seq_id)) is None or state.row is None:
                continue
            if token_id == PLACEHOLDER_TOKEN:
                sampled[seq_id] = state.row
            else:
                rows.append(state.row)
                token_ids.append(token_id)
        if rows:
            self._counts.add_output(rows, tensor_on(token_ids, torch.int64, self._device))
        if sampled:
            assert last_sampled_tokens is not None, "the last stage has sampled them"
            self._counts.add_output(list(sampled.values()), last_sampled_tokens.of(list(sampled)))

    def _count_prompt(self, row: int, num_prompt: int, chunk: Chunk) -> tuple[int, ...]:
        """Count the prompt tokens of a chunk; return its output tokens.

        A chunk of positions 4 to 8 with a prompt of 6 tokens: 4 and 5 are prompt, 6 to 8 output.
        The first chunk has its cached prefix, too.
        """
        token_ids = chunk.skipped_ids + chunk.token_ids
        num_of_prompt = max(num_prompt - (chunk.start - len(chunk.skipped_ids)), 0)
        if num_of_prompt:
            self._counts.add_prompt(row, token_ids[:num_of_prompt])
        return token_ids[num_of_prompt:]

    def _penalize(self, logits_RV: Tensor, states: Sequence[LogitsState]) -> None:
        """Apply the repetition, frequency and presence penalties."""
        counting = [
            (i, state.row, state.sampling)
            for i, state in enumerate(states)
            if state.row is not None
        ]
        if not counting:
            return

        def column(values: list[float]) -> Tensor:
            return tensor_on(values, torch.float32, self._device)[:, None]

        index = tensor_on([i for i, _, _ in counting], torch.int64, self._device)
        num_output, is_known = self._counts.counts([row for _, row, _ in counting])
        logits = logits_RV[index]
        repetition = column([sampling.repetition_penalty for _, _, sampling in counting])
        logits = torch.where(
            is_known, torch.where(logits > 0, logits / repetition, logits * repetition), logits
        )
        logits -= column([sampling.frequency_penalty for _, _, sampling in counting]) * num_output
        logits -= column([sampling.presence_penalty for _, _, sampling in counting]) * (
            num_output > 0
        )
        logits_RV[index] = logits

    def _mask_eos(
        self, logits_RV: Tensor, states: Sequence[LogitsState], positions: Sequence[int]
    ) -> None:
        """Ban tokens that end the output before ``min_tokens``. A prompt of 5 and min_tokens 2: at
        positions 5 and 6.
        """
        early = [
            i
            for i, state in enumerate(states)
            if positions[i] - state.num_prompt < state.sampling.min_tokens
        ]
        if early:
            logits_RV[tensor_on(early, torch.int64, self._device)[:, None], self._eos] = -torch.inf
        stops = [(i, token_id) for i in early for token_id in states[i].sampling.stop_token_ids]
        if stops:
            rows, token_ids = zip(*stops, strict=True)
            logits_RV[
                tensor_on(rows, torch.int64, self._device),
                tensor_on(token_ids, torch.int64, self._device),
            ] = -torch.inf


def _add_biases(logits_RV: Tensor, states: Sequence[LogitsState]) -> None:
    lengths = [len(state.bias_ids) for state in states]
    if not any(lengths):
        return
    rows = tensor_on(
        [row for row, length in enumerate(lengths) for _ in range(length)],
        torch.int64,
        logits_RV.device,
    )
    token_ids = torch.cat([state.bias_ids for state in states])
    logits_RV.index_put_(
        (rows, token_ids), torch.cat([state.biases for state in states]), accumulate=True
    )
