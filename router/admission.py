"""What may be added to a scheduler at all, and what may be added now."""

from collections.abc import Collection
from dataclasses import dataclass

from tramontane.proto.errors import RequestError
from tramontane.router.admitted import Admitted
from tramontane.router.line import Line
from tramontane.router.pages import PageLedger
from tramontane.router.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Limits:
    """``max_queued_seqs`` and ``max_queued_tokens`` (of prompts) bound what waits for admission, of each priority by itself."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()
    max_queued_seqs: int | None = None
    max_queued_tokens: int | None = None


def check_possible(sequence: Sequence, limits: Limits, ledger: PageLedger) -> None:
    """Raises RequestError if this sequence could never run, however long it waited."""
    if not sequence.prompt_ids:
        raise RequestError("the prompt is empty; give it at least one token")
    if len(sequence.prompt_ids) >= limits.max_model_len:
        raise RequestError(
            f"the prompt has {len(sequence.prompt_ids)} tokens; with a context of "
            f"{limits.max_model_len} positions it may have at most {limits.max_model_len - 1}"
        )
    for token_id in (min(sequence.prompt_ids), max(sequence.prompt_ids)):
        if not 0 <= token_id < limits.vocab_size:
            raise RequestError(f"token id {token_id} is outside the model's vocabulary of {limits.vocab_size}")
    for token_id, _ in sequence.sampling.logit_bias:
        if not 0 <= token_id < limits.vocab_size:
            raise RequestError(f"logit_bias: token id {token_id} is outside the model's vocabulary of {limits.vocab_size}")
    assert sequence.max_len <= limits.max_model_len
    if not ledger.fits_ever(sequence):
        raise RequestError(
            f"a sequence of {sequence.max_len} tokens needs more cache pages than there are; "
            "shorten it or raise --kv-cache-memory"
        )


def overload(arriving: Collection[Sequence], waiting: Line, admitted: Admitted, limits: Limits) -> str | None:
    """Why these sequences must not be added now, or None.

    Only what would wait is counted, and of waiting ones only those of the same priority. With 3 of 64 places free, pages for
    them, and nobody as urgent waiting, 5 arrivals queue 2. Places and pages of less urgent sequences count as free.
    """
    reasons = (
        _overload([s for s in arriving if s.priority == priority], priority, waiting, admitted, limits)
        for priority in {s.priority for s in arriving}
    )
    return next(filter(None, reasons), None)


def _overload(arriving: list[Sequence], priority: int, line: Line, admitted: Admitted, limits: Limits) -> str | None:
    waiting = line.of_priority(priority)
    free = 0 if line.has_any_up_to(priority) else admitted.num_free_for(arriving, priority)
    num_queued = len(waiting) + max(len(arriving) - free, 0)
    if limits.max_queued_seqs is not None and num_queued > limits.max_queued_seqs:
        return f"{len(waiting)} sequences are waiting and at most {limits.max_queued_seqs} may"
    num_tokens = [len(s.prompt_ids) for s in (*waiting, *arriving[free:])]
    if limits.max_queued_tokens is not None and len(num_tokens) > 1 and sum(num_tokens) > limits.max_queued_tokens:
        return f"{sum(num_tokens)} prompt tokens would be waiting and at most {limits.max_queued_tokens} may"
    return None
