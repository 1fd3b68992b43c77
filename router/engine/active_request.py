"""One client's request while a router works on it."""

import math
from collections.abc import Callable, Mapping, Sequence

from tramontane.proto.errors import PipelineError, PoisonError
from tramontane.proto.log_fields import about, about_all
from tramontane.proto.request import ExpertChoices, Logprobs, RequestTimes, TokenBatch, TokenEvent
from tramontane.router.engine.expert_history import ExpertHistory
from tramontane.router.engine.logprob_history import LogprobHistory
from tramontane.router.scheduling.sequence import Sequence as LiveSequence

Sink = Callable[[TokenBatch | PipelineError | PoisonError], None]


def about_them(requests: "Mapping[int, LiveRequest]") -> dict[str, list[str]]:
    """For the log, beside a line about all these; by the numbers of their sequences."""
    return about_all(request.request_id for request in requests.values())


class LiveRequest:
    """Its sequences, and when what happened."""

    def __init__(self, sequences: Sequence[LiveSequence], sink: Sink, now: float) -> None:
        self.sink = sink
        self.index_of = {s.seq_id: index for index, s in enumerate(sequences)}
        self.priority, self.request_id = sequences[0].priority, sequences[0].request_id
        self.arrived_at, self.started_at, self.first_token_at = now, math.inf, math.inf
        self.is_single = len(sequences) == 1
        has_begun = any(s.output_ids for s in sequences)  # with another router
        self.told_at = now if has_begun else math.inf  # of tokens, last
        self._experts = ExpertHistory()
        self._logprobs = LogprobHistory()
        for index, sequence in enumerate(sequences):
            if sequence.output_ids:  # of a prompt of 3 and an answer of 2, logprobs of 1..4 are known, experts of 0..3
                self._logprobs.begin_at(index, sequence.num_known)
                self._experts.begin_at(index, sequence.sampling.return_experts, sequence.num_known - 1)

    @property
    def about(self) -> dict[str, object]:
        """For the log, beside a line about it."""
        return about(self.request_id)

    def note_experts(self, choices: ExpertChoices) -> None:
        """They go with the next token of their sequence: a piece of a prompt may be the last for a while."""
        self._experts.add(choices._replace(seq_id=self.index_of[choices.seq_id]))

    def note_logprobs(self, logprobs: Logprobs) -> None:
        """They go with the next token of their sequence too."""
        self._logprobs.add(logprobs._replace(seq_id=self.index_of[logprobs.seq_id]))

    def deliver(self, events: list[TokenEvent], now: float) -> None:
        self.first_token_at, self.told_at = min(self.first_token_at, now), now
        own = tuple(TokenEvent(self.index_of[e.seq_id], e.token_id, e.finish) for e in events)
        experts = tuple(choices for event in own for choices in self._experts.take(event.seq_id))
        self.sink(TokenBatch(own, self._times(now), experts, self._logprobs.take(own)))

    @property
    def times(self) -> RequestTimes:
        """As they were told last. All 0 before its first token."""
        return self._times(self.told_at) if self.first_token_at < math.inf else RequestTimes(0.0, 0.0, 0.0)

    def phases(self, now: float) -> list[tuple[str, float, float]]:
        """Queue, prefill and decode, as far as it has come: when each began and ended, by the router's clock."""
        ends = [self.arrived_at, self.started_at, self.first_token_at, self.told_at]
        spans = zip(("queue", "prefill", "decode"), ends, ends[1:], strict=False)
        return [(name, began, min(ended, now)) for name, began, ended in spans if began < math.inf]

    def _times(self, now: float) -> RequestTimes:
        return RequestTimes(self.started_at - self.arrived_at, self.first_token_at - self.started_at, now - self.first_token_at)
