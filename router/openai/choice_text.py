"""One choice of a completion: from tokens to the text that a client may see."""

from collections.abc import Sequence

from tramontane.proto.errors import UnsatisfiableSchemaError
from tramontane.proto.request import FinishReason, TokenEvent
from tramontane.router.openai.logprobs import TokenLogprobs, TokenWithLogprobs
from tramontane.router.openai.resume_state import ChoiceState
from tramontane.router.tokenization.tokenizer import Tokenizer


class StopMatcher:
    """Cuts a text at the first stop string, wherever its pieces are cut.

    Text that may yet turn out to be the beginning of a stop string is held back, so
    that no part of one is ever shown.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""
        self._overlaps = [_PrefixMatcher(stop) for stop in stops]

    def push(self, text: str, *, may_stop: bool = True) -> tuple[str, bool]:
        """What may be shown now, and whether a stop string has been met. One that ends in a text that may not stop is none.

        Stop "END": push("xEN") shows "x" and holds "EN"; push("Q") shows "ENQ".
        """
        num_held = len(self._held)
        self._held += text
        stops = self._stops if may_stop else ()
        found = [(at + len(stop), at) for stop in stops if (at := self._held.find(stop, max(num_held - len(stop) + 1, 0))) >= 0]
        if found:  # the one that is complete first, and of those the longest
            shown, self._held = self._held[: min(found)[1]], ""
            return shown, True
        for overlap in self._overlaps:
            overlap.push(text)
        keep = max((overlap.length for overlap in self._overlaps), default=0)
        shown, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return shown, False

    def finish(self) -> str:
        """What was held back, now that nothing follows."""
        held, self._held = self._held, ""
        return held


class _PrefixMatcher:
    """The longest end of a text that begins one stop string, as Knuth, Morris and Pratt find it: for "END" it is 2 after "xEN".

    Some steps per character, however alike text and stop string are, and none beforehand.
    """

    def __init__(self, stop: str) -> None:
        self.length = 0
        self._stop = stop
        # The same of every beginning of the stop string that the text has reached, itself left out: 1 for the "ENE" of "ENEMY".
        self._within = [0, 0]

    def push(self, text: str) -> None:
        for character in text:
            self.length = self._after(self.length, character)
            if self.length == len(self._within):
                self._within.append(self._after(self._within[-1], character))
            if self.length == len(self._stop):
                self.length = self._within[self.length]

    def _after(self, length: int, character: str) -> int:
        while length and self._stop[length] != character:
            length = self._within[length]
        return length + (self._stop[length] == character)


class ChoiceDetokenizer:
    """Tokens in, text out. After a stop string further tokens change nothing; before ``min_tokens`` none is one.

    Tokens that come with a score come out again, as far as their text may be shown: a token that begins within it is told, one
    that begins in a stop string, or after it, never is.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, stops: Sequence[str], min_tokens: int = 0, *, is_text_start: bool = False
    ) -> None:
        """``is_text_start``: see ``Tokenizer.decoder``."""
        self._decoder = tokenizer.decoder(is_text_start=is_text_start) if tokenizer else None
        self._matcher = StopMatcher(stops)
        self._has_stops = bool(stops)
        self._min_tokens = min_tokens
        self._num_decoded = self._num_shown = 0  # characters
        self._pending: list[TokenWithLogprobs] = []
        self.num_tokens = 0
        self.finish: FinishReason | None = None

    def push(self, event: TokenEvent, score: TokenLogprobs | None = None) -> str:
        """The text that this token completes. A token that completes a stop string still counts as made.

        Raises UnsatisfiableSchemaError where the sequence has ended with an error.
        """
        if self.finish is not None:
            return ""
        if event.finish is FinishReason.ERROR:
            raise UnsatisfiableSchemaError(
                "the answer could not go on as its schema asks for: it may be too complicated for this model"
            )
        self.num_tokens += 1
        piece = self._piece(event.token_id, score)
        if event.finish and self._decoder:
            piece += self._decoder.finish()
        self._num_decoded += len(piece)
        shown, stopped = self._matcher.push(piece, may_stop=self.num_tokens >= self._min_tokens)
        if stopped:
            self.finish = FinishReason.STOP
        elif event.finish:
            self.finish = event.finish
            shown += self._matcher.finish()
        self._num_shown += len(shown)
        if stopped and self._pending:
            self._pending = self._begun_in_shown()
        return shown

    def resume(self, told: ChoiceState, *, is_whole: bool = False) -> None:
        """As if its tokens had been pushed, and what they gave been taken, here. ``is_whole``: see ``ResumeState``."""
        for token_id in told.token_ids:
            self.push(TokenEvent(0, token_id))
        self.finish, self._pending = told.finish, list(told.pending_logprobs)

    @property
    def pending_logprobs(self) -> list[TokenWithLogprobs]:
        """Tokens with scores that may not be told yet."""
        return list(self._pending)

    def take_logprobs(self) -> list[TokenWithLogprobs]:
        """Of the tokens with scores those that may be told and have not been; offsets count from the beginning of the text."""
        told = self._pending if self.finish or not self._has_stops else self._begun_in_shown()
        self._pending = self._pending[len(told) :]
        return told

    def _piece(self, token_id: int, score: TokenLogprobs | None) -> str:
        if score is None:
            return self._decoder.push(token_id) if self._decoder else ""
        piece, place = self._decoder.push_with_offset(token_id) if self._decoder else ("", 0)
        self._pending.append(TokenWithLogprobs(token_id, self._num_decoded + place, score))
        return piece

    def _begun_in_shown(self) -> list[TokenWithLogprobs]:
        """Tokens "x", "E", "ND" of which "x" is shown: the first one."""
        return [token for token in self._pending if token.offset < self._num_shown]
