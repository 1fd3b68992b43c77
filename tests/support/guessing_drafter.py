"""A drafter that knows the answer, and drafts it rightly with a given probability."""

import random
from collections.abc import Callable, Sequence

import pytest

from tramontane.proto.step import MicroBatch
from tramontane.router.scheduling import decode_queue
from tramontane.router.scheduling.policy import SchedulerState
from tramontane.router.scheduling.scheduler import Scheduler
from tramontane.router.scheduling.speculation_state import AcceptanceEstimate

WRONG = 1  # no answer has this token


class GuessingDrafter:
    """Drafts by ``next_token``, which returns the right token after some text, or a wrong one."""

    def __init__(
        self,
        tokens: Sequence[int],
        next_token: Callable[[Sequence[int]], int],
        share: float,
        seed: int,
    ) -> None:
        self._tokens, self._next_token, self._share, self._seed = tokens, next_token, share, seed

    def index(self, _max_tokens: int) -> int:
        return 0

    def close(self) -> None:
        pass

    def draft(self, num_tokens: int) -> tuple[int, ...]:
        text = list(self._tokens)
        for _ in range(num_tokens):  # a draft is the same each time, so that others can follow it
            is_right = random.Random(hash((self._seed, *text))).random() < self._share
            text.append(self._next_token(text) if is_right else WRONG)
        return tuple(text[len(self._tokens) :])


def guess(
    patch: pytest.MonkeyPatch,
    next_token: Callable[[Sequence[int]], int],
    share: float,
    seed: int = 0,
    *,
    always: bool = True,
) -> None:
    """Let all sequences draft like this. ``always``: however often their drafts were wrong."""
    patch.setattr(
        decode_queue,
        "NgramDrafter",
        lambda tokens, *_: GuessingDrafter(tokens, next_token, share, seed),
    )
    if always:
        patch.setattr(
            AcceptanceEstimate,
            "num_worthwhile",
            lambda _, break_even, most: 0 if break_even >= 1 else max(most, 0),
        )
        patch.setattr(
            AcceptanceEstimate,
            "num_likely",
            lambda _, probability: 0 if probability >= 1 else 2**30,
        )


def count_ahead(patch: pytest.MonkeyPatch) -> list[int]:
    """Return the list to which the ids of micro-batches of nothing but drafts will be appended."""
    found, own = list[int](), Scheduler._lookahead_batch

    def batch_ahead(scheduler: Scheduler, state: SchedulerState) -> MicroBatch | None:
        batch = own(scheduler, state)
        found.extend([batch.step_id] if batch else [])
        return batch

    patch.setattr(Scheduler, "_lookahead_batch", batch_ahead)
    return found
