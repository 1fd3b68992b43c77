"""Stop strings in a text that grows."""

from collections.abc import Sequence


class StopMatcher:
    """Cuts a growing text at the first stop string. Text that may begin one is held back, so that
    no part of one is emitted.

    With ``includes_stop`` the text ends after the stop string instead.
    """

    def __init__(self, stops: Sequence[str], *, includes_stop: bool = False) -> None:
        self._stops, self._includes_stop = stops, includes_stop
        self._held = ""
        self._overlaps = [_PrefixMatcher(stop) for stop in stops]
        self.matched: str | None = None  # the stop string at which the text was cut

    def push(self, text: str, *, may_stop: bool = True) -> tuple[str, bool]:
        """Return the text to emit now, and whether a stop string is complete. With ``may_stop``
        False none completes in ``text``.

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
        if found:  # the one that completes first; of several the longest
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
