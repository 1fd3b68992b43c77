"""The common part of ``/v1/responses`` and ``/v1/messages``: an answer of one choice, which is
written as blocks.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from tramontane.proto.errors import ParameterError
from tramontane.proto.ports import TokenSource
from tramontane.router.chat_apis.blocks import BlockEvent, BlockRecorder, Blocks
from tramontane.router.chat_apis.conversation import Conversation
from tramontane.router.openai.chat_completion import encode_chat, prepare_conversation
from tramontane.router.openai.chat_request import ChatRequest
from tramontane.router.openai.formatter import AnswerFormatter
from tramontane.router.openai.generation import Generation
from tramontane.router.openai.json_limits import run_off_loop
from tramontane.router.openai.response_models import CompletionChange, Event
from tramontane.router.openai.resume_state import ProgressCallback, ResumeState, no_progress
from tramontane.router.openai.served_model import ServedModel
from tramontane.router.structured.grammar import visible_tools
from tramontane.router.tokenization.chat import ChatTemplate

COPIES = 5  # of the text, which the last events of a stream repeat


async def prepare_blocks(
    model: ServedModel,
    template: ChatTemplate,
    conversation: Conversation,
    arrived_at: float,
    state: ResumeState,
) -> Generation:
    """Return the generation of a conversation's answer. Raises ParameterError that names the
    parameter of the client's API.
    """
    try:
        request = _request_for(template, conversation)
        return await prepare_conversation(
            model, template, request, arrived_at, state, BlockRecorder
        )
    except ParameterError as error:
        raise conversation.renamed(error) from error


async def encode_conversation(
    model: ServedModel, template: ChatTemplate, conversation: Conversation
) -> tuple[int, ...]:
    """Return the token ids of a conversation, as ``prepare_blocks`` has them. Raises
    ParameterError.
    """
    request = _request_for(template, conversation)
    tools = visible_tools(request.tools, request.tool_choice)
    try:
        effort = request.reasoning_effort
        return await encode_chat(
            model, template, request.conversation(), tools, reasoning_effort=effort
        )
    except ParameterError as error:
        raise conversation.renamed(error) from error


def _disables_thoughts(template: ChatTemplate, conversation: Conversation) -> bool:
    """Return whether the client disables the reasoning of a reasoning model."""
    return conversation.refuses_thoughts and template.reasoning_format is not None


def _request_for(template: ChatTemplate, conversation: Conversation) -> ChatRequest:
    """Return the chat for this model: it reasons with the least effort if the client disables
    reasoning.
    """
    request = conversation.request
    return (
        request.model_copy(update={"reasoning_effort": "none"})
        if _disables_thoughts(template, conversation)
        else request
    )


class BlockFormatter(AnswerFormatter):
    """Writes answers as blocks. ``echo_bytes``: of JSON of the request, which an answer may
    repeat.
    """

    list_depth = 3  # of the list of parts of an item

    def __init__(self, generation: Generation, echo_bytes: int = 0) -> None:
        super().__init__(generation)
        [choice] = generation.texts
        assert isinstance(choice, BlockRecorder)
        self._choice, self._echo_bytes = choice, echo_bytes
        self._blocks = Blocks()
        # received by the client, or by the proxy for a response that is not streamed
        self._blocks.push(choice.take_pieces())
        self._has_opened = False

    async def run(
        self, source: TokenSource, report: ProgressCallback = no_progress
    ) -> dict[str, Any]:
        """Return the whole answer. See ``Generation.collect`` for ``report``."""
        choices = await self.generation.collect(source, report)
        return await run_off_loop(self.answer_bytes, lambda: self.whole(choices))

    def whole(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the whole answer."""
        self._blocks.push(self._choice.take_pieces())
        self._blocks.finish()
        return self.whole_blocks(choices[0]["logprobs"])

    def opening(self) -> list[Event]:
        """Return the first events; none if the client has received them."""
        self._has_opened = True
        return [] if self.generation.has_begun else self.first_events()

    def events(self, changes: Sequence[CompletionChange]) -> list[Event]:
        """Return the events of these changes; with the last changes also the events that end the
        stream.
        """
        steps, is_finished = (
            self._blocks.push(self._choice.take_pieces()),
            self.generation.is_finished,
        )
        if is_finished:
            steps += self._blocks.finish()
        events = self.events_of(steps, changes[0]["logprobs"] if changes else None)
        return [*events, *self.last_events()] if is_finished else events

    @abstractmethod
    def whole_blocks(self, logprobs: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return the whole answer of all blocks."""

    @abstractmethod
    def first_events(self) -> list[Event]:
        """Return the events before all blocks."""

    @abstractmethod
    def events_of(
        self, steps: Sequence[BlockEvent], logprobs: Mapping[str, Any] | None
    ) -> list[Event]:
        """Return the events of these block changes."""

    @abstractmethod
    def last_events(self) -> list[Event]:
        """Return the events after all blocks."""

    @property
    def change_bytes(self) -> int:
        """Approximate size of the next events in bytes of JSON, without the additions of the last
        tokens.
        """
        num_bytes = self.generation.change_bytes + (0 if self._has_opened else self._echo_bytes)
        return num_bytes + (
            self._echo_bytes + COPIES * self._choice.num_chars if self.generation.is_finished else 0
        )

    @property
    def answer_bytes(self) -> int:
        """Approximate size of the whole answer in bytes of JSON."""
        return self.generation.answer_bytes + self._echo_bytes + self._choice.num_chars
