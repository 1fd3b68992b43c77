"""Drafts of a draft model, which arrive later than they are requested."""

from collections.abc import Callable, Sequence
from itertools import islice

from tramontane.proto.plan import MAX_INDEXED_TOKENS
from tramontane.proto.request import SamplingParams
from tramontane.proto.step import DraftRequest


class DraftQueue:
    """The sequences that wait for drafts, and the sequences that have ended since the draft model
    was last called.

    ``on_request`` is called when the first sequence begins to wait.
    """

    def __init__(self) -> None:
        self.on_request: Callable[[], None] = lambda: None
        self._waiting: dict[int, ModelDrafter] = {}
        self._known = set[int]()  # ids known to the draft model; rarely all of a busy server
        self._ended: list[int] = []

    def add(self, drafter: "ModelDrafter") -> None:
        """Let a sequence wait for drafts."""
        if not self._waiting:
            self.on_request()
        self._waiting[drafter.seq_id] = drafter

    def end(self, seq_id: int) -> None:
        """Drop a sequence."""
        self._waiting.pop(seq_id, None)
        if seq_id in self._known:
            self._known.remove(seq_id)
            self._ended.append(seq_id)

    def take(self) -> tuple[list["ModelDrafter"], list[int]]:
        """Remove and return the waiting sequences, and the ids of ended ones, which the model drops
        first.
        """
        taken = list(self._waiting.values()), self._ended
        self._known.update(self._waiting)
        self._waiting, self._ended = {}, []
        return taken


class ModelDrafter:
    """The ``Drafter`` of one sequence that a draft model continues.

    The model drafts from the text with its earlier drafts, as if these were right; after a wrong
    draft, it begins after the last right token. ``tokens`` is only read; it grows outside.
    ``max_len``: of text and drafts.
    """

    def __init__(
        self,
        tokens: Sequence[int],
        seq_id: int,
        sampling: SamplingParams,
        num_tokens: int,
        max_len: int,
        queue: DraftQueue,
    ) -> None:
        self.seq_id = seq_id
        self._tokens, self._sampling, self._num_tokens, self._max_len = (
            tokens,
            sampling,
            num_tokens,
            max_len,
        )
        self._queue = queue
        self._text: list[int] = []  # the text that the model has, with its drafts
        # number of leading tokens that match the sequence's known tokens
        self._num_common = 0
        self._is_waiting = False
        self._num_asked = 0  # tokens of the text at the last request
        self._num_in_vain = 0  # tokens of the text at the last request that gave no drafts

    def index(self, _max_tokens: int) -> int:
        """Do nothing: there is no index."""
        return 0

    def draft(self, num_tokens: int) -> tuple[int, ...]:
        """Return up to ``num_tokens`` of the drafts received, and request more if they are
        fewer.
        """
        drafts = self._drafts()
        is_new = len(self._tokens) > self._num_in_vain
        if (
            len(drafts) < num_tokens
            and is_new
            and not self._is_waiting
            and self._num_left(drafts) > 0
        ):
            self._is_waiting = True
            self._queue.add(self)
        return tuple(drafts[:num_tokens])

    def request(self) -> DraftRequest:
        """Return the request for the next drafts.

        Known tokens 5 6 7 8 4, and the model has 5 6 7 8 9 2: four tokens are kept, and 4 is new.
        With known tokens 5 6 7 all are kept, and 8 9 2 are expected to be right.
        """
        self._num_asked = len(self._tokens)
        drafts = self._drafts()
        num_kept = len(self._text) if drafts else self._num_common
        new = () if drafts else tuple(self._tokens[num_kept:])
        self._text[num_kept:] = new
        return DraftRequest(
            self.seq_id,
            num_kept,
            new,
            min(self._num_tokens, self._num_left(drafts)),
            self._sampling,
        )

    def receive(self, drafts: Sequence[int] | None) -> None:
        """Take the drafts of the last request. None: the model does not have the sequence, and
        needs all of its tokens.

        After an empty result, no more drafts are requested until the text has grown.
        """
        self._is_waiting = False
        if not drafts:
            self._num_in_vain = self._num_asked
        if drafts is None:
            self._text.clear()
            self._num_common = 0
        else:
            self._text += drafts

    def close(self) -> None:
        """Let the model drop the sequence."""
        self._queue.end(self.seq_id)

    def _drafts(self) -> list[int]:
        """Return the drafts after the known tokens, if the model has these tokens."""
        tokens, text = self._tokens, self._text
        self._num_common = min(self._num_common, len(text))
        while (
            self._num_common < min(len(tokens), len(text))
            and tokens[self._num_common] == text[self._num_common]
        ):
            self._num_common += 1
        return text[self._num_common :] if self._num_common == len(tokens) else []

    def _num_left(self, drafts: Sequence[int]) -> int:
        return self._max_len - len(self._tokens) - len(drafts)


# Prompt lookup: drafts are the tokens that followed an earlier occurrence of the last tokens.
#
# This is prompt lookup decoding (Saxena 2023, github.com/apoorvumang/prompt-lookup-decoding), over
# prompt and output.

# n-grams of a sequence; above this number the least recently seen ones are dropped
MAX_INDEXED = MAX_INDEXED_TOKENS
MAX_PLACES = 4  # positions of an n-gram that are kept, the last ones


class NgramDrafter:
    """Finds the last ``min_ngram`` tokens earlier in the text, and drafts the tokens that followed
    them.

    Of several occurrences, the one that matches most of the last ``max_ngram`` tokens is used, and
    of equal ones the last. ``tokens`` is only read; it grows outside. At the start only the last
    ``MAX_INDEXED`` tokens are indexed.
    """

    def __init__(self, tokens: Sequence[int], min_ngram: int, max_ngram: int) -> None:
        assert 1 <= min_ngram <= max_ngram
        self._tokens, self._min, self._max = tokens, min_ngram, max_ngram
        # index of the token that follows, by n-gram
        self._places: dict[tuple[int, ...], tuple[int, ...]] = {}
        # tokens that are indexed as followers
        self._num_indexed = max(min_ngram, len(tokens) - MAX_INDEXED)

    def index(self, max_tokens: int) -> int:
        """Index up to ``max_tokens`` tokens, about a microsecond each; return how many. There are
        no drafts until all tokens are indexed.
        """
        num_new = max(min(len(self._tokens) - self._num_indexed, max_tokens), 0)
        self._index(self._num_indexed + num_new)
        return num_new

    def draft(self, num_tokens: int) -> tuple[int, ...]:
        """Return up to ``num_tokens`` tokens that may come next, if all of the text has been
        indexed.

        Text 5 6 7 8 5 6 with n-grams of two: 5 6 stood at the beginning, followed by 7 8 5 6. After
        the end of the text the draft itself is copied: 1 1 1 continues with 1 1 1.
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
        """Index the n-grams before the tokens up to ``end``: the last n-gram of the text has no
        next token yet.
        """
        tokens, places, size = self._tokens, self._places, self._min
        for follower in range(self._num_indexed, end):
            ngram = tuple(tokens[follower - size : follower])
            before = places.pop(ngram, None)  # so that it is the most recent entry
            places[ngram] = (follower,) if before is None else (*before[1 - MAX_PLACES :], follower)
        self._num_indexed = end
        if len(places) > MAX_INDEXED:
            for ngram in list(islice(places, len(places) - MAX_INDEXED // 2)):
                del places[ngram]

    def _num_common(self, place: int) -> int:
        """Return how many tokens before this position equal the last tokens of the text, at most
        ``max_ngram``.
        """
        tokens, end = self._tokens, len(self._tokens)
        count = self._min
        while (
            count < min(self._max, place) and tokens[place - 1 - count] == tokens[end - 1 - count]
        ):
            count += 1
        return count
