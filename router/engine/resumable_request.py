"""What has been told of a request's answers, so that another router can go on where one was lost."""

from collections.abc import Sequence
from dataclasses import replace

from tramontane.proto.request import RequestOutput, SequenceRequest


class ResumableRequest:
    """Numbers sequences as the request does; a router that gets only the rest of them numbers those from 0.

    Of three sequences the second has ended: the next router gets the first and the third, whose number there is 1.
    """

    def __init__(self, specs: Sequence[SequenceRequest]) -> None:
        self._specs = specs
        self._output_ids = [list(spec.output_ids) for spec in specs]
        self._unfinished = dict.fromkeys(range(len(specs)))
        self.was_accepted = any(spec.already_admitted or spec.output_ids for spec in specs)
        self._asked = list(self._unfinished)  # of the router that works on it now: the request's numbers

    @property
    def is_complete(self) -> bool:
        return not self._unfinished

    @property
    def num_unfinished(self) -> int:
        return len(self._unfinished)

    def remaining_specs(self) -> Sequence[SequenceRequest]:
        """What is left to do, for the next router."""
        self._asked = list(self._unfinished)
        return [
            replace(self._specs[number], output_ids=tuple(self._output_ids[number]), already_admitted=self.was_accepted)
            for number in self._asked
        ]

    def record(self, batch: RequestOutput) -> RequestOutput:
        """What the router tells, in the request's own numbers."""
        if len(self._asked) < len(self._specs):
            batch = remap_seq_ids(batch, self._asked)
        for number, token_id, finish in batch.events:
            self._output_ids[number].append(token_id)
            if finish is not None:
                del self._unfinished[number]
        return batch


def remap_seq_ids(batch: RequestOutput, numbers: Sequence[int]) -> RequestOutput:
    """Sequence 1 becomes what ``numbers`` has in place 1."""
    return replace(
        batch,
        events=tuple(event._replace(seq_id=numbers[event.seq_id]) for event in batch.events),
        experts=tuple(choices._replace(seq_id=numbers[choices.seq_id]) for choices in batch.experts),
        logprobs=tuple(logprobs._replace(seq_id=numbers[logprobs.seq_id]) for logprobs in batch.logprobs),
    )
