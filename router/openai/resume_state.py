"""An answer that outlives the door that tells it: its name, its randomness, and what its client has been told."""

import secrets
import time
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from tramontane.proto.request import FinishReason
from tramontane.router.openai.logprobs import TokenWithLogprobs

# What one message tells of a choice: its index, the tokens that the message came from, how it ended, and the tokens among those
# told so far whose log-probabilities wait for text that is held back. A plain tuple: one is pickled for every message.
ChoiceUpdate = tuple[int, list[int], FinishReason | None, list[TokenWithLogprobs]]


@dataclass(slots=True)
class ChoiceState:
    """All the news of a choice, put together."""

    token_ids: list[int] = field(default_factory=list)
    finish: FinishReason | None = None
    pending_logprobs: list[TokenWithLogprobs] = field(default_factory=list)


@dataclass(slots=True)
class ResumeState:
    """``id`` is the part of it that endpoints have in common; ``seed`` counts where the client gave none.

    ``model`` is a mark of the one that it has begun with. ``choices`` has those of which a client has been told anything,
    were it only that they have ended; or, of a whole answer, that its proxy has: then ``parts`` has all changes so far, of
    which it will be made (see ``Completion.stream``). ``num_lost_ingresses`` had it before, ``waited_s`` after its arrival the
    next one was asked.
    """

    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))
    seed: int = field(default_factory=lambda: secrets.randbits(63))
    model: str = ""
    choices: dict[int, ChoiceState] = field(default_factory=dict)
    parts: list[dict[str, Any]] = field(default_factory=list)
    num_lost_ingresses: int = 0
    waited_s: float = 0.0

    @property
    def is_resumed(self) -> bool:
        """It had its place with another door, and must not be refused for want of one."""
        return self.num_lost_ingresses > 0

    @property
    def is_buffered(self) -> bool:
        """No client has been told anything of it."""
        return bool(self.parts)

    def bind_model(self, model: str) -> None:
        """It is this model's, unless clients have been told what another one says."""
        if self.is_buffered and self.model != model:
            self.choices.clear()
            self.parts.clear()
        if not self.choices:
            self.model = model

    def add(self, news: Iterable[ChoiceUpdate]) -> None:
        """Of one message."""
        for index, token_ids, finish, unscored in news:
            choice = self.choices.get(index)
            if choice is None:
                choice = self.choices[index] = ChoiceState()
            choice.token_ids += token_ids
            choice.finish, choice.pending_logprobs = finish, unscored
