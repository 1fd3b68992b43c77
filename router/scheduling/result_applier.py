"""Application of results to sequences: accepted tokens, ends, and what is ready for its next
token.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice, repeat, takewhile
from typing import NamedTuple

from tramontane.proto.request import NOT_FINITE_TOKEN, FinishReason, request_fields
from tramontane.proto.step import NO_TOKEN, MicroBatch, StepResult
from tramontane.router.scheduling.batch_queues import DecodeQueue
from tramontane.router.scheduling.page_allocator import PageAllocator
from tramontane.router.scheduling.poison_detector import PoisonDetector
from tramontane.router.scheduling.policy import BatchBudget, BatchWork
from tramontane.router.scheduling.sequence import Sequence, SequenceStatus

logger = logging.getLogger(__name__)

# Looked up hundreds of times in a step, which through the class takes Python 3.11 four times as
# long.
RUNNING, PREEMPTED, FINISHED = (
    SequenceStatus.RUNNING,
    SequenceStatus.PREEMPTED,
    SequenceStatus.FINISHED,
)
Accepted = tuple[int, int, FinishReason | None]  # the fields of a TokenEvent


@dataclass(slots=True)
class DraftCounts:
    """Counts of drafts so far, by vLLM's names: how often sequences had any, their tokens, and
    those that were right.
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0


class InFlight(NamedTuple):
    """A micro-batch in flight; the decoding sequences in the order of columns, and the rows of each
    if any has drafts.
    """

    budget: BatchBudget
    work: BatchWork
    decoding: list[Sequence]
    counts: list[int]
    is_ahead: bool


class ResultApplier:
    """Applies the parts of a result.

    ``deschedule`` takes a sequence out of the queues, and ``release`` frees it once it is drained.
    """

    def __init__(
        self,
        allocator: PageAllocator,
        decodes: DecodeQueue,
        poison_detector: PoisonDetector,
        deschedule: Callable[[Sequence, SequenceStatus], None],
        release: Callable[[Sequence], None],
    ) -> None:
        self._allocator, self._decodes, self._poison_detector = allocator, decodes, poison_detector
        self._deschedule, self._release = deschedule, release
        self.draft_counts = DraftCounts()

    def apply_result(
        self,
        batch: MicroBatch,
        in_flight: InFlight,
        result: StepResult,
        running: Mapping[int, Sequence],
        *,
        has_ahead: bool,
    ) -> list[Accepted]:
        """Apply a result. ``has_ahead``: whether drafts are in flight that follow in another
        micro-batch.
        """
        token_ids, finished, accepted = (
            iter(result.token_ids),
            dict(result.finished),
            list[Accepted](),
        )
        for chunk in batch.chunks:
            sampled = (next(token_ids),) if chunk.needs_sample else ()
            accepted += self._apply(running[chunk.seq_id], sampled, finished.get(chunk.seq_id))
        if in_flight.counts or has_ahead:
            return accepted + self._apply_drafted(in_flight, token_ids, finished)
        return accepted + self._apply_decodes(in_flight.decoding, token_ids, finished)

    def _apply_decodes(
        self,
        decoding: list[Sequence],
        token_ids: Iterator[int],
        finished: Mapping[int, FinishReason],
    ) -> list[Accepted]:
        """Apply one token per decoding sequence; the branch that nearly all of them take is
        inlined.
        """
        accepted: list[Accepted] = []
        lengths = []  # of sequences that continue
        ready = self._decodes.ready
        for sequence, token_id in zip(decoding, token_ids, strict=True):
            num_known = sequence.num_known + 1
            continues = (
                num_known < sequence.max_len
                and token_id not in sequence.end_ids
                and sequence.seq_id not in finished
            )
            if continues and sequence.status is RUNNING:
                sequence.num_in_flight -= 1
                sequence.output_ids.append(token_id)
                sequence.num_known = num_known
                lengths.append(num_known)
                if sequence.num_placeholders:  # it became ready when this step was submitted
                    sequence.num_placeholders -= 1
                else:
                    ready.append(sequence)
                accepted.append((sequence.seq_id, token_id, None))
            else:
                accepted += self._apply(sequence, (token_id,), finished.get(sequence.seq_id))
        self._decodes.record_growth(lengths)
        return accepted

    def _apply_drafted(
        self, in_flight: InFlight, token_ids: Iterator[int], finished: Mapping[int, FinishReason]
    ) -> list[Accepted]:
        """Apply the tokens of sequences that have several rows, of which the later ones are drafts,
        or all (``is_ahead``).
        """
        accepted: list[Accepted] = []
        num_known = 0 if in_flight.is_ahead else 1
        for sequence, count in zip(in_flight.decoding, in_flight.counts or repeat(1), strict=False):
            tokens = tuple(
                takewhile(lambda token_id: token_id != NO_TOKEN, list(islice(token_ids, count)))
            )
            assert tokens or in_flight.is_ahead, "the last known token is no draft"
            self.draft_counts.num_drafts += count > num_known
            self.draft_counts.num_draft_tokens += count - num_known
            self.draft_counts.num_accepted_tokens += max(len(tokens) - num_known, 0)
            own = self._apply(sequence, tokens, finished.get(sequence.seq_id))
            sequence.num_draft_tokens += count - num_known
            if own:  # drafts after the end are not right
                sequence.num_right_drafts += min(len(tokens) - 1, len(own)) + 1 - num_known
            accepted += own
        return accepted

    def _apply(
        self, sequence: Sequence, token_ids: tuple[int, ...], finish: FinishReason | None
    ) -> list[Accepted]:
        """Apply a sequence's part of a result: the tokens that were sampled, and why the stage ends
        it after them, if any.

        It ends without a token where log-probabilities of its prompt are not finite.
        """
        sequence.num_in_flight -= 1
        if finish is FinishReason.ERROR and not token_ids:
            token_ids = (NOT_FINITE_TOKEN,)
        accepted = (
            self._accept(sequence, token_ids, finish)
            if token_ids and sequence.status is not FINISHED
            else []
        )
        if sequence.status is not RUNNING:
            self._release(sequence)
        return accepted

    def _accept(
        self, sequence: Sequence, token_ids: tuple[int, ...], finish: FinishReason | None
    ) -> list[Accepted]:
        """Accept tokens up to the first that ends the sequence."""
        accepted: list[Accepted] = []
        for number, token_id in enumerate(token_ids, 1):
            if token_id == NOT_FINITE_TOKEN:
                return [*accepted, self._end_with_error(sequence)]
            num_known = sequence.accept(token_id)
            if sequence.is_decoding:
                self._decodes.record_growth([num_known])
            reason = finish if number == len(token_ids) else None
            if reason is None and token_id in sequence.end_ids:
                reason = FinishReason.STOP
            elif reason is None and num_known >= sequence.max_len:
                reason = FinishReason.LENGTH
            accepted.append((sequence.seq_id, token_id, reason))
            if reason is not None:
                self._deschedule(sequence, FINISHED)
                break
        state = sequence.speculation  # None once it is descheduled
        is_submitted = state is not None and state.update(sequence.output_ids)
        # right drafts have been computed, or will be
        sequence.num_dispatched += len(accepted) - (not is_submitted)
        if sequence.num_placeholders:
            sequence.num_placeholders -= 1
        elif sequence.status is RUNNING and not is_submitted:
            self._decodes.add(sequence)
        if self._poison_detector.clear(sequence):
            self._deschedule(sequence, PREEMPTED)
        return accepted

    def _end_with_error(self, sequence: Sequence) -> Accepted:
        """End a sequence of which the next token's logits are not finite, and let no other one
        begin with its pages.
        """
        name, fields = sequence.request_id or "-", request_fields(sequence.request_id)
        why = (
            "a sequence of request %s ends with an error: the logits of its token at position %d"
            " are not finite"
        )
        logger.warning(why, name, sequence.num_known, extra=fields)
        self._allocator.forget(sequence)
        self._deschedule(sequence, FINISHED)
        return sequence.seq_id, NOT_FINITE_TOKEN, FinishReason.ERROR
