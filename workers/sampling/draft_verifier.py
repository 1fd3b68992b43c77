"""Verification of drafts: which of the sampled tokens are right, in the order of the steps.

A sampled token is right if its row was computed from right tokens. Rows of a micro-batch that is
ahead begin with drafts of which the steps before it decide, so tokens are accepted in the order in
which steps have begun, by any thread.

Shape letters: S sampled rows.
"""

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tramontane.proto.step import NO_TOKEN, MicroBatch
from tramontane.workers.device.pinned_memory import HostCopy

# position and id of the last token that was sampled for a sequence
Latest = Mapping[int, tuple[int, int]]


@dataclass(frozen=True, slots=True)
class SampledRows:
    """The rows that are sampled: their sequences, the positions of the new tokens, and the draft
    that each row begins with.

    A row's draft is the token that the row is computed from; it is None for all rows but those of
    drafts.
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
        if not decodes.is_ahead and len(set(decodes.seq_ids)) == len(decodes.seq_ids):
            return cls(batch.sampled_seq_ids, positions, [None] * len(positions), has_drafts=False)
        drafts: list[int | None] = [None] * len(ends)
        previous = NO_TOKEN  # no sequence has this id
        for seq_id, token_id in zip(decodes.seq_ids, decodes.token_ids, strict=True):
            drafts.append(token_id if decodes.is_ahead or seq_id == previous else None)
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
    """What of a step is accepted, once that is known."""

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
        """Forget the sequences that have ended, once the steps before this one are settled."""
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
        """Return the accepted tokens of a step, with NO_TOKEN for the others. Waits for the tokens
        of this and earlier steps.
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
        """Forget all sequences; nothing of the steps that have begun is accepted."""
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
        except Exception as error:  # of this step, whichever is read now
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
