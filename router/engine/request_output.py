"""The output of one request on its way to the client: split into parts for transport, merged until
it is read, kept to resume on another router.
"""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from tramontane.proto.errors import TramontaneError
from tramontane.proto.request import (
    ExpertChoices,
    Logprobs,
    Request,
    RequestOutput,
    RequestTimings,
    TokenEvent,
)


def split_output(output: RequestOutput, max_values: int) -> Iterator[RequestOutput]:
    """Yield parts with at most ``max_values`` log-probabilities and expert ids each; the values of
    one token are never split.

    Only the last part has the events. With ``max_values`` 4, log-probabilities of five tokens with
    one other token each are split into values of the first two tokens, of the next two, and of the
    last one.
    """
    experts, logprobs, num_values = list[ExpertChoices](), list[Logprobs](), 0
    extras: list[ExpertChoices | Logprobs] = [*output.experts, *output.logprobs]
    for values in extras:
        step = max(max_values // max(values.values_per_token, 1), 1)
        for start in range(values.start, values.end, step):
            part = values.between(start, start + step)
            size = (part.end - part.start) * part.values_per_token
            if num_values and num_values + size > max_values:
                yield RequestOutput((), output.times, tuple(experts), tuple(logprobs))
                experts, logprobs, num_values = [], [], 0
            num_values += size
            if isinstance(part, ExpertChoices):
                experts.append(part)
            else:
                logprobs.append(part)
    yield output._replace(experts=tuple(experts), logprobs=tuple(logprobs))


class OutputQueue:
    """Merges all outputs that arrive between two reads, so a slow reader makes few and large reads.

    Outputs without events are read together with the events that follow, never before: parts of
    ``split_output``, and fingerprints of ``fingerprint_output``. Outputs are merged as they arrive,
    into lists of plain values: Python's garbage collector would examine thousands of waiting
    outputs again and again, which took half of the time of an ingress with 500 streams.
    """

    def __init__(self) -> None:
        self._events: list[Any] = []  # the fields of all tokens, three of each
        # times of the last output; None if there is no output to read
        self._times: RequestTimings | None = None
        self._experts: list[ExpertChoices] = []
        self._logprobs: list[Logprobs] = []
        # parts of an output whose last part has not arrived
        self._parts: list[RequestOutput] = []
        self._fingerprint = ""  # a new fingerprint that has not been read
        self._num_cached = 0
        self._drafts: dict[int, tuple[int, int]] = {}  # drafts and accepted ones, by sequence
        self._error: TramontaneError | None = None
        self._filled = asyncio.Event()

    def put(self, item: RequestOutput | TramontaneError) -> None:
        """Add an output, or the error that ends the request."""
        if isinstance(item, RequestOutput):
            self._parts.append(item)
            if not item.events:
                self._fingerprint = item.fingerprint or self._fingerprint
                return
            for event in item.events:
                self._events += event
            for part in self._parts:
                self._experts += part.experts
                self._logprobs += part.logprobs
            self._parts.clear()
            self._num_cached += item.num_cached
            for seq_id, num_drafts, num_right in item.drafts:
                before = self._drafts.get(seq_id, (0, 0))
                self._drafts[seq_id] = before[0] + num_drafts, before[1] + num_right
            self._times = item.times
        else:
            self._error = item
        self._filled.set()

    async def get(self) -> RequestOutput:
        """Return all outputs as one, waiting for the first. Raises an error that was put, after the
        outputs.
        """
        await self._filled.wait()
        if self._times is None:
            assert self._error is not None
            raise self._error
        if self._error is None:
            self._filled.clear()
        return self._take(self._times)

    def _take(self, times: RequestTimings) -> RequestOutput:
        fields = iter(self._events)
        events = tuple(map(TokenEvent._make, zip(fields, fields, fields, strict=True)))
        extras = tuple(self._experts), tuple(self._logprobs)
        drafts = tuple((seq_id, *counts) for seq_id, counts in self._drafts.items())
        output = RequestOutput(events, times, *extras, self._fingerprint, self._num_cached, drafts)
        self._drafts = {}
        (
            self._events,
            self._times,
            self._experts,
            self._logprobs,
            self._fingerprint,
            self._num_cached,
        ) = [], None, [], [], "", 0
        return output


class ResumableRequest:
    """A request with the tokens received so far, so that another router can continue it after one
    was lost.

    It numbers sequences as the client's request does; a router that gets only the unfinished
    sequences numbers them from 0. If the second of three sequences has ended, the next router gets
    the first and the third, and the third has number 1 there.
    """

    def __init__(self, request: Request) -> None:
        self.request = request
        self._output_ids = [list(each.output_ids) for each in request.sequences]
        self._unfinished = dict.fromkeys(range(len(request.sequences)))
        self.was_accepted = request.was_accepted
        # the request's numbers of the sequences that the present router works on
        self._submitted = list(self._unfinished)

    @property
    def is_complete(self) -> bool:
        """Whether all sequences have ended."""
        return not self._unfinished

    @property
    def num_unfinished(self) -> int:
        """Sequences that have not ended."""
        return len(self._unfinished)

    def remaining(self) -> Request:
        """Return the unfinished sequences with their tokens so far, for the next router."""
        self._submitted = list(self._unfinished)
        sequences = tuple(
            replace(self.request.sequences[number], output_ids=tuple(self._output_ids[number]))
            for number in self._submitted
        )
        return replace(self.request, sequences=sequences, already_admitted=self.was_accepted)

    def record(self, batch: RequestOutput) -> RequestOutput:
        """Record an output of the present router; return it with the request's own numbers."""
        if len(self._submitted) < len(self.request.sequences):
            batch = remap_seq_ids(batch, self._submitted)
        for number, token_id, finish in batch.events:
            self._output_ids[number].append(token_id)
            if finish is not None:
                del self._unfinished[number]
        return batch


def remap_seq_ids(batch: RequestOutput, numbers: Sequence[int]) -> RequestOutput:
    """Replace every sequence id i by ``numbers[i]``."""
    return batch._replace(
        events=tuple(event._replace(seq_id=numbers[event.seq_id]) for event in batch.events),
        experts=tuple(
            choices._replace(seq_id=numbers[choices.seq_id]) for choices in batch.experts
        ),
        logprobs=tuple(
            logprobs._replace(seq_id=numbers[logprobs.seq_id]) for logprobs in batch.logprobs
        ),
        drafts=tuple(
            (numbers[seq_id], num_drafts, num_right)
            for seq_id, num_drafts, num_right in batch.drafts
        ),
    )
