"""Tokens of a micro-batch: logits are processed, masked and sampled, row by row where drafts change
the mask or penalties of the next row.

Shape letters: S sampled rows, V vocabulary.
"""

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tramontane.proto.request import NOT_FINITE_TOKEN, FinishReason, SamplingParams
from tramontane.proto.step import NO_TOKEN, MicroBatch
from tramontane.workers.device.cuda import HostCopy, tensor_on
from tramontane.workers.sampling.integer_sampler import ChooseTokens
from tramontane.workers.sampling.logits_processors import LogitsProcessor
from tramontane.workers.sampling.sampler import sample
from tramontane.workers.sampling.structured_output import StructuredOutputManager

# Verification of drafts: which of the sampled tokens are right, in the order of the steps.
#
# A sampled token is right if its row was computed from right tokens. Rows of a lookahead
# micro-batch begin with drafts that earlier steps accept or reject, so tokens are accepted in the
# order in which steps have begun, by any thread.
#
# Shape letters: S sampled rows.

# position and id of the last token that was sampled for a sequence
Latest = Mapping[int, tuple[int, int]]


@dataclass(frozen=True, slots=True)
class SampledRows:
    """The rows to sample: their sequences, the positions of the new tokens, and the draft that each
    row begins with.

    A row's draft is the token that the row is computed from; None for rows without a draft.
    """

    seq_ids: tuple[int, ...]
    positions: list[int]
    drafts: list[int | None]
    has_drafts: bool

    @classmethod
    def of(cls, batch: MicroBatch) -> "SampledRows":
        """Return the rows of a micro-batch, in its order."""
        decodes = batch.decodes
        ends = [chunk.start + chunk.num_tokens for chunk in batch.chunks if chunk.needs_sample]
        positions = ends + [start + 1 for start in decodes.starts]
        if not decodes.is_lookahead and len(set(decodes.seq_ids)) == len(decodes.seq_ids):
            return cls(batch.sampled_seq_ids, positions, [None] * len(positions), has_drafts=False)
        drafts: list[int | None] = [None] * len(ends)
        previous = NO_TOKEN  # no sequence has this id
        for seq_id, token_id in zip(decodes.seq_ids, decodes.token_ids, strict=True):
            drafts.append(token_id if decodes.is_lookahead or seq_id == previous else None)
            previous = seq_id
        return cls(batch.sampled_seq_ids, positions, drafts, has_drafts=True)

    def accepted(self, token_ids: Sequence[int], latest: Latest) -> tuple[int, ...]:
        """Return the sampled tokens, with NO_TOKEN in rows whose draft, or an earlier one, is not
        the token sampled before it.

        Drafts None, 41, 42 and tokens 41, 50, 60: 41, 50, NO_TOKEN. Drafts 43, 44 for the positions
        12 and 13, and tokens 44, 45: both if ``latest`` is (12, 43) for this sequence.
        """
        if not self.has_drafts:
            return tuple(token_ids)
        accepted: list[int] = []
        for row, (draft, token_id) in enumerate(zip(self.drafts, token_ids, strict=True)):
            if draft is None:
                is_right = True
            elif row and self.seq_ids[row - 1] == self.seq_ids[row]:
                is_right = accepted[-1] == draft
            else:
                is_right = latest.get(self.seq_ids[row]) == (self.positions[row] - 1, draft)
            accepted.append(token_id if is_right else NO_TOKEN)
        return tuple(accepted)


@dataclass(slots=True)
class StepVerdict:
    """The accepted tokens of a step, once they are known."""

    rows: SampledRows
    sampled: HostCopy  # token ids [S]
    freed_seq_ids: tuple[int, ...]
    token_ids: tuple[int, ...] | None = field(default=None)
    error: Exception | None = field(default=None)


class DraftVerifier:
    """Accepts the sampled tokens of steps in their order. ``is_needed``: whether sequences may ever
    have drafts.
    """

    def __init__(self, *, is_needed: bool) -> None:
        self._is_needed = is_needed
        self._lock = threading.Lock()
        self._open: deque[StepVerdict] = deque()
        # sequences that have ended since the last step with sampled tokens
        self._freed: list[int] = []
        self._latest: dict[int, tuple[int, int]] = {}

    def update(self, batch: MicroBatch) -> None:
        """Remove the sequences that have ended, once the earlier steps are settled."""
        if self._is_needed:
            self._freed += batch.freed_seq_ids

    def begin(self, rows: SampledRows, sampled: HostCopy) -> StepVerdict:
        """Add a step. Call it in the order of the steps."""
        verdict = StepVerdict(rows, sampled, tuple(self._freed))
        self._freed.clear()
        if self._is_needed:
            with self._lock:
                self._open.append(verdict)
        return verdict

    def accepted(self, verdict: StepVerdict) -> tuple[int, ...]:
        """Return the accepted tokens of a step, with NO_TOKEN for rejected ones. Waits for the
        tokens of this and earlier steps.
        """
        if not self._is_needed:
            verdict.sampled.wait()
            return tuple(verdict.sampled.tensor.tolist())
        with self._lock:
            while verdict.token_ids is None:
                self._settle(self._open.popleft())
        if verdict.error is not None:
            raise verdict.error
        return verdict.token_ids

    def clear(self) -> None:
        """Remove all sequences; tokens of steps that have begun are rejected."""
        with self._lock:
            for verdict in self._open:
                verdict.token_ids = (NO_TOKEN,) * len(verdict.rows.seq_ids)
            self._open.clear()
            self._freed.clear()
            self._latest.clear()

    def _settle(self, verdict: StepVerdict) -> None:
        for seq_id in verdict.freed_seq_ids:
            self._latest.pop(seq_id, None)
        rows = verdict.rows
        try:
            verdict.sampled.wait()
        except Exception as error:  # of this step, regardless of the step that is read now
            verdict.token_ids, verdict.error = (NO_TOKEN,) * len(rows.seq_ids), error
            return
        verdict.token_ids = rows.accepted(verdict.sampled.tensor.tolist(), self._latest)
        accepted = zip(
            rows.seq_ids, zip(rows.positions, verdict.token_ids, strict=True), strict=True
        )
        self._latest.update(
            accepted
            if not rows.has_drafts
            else (each for each in accepted if each[1][1] != NO_TOKEN)
        )


Finished = tuple[int, FinishReason]


@dataclass(slots=True)
class SampledTokens:
    """The result of sampling: ``token_ids`` [S] on the device, and the sequences whose grammars
    have been advanced already.
    """

    token_ids: Tensor
    advanced: set[int] = field(default_factory=set)
    finished: list[Finished] = field(default_factory=list)


class TokenSampler:
    """Samples the tokens of the last stage's rows, by ``LogitsProcessor`` and
    ``StructuredOutputManager``.

    ``params_of`` returns a sequence's parameters; ``choose``: see ``sample``. If parameters make a
    row depend on the tokens before it, the rows of its drafts are sampled one after the other, up
    to the first wrong draft; all other rows are sampled at once.
    """

    def __init__(
        self,
        logits_processor: LogitsProcessor,
        structured_output: StructuredOutputManager,
        params_of: Callable[[int], SamplingParams],
        choose: ChooseTokens | None,
    ) -> None:
        self._logits_processor, self._structured_output = logits_processor, structured_output
        self._params_of, self._choose = params_of, choose

    def sample(self, logits_SV: Tensor, rows: SampledRows) -> SampledTokens:
        """Sample a token for each row. Waits for the device only where a sequence with drafts
        depends on its tokens.
        """
        if not rows.has_drafts:
            return SampledTokens(self._sample(logits_SV, rows.seq_ids, rows.positions))
        drafted = dict.fromkeys(
            s for s, draft in zip(rows.seq_ids, rows.drafts, strict=True) if draft is not None
        )
        dependent = {seq_id for seq_id in drafted if self._params_of(seq_id).needs_tokens}
        at_once = [
            row
            for row, s in enumerate(rows.seq_ids)
            if s not in dependent or rows.drafts[row] is None
        ]
        sampled = SampledTokens(
            torch.full((len(rows.seq_ids),), NO_TOKEN, dtype=torch.int64, device=logits_SV.device)
        )
        self._sample_rows(logits_SV, rows, at_once, sampled)
        for seq_id in dependent:
            self._sample_in_order(logits_SV, rows, seq_id, sampled)
        return sampled

    def finished(
        self, sampled: SampledTokens, rows: SampledRows, token_ids: Sequence[int]
    ) -> tuple[Finished, ...]:
        """Advance grammars by the accepted tokens; return the sequences that end with them."""
        own = [
            (seq_id, token_id)
            for seq_id, token_id in zip(rows.seq_ids, token_ids, strict=True)
            if token_id not in (NO_TOKEN, NOT_FINITE_TOKEN) and seq_id not in sampled.advanced
        ]
        seq_ids, tokens = [seq_id for seq_id, _ in own], [token_id for _, token_id in own]
        return (*sampled.finished, *self._structured_output.finished(seq_ids, tokens))

    def _sample_in_order(
        self, logits_SV: Tensor, rows: SampledRows, seq_id: int, sampled: SampledTokens
    ) -> None:
        """Sample the rows of one sequence up to the first wrong draft, the end of its grammar, or
        logits that are not finite.
        """
        sampled.advanced.add(seq_id)
        row = rows.seq_ids.index(seq_id)
        while True:
            token_id = int(sampled.token_ids[row])
            if token_id == NOT_FINITE_TOKEN:
                return
            if ended := self._structured_output.finished((seq_id,), (token_id,)):
                sampled.finished += ended
                return
            row += 1
            # another sequence begins with a row without one
            if row == len(rows.seq_ids) or rows.drafts[row] != token_id:
                return
            self._logits_processor.count_draft(seq_id, token_id)
            self._sample_rows(logits_SV, rows, [row], sampled)

    def _sample_rows(
        self, logits_SV: Tensor, rows: SampledRows, chosen: list[int], sampled: SampledTokens
    ) -> None:
        index = tensor_on(chosen, torch.int64, logits_SV.device)
        seq_ids, positions = (
            [rows.seq_ids[row] for row in chosen],
            [rows.positions[row] for row in chosen],
        )
        sampled.token_ids[index] = self._sample(logits_SV[index], seq_ids, positions)

    def _sample(
        self, logits_SV: Tensor, seq_ids: Sequence[int], positions: Sequence[int]
    ) -> Tensor:
        changed_SV = self._logits_processor.apply(logits_SV, seq_ids, positions)
        allowed_SV = self._structured_output.apply_masks(changed_SV, seq_ids)
        return sample(allowed_SV, [self._params_of(s) for s in seq_ids], positions, self._choose)
