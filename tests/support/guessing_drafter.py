"""A drafter that knows the answer, and drafts it rightly with a given probability."""

import random
from collections.abc import Callable, Sequence

import pytest

from tramontane.router.speculation import speculation_state
from tramontane.router.speculation.speculation_state import AcceptanceEstimate

WRONG = 1  # no answer has this token


class GuessingDrafter:
    """Drafts by ``next_token``, which returns the right token after some text, or a wrong one."""

    def __init__(
        self, tokens: Sequence[int], next_token: Callable[[Sequence[int]], int], share: float, rng: random.Random
    ) -> None:
        self._tokens, self._next_token, self._share, self._rng = tokens, next_token, share, rng

    def index(self, _max_tokens: int) -> int:
        return 0

    def draft(self, num_tokens: int) -> tuple[int, ...]:
        text = list(self._tokens)
        for _ in range(num_tokens):
            text.append(self._next_token(text) if self._rng.random() < self._share else WRONG)
        return tuple(text[len(self._tokens) :])


def guess(
    patch: pytest.MonkeyPatch, next_token: Callable[[Sequence[int]], int], share: float, seed: int = 0, *, always: bool = True
) -> None:
    """Let all sequences draft like this. ``always``: however often their drafts were wrong."""
    rng = random.Random(seed)
    patch.setattr(speculation_state, "NgramDrafter", lambda tokens, *_: GuessingDrafter(tokens, next_token, share, rng))
    if always:
        patch.setattr(AcceptanceEstimate, "num_worthwhile", lambda _self, break_even: 0 if break_even >= 1 else 2**30)
