"""Drafts from a sequence's own text: what followed the last tokens where they stood before.

This is prompt lookup decoding (Saxena 2023, github.com/apoorvumang/prompt-lookup-decoding), over
prompt and output.
"""

from collections.abc import Sequence
from itertools import islice

from tramontane.proto.plan import MAX_INDEXED_TOKENS

# n-grams of a sequence; those not seen for longest are dropped where there are more
MAX_INDEXED = MAX_INDEXED_TOKENS
MAX_PLACES = 4  # of an n-gram that are remembered, the last ones


class NgramDrafter:
    """Finds the last ``min_ngram`` tokens earlier in the text, and drafts what followed there.

    Of several places that one counts which has most in common with the last ``max_ngram`` tokens,
    and of equal ones the last. ``tokens`` is only read; it grows outside. What is older than
    ``MAX_INDEXED`` tokens when it begins is not looked at.
    """

    def __init__(self, tokens: Sequence[int], min_ngram: int, max_ngram: int) -> None:
        assert 1 <= min_ngram <= max_ngram
        self._tokens, self._min, self._max = tokens, min_ngram, max_ngram
        # index of the token that follows, by n-gram
        self._places: dict[tuple[int, ...], tuple[int, ...]] = {}
        # tokens that are known as followers
        self._num_indexed = max(min_ngram, len(tokens) - MAX_INDEXED)

    def index(self, max_tokens: int) -> int:
        """Index up to so many tokens, about a microsecond each; return how many. Without all of
        them there are no drafts.
        """
        num_new = max(min(len(self._tokens) - self._num_indexed, max_tokens), 0)
        self._index(self._num_indexed + num_new)
        return num_new

    def draft(self, num_tokens: int) -> tuple[int, ...]:
        """Return up to ``num_tokens`` tokens that may come next, if all of the text has been
        indexed.

        Text 5 6 7 8 5 6 with n-grams of two: 5 6 stood at the beginning, where 7 8 5 6 followed.
        What follows beyond the end is the draft itself: of 1 1 1 the next ones are 1 1 1 again.
        """
        tokens, end = self._tokens, len(self._tokens)
        if self._num_indexed < end or num_tokens <= 0:
            return ()
        places = self._places.get(tuple(tokens[end - self._min : end]))
        if places is None:
            return ()
        place = (
            places[-1]
            if len(places) == 1
            else max(places, key=lambda each: (self._num_common(each), each))
        )
        period = end - place
        return tuple([tokens[place + i % period] for i in range(num_tokens)])

    def close(self) -> None:
        """Do nothing: the index is the drafter's own."""

    def _index(self, end: int) -> None:
        """Index the n-grams before the tokens up to ``end``: the last one of the text has no
        follower yet.
        """
        tokens, places, size = self._tokens, self._places, self._min
        for follower in range(self._num_indexed, end):
            ngram = tuple(tokens[follower - size : follower])
            before = places.pop(ngram, None)  # so that it is the youngest now
            places[ngram] = (follower,) if before is None else (*before[1 - MAX_PLACES :], follower)
        self._num_indexed = end
        if len(places) > MAX_INDEXED:
            for ngram in list(islice(places, len(places) - MAX_INDEXED // 2)):
                del places[ngram]

    def _num_common(self, place: int) -> int:
        """Return how many tokens before this place equal the last ones of the text, at most
        ``max_ngram``.
        """
        tokens, end = self._tokens, len(self._tokens)
        count = self._min
        while (
            count < min(self._max, place) and tokens[place - 1 - count] == tokens[end - 1 - count]
        ):
            count += 1
        return count
