"""Formatters: how an API writes the response of a ``Generation``, whole or as server-sent events.

This module has OpenAI's chunks, for completions and chats; ``chat_apis`` has the formats of the
Responses API and of Anthropic's messages.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from tramontane.proto.ports import TokenSource
from tramontane.router.openai.generation import Generation
from tramontane.router.openai.response_models import (
    CHOICES_DEPTH,
    ChatChunk,
    CompletionAnswer,
    CompletionChange,
    CompletionChoice,
    CompletionChunk,
    Event,
)
from tramontane.router.openai.resume_state import ProgressCallback, no_progress


class AnswerFormatter(ABC):
    """Writes the answer of one request."""

    ending: ClassVar[bytes] = b""  # of a stream, after the last event
    list_depth: ClassVar[int] = CHOICES_DEPTH  # of the list that makes a whole answer long

    def __init__(self, generation: Generation) -> None:
        self.generation = generation

    async def run(
        self, source: TokenSource, report: ProgressCallback = no_progress
    ) -> dict[str, Any]:
        """Return the whole answer. See ``Generation.collect`` for ``report``."""
        return self.whole(await self.generation.collect(source, report))

    @abstractmethod
    def whole(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the whole answer. ``choices``: see ``Generation.collect``."""

    def opening(self) -> list[Event]:
        """Return the events before the first changes; none if the client has received them."""
        return []

    @abstractmethod
    def events(self, changes: Sequence[CompletionChange]) -> list[Event]:
        """Return the events of these changes; with the last changes also the events that end the
        stream.
        """

    def failure(self, _error: Mapping[str, Any]) -> list[Event]:
        """Return the events after that of an error, which ends a stream: none in most APIs."""
        return []

    @property
    def next_number(self) -> int:
        """Number of the next event, where the API numbers events."""
        return 0

    @property
    def change_bytes(self) -> int:
        """Approximate size of the next events in bytes of JSON, without the overhead of a few
        tokens.
        """
        return self.generation.change_bytes

    @property
    def answer_bytes(self) -> int:
        """Approximate size of the whole answer in bytes of JSON."""
        return self.generation.answer_bytes


class ChunkFormatter(AnswerFormatter):
    """Writes OpenAI's chunks, which have no names, and ``[DONE]``. ``ends_with_usage``: without
    include_usage the last chunk has the usage, as Mistral's API has it.
    """

    ending = b"data: [DONE]\n\n"
    chunk_model: ClassVar[type[CompletionChunk] | type[ChatChunk]] = CompletionChunk

    def __init__(self, generation: Generation, *, ends_with_usage: bool = False) -> None:
        super().__init__(generation)
        self._ends_with_usage = ends_with_usage

    def choice(self, change: CompletionChange) -> Mapping[str, Any]:
        """Return the chunk's part for one choice."""
        return change

    def events(self, changes: Sequence[CompletionChange]) -> list[Event]:
        """Return the chunk of these changes, and at the end the usage chunk if the client requests
        it.
        """
        events = [Event("", self.chunk([self.choice(change) for change in changes]))]
        if self.generation.is_finished and self.generation.request.includes_usage:
            events.append(Event("", self.usage_chunk()))
        return events

    def chunk(
        self, choices: Sequence[Mapping[str, Any]], *, has_tokens: bool = True
    ) -> dict[str, Any]:
        """Return one chunk. With include_usage every chunk except the last has a usage of null.

        With continuous_usage_stats each chunk has the usage so far; ``has_tokens`` is False for a
        chunk before the first new tokens.
        """
        generation, request = self.generation, self.generation.request
        chunk: dict[str, Any] = {**generation.head, "choices": choices}
        if request.counts_in_chunks:
            chunk["usage"] = generation.usage_of(has_tokens=has_tokens).as_json()
        elif request.includes_usage:
            chunk["usage"] = None
        elif self._ends_with_usage and has_tokens and generation.is_finished:
            chunk["usage"] = generation.usage.as_json()
        return chunk

    def usage_chunk(self) -> dict[str, Any]:
        """Return the last chunk, which has no choices but the usage."""
        generation = self.generation
        return self.chunk_model(
            **generation.head, choices=[], usage=generation.usage, timings=generation.timings
        ).as_json()


class CompletionFormatter(ChunkFormatter):
    """Writes the answer of ``/v1/completions``."""

    def whole(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """Return OpenAI's object."""
        generation = self.generation
        return CompletionAnswer(
            **generation.head,
            # which share their long lists
            choices=[CompletionChoice(**choice) for choice in choices],
            usage=generation.usage,
            timings=generation.timings,
        ).as_json()
