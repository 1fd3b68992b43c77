"""A conversation, and what turns it into a prompt."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol


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
