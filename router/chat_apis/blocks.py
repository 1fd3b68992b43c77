"""An answer as blocks in their order: thoughts, text, tool calls. Which blocks there are follows
from its tokens alone.

    blocks = Blocks()
    for step in blocks.push(choice.take_pieces()):
        match step.action: ...  # "open", "add" or "close"

Tokens that arrive together give the same blocks as the same tokens one by one, so an ingress that
continues an answer opens the next block where the first ingress would have.
"""

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from tramontane.proto.errors import ParameterError
from tramontane.proto.ports import TokenSource
from tramontane.proto.request import TokenEvent
from tramontane.router.chat_apis.conversation import Conversation
from tramontane.router.openai.body_bounds import run_off_loop
from tramontane.router.openai.chat_completion import ChatCompletion
from tramontane.router.openai.chat_request import ChatRequest
from tramontane.router.openai.choice_text import ChatDetokenizer
from tramontane.router.openai.logprobs import TokenLogprob, TokenWithLogprobs
from tramontane.router.openai.responses import ChatChange, Event
from tramontane.router.openai.resume_state import (
    ChoiceState,
    ChoiceUpdate,
    ProgressCallback,
    ResumeState,
    no_progress,
)
from tramontane.router.openai.served_model import ServedModel
from tramontane.router.openai.tokenize import encode_chat
from tramontane.router.structured.grammar import visible_tools
from tramontane.router.tokenization.chat import ChatTemplate
from tramontane.router.tokenization.tool_parser import CallDelta

Kind = Literal["thought", "text", "call"]


class Piece(NamedTuple):
    """What one token adds to an answer, in this order."""

    thought: str = ""
    text: str = ""
    calls: tuple[CallDelta, ...] = ()


class PieceRecorder(ChatDetokenizer):
    """A choice of a chat that also keeps what each token adds, in order.

    Text that may begin a stop string is returned when calls begin, because none can complete then.
    Log-probabilities wait until there is text with which they can be returned.
    """

    def __init__(self, *args: Any, **settings: Any) -> None:  # those of a ``ChatDetokenizer``
        super().__init__(*args, **settings)
        self._pieces: list[Piece] = []
        self._has_text = False  # since the last log-probabilities
        self.num_chars = 0  # of all pieces

    def push(self, event: TokenEvent, score: TokenLogprob | None = None) -> str:
        """See ``ChoiceDetokenizer``."""
        was_calling = self.is_calling
        text = super().push(event, score)
        if self.is_calling and not was_calling:
            held = self._matcher.finish()
            self._num_emitted += len(held)
            text += held
        piece = Piece(self.take_reasoning(), text, tuple(self.take_calls()))
        if piece.thought or text or piece.calls:
            self._pieces.append(piece)
            self.num_chars += (
                len(piece.thought) + len(text) + sum(len(call.arguments) for call in piece.calls)
            )
        self._has_text |= bool(text)
        return text

    def resume(self, state: ChoiceState, *, is_whole: bool = False) -> None:
        """See ``ChoiceDetokenizer``. The pieces so far are kept."""
        super().resume(state, is_whole=is_whole)
        self._has_text = False  # what came with it has been sent

    def take_pieces(self) -> list[Piece]:
        """Return the pieces since the last time; at first those of a resumed choice, which the
        client may have received.
        """
        pieces, self._pieces = self._pieces, []
        return pieces

    def take_logprobs(self) -> list[TokenWithLogprobs]:
        """See ``ChoiceDetokenizer``. None without new text; those of thoughts, which these APIs do
        not have, are dropped.
        """
        if not self._has_text and not self.finish:
            self._pending = [token for token in self._pending if not token.in_thought]
            return []
        self._has_text = False
        return super().take_logprobs()


@dataclass(slots=True, eq=False)
class Block:
    """A part of an answer: its kind, its number, and for a call its id and the function's name."""

    kind: Kind
    index: int
    call_id: str = ""
    name: str = ""
    parts: list[str] = field(default_factory=list)

    @property
    def content(self) -> str:
        """The thought, the text, or the arguments of a call, so far."""
        return "".join(self.parts)


class Step(NamedTuple):
    """Something that happens to a block; ``parts`` are the texts that are added to it."""

    action: Literal["open", "add", "close"]
    block: Block
    parts: list[str]


class Blocks:
    """The blocks of one answer, of which only the last one may be open."""

    def __init__(self) -> None:
        self.all: list[Block] = []
        self._is_open = False

    def push(self, pieces: Iterable[Piece]) -> list[Step]:
        """Add what tokens add. Returns what happens to the blocks, with one addition to a block at
        most.
        """
        steps: list[Step] = []
        for piece in pieces:
            if piece.thought:
                self._add(steps, "thought", piece.thought)
            if piece.text:
                self._add(steps, "text", piece.text)
            for call in piece.calls:
                if call.name is not None:
                    self._open(steps, Block("call", len(self.all), call.id or "", call.name))
                if call.arguments:
                    self._add(steps, "call", call.arguments)
        return steps

    def finish(self) -> list[Step]:
        """End the last block. An answer of nothing becomes an empty text."""
        steps: list[Step] = []
        if not self.all:
            self._open(steps, Block("text", 0))
        self._close(steps)
        return steps

    def _add(self, steps: list[Step], kind: Kind, text: str) -> None:
        if not self._is_open or self.all[-1].kind != kind:
            self._open(steps, Block(kind, len(self.all)))
        block = self.all[-1]
        block.parts.append(text)
        if steps and steps[-1].action == "add":
            steps[-1].parts.append(text)
        else:
            steps.append(Step("add", block, [text]))

    def _open(self, steps: list[Step], block: Block) -> None:
        self._close(steps)
        self.all.append(block)
        self._is_open = True
        steps.append(Step("open", block, []))

    def _close(self, steps: list[Step]) -> None:
        if self._is_open:
            steps.append(Step("close", self.all[-1], []))
        self._is_open = False


# The common part of ``/v1/responses`` and ``/v1/messages``: a chat completion of one choice, whose
# answer is made of blocks.

COPIES = 5  # of the text, which the last events of a stream repeat


async def prepare_chat(
    model: ServedModel,
    template: ChatTemplate,
    conversation: Conversation,
    arrived_at: float,
    state: ResumeState,
) -> ChatCompletion:
    """Return the chat completion for a request. Raises ParameterError that names the parameter of
    the client's API.
    """
    try:
        request = _request_for(template, conversation)
        return await ChatCompletion.prepare(
            model, template, request, arrived_at, state, PieceRecorder
        )
    except ParameterError as error:
        raise _renamed(error, template, conversation) from error


async def encode_conversation(
    model: ServedModel, template: ChatTemplate, conversation: Conversation
) -> tuple[int, ...]:
    """Return the token ids of a conversation, as ``prepare_chat`` has them. Raises
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
        raise _renamed(error, template, conversation) from error


def _disables_thoughts(template: ChatTemplate, conversation: Conversation) -> bool:
    """Return whether the client wants no thoughts of a model that thinks."""
    return conversation.refuses_thoughts and template.reasoning_format is not None


def _request_for(template: ChatTemplate, conversation: Conversation) -> ChatRequest:
    """Return the chat as this model gets it: it is to think with the least effort if the client
    wants no thoughts.
    """
    request = conversation.request
    return (
        request.model_copy(update={"reasoning_effort": "none"})
        if _disables_thoughts(template, conversation)
        else request
    )


def _renamed(
    error: ParameterError, template: ChatTemplate, conversation: Conversation
) -> ParameterError:
    if error.parameter == "reasoning_effort" and _disables_thoughts(template, conversation):
        return ParameterError(
            "thinking: this model has no setting by which it would not think; leave thinking out",
            "thinking",
        )
    return conversation.renamed(error)


class BlockAnswer(ABC):
    """An answer, whole or as a stream of events. ``echo_bytes``: of JSON of the request, which an
    answer may repeat.
    """

    ending = b""  # of a stream
    list_depth = 3  # of the list of parts of an item, in an answer

    def __init__(self, chat: ChatCompletion, echo_bytes: int = 0) -> None:
        [choice] = chat.choices
        assert isinstance(choice, PieceRecorder)
        self._chat, self._choice, self._echo_bytes = chat, choice, echo_bytes
        self._blocks = Blocks()
        # what the client has received; of a whole answer its proxy
        self._blocks.push(choice.take_pieces())
        self._has_opened = False

    async def stream(self, source: TokenSource) -> AsyncGenerator[list[ChatChange], None]:
        """Yield changes as ``Completion.stream`` does."""
        async with aclosing(self._chat.stream(source)) as batches:
            async for changes in batches:
                yield changes

    async def run(
        self, source: TokenSource, report: ProgressCallback = no_progress
    ) -> dict[str, Any]:
        """Return the whole answer. See ``Completion.collect`` for ``report``."""
        whole = await self._chat.run(source, report)
        self._blocks.push(self._choice.take_pieces())
        self._blocks.finish()
        return await run_off_loop(
            self.answer_bytes, lambda: self.whole(whole["choices"][0]["logprobs"])
        )

    def opening(self) -> list[Event]:
        """Return the first events; none if the client has received them."""
        self._has_opened = True
        return [] if self._chat.has_begun else self.first_events()

    def events(self, changes: Sequence[ChatChange]) -> list[Event]:
        """Return the events of these changes, with the last changes also those that end the
        stream.
        """
        steps = self._blocks.push(self._choice.take_pieces())
        if self.is_finished:
            steps += self._blocks.finish()
        events = self.events_of(steps, changes[0]["logprobs"] if changes else None)
        return [*events, *self.last_events()] if self.is_finished else events

    @abstractmethod
    def whole(self, logprobs: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return the whole answer of all blocks."""

    @abstractmethod
    def first_events(self) -> list[Event]:
        """Return the events before all blocks."""

    @abstractmethod
    def events_of(self, steps: Sequence[Step], logprobs: Mapping[str, Any] | None) -> list[Event]:
        """Return the events of what happens to blocks."""

    @abstractmethod
    def last_events(self) -> list[Event]:
        """Return the events after all blocks."""

    @property
    def next_number(self) -> int:
        """Number of the next event, where events are numbered."""
        return 0

    @property
    def is_finished(self) -> bool:
        """True once the answer has ended."""
        return self._chat.is_finished

    @property
    def fingerprint(self) -> str | None:
        """See ``Completion``."""
        return self._chat.fingerprint

    @property
    def change_bytes(self) -> int:
        """About how many bytes of JSON the next events are, without what the last tokens have
        added.
        """
        num_bytes = self._chat.change_bytes + (0 if self._has_opened else self._echo_bytes)
        return num_bytes + (
            self._echo_bytes + COPIES * self._choice.num_chars if self.is_finished else 0
        )

    @property
    def answer_bytes(self) -> int:
        """About how many bytes of JSON the whole answer is."""
        return self._chat.answer_bytes + self._echo_bytes + self._choice.num_chars

    def take_updates(self) -> list[ChoiceUpdate]:
        """Return what another ingress needs, as ``Completion.take_updates`` does."""
        return self._chat.take_updates()
