"""The token source of one request: adds the client's API key and the request's deadline."""

import asyncio
import math
import time
from bisect import bisect_left
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import replace
from types import MappingProxyType

from tramontane.proto.errors import (
    DeadlineExceededError,
    DrainingError,
    OverloadedError,
    ParameterError,
    PipelineUnavailableError,
    QueueFullError,
)
from tramontane.proto.ports import TokenSource
from tramontane.proto.request import FinishReason, Identity, Request, RequestOutput
from tramontane.router.engine.stats import SampleBuffer
from tramontane.router.openai.detokenizer import ChoiceDetokenizer

TIMEOUT_HEADER = "x-request-timeout"
MAX_TIMEOUT_S = 10_000_000.0


class RequestTokenSource:
    """A ``TokenSource`` for one request. ``deadline`` (of the event loop's clock) ends its work,
    also while it waits.

    ``identity``: of the client, by its API key, whose tenant is joined to a request's own salt.
    ``request_id``: the id in the logs. ``counts``: of refusals by ``check_capacity``;
    ``RequestStats.track`` counts later ones. ``priority``: see ``Request``.
    """

    def __init__(
        self,
        source: TokenSource,
        identity: Identity,
        deadline: float = math.inf,
        request_id: str = "",
        counts: "RequestStats | None" = None,
        priority: int = 0,
    ) -> None:
        self._source, self._identity, self._deadline = source, identity, deadline
        self._request_id, self._counts, self._priority = request_id, counts, priority

    def check_capacity(self, num_sequences: int, owner: int = 0) -> None:
        """Raise if the source has no capacity for these sequences."""
        try:
            self._source.check_capacity(num_sequences, owner or self._identity.owner)
        except Exception as error:
            if self._counts is not None:
                self._counts.record_refusal(error)
            raise

    async def generate(self, request: Request) -> AsyncGenerator[RequestOutput, None]:
        """Yield the source's tokens. Raises DeadlineExceededError, before the source is called if
        the deadline has passed.
        """
        if asyncio.get_running_loop().time() >= self._deadline:
            raise _deadline_error()
        request = replace(
            request,
            owner=self._identity.owner,
            request_id=self._request_id,
            cache_salt=self._identity.cache_salt(request.cache_salt),
            priority=self._priority,
        )
        async with aclosing(self._source.generate(request)) as batches:
            while (batch := await self._next(batches)) is not None:
                yield batch

    async def _next(self, batches: AsyncGenerator[RequestOutput, None]) -> RequestOutput | None:
        if self._deadline == math.inf:
            return await anext(batches, None)
        try:
            async with asyncio.timeout_at(self._deadline):
                return await anext(batches, None)
        except TimeoutError:
            raise _deadline_error() from None


def _deadline_error() -> DeadlineExceededError:
    return DeadlineExceededError(f"the request took longer than its {TIMEOUT_HEADER} allows")


def parse_timeout(values: Sequence[str]) -> float:
    """Return the seconds that the header's values allow, infinity without one. Raises
    ParameterError.
    """
    if not values:
        return math.inf
    try:
        (text,) = values
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= MAX_TIMEOUT_S:  # NaN fails, too
        raise ParameterError(
            f"the header must be given once, with seconds above 0, up to {MAX_TIMEOUT_S:.0f}, such"
            " as 30 or 0.5",
            TIMEOUT_HEADER,
        )
    return seconds


# Request counters of one ingress. They only grow, so that metrics can read them from any thread.

# Why a request was refused, by error. The first class that matches counts.
REFUSALS = MappingProxyType(
    {
        QueueFullError: "full",
        OverloadedError: "overloaded",
        DrainingError: "draining",
        PipelineUnavailableError: "not_running",
    }
)
# Errors that count as a disconnected client; a missed deadline is one.
CLIENT_GONE_ERRORS = (asyncio.CancelledError, GeneratorExit, DeadlineExceededError)


# Bounds of buckets, as vLLM has them.
FIRST_TOKEN_BOUNDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
INTER_TOKEN_BOUNDS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0),
)
REQUEST_BOUNDS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
TOKEN_BOUNDS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))


class Histogram:
    """Counts of values by bucket, and their sum. One thread adds them."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds, self.sum = bounds, 0.0
        self.counts = [0] * (len(bounds) + 1)  # the last one: above all bounds

    def add(self, value: float) -> None:
        """Count a value; one that equals a bound is in the bucket below it."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value


class RequestStats:
    """Counters of one ingress: finish reasons by choice, times by request.

    Samples are for Ray's metrics, which may lose some; the histograms have all values.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.refused = dict.fromkeys(REFUSALS.values(), 0)
        self.finished = dict.fromkeys(FinishReason, 0)
        self.prompt_tokens = self.generation_tokens = self.ignored_fields = 0
        self.first_token_s, self.inter_token_s = SampleBuffer(), SampleBuffer()
        self.whole_s, self.queue_s = SampleBuffer(), SampleBuffer()
        self.first_token, self.inter_token = (
            Histogram(FIRST_TOKEN_BOUNDS),
            Histogram(INTER_TOKEN_BOUNDS),
        )
        self.whole, self.queue = Histogram(REQUEST_BOUNDS), Histogram(REQUEST_BOUNDS)
        self.request_prompt_tokens, self.request_generation_tokens = (
            Histogram(TOKEN_BOUNDS),
            Histogram(TOKEN_BOUNDS),
        )

    def record_refusal(self, error: BaseException) -> bool:
        """Count an error if it is a refusal; return whether it is one."""
        reason = next(
            (reason for kind, reason in REFUSALS.items() if isinstance(error, kind)), None
        )
        if reason is not None:
            self.refused[reason] += 1
        return reason is not None

    @contextmanager
    def track(
        self,
        arrived_at: float,
        num_prompt: int,
        choices: Sequence[ChoiceDetokenizer],
        *,
        has_begun: bool,
    ) -> Iterator["RequestRecorder"]:
        """Count one request while the context is open. ``has_begun``: another ingress has counted
        its beginning.
        """
        recorder = RequestRecorder(self, arrived_at, num_prompt, has_begun)
        # of unfinished choices; None if the request was refused
        reason: FinishReason | None = FinishReason.ABORT
        try:
            yield recorder
        except BaseException as error:
            if not recorder.has_begun and self.record_refusal(error):
                reason = None
            elif not isinstance(error, CLIENT_GONE_ERRORS):
                reason = FinishReason.ERROR
            raise
        finally:
            for choice in choices:
                if (finish := choice.finish or reason) is not None:
                    self.finished[finish] += 1
            if all(choice.finish for choice in choices):
                self._record_end(self.clock() - arrived_at, num_prompt, choices)

    def _record_end(
        self, seconds: float, num_prompt: int, choices: Sequence[ChoiceDetokenizer]
    ) -> None:
        self.whole_s.add(seconds)
        self.whole.add(seconds)
        self.request_prompt_tokens.add(num_prompt)
        self.request_generation_tokens.add(sum(choice.num_tokens for choice in choices))


class RequestRecorder:
    """Measures the times of one request."""

    def __init__(
        self, counts: RequestStats, arrived_at: float, num_prompt: int, has_begun: bool
    ) -> None:
        self._counts, self._arrived_at, self._num_prompt = counts, arrived_at, num_prompt
        self.has_begun = has_begun
        self._last_at: float | None = None

    def observe(self, batch: RequestOutput) -> None:
        """Count the tokens and the time of one batch."""
        counts, now = self._counts, self._counts.clock()
        counts.generation_tokens += len(batch.events)
        if self._last_at is not None:
            counts.inter_token_s.add(now - self._last_at)
            counts.inter_token.add(now - self._last_at)
        elif not self.has_begun:
            counts.prompt_tokens += self._num_prompt
            counts.first_token_s.add(now - self._arrived_at)
            counts.first_token.add(now - self._arrived_at)
            counts.queue_s.add(batch.times.queue_s)
            counts.queue.add(batch.times.queue_s)
        self._last_at, self.has_begun = now, True
