"""One choice of a completion: from tokens to the text that a client may see."""

from collections.abc import Sequence

from tramontane.proto.request import FinishReason, TokenEvent
from tramontane.router.tokenizer import Tokenizer


class StopMatcher:
    """Cuts a text at the first stop string, wherever its pieces are cut.

    Text that may yet turn out to be the beginning of a stop string is held back, so
    that no part of one is ever shown.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """What may be shown now, and whether a stop string has been met.

        Stop "END": push("xEN") shows "x" and holds "EN"; push("Q") shows "ENQ".
        """
        self._held += text
        found = [(at + len(stop), at) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:  # the one that is complete first, and of those the longest
            shown, self._held = self._held[: min(found)[1]], ""
            return shown, True
        keep = max((_overlap(self._held, stop) for stop in self._stops), default=0)
        shown, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return shown, False

    def finish(self) -> str:
        """What was held back, now that nothing follows."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that begins ``stop``: ("xEN", "END") has 2."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)


class ChoiceText:
    """Tokens in, text out. After a stop string further tokens change nothing."""

    def __init__(self, tokenizer: Tokenizer | None, stops: Sequence[str]) -> None:
        self._decoder = tokenizer.decoder() if tokenizer else None
        self._matcher = StopMatcher(stops)
        self.num_tokens = 0
        self.finish: FinishReason | None = None

    def push(self, event: TokenEvent) -> str:
        """The text that this token completes. A token that completes a stop string still counts as made."""
        if self.finish is not None:
            return ""
        self.num_tokens += 1
        piece = self._decoder.push(event.token_id) if self._decoder else ""
        if event.finish and self._decoder:
            piece += self._decoder.finish()
        shown, stopped = self._matcher.push(piece)
        if stopped:
            self.finish = FinishReason.STOP
        elif event.finish:
            self.finish = event.finish
            shown += self._matcher.finish()
        return shown
