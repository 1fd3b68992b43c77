"""An answer as blocks in their order: reasoning, text, tool calls. Its tokens alone determine its
blocks.

    blocks = Blocks()
    for step in blocks.push(choice.take_pieces()):
        match step.action: ...  # "open", "add" or "close"

Tokens that arrive together give the same blocks as the same tokens one by one, so an ingress that
continues an answer opens the next block where the first ingress would have.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from tramontane.proto.request import TokenEvent
from tramontane.router.openai.detokenizer import ChatDetokenizer
from tramontane.router.openai.logprobs import TokenLogprobs, TokenWithLogprobs
from tramontane.router.openai.resume_state import ChoiceState
from tramontane.router.tokenization.tool_parser import CallDelta

Kind = Literal["thought", "text", "call"]


class AnswerPiece(NamedTuple):
    """The additions of one token to an answer, in this order."""

    thought: str = ""
    text: str = ""
    calls: tuple[CallDelta, ...] = ()


class BlockRecorder(ChatDetokenizer):
    """A choice of a chat that also keeps the additions of each token, in order.

    Text that may begin a stop string is returned when calls begin, because no stop string can
    complete then. Log-probabilities wait until there is text with which they can be returned.
    """

    def __init__(self, *args: Any, **settings: Any) -> None:  # see ``ChatDetokenizer``
        super().__init__(*args, **settings)
        self._pieces: list[AnswerPiece] = []
        self._has_text = False  # since the last log-probabilities
        self.num_chars = 0  # of all pieces

    def push(self, event: TokenEvent, score: TokenLogprobs | None = None) -> str:
        """See ``ChoiceDetokenizer``."""
        was_calling = self.is_calling
        text = super().push(event, score)
        if self.is_calling and not was_calling:
            held = self._matcher.finish()
            self._num_emitted += len(held)
            text += held
        piece = AnswerPiece(self.take_reasoning(), text, tuple(self.take_calls()))
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
        self._has_text = False  # the text since the last log-probabilities has been sent

    def take_pieces(self) -> list[AnswerPiece]:
        """Return the pieces since the last call; at first the pieces of a resumed choice, which the
        client may have received.
        """
        pieces, self._pieces = self._pieces, []
        return pieces

    def take_logprobs(self) -> list[TokenWithLogprobs]:
        """See ``ChoiceDetokenizer``. Empty without new text; log-probabilities of reasoning, which
        these APIs do not have, are dropped.
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


class BlockEvent(NamedTuple):
    """A change of a block; ``parts`` are the texts added to it."""

    action: Literal["open", "add", "close"]
    block: Block
    parts: list[str]


class Blocks:
    """The blocks of one answer; only the last block may be open."""

    def __init__(self) -> None:
        self.all: list[Block] = []
        self._is_open = False

    def push(self, pieces: Iterable[AnswerPiece]) -> list[BlockEvent]:
        """Add the pieces of tokens. Returns the changes of the blocks, with at most one addition to
        each block.
        """
        steps: list[BlockEvent] = []
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

    def finish(self) -> list[BlockEvent]:
        """End the last block. An empty answer becomes an empty text."""
        steps: list[BlockEvent] = []
        if not self.all:
            self._open(steps, Block("text", 0))
        self._close(steps)
        return steps

    def _add(self, steps: list[BlockEvent], kind: Kind, text: str) -> None:
        if not self._is_open or self.all[-1].kind != kind:
            self._open(steps, Block(kind, len(self.all)))
        block = self.all[-1]
        block.parts.append(text)
        if steps and steps[-1].action == "add":
            steps[-1].parts.append(text)
        else:
            steps.append(BlockEvent("add", block, [text]))

    def _open(self, steps: list[BlockEvent], block: Block) -> None:
        self._close(steps)
        self.all.append(block)
        self._is_open = True
        steps.append(BlockEvent("open", block, []))

    def _close(self, steps: list[BlockEvent]) -> None:
        if self._is_open:
            steps.append(BlockEvent("close", self.all[-1], []))
        self._is_open = False
