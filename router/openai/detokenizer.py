"""Detokenization of one choice: from tokens to the text that the client receives."""

from collections import deque
from collections.abc import Sequence

from tramontane.proto.errors import ParameterError
from tramontane.proto.request import FinishReason, TokenEvent, sequence_error
from tramontane.router.openai.completion_request import CompletionRequest
from tramontane.router.openai.logprobs import TokenLogprobs, TokenWithLogprobs
from tramontane.router.openai.resume_state import ChoiceState
from tramontane.router.structured.answer_rules import Constraint
from tramontane.router.structured.grammar import build_grammar
from tramontane.router.structured.guided import answer_constraint
from tramontane.router.structured.validator import run_in_grammar_pool
from tramontane.router.tokenization.reasoning_parser import ReasoningParser, Split
from tramontane.router.tokenization.tokenizer import Tokenizer
from tramontane.router.tokenization.tool_parser import CallDelta, CallJoiner, ToolCallParser

UNDECIDED = -1  # offset of a token that may be a part of a marker of thoughts


class ChoiceDetokenizer:
    """Turns the tokens of one choice into text.

    Tokens after a stop string are ignored; no stop string completes before ``min_tokens``. Tokens
    with log-probabilities are returned once their text may be emitted; a token that begins inside
    or after a stop string never is. A token of ``stop_token_ids`` that ends the sequence has no
    text, unless ``includes_stop`` keeps the text of the stop.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        stops: Sequence[str],
        min_tokens: int = 0,
        *,
        is_text_start: bool = False,
        stop_token_ids: Sequence[int] = (),
        includes_stop: bool = False,
    ) -> None:
        self._decoder = tokenizer.decoder(is_text_start=is_text_start) if tokenizer else None
        self._matcher = StopMatcher(stops, includes_stop=includes_stop)
        self._silent_ids = frozenset(() if includes_stop else stop_token_ids)
        self._has_stops = bool(stops)
        self._min_tokens = min_tokens
        self._num_decoded = self._num_emitted = 0  # characters
        self._pending: list[TokenWithLogprobs] = []
        self.num_tokens = 0
        self.num_reasoning_tokens: int | None = None  # None without reasoning
        self.finish: FinishReason | None = None

    def push(self, event: TokenEvent, score: TokenLogprobs | None = None) -> str:
        """Return the text that this token completes. A token that completes a stop string counts as
        generated.

        Raises UnsatisfiableSchemaError or NotFiniteError if the sequence ended with an error.
        """
        if self.finish is not None:
            return ""
        if event.finish is FinishReason.ERROR:
            raise sequence_error(event)
        self.num_tokens += 1
        is_silent = event.finish is FinishReason.STOP and event.token_id in self._silent_ids
        piece = "" if is_silent else self._piece(event.token_id, score)
        if event.finish:
            piece += self._last_piece()
        if is_silent:
            self._take_silent(event.token_id, self._num_decoded + len(piece), score)
        self._num_decoded += len(piece)
        emitted, stopped = self._matcher.push(piece, may_stop=self.num_tokens >= self._min_tokens)
        if stopped:
            self.finish = FinishReason.STOP
        elif event.finish:
            self.finish = event.finish
            emitted += self._matcher.finish()
        self._num_emitted += len(emitted)
        if stopped and self._pending:
            self._pending = self._begun_in_emitted()
        return emitted

    def resume(self, state: ChoiceState, *, is_whole: bool = False) -> None:
        """Restore a choice as if its tokens had been pushed here. ``is_whole``: the client has
        received no part of it.
        """
        for number, token_id in enumerate(state.token_ids, start=1):
            # may be a stop token, which has no text
            is_last = number == len(state.token_ids)
            self.push(TokenEvent(0, token_id, state.finish if is_last else None))
        self.finish, self._pending = state.finish, list(state.pending_logprobs)

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the choice; None if there is none."""
        return self._matcher.matched

    @property
    def pending_logprobs(self) -> list[TokenWithLogprobs]:
        """Tokens with log-probabilities whose text may not be emitted yet."""
        return list(self._pending)

    def take_logprobs(self) -> list[TokenWithLogprobs]:
        """Return new tokens with log-probabilities; offsets count from the beginning of the
        text.
        """
        if self.finish or not self._has_stops:
            ready, self._pending = self._pending, []
        else:
            ready = self._begun_in_emitted()
            self._pending = [token for token in self._pending if not self._is_emitted(token)]
        return ready

    def _piece(self, token_id: int, score: TokenLogprobs | None) -> str:
        if score is None:
            return self._decoder.push(token_id) if self._decoder else ""
        piece, offset = self._decoder.push_with_offset(token_id) if self._decoder else ("", 0)
        self._pending.append(TokenWithLogprobs(token_id, self._num_decoded + offset, score))
        return piece

    def _last_piece(self) -> str:
        """Return the rest of the text, at the end of the sequence."""
        return self._decoder.finish() if self._decoder else ""

    def _take_silent(self, token_id: int, offset: int, score: TokenLogprobs | None) -> None:
        """Take the last token, which has no text."""
        if score is not None:
            self._pending.append(TokenWithLogprobs(token_id, offset, score))

    def _begun_in_emitted(self) -> list[TokenWithLogprobs]:
        """Return pending tokens that begin in emitted text: of "x", "E", "ND" the first if "x" is
        emitted.
        """
        return [token for token in self._pending if self._is_emitted(token)]

    def _is_emitted(self, token: TokenWithLogprobs) -> bool:
        return token.in_thought or token.offset < self._num_emitted


class ChatDetokenizer(ChoiceDetokenizer):
    """A choice of a chat: its thoughts, its text, and the tool calls that follow the text. Stop
    strings end only the text.

    ``whole_calls``: a call is kept until it is complete, or the sequence ends.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        stops: Sequence[str],
        min_tokens: int = 0,
        *,
        is_text_start: bool = True,
        stop_token_ids: Sequence[int] = (),
        includes_stop: bool = False,
        tools: ToolCallParser | None = None,
        thoughts: ReasoningParser | None = None,
        whole_calls: bool = False,
    ) -> None:
        super().__init__(
            tokenizer,
            stops,
            min_tokens,
            is_text_start=is_text_start,
            stop_token_ids=stop_token_ids,
            includes_stop=includes_stop,
        )
        self._tools, self._thoughts = tools, thoughts
        self._joiner = CallJoiner() if whole_calls else None
        self._calls: list[CallDelta] = []
        self._reasoning: list[str] = []  # reasoning that has not been taken
        # tokens that may be part of a marker
        self._undecided: deque[tuple[int, TokenLogprobs | None]] = deque()
        self.num_reasoning_tokens = None if thoughts is None else 0

    @property
    def is_calling(self) -> bool:
        """Whether calls have begun, which no text follows."""
        return self._tools is not None and self._tools.is_calling

    @property
    def can_think(self) -> bool:
        """Whether the model has a format for reasoning."""
        return self._thoughts is not None

    @property
    def finish_reason(self) -> str | None:
        """OpenAI's ``finish_reason`` of the choice; None before it has finished."""
        has_calls = self._tools is not None and self._tools.num_calls > 0
        return (
            "tool_calls"
            if has_calls and self.finish is FinishReason.STOP
            else self.finish and self.finish.value
        )

    def resume(self, state: ChoiceState, *, is_whole: bool = False) -> None:
        """Restore a choice. Tool calls and reasoning that the client has received are dropped; if
        ``is_whole``, all are kept.
        """
        super().resume(state, is_whole=is_whole)
        if not is_whole:
            self.take_calls()
            self._reasoning = []
        waiting = [token for token in self._pending if token.offset == UNDECIDED]
        if waiting:
            self._pending = self._pending[: -len(waiting)]
            self._undecided = deque((token.token_id, token.score) for token in waiting)

    @property
    def pending_logprobs(self) -> list[TokenWithLogprobs]:
        """Tokens with log-probabilities whose text may not be emitted yet; the tokens that are not
        yet known to be content or reasoning come last.
        """
        waiting = [
            TokenWithLogprobs(token_id, UNDECIDED, score)
            for token_id, score in self._undecided
            if score
        ]
        return self._pending + waiting

    def take_calls(self) -> list[CallDelta]:
        """Return the new parts of tool calls since the last call; with ``whole_calls`` one delta
        for each new call.
        """
        if self._joiner is not None and self.finish:
            self._calls += self._joiner.finish()
        calls, self._calls = self._calls, []
        return calls

    def take_reasoning(self) -> str:
        """Return the new reasoning text since the last call."""
        reasoning, self._reasoning = "".join(self._reasoning), []
        return reasoning

    def _piece(self, token_id: int, score: TokenLogprobs | None) -> str:
        thoughts, tools = self._thoughts, self._tools
        if tools is not None and (
            tools.is_calling or thoughts is None or not thoughts.is_of_thought(token_id)
        ):
            calls = tools.push(token_id)
            if self._joiner is not None:
                calls = self._joiner.push(calls, is_complete=not tools.is_in_arguments)
            self._calls += calls
            if tools.is_calling:
                return ""
        if thoughts is None:
            return super()._piece(token_id, score)
        self._undecided.append((token_id, score))
        return self._add(thoughts.push(token_id))

    def _take_silent(self, token_id: int, offset: int, score: TokenLogprobs | None) -> None:
        if self._thoughts is None or not self._thoughts.in_thought:
            super()._take_silent(token_id, offset, score)
            return
        self.num_reasoning_tokens = (self.num_reasoning_tokens or 0) + 1
        if score is not None:
            self._pending.append(TokenWithLogprobs(token_id, offset, score, in_thought=True))

    def _last_piece(self) -> str:
        return (
            super()._last_piece() if self._thoughts is None else self._add(self._thoughts.finish())
        )

    def _add(self, split: Split) -> str:
        """Return the text of the content; keep the text of the reasoning."""
        if split.thought:
            self._reasoning.append(split.thought)
        for in_thought, offset in split.places:
            token_id, score = self._undecided.popleft()
            self.num_reasoning_tokens = (self.num_reasoning_tokens or 0) + in_thought
            if score is not None:
                self._pending.append(TokenWithLogprobs(token_id, offset, score, in_thought))
        return split.content


def make_detokenizer(tokenizer: Tokenizer | None, request: CompletionRequest) -> ChoiceDetokenizer:
    """Return the detokenizer of one choice of a completion."""
    return ChoiceDetokenizer(
        tokenizer,
        request.stop,
        request.min_tokens,
        stop_token_ids=request.stop_token_ids,
        includes_stop=request.include_stop_str_in_output,
    )


async def completion_grammar(tokenizer: Tokenizer | None, request: CompletionRequest) -> str:
    """Return the grammar of a completion's choices, empty if there is none. Raises
    ParameterError.
    """
    constraint = answer_constraint(request)
    if constraint is None:
        return ""
    if tokenizer is None:
        name = constraint.where if isinstance(constraint, Constraint) else "response_format"
        raise ParameterError(f"{name} needs text, and this model has no tokenizer", name)
    return await run_in_grammar_pool(
        lambda: build_grammar(constraint, num_sequences=request.num_sequences)
    )


# Stop strings in a growing text.


class StopMatcher:
    """Cuts a growing text at the first stop string. Text that may begin a stop string is held back,
    so that no part of one is emitted.

    With ``includes_stop`` the text ends after the stop string instead.
    """

    def __init__(self, stops: Sequence[str], *, includes_stop: bool = False) -> None:
        self._stops, self._includes_stop = stops, includes_stop
        self._held = ""
        self._overlaps = [_PrefixMatcher(stop) for stop in stops]
        self.matched: str | None = None  # the stop string at which the text was cut

    def push(self, text: str, *, may_stop: bool = True) -> tuple[str, bool]:
        """Return the text to emit now, and whether a stop string is complete. With ``may_stop``
        False, no stop string completes in ``text``.

        Stop "END": push("xEN") emits "x" and holds "EN"; push("Q") emits "ENQ".
        """
        if not self._stops:  # nearly always
            return text, False
        num_held = len(self._held)
        self._held += text
        stops = self._stops if may_stop else ()
        found = [
            (at + len(stop), at)
            for stop in stops
            if (at := self._held.find(stop, max(num_held - len(stop) + 1, 0))) >= 0
        ]
        if found:  # the stop string that completes first; of several the longest
            end, start = min(found)
            self.matched = self._held[start:end]
            emitted, self._held = self._held[: end if self._includes_stop else start], ""
            return emitted, True
        for overlap in self._overlaps:
            overlap.push(text)
        num_emitted = len(self._held) - max(
            (overlap.length for overlap in self._overlaps), default=0
        )
        emitted, self._held = self._held[:num_emitted], self._held[num_emitted:]
        return emitted, False

    def finish(self) -> str:
        """Return the text that was held back, at the end of the text."""
        held, self._held = self._held, ""
        return held


class _PrefixMatcher:
    """Length of the longest suffix of a text that is a prefix of one stop string: for "END" it is 2
    after "xEN".

    The algorithm of Knuth, Morris and Pratt: amortized constant time per character. Its table grows
    with the matches.
    """

    def __init__(self, stop: str) -> None:
        self.length = 0
        self._stop = stop
        # The same length for every prefix of the stop string that the text has reached: 1 for "ENE"
        # of "ENEMY".
        self._failure = [0, 0]

    def push(self, text: str) -> None:
        for character in text:
            self.length = self._after(self.length, character)
            if self.length == len(self._failure):
                self._failure.append(self._after(self._failure[-1], character))
            if self.length == len(self._stop):
                self.length = self._failure[self.length]

    def _after(self, length: int, character: str) -> int:
        while length and self._stop[length] != character:
            length = self._failure[length]
        return length + (self._stop[length] == character)
