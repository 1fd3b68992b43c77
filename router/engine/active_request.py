"""One client's request while a router works on it.

An ``ActiveRequest`` maps the router's sequence ids to the request's own, holds log-probabilities
and expert choices back until they are sent with a token, and records timestamps.
``QueueWaitTracker`` derives Retry-After from that.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import repeat
from typing import Generic, TypeVar

from tramontane.proto.errors import PipelineError, PoisonRequestError
from tramontane.proto.request import (
    NUM_PRIORITIES,
    ExpertChoices,
    Logprobs,
    RequestOutput,
    RequestTimings,
    SequenceDrafts,
    TokenEvent,
)
from tramontane.proto.step import MicroBatch
from tramontane.router.scheduling.sequence import Sequence as LiveSequence

Sink = Callable[[RequestOutput | PipelineError | PoisonRequestError], None]
T = TypeVar("T", ExpertChoices, Logprobs)


class PositionBuffer(Generic[T]):
    """Values of consecutive positions, held until a token of their sequence is emitted; no position
    is emitted twice.

    A sequence that is computed again has the same values, up to float rounding.
    """

    def __init__(self) -> None:
        self._next: dict[tuple[int, int], int] = {}  # next position, by sequence and layer
        self._held: dict[int, list[T]] = {}  # by sequence

    def skip_to(self, seq_id: int, position: int, layer: int = 0) -> None:
        """Skip all positions before this one: another router has emitted them."""
        self._next[seq_id, layer] = position

    def add(self, values: T, layer: int = 0) -> None:
        """Add values that continue the ones before or overlap them: after positions 1..4, values of
        3..6 add 5 and 6.
        """
        seq_id, position = values.seq_id, self._next.get((values.seq_id, layer), values.start)
        assert values.start <= position, "positions are missing"
        if values.end > position:
            self._held.setdefault(seq_id, []).append(values.between(position, values.end))
            self._next[seq_id, layer] = values.end

    def take(self, events: Iterable[TokenEvent], end_of: Callable[[int], int]) -> tuple[T, ...]:
        """Remove and return all values held for the sequences of the events, up to their last
        tokens.

        ``end_of`` returns how many tokens of a sequence are known. A sequence that ends with the
        first of three tokens, two of them drafts, holds values of all three; the values of
        the drafts are dropped.
        """
        if not self._held:  # as for nearly all requests
            return ()
        held = (
            (end_of(event.seq_id), values)
            for event in events
            for values in self._held.pop(event.seq_id, ())
        )
        return tuple(
            values.between(values.start, min(values.end, end))
            for end, values in held
            if values.start < end
        )


class ActiveRequest:
    """The sequences of a request, its timestamps by the router's clock, and the sink of its output.

    ``counts_drafts``: whether the router speculates, so that outputs have the numbers of drafts and
    of accepted drafts.
    """

    def __init__(
        self,
        sequences: Sequence[LiveSequence],
        sink: Sink,
        now: float,
        *,
        counts_drafts: bool = False,
    ) -> None:
        self.sink = sink
        self.index_of = {s.seq_id: index for index, s in enumerate(sequences)}
        self._sequences = list(sequences)
        self.priority, self.request_id = sequences[0].priority, sequences[0].request_id
        self.arrived_at, self.started_at, self.first_token_at = now, math.inf, math.inf
        self.is_single = len(sequences) == 1
        is_resumed = any(s.output_ids for s in sequences)  # another router has emitted tokens
        self.last_token_at = now if is_resumed else math.inf
        # cached tokens of a sequence's prompt, by seq_id, until the sequence has its first token
        self._num_cached: dict[int, int] = {}
        self._counts_prompt = {
            s.seq_id
            for s in {id(s.prompt_ids): s for s in reversed(sequences)}.values()
            if not s.output_ids
        }
        self._counts_drafts = counts_drafts
        # numbers of drafts and of accepted drafts in all outputs so far, by sequence
        self._sent_drafts: dict[int, tuple[int, int]] = {}
        self._experts = PositionBuffer[ExpertChoices]()
        self._logprobs = PositionBuffer[Logprobs]()
        for index, sequence in enumerate(sequences):
            # with a prompt of 3 tokens and an output of 2, log-probabilities of the positions 1..4
            # are known, and experts of the positions 0..3
            if sequence.output_ids:
                self._logprobs.skip_to(index, sequence.num_known)
            for layer in sequence.sampling.return_experts:
                self._experts.skip_to(
                    index, sequence.num_known - 1 if sequence.output_ids else 0, layer
                )

    def record_start(self, seq_id: int, num_cached: int, now: float) -> None:
        """Record the first chunk of a sequence: it begins after ``num_cached`` tokens. The sequence
        may be computed again later, and then has another first chunk.
        """
        self.started_at = min(self.started_at, now)
        if num_cached and seq_id in self._counts_prompt:
            self._num_cached[seq_id] = num_cached
        self._counts_prompt.discard(seq_id)

    def add_experts(self, choices: ExpertChoices) -> None:
        """Hold expert choices until the next token of their sequence: chunks of a prompt may give
        no token for a while.
        """
        self._experts.add(choices._replace(seq_id=self.index_of[choices.seq_id]), choices.layer)

    def add_logprobs(self, logprobs: Logprobs) -> None:
        """Hold log-probabilities until the next token of their sequence."""
        self._logprobs.add(logprobs._replace(seq_id=self.index_of[logprobs.seq_id]))

    def deliver(self, events: list[TokenEvent], now: float) -> None:
        """Send tokens to the sink, with all values that were held for their sequences."""
        self.first_token_at, self.last_token_at = min(self.first_token_at, now), now
        fields = [(self.index_of[seq_id], token_id, finish) for seq_id, token_id, finish in events]
        # takes half the time of calling TokenEvent
        own = tuple(map(tuple.__new__, repeat(TokenEvent), fields))
        cached = (
            sum(self._num_cached.pop(seq_id, 0) for seq_id, _, _ in events)
            if self._num_cached
            else 0
        )
        experts, logprobs = (
            self._experts.take(own, self._num_known),
            self._logprobs.take(own, self._num_known),
        )
        drafts = self._take_drafts(own) if self._counts_drafts else ()
        self.sink(
            RequestOutput(
                own, self._times(now), experts, logprobs, num_cached=cached, drafts=drafts
            )
        )

    def _take_drafts(self, events: Iterable[TokenEvent]) -> tuple[SequenceDrafts, ...]:
        """Return the numbers of drafts of the events' sequences since the last output; with a
        sequence's first output also a number of 0.
        """
        found: list[SequenceDrafts] = []
        for index in {event.seq_id: None for event in events}:
            sequence, sent = self._sequences[index], self._sent_drafts.get(index)
            counts = sequence.num_draft_tokens, sequence.num_accepted_draft_tokens
            if counts != sent:
                self._sent_drafts[index] = counts
                num_drafts, num_right = sent or (0, 0)
                found.append((index, counts[0] - num_drafts, counts[1] - num_right))
        return tuple(found)

    def _num_known(self, index: int) -> int:
        return self._sequences[index].num_known

    @property
    def times(self) -> RequestTimings:
        """The timings that were sent last; all 0 before the first token."""
        return (
            self._times(self.last_token_at)
            if self.first_token_at < math.inf
            else RequestTimings(0.0, 0.0, 0.0)
        )

    def phases(self, now: float) -> list[tuple[str, float, float]]:
        """Return name, start and end of the phases queue, prefill and decode that have begun, by
        the router's clock.
        """
        bounds = [self.arrived_at, self.started_at, self.first_token_at, self.last_token_at]
        spans = zip(("queue", "prefill", "decode"), bounds, bounds[1:], strict=False)
        return [(name, start, min(end, now)) for name, start, end in spans if start < math.inf]

    def _times(self, now: float) -> RequestTimings:
        return RequestTimings(
            self.started_at - self.arrived_at,
            self.first_token_at - self.started_at,
            now - self.first_token_at,
        )


class QueueWaitTracker:
    """How long the requests of one router wait for their first micro-batch, by its clock."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        # wait of the request that started last, by priority
        self._last_queue_s = [0.0] * NUM_PRIORITIES

    def record_starts(self, batch: MicroBatch, requests: Mapping[int, ActiveRequest]) -> None:
        """Record which requests, by the ids of their sequences, start with this micro-batch."""
        for chunk in batch.chunks:
            if chunk.sampling is not None and (request := requests.get(chunk.seq_id)):
                now = self._clock()
                if request.started_at == math.inf:
                    self._last_queue_s[request.priority] = now - request.arrived_at
                request.record_start(chunk.seq_id, chunk.start, now)

    def retry_after_s(self, priority: int, requests: Iterable[ActiveRequest]) -> int:
        """Return the longest wait of this priority in whole seconds: of the request that started
        last, or of a request that is still waiting.
        """
        now = self._clock()
        waiting = (r for r in requests if r.priority == priority and r.started_at == math.inf)
        longest = max((now - request.arrived_at for request in waiting), default=0.0)
        return max(1, math.ceil(max(longest, self._last_queue_s[priority])))


def by_layer(
    choices: Iterable[ExpertChoices], first: int, end: int
) -> dict[str, list[tuple[int, ...]]]:
    """Group the expert choices at positions first..end-1 of one sequence by layer, token by token.

    A layer without choices at these positions is left out. Choices at 2..4 of layer 7, for 3..9:
    {"7": [choice at 3, choice at 4]}.
    """
    found: defaultdict[str, list[tuple[int, ...]]] = defaultdict(list)
    for each in choices:
        if part := each.between(first, end).expert_ids:
            found[str(each.layer)] += part
    return dict(found)
