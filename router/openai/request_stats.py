"""What became of a door's requests: plain numbers that only grow, for whoever watches, in whichever thread."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Protocol

from tramontane.proto.errors import (
    DeadlineExceededError,
    DrainingError,
    OverloadedError,
    PipelineUnavailableError,
    QueueFullError,
)
from tramontane.proto.ports import TokenSource
from tramontane.proto.request import FinishReason, RequestOutput, SequenceRequest
from tramontane.router.engine.pipeline_stats import SampleBuffer

# Why a request was not taken. The first that fits counts.
REFUSALS = MappingProxyType(
    {QueueFullError: "full", OverloadedError: "overloaded", DrainingError: "draining", PipelineUnavailableError: "not_running"}
)
# What counts as a client that has left: it may only have no time any more.
CLIENT_GONE_ERRORS = (asyncio.CancelledError, GeneratorExit, DeadlineExceededError)


class Finishable(Protocol):
    """A choice: why it has finished, if it has."""

    @property
    def finish(self) -> FinishReason | None: ...


class RequestStats:
    """Of one door. Choices of a request end by themselves; its times are those of the request as a whole."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.refused = dict.fromkeys(REFUSALS.values(), 0)
        self.finished = dict.fromkeys(FinishReason, 0)
        self.prompt_tokens = self.generation_tokens = 0
        self.first_token_s, self.inter_token_s, self.whole_s, self.queue_s = (
            SampleBuffer(),
            SampleBuffer(),
            SampleBuffer(),
            SampleBuffer(),
        )

    def record_refusal(self, error: BaseException) -> bool:
        """Whether it is one."""
        reason = next((reason for kind, reason in REFUSALS.items() if isinstance(error, kind)), None)
        if reason is not None:
            self.refused[reason] += 1
        return reason is not None

    @contextmanager
    def track(
        self, arrived_at: float, num_prompt: int, choices: Sequence[Finishable], *, has_begun: bool
    ) -> Iterator["RequestRecorder"]:
        """Around the work on one request. ``has_begun``: another door has told something of it, and counted its beginning."""
        one = RequestRecorder(self, arrived_at, num_prompt, has_begun)
        left_by: FinishReason | None = FinishReason.ABORT
        try:
            yield one
        except BaseException as error:
            if not one.has_begun and self.record_refusal(error):
                left_by = None
            elif not isinstance(error, CLIENT_GONE_ERRORS):
                left_by = FinishReason.ERROR
            raise
        finally:
            self._note_end(choices, left_by, arrived_at)

    def _note_end(self, choices: Sequence[Finishable], left_by: FinishReason | None, arrived_at: float) -> None:
        """``left_by``: why those have ended that did not finish; None: they never began."""
        for choice in choices:
            if (reason := choice.finish or left_by) is not None:
                self.finished[reason] += 1
        if all(choice.finish for choice in choices):
            self.whole_s.add(self.clock() - arrived_at)


class RequestRecorder:
    """One request, while it is worked on."""

    def __init__(self, counts: RequestStats, arrived_at: float, num_prompt: int, has_begun: bool) -> None:
        self._counts, self._arrived_at, self._num_prompt = counts, arrived_at, num_prompt
        self.has_begun = has_begun
        self._last_at: float | None = None

    def observe(self, batch: RequestOutput) -> None:
        counts, now = self._counts, self._counts.clock()
        counts.generation_tokens += len(batch.events)
        if self._last_at is not None:
            counts.inter_token_s.add(now - self._last_at)
        elif not self.has_begun:
            counts.prompt_tokens += self._num_prompt
            counts.first_token_s.add(now - self._arrived_at)
            counts.queue_s.add(batch.times.queue_s)
        self._last_at, self.has_begun = now, True


class CountingTokenSource:
    """A ``TokenSource`` of which it is counted how often it has no room. What it refuses later, ``counted`` sees."""

    def __init__(self, source: TokenSource, counts: RequestStats) -> None:
        self._source, self._counts = source, counts

    def generate(self, specs: Sequence[SequenceRequest]) -> AsyncGenerator[RequestOutput, None]:
        return self._source.generate(specs)

    def check_capacity(self, num_sequences: int, owner: int = 0) -> None:
        try:
            self._source.check_capacity(num_sequences, owner)
        except Exception as error:
            self._counts.record_refusal(error)
            raise
