"""State with which another ingress can continue an answer: its id, its seed, and the part that the
client has received.
"""

import secrets
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from tramontane.proto.request import FinishReason
from tramontane.router.openai.logprobs import TokenWithLogprobs
from tramontane.router.openai.response_models import CompletionChange

# The update of a choice in one message: its index, the new tokens, how it finished, and all tokens
# whose log-probabilities wait for text that is held back. A plain tuple, because one is pickled for
# every message.
ChoiceUpdate = tuple[int, list[int], FinishReason | None, list[TokenWithLogprobs]]
# Gets updates, changes, and about how many bytes of JSON the changes are.
ProgressCallback = Callable[[list[ChoiceUpdate], list[CompletionChange], int], Awaitable[None]]


async def no_progress(
    _updates: list[ChoiceUpdate], _changes: list[CompletionChange], _num_bytes: int
) -> None:
    """Ignore the progress of an answer that is not streamed."""


@dataclass(slots=True)
class ChoiceState:
    """Sum of the updates of one choice."""

    token_ids: list[int] = field(default_factory=list)
    finish: FinishReason | None = None
    pending_logprobs: list[TokenWithLogprobs] = field(default_factory=list)


@dataclass(slots=True)
class ResumeState:
    """An answer that may move to another ingress.

    ``choices``: the choices of which the client has received anything, even only that they
    finished. The proxy buffers an answer that is not streamed: then ``choices`` is the part that
    the proxy has received, and ``parts`` all changes so far (see ``Generation.stream``).
    """

    id: str = field(default_factory=lambda: uuid.uuid4().hex)  # without the endpoint's prefix
    created: int = field(default_factory=lambda: int(time.time()))
    seed: int = field(default_factory=lambda: secrets.randbits(63))  # used if the client gave none
    model: str = ""  # fingerprint of the model that began it
    choices: dict[int, ChoiceState] = field(default_factory=dict)
    parts: list[dict[str, Any]] = field(default_factory=list)
    num_lost_ingresses: int = 0  # ingresses that had the request before
    waited_s: float = 0.0  # from the request's arrival until the current ingress was called

    @property
    def is_resumed(self) -> bool:
        """True if another ingress admitted this request already; it must not be rejected for lack
        of capacity.
        """
        return self.num_lost_ingresses > 0

    @property
    def is_buffered(self) -> bool:
        """True if only the proxy, not the client, has received parts of the answer."""
        return bool(self.parts)

    def bind_model(self, model: str) -> None:
        """Assign the answer to a model; a buffered answer starts again if it was of another model.
        A stream that has begun keeps its model.
        """
        if self.is_buffered and self.model != model:
            self.choices.clear()
            self.parts.clear()
        if not self.choices:
            self.model = model

    def add(self, updates: Iterable[ChoiceUpdate]) -> None:
        """Add the updates of one message."""
        for index, token_ids, finish, pending_logprobs in updates:
            choice = self.choices.get(index)
            if choice is None:
                choice = self.choices[index] = ChoiceState()
            choice.token_ids += token_ids
            choice.finish, choice.pending_logprobs = finish, pending_logprobs
