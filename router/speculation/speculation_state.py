"""Speculation of one sequence: its drafts, and how often they have been right."""

import math
from collections.abc import Sequence
from itertools import takewhile

from tramontane.proto.plan import SpeculativeConfig
from tramontane.router.speculation.ngram_drafter import NgramDrafter

DECAY = 0.9  # of the weight of a draft with each later one
PRIOR_RIGHT, PRIOR_WRONG = 1.0, 1.0  # drafts that count as observed before the first
MAX_ACCEPTANCE = 0.98  # that is believed


class AcceptanceEstimate:
    """How likely a draft is right if those before it are: a mean with exponential forgetting."""

    def __init__(self) -> None:
        self._right, self._wrong = PRIOR_RIGHT, PRIOR_WRONG

    @property
    def probability(self) -> float:
        """The estimate. Half at first; after four right drafts (0.656 + 3.439) / (0.656 + 0.656 + 3.439) = 0.86."""
        return min(self._right / (self._right + self._wrong), MAX_ACCEPTANCE)

    def observe(self, is_right: bool) -> None:
        """Record whether a draft was right."""
        self._right = DECAY * self._right + is_right
        self._wrong = DECAY * self._wrong + (not is_right)

    def num_worthwhile(self, break_even: float) -> int:
        """Return how many drafts in a row are each right with at least this probability.

        Estimate 0.7, break even 0.3: 0.7, 0.49, 0.34, so 3.
        """
        if break_even >= self.probability:
            return 0
        return int(math.log(break_even) / math.log(self.probability) + 1e-9) if break_even > 0 else 2**30


class SpeculationState:
    """The drafts of one sequence. Those that were not worth their rows are compared with the output all the same."""

    def __init__(self, config: SpeculativeConfig, prompt_ids: Sequence[int]) -> None:
        self._config = config
        self._tokens, self._num_prompt = [*prompt_ids], len(prompt_ids)
        self._drafter = NgramDrafter(self._tokens, config.prompt_lookup_min, config.prompt_lookup_max)
        self._draft: tuple[int, ...] = ()  # of the tokens after ``_tokens``
        self._is_drafted = False
        self.acceptance = AcceptanceEstimate()

    def index(self, output_ids: Sequence[int], max_tokens: int) -> int:
        """Take the tokens that have come, and index up to so many of the text; return how many were."""
        if new := output_ids[len(self._tokens) - self._num_prompt :]:
            self._observe(new)
            self._draft, self._is_drafted = (), False
        return self._drafter.index(max_tokens)

    def draft(self, break_even: float, max_tokens: int) -> tuple[int, ...]:
        """Return drafts of the tokens after the text, each right with at least this probability as far as is known."""
        if not self._is_drafted:
            self._draft, self._is_drafted = self._drafter.draft(self._config.num_speculative_tokens), True
        return self._draft[: max(min(self.acceptance.num_worthwhile(break_even), max_tokens), 0)]

    def _observe(self, token_ids: Sequence[int]) -> None:
        """Compare the tokens that have come with the last draft.

        Draft 5 6 7, of which one token was submitted, and the tokens 5 6: two were right. Tokens 5 8: one was, and one was not.
        """
        right = list(takewhile(bool, (a == b for a, b in zip(self._draft, token_ids, strict=False))))
        for _ in right:
            self.acceptance.observe(True)
        if len(right) < min(len(self._draft), len(token_ids)):
            self.acceptance.observe(False)
        self._tokens += token_ids
