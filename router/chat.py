"""A conversation, and what turns it into a prompt."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from tramontane.proto.errors import RequestError


@dataclass(frozen=True, slots=True)
class ChatMessage:
    role: Literal["system", "user", "assistant"]
    content: str


class ChatPrompt(Protocol):
    """Token ids up to where the assistant answers.

    What people and models wrote is text, also where it looks like a control token.
    Raises RequestError for conversations that the model's format does not know.
    """

    def encode(self, messages: Sequence[ChatMessage]) -> tuple[int, ...]: ...


@dataclass(frozen=True, slots=True)
class Conversation:
    """Questions and answers in turn, as many of the latest as leave room for an answer.

    ``head`` (a system message, or nothing) is never forgotten; ``num_dropped`` counts what was.
    """

    prompt: ChatPrompt
    context: int  # positions
    max_tokens: int  # of an answer
    head: tuple[ChatMessage, ...] = ()
    turns: tuple[ChatMessage, ...] = ()
    num_dropped: int = 0

    def asked(self, question: str) -> tuple["Conversation", tuple[int, ...]]:
        """With a question, and the prompt for its answer. Raises RequestError if it fits into no context."""
        turns = (*self.turns, ChatMessage("user", question))
        room = self.context - min(self.max_tokens, self.context // 2)
        ids = self.prompt.encode((*self.head, *turns))
        while len(ids) > room and len(turns) > 1:
            turns = turns[2:]
            ids = self.prompt.encode((*self.head, *turns))
        if len(ids) >= self.context:
            raise RequestError(
                f"that takes {len(ids)} tokens; with a context of {self.context} positions it may take {self.context - 1}"
            )
        dropped = len(self.turns) + 1 - len(turns)
        return replace(self, turns=turns, num_dropped=self.num_dropped + dropped), ids

    def answered(self, answer: str) -> "Conversation":
        """With the answer to its last question; a question that got none is forgotten."""
        turns = (*self.turns, ChatMessage("assistant", answer)) if answer.strip() else self.turns[:-1]
        return replace(self, turns=turns)
