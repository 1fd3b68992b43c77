"""Scheduling policies: how much work the next micro-batch gets, how work is counted, and the
fallback after a defect.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from tramontane.proto.step import MicroBatch, StageTiming

T = TypeVar("T")

logger = logging.getLogger(__name__)

ASSUMED_TOKEN_S = 1e-3
ASSUMED_BREAK_EVEN = 0.5  # of drafts, while no times are known
NEVER = 2.0  # no draft reaches this acceptance probability


@dataclass(frozen=True, slots=True)
class BatchWork:
    """The work of a micro-batch in one stage, counted so that time is about linear in it."""

    prefill_tokens: int = 0
    prefill_keys: int = 0  # that all prompt tokens together attend to
    decodes: int = 0
    decode_keys: int = 0  # that all decodes together attend to

    def __add__(self, other: "BatchWork") -> "BatchWork":
        """Return the work of both."""
        return BatchWork(
            self.prefill_tokens + other.prefill_tokens,
            self.prefill_keys + other.prefill_keys,
            self.decodes + other.decodes,
            self.decode_keys + other.decode_keys,
        )


class WorkEstimator:
    """Estimates the keys that tokens attend to, from the window of each kind of layer; without one,
    the context's length.
    """

    def __init__(self, windows: Sequence[int]) -> None:
        self._windows = tuple(windows)
        self._shortest, self._longest = min(windows), max(windows)

    def visible_keys(self, num_positions: int) -> int:
        """Return the keys that the last of ``num_positions`` positions sees, averaged over the
        kinds of windows.

        Windows of 4 and 10: the third position sees 3, the eighth (4 + 8) // 2 = 6, the twelfth (4
        + 10) // 2 = 7.
        """
        if num_positions <= self._shortest:
            return num_positions
        return sum(min(window, num_positions) for window in self._windows) // len(self._windows)

    def visible_keys_gained(self, num_positions: Sequence[int]) -> int:
        """Return the sum, over sequences of these lengths, of the additional keys that the last
        position sees compared with the one before.
        """
        if not num_positions or max(num_positions) <= self._shortest:
            return len(num_positions)
        return sum(
            self.visible_keys(n) - self.visible_keys(n - 1)
            for n in num_positions
            if n <= self._longest
        )

    def work_of(self, batch: MicroBatch) -> BatchWork:
        """Return a micro-batch's work. A prompt's token sees the positions before its chunk, and on
        average half of the chunk.
        """
        tokens = keys = 0
        single = [start + 1 for start in batch.decodes.starts]
        for chunk in batch.chunks:
            if (length := len(chunk.token_ids)) == 1:
                single.append(chunk.start + 1)
            else:
                tokens += length
                keys += length * self.visible_keys(chunk.start) + length * (length + 1) // 2
        if single and max(single) > self._shortest:
            single = [self.visible_keys(num_positions) for num_positions in single]
        return BatchWork(tokens, keys, len(single), sum(single))

    def work_left(self, sequences: Iterable[tuple[int, int, int]]) -> BatchWork:
        """Return the work of sequences: how many tokens are submitted, how many known, and how many
        more are expected.

        3 of 8 tokens submitted, 2 expected, no window: 5 prompt tokens, which see 3 * 5 + 15 keys,
        and 2 decodes, which see 16.
        """
        tokens = keys = decodes = decode_keys = 0
        for start, known, expected in sequences:
            length = known - start
            tokens += length
            keys += length * self.visible_keys(start) + length * (length + 1) // 2
            decodes += expected
            decode_keys += expected * self.visible_keys(known)
        return BatchWork(tokens, keys, decodes, decode_keys)


@dataclass(frozen=True, slots=True)
class SchedulerState:
    """The work that exists at this moment."""

    num_in_flight: int  # micro-batches with known tokens
    num_decoding: int  # sequences past their prompts
    decoding_keys: int  # visible to these sequences in total
    num_ready: int  # sequences whose next token can be submitted now
    ready_keys: Iterable[int]  # visible to each ready sequence, in scheduling order
    pending_tokens: int  # of prompts, admitted and not yet submitted
    prefill_start: int  # positions before the first pending token
    waiting_tokens: int  # of sequences that are not admitted
    free_share: float  # of the scarcest pages
    num_lookahead: int = 0  # micro-batches in flight with drafts only
    # the first pending tokens, if they are more urgent than another running sequence, which should
    # yield
    urgent_tokens: int = 0


@dataclass(frozen=True, slots=True)
class BatchBudget:
    """The most decode tokens and prompt tokens that the next micro-batch may have. Only the policy
    itself reads the other fields.
    """

    decodes: int
    prefill_tokens: int
    # number of micro-batches that decodes are divided into; 0 if this one may have prompt tokens
    decode_groups: int = 0
    round_s: float = 0.0  # expected time of a round of such micro-batches
    # nothing else was in flight, and its decodes continue those of the last micro-batch
    pipeline_was_idle: bool = False


NO_BUDGET = BatchBudget(0, 0)


class Policy(Protocol):
    """Decides the size of every micro-batch."""

    # whether a prompt's next chunk may be submitted while its last one is in flight
    overlaps_chunks: bool

    @property
    def max_in_flight(self) -> int:
        """Micro-batches with known tokens in flight, at most."""

    def choose_budget(self, state: SchedulerState) -> BatchBudget | None:
        """Return the budget of the next micro-batch, or None to wait for a result."""

    def observe(self, budget: BatchBudget, work: BatchWork, timings: Sequence[StageTiming]) -> None:
        """Update the policy with the time of each stage for a micro-batch of this budget. Called in
        the order of submission.
        """

    def restart(self) -> None:
        """Reset the times of the stages' last work: they restart, some perhaps as other processes
        with other clocks.
        """

    def seconds(self, work: BatchWork) -> float:
        """Return roughly how long the busiest stage takes for this work, without the fixed time of
        a micro-batch.
        """

    def draft_break_even(self, state: SchedulerState) -> float:
        """Return the probability of being right from which a draft is worth its row in the next
        micro-batch; ``NEVER``: none is.
        """

    def lookahead_break_even(self, state: SchedulerState) -> float:
        """Return the probability of being right from which the first draft of a micro-batch of
        drafts only is worth it; ``NEVER``: none is.
        """


class FixedInFlightPolicy:
    """Keeps M micro-batches in flight and spreads decodes evenly over them. Urgent prompts do not
    share micro-batches with other prompts.
    """

    overlaps_chunks = True

    def __init__(self, max_in_flight: int, max_tokens: int) -> None:
        self._max_in_flight, self._max_tokens = max_in_flight, max_tokens

    @property
    def max_in_flight(self) -> int:
        """M, as it was given."""
        return self._max_in_flight

    def choose_budget(self, state: SchedulerState) -> BatchBudget | None:
        """See ``Policy``."""
        if state.num_in_flight >= self._max_in_flight:
            return None
        max_decodes = self._max_tokens - reserved_for_prefill(state, self._max_tokens)
        decodes = min(-(-state.num_decoding // self._max_in_flight), max_decodes, state.num_ready)
        return BatchBudget(
            decodes, min(state.urgent_tokens or self._max_tokens, self._max_tokens - decodes)
        )

    def observe(self, budget: BatchBudget, work: BatchWork, timings: Sequence[StageTiming]) -> None:
        """Do nothing: the number in flight is fixed."""

    def restart(self) -> None:
        """Do nothing: there is no state."""

    def seconds(self, work: BatchWork) -> float:
        """See ``Policy``: no times are known, so all tokens count the same."""
        return assumed_seconds(work)

    def draft_break_even(self, state: SchedulerState) -> float:
        """See ``Policy``."""
        return NEVER if has_prompts(state) else ASSUMED_BREAK_EVEN

    def lookahead_break_even(self, state: SchedulerState) -> float:
        """See ``Policy``."""
        is_full = state.num_in_flight + state.num_lookahead >= self._max_in_flight
        return NEVER if is_full else self.draft_break_even(state)


class GuardedPolicy:
    """Calls a policy until it raises or leaves the pipeline idle; from then on a
    ``FixedInFlightPolicy`` decides.

    The fallback keeps as many micro-batches in flight as the policy did when this object was made,
    before any measurement. It decides for as long as the scheduler exists: the state of a policy
    that has failed cannot be trusted, and calling it again would fail again. Tests fail on the one
    message that is logged (``conftest.py``).
    """

    def __init__(self, policy: Policy, max_tokens: int) -> None:
        self.policy = policy
        self.overlaps_chunks = policy.overlaps_chunks
        self.failure = ""  # the exception of the policy; "" while it works
        self._fallback = FixedInFlightPolicy(policy.max_in_flight, max_tokens)

    @property
    def max_in_flight(self) -> int:
        """See ``Policy``."""
        return self.policy.max_in_flight

    def choose_budget(self, state: SchedulerState) -> BatchBudget | None:
        """See ``Policy``."""
        return self._call(lambda policy: _checked(policy.choose_budget(state), state))

    def observe(self, budget: BatchBudget, work: BatchWork, timings: Sequence[StageTiming]) -> None:
        """See ``Policy``."""
        self._call(lambda policy: policy.observe(budget, work, timings))

    def restart(self) -> None:
        """See ``Policy``."""
        self._call(lambda policy: policy.restart())

    def seconds(self, work: BatchWork) -> float:
        """See ``Policy``."""
        return self._call(lambda policy: policy.seconds(work))

    def draft_break_even(self, state: SchedulerState) -> float:
        """See ``Policy``."""
        return self._call(lambda policy: policy.draft_break_even(state))

    def lookahead_break_even(self, state: SchedulerState) -> float:
        """See ``Policy``."""
        return self._call(lambda policy: policy.lookahead_break_even(state))

    def _call(self, ask: Callable[[Policy], T]) -> T:
        try:
            return ask(self.policy)
        except Exception as error:
            if self.policy is self._fallback:  # there is no further fallback
                raise
            self.failure = f"{type(error).__name__}: {error}"
            logger.exception(
                "the scheduling policy %s failed with a defect; no request ends, but until this"
                " router is restarted %d micro-batches are kept in flight and cut without predicted"
                " times, which may cost throughput",
                type(self.policy).__name__,
                self._fallback.max_in_flight,
            )
            self.policy = self._fallback
        return ask(self.policy)


def has_prompts(state: SchedulerState) -> bool:
    """Return whether prompts could use the time that drafts would take."""
    return bool(state.pending_tokens or state.waiting_tokens)


def assumed_seconds(work: BatchWork) -> float:
    """Return an assumed time for this work while no time is known: enough to compare pipelines with
    each other.
    """
    return ASSUMED_TOKEN_S * (work.prefill_tokens + work.decodes)


def reserved_for_prefill(state: SchedulerState, max_tokens: int) -> int:
    """Return how many tokens of a micro-batch decodes leave to prompts: one, or up to seven eighths
    if urgent prompts need them.

    Of 64 tokens, urgent prompts of 20 tokens get 20, and urgent prompts of 200 get 56. If there is
    one token, a decode takes it.
    """
    if not state.pending_tokens or max_tokens == 1:
        return 0
    return max(min(state.urgent_tokens, max_tokens * 7 // 8), 1)


def _checked(budget: BatchBudget | None, state: SchedulerState) -> BatchBudget | None:
    """Assert that the counts are not negative, and that work is in flight or submitted if there is
    any.
    """
    decodes, prefill_tokens = (budget.decodes, budget.prefill_tokens) if budget else (0, 0)
    assert min(decodes, prefill_tokens) >= 0, (
        f"a budget of {decodes} decodes and {prefill_tokens} prompt tokens"
    )
    is_idle = not (state.num_in_flight or state.num_lookahead)
    may_run = (state.num_ready and decodes) or (state.pending_tokens and prefill_tokens)
    assert may_run or not is_idle or not (state.num_ready or state.pending_tokens), (
        f"nothing is to run of {state}"
    )
    return budget
