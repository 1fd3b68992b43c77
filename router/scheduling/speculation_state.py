"""Speculation of one sequence: its drafts, and their acceptance rate."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Protocol

from tramontane.proto.plan import SpeculativeConfig

DECAY = 0.95  # decay of a draft's weight with each later draft
PRIOR_RIGHT, PRIOR_WRONG = 1.0, 1.0  # drafts that count as observed before the first
MAX_ACCEPTANCE = 0.98  # upper limit of the estimate


@dataclass(slots=True)
class DraftCounts:
    """Counts so far, by vLLM's names: drafts (one for each sequence with draft tokens in a
    micro-batch), draft tokens, and accepted draft tokens.
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0

    def add(self, num_drafts: int, num_right: int) -> None:
        """Count the drafts that a sequence had in one micro-batch, perhaps none."""
        self.num_drafts += num_drafts > 0
        self.num_draft_tokens += num_drafts
        self.num_accepted_tokens += num_right


class AcceptanceEstimate:
    """The probability that a draft is right if all drafts before it are: a mean with exponential
    forgetting.
    """

    def __init__(self) -> None:
        self._right, self._wrong = PRIOR_RIGHT, PRIOR_WRONG

    @property
    def probability(self) -> float:
        """The estimate. Half at first; after four right drafts (0.815 + 3.710) / (0.815 + 0.815 +
        3.710) = 0.85.
        """
        return min(self._right / (self._right + self._wrong), MAX_ACCEPTANCE)

    def observe(self, is_right: bool) -> None:
        """Record whether a draft was right."""
        self._right = DECAY * self._right + is_right
        self._wrong = DECAY * self._wrong + (not is_right)

    def num_likely(self, probability: float) -> int:
        """Return how many drafts in a row are right with at least this probability. Estimate 0.7,
        0.3: 3, as 0.34 is enough.
        """
        if probability >= 1:
            return 0
        return (
            int(math.log(probability) / math.log(self.probability) + 1e-9)
            if probability > 0
            else 2**30
        )

    def num_worthwhile(self, break_even: float, most: int) -> int:
        """Return the number of consecutive drafts that gives the most tokens per second, if each
        row takes this share of the time without drafts.

        With n drafts of probability a, E = 1 + a + ... + a**n tokens come in the time 1 + n b. One
        more is worth it while a**(n+1) / b is at least E / (1 + n b). Estimate 0.7, b = 0.1: 0.24 /
        0.1 against 2.53 / 1.3 after three, so a fourth one, and 0.17 / 0.1 against 2.77 / 1.4 after
        that, so no fifth.
        """
        count, expected, right = 0, 1.0, self.probability
        while (
            count < most
            and right * (1 + count * break_even) >= break_even * expected
            and break_even < 1
        ):
            expected += right
            right *= self.probability
            count += 1
        return count


class Drafter(Protocol):
    """Drafts the tokens after the text of one sequence; the text is given at construction, and
    grows.
    """

    def index(self, max_tokens: int) -> int:
        """Index up to ``max_tokens`` tokens of the text, if there is an index; return how many."""

    def draft(self, num_tokens: int) -> tuple[int, ...]:
        """Return drafts of up to ``num_tokens`` tokens after the text; the same ones, or more,
        until the text has grown.
        """

    def close(self) -> None:
        """Free the state that is kept elsewhere for the sequence."""


class SpeculationState:
    """The drafts of one sequence. Drafts that were not worth their rows are not submitted, but are
    also compared with the output.

    ``num_lookahead``: drafts in flight. Text 1 2 3, drafts 4 5 6 7: one micro-batch has 3 4 5 and
    the next one 6, so it is 3. If the first one samples 4 5 6, then 6 is known and submitted, and
    ``num_lookahead`` is 0. If it samples 4 8, the other micro-batch is wasted, and 8 is to be
    submitted.
    """

    def __init__(
        self,
        config: SpeculativeConfig,
        prompt_ids: Sequence[int],
        make_drafter: Callable[[Sequence[int]], "Drafter"],
    ) -> None:
        self._config = config
        self._tokens, self._num_prompt = [*prompt_ids], len(prompt_ids)
        self._drafter = make_drafter(self._tokens)
        self._draft: tuple[int, ...] = ()  # of the tokens after ``_tokens``
        self.num_lookahead = 0
        self.acceptance = AcceptanceEstimate()

    def update(self, output_ids: Sequence[int]) -> bool:
        """Take the new tokens; return whether the last of them has been submitted, as a draft."""
        new = output_ids[len(self._tokens) - self._num_prompt :]
        if not new:
            return False
        is_right = self._observe(new)
        is_submitted = is_right and len(new) <= self.num_lookahead
        self.num_lookahead = self.num_lookahead - len(new) if is_submitted else 0
        self._draft = self._draft[len(new) :] if is_submitted else ()
        return is_submitted

    def index(self, max_tokens: int) -> int:
        """Index up to ``max_tokens`` tokens of the text; return how many."""
        return self._drafter.index(max_tokens)

    def close(self) -> None:
        """Free the drafter's state of this sequence."""
        self._drafter.close()

    def draft(self, break_even: float, max_tokens: int) -> tuple[int, ...]:
        """Return drafts of the tokens after the last known one that are worth their rows, see
        ``AcceptanceEstimate``.
        """
        assert not self.num_lookahead
        if self._config.method == "draft_model" and (break_even >= 1 or max_tokens <= 0):
            return ()  # unlike n-grams, the model costs time
        drafts = self._drafts(self._config.num_speculative_tokens)
        return drafts[: self.acceptance.num_worthwhile(break_even, min(max_tokens, len(drafts)))]

    def draft_lookahead(self, break_even: float, max_tokens: int) -> tuple[int, ...]:
        """Return the next drafts after those in flight, each right with an estimated probability of
        at least ``break_even``.

        Estimate 0.9, two in flight, ``break_even`` 0.6: 0.9 ** 3 = 0.73 and 0.66, so two.
        """
        num_likely = self.acceptance.num_likely(break_even) - self.num_lookahead
        num_drafts = min(num_likely, max_tokens, 1 + self._config.num_speculative_tokens)
        return (
            self._drafts(self.num_lookahead + num_drafts)[self.num_lookahead :]
            if num_drafts > 0
            else ()
        )

    def _drafts(self, num_tokens: int) -> tuple[int, ...]:
        """Return up to ``num_tokens`` drafts after the text. Drafts in flight stay, so new ones are
        used only if they agree with these.
        """
        if num_tokens > len(self._draft):
            fresh = self._drafter.draft(num_tokens)
            if fresh[: self.num_lookahead] == self._draft[: self.num_lookahead]:
                self._draft = fresh
        return self._draft[:num_tokens]

    def _observe(self, token_ids: Sequence[int]) -> bool:
        """Compare the new tokens with the last draft; return whether all are as drafted.

        Draft 5 6 7, of which one token was submitted, and the tokens 5 6: two were right. Tokens 5
        8: one was right, and one was wrong.
        """
        right = list(
            takewhile(bool, (a == b for a, b in zip(self._draft, token_ids, strict=False)))
        )
        for _ in right:
            self.acceptance.observe(True)
        if len(right) < min(len(self._draft), len(token_ids)):
            self.acceptance.observe(False)
        self._tokens += token_ids
        return len(right) == len(token_ids)
