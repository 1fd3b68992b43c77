"""Log-probabilities of a request's tokens, from the last stage to whoever asked for them."""

from collections.abc import Iterable

from tramontane.proto.request import Logprobs, TokenEvent


class LogprobHistory:
    """Keeps them until a token of the same sequence goes out. No position goes out twice: a prompt that is computed again has
    the same, up to float rounding.
    """

    def __init__(self) -> None:
        self._next: dict[int, int] = {}  # position, by sequence
        self._held: dict[int, list[Logprobs]] = {}  # by sequence

    def begin_at(self, seq_id: int, position: int) -> None:
        """All before it has been told, by another router."""
        self._next[seq_id] = position

    def add(self, logprobs: Logprobs) -> None:
        """Positions follow each other, or begin anew. Of 1..4 and 3..6 the second adds 5 and 6."""
        seq_id, start = logprobs.seq_id, logprobs.start
        due = self._next.get(seq_id, start)
        assert start <= due, "positions are missing"
        if new := logprobs.logprobs[due - start :]:
            self._held.setdefault(seq_id, []).append(Logprobs(seq_id, due, new, logprobs.top[due - start :]))
            self._next[seq_id] = due + len(new)

    def take(self, events: Iterable[TokenEvent]) -> tuple[Logprobs, ...]:
        """All that is kept of these events' sequences."""
        if not self._held:  # nearly always
            return ()
        return tuple(logprobs for event in events for logprobs in self._held.pop(event.seq_id, ()))
