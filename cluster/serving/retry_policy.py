"""How long a door tries to have a request go on that has lost its router.

What a door knows, without asking anybody, of whether routers would take more.
"""

import asyncio
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tramontane.cluster.pipeline.stage_chain import LOAD_TIMEOUT_S
from tramontane.proto.errors import (
    ModelMismatchError,
    OverloadedError,
    PipelineError,
    PipelineSupersededError,
    PipelineUnavailableError,
    QueueFullError,
    RouterLostError,
    TramontaneError,
)

NEW_VERSION_S = 120.0  # new requests wait so long for one that was announced; what only an old router could go on with, for that
ADMISSION_TIMEOUT_S = 50.0  # what no router has ever accepted can still be refused, and may find another server
MAX_LOSSES = 10  # of routers that had accepted the request and told no token of it: it may have waited, or be what they die of
TRY_EVERY_S = 0.2


class FailoverBudget:
    """Of one request, which a router may have accepted already. It is renewed with every token.

    ``since``: when it was left without a router, by the event loop's clock; until it has lost one, when it came.
    """

    def __init__(self, *, was_accepted: bool = False) -> None:
        self.reset()
        self.since = asyncio.get_running_loop().time()
        self._was_accepted = was_accepted

    def reset(self) -> None:
        self._failing_since: float | None = None
        self._num_losses = 0

    def on_error(self, error: TramontaneError) -> None:
        """Raises why not to ask again, after this.

        A request that no router has ever accepted may be refused, with what the routers say; it waits for a newer version.
        """
        now = asyncio.get_running_loop().time()
        self._failing_since = self._failing_since or now
        if isinstance(error, RouterLostError):
            self._was_accepted = True
            self._failing_since = self.since = now  # it was with a router until now, and may have waited there for long
            self._num_losses += 1
            if self._num_losses >= MAX_LOSSES:
                raise PipelineError(f"{MAX_LOSSES} routers were lost with this request: {error}") from error
        may_wait = self._was_accepted or isinstance(error, PipelineSupersededError)
        if isinstance(error, PipelineUnavailableError | OverloadedError) and not may_wait:
            raise error
        if now - self._failing_since <= self._limit_s(error):
            return
        if self._was_accepted:
            raise PipelineError(f"no router could go on with this request in time: {error}") from error
        raise PipelineUnavailableError("no pipeline was ready in time; try again later") from error

    def _limit_s(self, error: TramontaneError) -> float:
        """Without a token, in all, if this is the latest error."""
        if isinstance(error, ModelMismatchError):
            return NEW_VERSION_S
        if self._was_accepted:
            return LOAD_TIMEOUT_S
        return NEW_VERSION_S if isinstance(error, PipelineSupersededError) else ADMISSION_TIMEOUT_S

    async def backoff(self) -> None:
        """Until it is time to ask again."""
        await asyncio.sleep(TRY_EVERY_S)


def most_useful_error(refusals: Iterable[TramontaneError]) -> TramontaneError:
    """Of those of several routers: one that is to come, then one that has room soon; one of another model is no help at all."""

    def rank(refusal: TramontaneError) -> int:
        if isinstance(refusal, PipelineSupersededError):
            return 0
        if isinstance(refusal, OverloadedError):
            return 1 + isinstance(refusal, QueueFullError)
        return 3 + isinstance(refusal, ModelMismatchError)

    return min(refusals, key=rank)


LONGEST_RETRY_S = 60  # nobody is sent away for longer: a pipeline that loads may be there before
FULL_TTL_S = 0.25  # that routers are full is believed for so long, unless a request ends before


@dataclass(frozen=True, slots=True)
class WaitingRequest:
    """A request that no router is known to work on."""

    num_sequences: int
    since: float  # by the event loop's clock


class AdmissionWindow:
    """``max_unaccepted``: sequences that may be on their way to a router. Where no router is running they
    would wait in Ray Serve, which has no bound and no end to its patience.
    """

    def __init__(self, max_unaccepted: int) -> None:
        self._max_unaccepted = max_unaccepted
        self.unaccepted: dict[int, WaitingRequest] = {}  # by request
        self._pausing: list[WaitingRequest] = []  # requests that wait until a router can be asked again
        self._full: dict[int, tuple[QueueFullError, float]] = {}  # what all routers said, and until when it holds, by owner

    def check(self, num_sequences: int, owner: int) -> None:
        """Raises OverloadedError. What routers have said is an answer for those who come soon after, too."""
        waiting = (*self.unaccepted.values(), *self._pausing)
        on_their_way = sum(each.num_sequences for each in waiting)
        if num_sequences <= self._max_unaccepted < on_their_way + num_sequences:  # what is larger is refused for good, by others
            oldest = min(each.since for each in waiting)
            raise OverloadedError("too many requests are on their way to a pipeline", _retry_after_s(oldest))
        error, until = self._full.get(owner, (None, 0.0))
        if error is not None and asyncio.get_running_loop().time() < until:
            raise QueueFullError(str(error), error.retry_after_s)
        self._full.pop(owner, None)

    @contextmanager
    def waiting(self, request: WaitingRequest) -> Iterator[None]:
        """While this block waits until a router can be asked again."""
        self._pausing.append(request)
        try:
            yield
        finally:
            self._pausing.remove(request)

    def mark_full(self, owner: int, error: QueueFullError) -> None:
        """As all routers have just said."""
        self._full[owner] = error, asyncio.get_running_loop().time() + FULL_TTL_S

    def on_request_end(self, number: int) -> None:
        """A request is with no router any more. It had a place, or stood in the way of others, if one had accepted it."""
        if self.unaccepted.pop(number, None) is None:
            self._full.clear()


def _retry_after_s(since: float) -> int:
    """As long as the one that waits longest has waited by now, in whole seconds: 0.2 s give 1, 12.3 s give 13, 100 s give 60."""
    waited_s = math.ceil(asyncio.get_running_loop().time() - since)
    return min(max(1, waited_s), LONGEST_RETRY_S)
