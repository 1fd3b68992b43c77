"""One client's request while a router works on it.

Which experts the tokens of a request have chosen, from the stages to whoever asked for them.

Log-probabilities of a request's tokens, from the last stage to whoever asked for them.

How long requests wait for their first micro-batch: what whoever is refused is told.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

from tramontane.proto.errors import PipelineError, PoisonRequestError
from tramontane.proto.log_fields import request_fields, requests_fields
from tramontane.proto.request import NUM_PRIORITIES, ExpertChoices, Logprobs, RequestOutput, RequestTimings, TokenEvent
from tramontane.proto.step import MicroBatch
from tramontane.router.scheduling.sequence import Sequence as LiveSequence


class LogprobBuffer:
    """Keeps them until a token of the same sequence goes out. No position goes out twice: a prompt that is computed again has
    the same, up to float rounding.
    """

    def __init__(self) -> None:
        self._next: dict[int, int] = {}  # position, by sequence
        self._held: dict[int, list[Logprobs]] = {}  # by sequence

    def skip_to(self, seq_id: int, position: int) -> None:
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


class ExpertChoiceBuffer:
    """Keeps what was chosen until a token of the same sequence goes out. No position goes out twice: what a sequence that gave
    its pages back computes again is the same, up to float rounding.
    """

    def __init__(self) -> None:
        self._num_known: Counter[tuple[int, int]] = Counter()  # positions, by sequence and layer
        self._held: defaultdict[int, list[ExpertChoices]] = defaultdict(list)  # by sequence

    def skip_to(self, seq_id: int, layers: Iterable[int], position: int) -> None:
        """All before it has been told, by another router."""
        self._num_known.update(dict.fromkeys(((seq_id, layer) for layer in layers), position))

    def add(self, choices: ExpertChoices) -> None:
        """Positions follow each other, or begin anew. Of 0..4 and 3..6 the second adds 5 and 6."""
        key = choices.seq_id, choices.layer
        num_known = self._num_known[key]
        assert choices.start <= num_known, "positions are missing"
        if new := choices.expert_ids[num_known - choices.start :]:
            self._held[choices.seq_id].append(choices._replace(start=num_known, expert_ids=new))
            self._num_known[key] += len(new)

    def take(self, seq_id: int) -> list[ExpertChoices]:
        return self._held.pop(seq_id, [])


def by_layer(choices: Iterable[ExpertChoices], first: int, end: int) -> dict[str, list[tuple[int, ...]]]:
    """Of the positions first..end-1 of one sequence, token by token; a layer of which none is there is left out.

    Positions 2..4 of layer 7, asked for 3..9: {"7": [those of 3, those of 4]}.
    """
    told: defaultdict[str, list[tuple[int, ...]]] = defaultdict(list)
    for _, layer, start, expert_ids in choices:
        if part := expert_ids[max(first - start, 0) : max(end - start, 0)]:
            told[str(layer)] += part
    return dict(told)


Sink = Callable[[RequestOutput | PipelineError | PoisonRequestError], None]


def requests_log_fields(requests: "Mapping[int, ActiveRequest]") -> dict[str, list[str]]:
    """For the log, beside a line about all these; by the numbers of their sequences."""
    return requests_fields(request.request_id for request in requests.values())


class ActiveRequest:
    """Its sequences, and when what happened."""

    def __init__(self, sequences: Sequence[LiveSequence], sink: Sink, now: float) -> None:
        self.sink = sink
        self.index_of = {s.seq_id: index for index, s in enumerate(sequences)}
        self.priority, self.request_id = sequences[0].priority, sequences[0].request_id
        self.arrived_at, self.started_at, self.first_token_at = now, math.inf, math.inf
        self.is_single = len(sequences) == 1
        has_begun = any(s.output_ids for s in sequences)  # with another router
        self.last_token_at = now if has_begun else math.inf  # of tokens, last
        self._experts = ExpertChoiceBuffer()
        self._logprobs = LogprobBuffer()
        for index, sequence in enumerate(sequences):
            if sequence.output_ids:  # of a prompt of 3 and an answer of 2, logprobs of 1..4 are known, experts of 0..3
                self._logprobs.skip_to(index, sequence.num_known)
                self._experts.skip_to(index, sequence.sampling.return_experts, sequence.num_known - 1)

    @property
    def log_fields(self) -> dict[str, object]:
        """For the log, beside a line about it."""
        return request_fields(self.request_id)

    def add_experts(self, choices: ExpertChoices) -> None:
        """They go with the next token of their sequence: a piece of a prompt may be the last for a while."""
        self._experts.add(choices._replace(seq_id=self.index_of[choices.seq_id]))

    def add_logprobs(self, logprobs: Logprobs) -> None:
        """They go with the next token of their sequence too."""
        self._logprobs.add(logprobs._replace(seq_id=self.index_of[logprobs.seq_id]))

    def deliver(self, events: list[TokenEvent], now: float) -> None:
        self.first_token_at, self.last_token_at = min(self.first_token_at, now), now
        own = tuple(TokenEvent(self.index_of[e.seq_id], e.token_id, e.finish) for e in events)
        experts = tuple(choices for event in own for choices in self._experts.take(event.seq_id))
        self.sink(RequestOutput(own, self._times(now), experts, self._logprobs.take(own)))

    @property
    def times(self) -> RequestTimings:
        """As they were told last. All 0 before its first token."""
        return self._times(self.last_token_at) if self.first_token_at < math.inf else RequestTimings(0.0, 0.0, 0.0)

    def phases(self, now: float) -> list[tuple[str, float, float]]:
        """Queue, prefill and decode, as far as it has come: when each began and ended, by the router's clock."""
        ends = [self.arrived_at, self.started_at, self.first_token_at, self.last_token_at]
        spans = zip(("queue", "prefill", "decode"), ends, ends[1:], strict=False)
        return [(name, began, min(ended, now)) for name, began, ended in spans if began < math.inf]

    def _times(self, now: float) -> RequestTimings:
        return RequestTimings(self.started_at - self.arrived_at, self.first_token_at - self.started_at, now - self.first_token_at)


class QueueWaitTracker:
    """Of one router's requests, by its clock."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._last_queue_s = [0.0] * NUM_PRIORITIES  # of the request of each that started last

    def record_starts(self, batch: MicroBatch, requests: Mapping[int, ActiveRequest]) -> None:
        """This micro-batch is sent; ``requests`` by the ids of their sequences."""
        for chunk in batch.chunks:
            if chunk.start == 0 and (request := requests.get(chunk.seq_id)) and request.started_at == math.inf:
                request.started_at = self._clock()
                self._last_queue_s[request.priority] = request.started_at - request.arrived_at

    def retry_after_s(self, priority: int, requests: Iterable[ActiveRequest]) -> int:
        """As long as the request like it that started last has waited, or one that has not for longer, in whole seconds."""
        now = self._clock()
        waiting = (r for r in requests if r.priority == priority and r.started_at == math.inf)
        longest = max((now - request.arrived_at for request in waiting), default=0.0)
        return max(1, math.ceil(max(longest, self._last_queue_s[priority])))
