"""Retries of one request that has lost its router, and an ingress's own estimate of whether routers
would accept more.
"""

import asyncio
import copy
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tramontane.proto import errors
from tramontane.proto.request import Request
from tramontane.proto.timing import (
    ADMISSION_RETRY_INTERVAL_S,
    ADMISSION_TIMEOUT_S,
    LOAD_TIMEOUT_S,
    NEW_VERSION_TIMEOUT_S,
)
from tramontane.proto.units import backoff_delays

# lost routers that had accepted a request and sent no token of it: the request may crash them
MAX_LOSSES = 10
MAX_RETRY_INTERVAL_S = 1.0  # bound of any delay
MAX_RETRY_AFTER_S = 60  # a pipeline that loads may be ready before
# how long a full router, or all being full, is remembered, unless a request ends earlier
FULL_TTL_S = 0.25
NOT_RUNNING_TTL_S = 1.0  # how long a router that does not run, or recovers, is asked last


class RouterFailoverBudget:
    """Decides how often and how long one request is retried. Every token resets it.

    Routers' answers decide which error ends a request, and after how long; only the delays are the
    same. ``without_router_since``: when the request lost its router, by the event loop's clock;
    before that, when it arrived.
    """

    def __init__(self, *, was_accepted: bool = False) -> None:
        self.reset()
        self.without_router_since = asyncio.get_running_loop().time()
        self._was_accepted = was_accepted

    def reset(self) -> None:
        """Reset all failures: the request has made progress."""
        self._failing_since: float | None = None
        self._num_losses = 0
        self._delays = backoff_delays(ADMISSION_RETRY_INTERVAL_S, MAX_RETRY_INTERVAL_S)

    def on_error(self, error: errors.TramontaneError) -> None:
        """Raise the error that ends the request, unless it is to be retried.

        A request that no router has ever accepted may be refused with the routers' reason; it waits
        for a newer version.
        """
        now = asyncio.get_running_loop().time()
        self._failing_since = self._failing_since or now
        if isinstance(error, errors.RouterLostError):
            self._was_accepted = True
            # a router had it until now, and it may have waited there for a long time
            self._failing_since = self.without_router_since = now
            self._num_losses += 1
            if self._num_losses >= MAX_LOSSES:
                raise errors.PipelineError(
                    f"{MAX_LOSSES} routers were lost with this request: {error}"
                ) from error
        may_wait = self._was_accepted or isinstance(error, errors.PipelineSupersededError)
        if (
            isinstance(error, errors.PipelineUnavailableError | errors.OverloadedError)
            and not may_wait
        ):
            raise error
        if now - self._failing_since <= self._timeout_s(error):
            return
        if self._was_accepted:
            raise errors.PipelineError(
                f"no router could continue this request in time: {error}"
            ) from error
        raise errors.PipelineUnavailableError(
            "no pipeline was ready in time; try again later"
        ) from error

    def _timeout_s(self, error: errors.TramontaneError) -> float:
        """Return how long the request may be without a token if this is the latest error."""
        if isinstance(error, errors.ModelMismatchError):
            return NEW_VERSION_TIMEOUT_S
        if self._was_accepted:
            return LOAD_TIMEOUT_S
        return (
            NEW_VERSION_TIMEOUT_S
            if isinstance(error, errors.PipelineSupersededError)
            else ADMISSION_TIMEOUT_S
        )

    async def backoff(self) -> None:
        """Wait until the next attempt."""
        await asyncio.sleep(next(self._delays))


@dataclass(frozen=True, slots=True, eq=False)
class WaitingRequest:
    """A request that no router is known to work on: on its way to a router, or between two
    attempts.
    """

    num_sequences: int
    since: float  # by the event loop's clock


class AdmissionWindow:
    """Refuses requests that no router would accept soon.

    ``max_unaccepted``: sequences that may be on their way to a router. Without a running router
    they would wait in Ray Serve, which has neither a bound nor a timeout.
    """

    def __init__(self, max_unaccepted: int) -> None:
        self._max_unaccepted = max_unaccepted
        self._waiting: set[WaitingRequest] = set()
        # the routers' common error and its expiry, by owner
        self._full: dict[int, tuple[errors.QueueFullError, float]] = {}

    def check(self, num_sequences: int, owner: int) -> None:
        """Raise OverloadedError if too many wait, or if all routers have just refused this
        owner.
        """
        num_waiting = sum(each.num_sequences for each in self._waiting)
        # larger requests are refused permanently elsewhere
        if num_sequences <= self._max_unaccepted < num_waiting + num_sequences:
            oldest = min(each.since for each in self._waiting)
            raise errors.OverloadedError(
                "too many requests are on their way to a pipeline", _retry_after_s(oldest)
            )
        if owner in self._full:
            error, expires_at = self._full[owner]
            if asyncio.get_running_loop().time() < expires_at:
                raise errors.QueueFullError(str(error), error.retry_after_s)

    def add(self, request: WaitingRequest) -> None:
        """Count a request until it is removed."""
        self._waiting.add(request)

    def remove(self, request: WaitingRequest) -> None:
        """Count it no more."""
        self._waiting.remove(request)

    @contextmanager
    def waiting(self, request: WaitingRequest) -> Iterator[None]:
        """Count a request while the block runs."""
        self.add(request)
        try:
            yield
        finally:
            self.remove(request)

    def mark_full(self, owner: int, error: errors.QueueFullError) -> None:
        """Note that all routers have just refused this owner."""
        self._full[owner] = error, asyncio.get_running_loop().time() + FULL_TTL_S

    def forget_full(self) -> None:
        """Note that a router has a free slot or queue entry now."""
        self._full.clear()


class RefusalTracker:
    """The routers that have recently refused a request. Other requests ask the remaining routers
    first.

    A router that refuses is always the least loaded one; without this memory every request would be
    sent to all of them. A full queue applies to requests of the same owner and priority, other
    reasons apply to all requests. A refusal of one request that is too large for the remaining room
    says nothing about others, and is not recorded.
    """

    def __init__(self) -> None:
        self._refusals: defaultdict[
            tuple[int, int] | None, dict[str, tuple[errors.TramontaneError, float]]
        ] = defaultdict(dict)

    def add(self, replica: str, error: errors.TramontaneError, request: Request) -> None:
        """Note that a router has just refused a request."""
        now = asyncio.get_running_loop().time()
        if isinstance(error, errors.QueueFullError):
            self._refusals[request.owner, request.priority][replica] = error, now + FULL_TTL_S
        elif isinstance(error, errors.PipelineUnavailableError):
            self._refusals[None][replica] = error, now + NOT_RUNNING_TTL_S

    def matching(self, request: Request) -> dict[str, errors.TramontaneError]:
        """Return the refusals that hold for a request, by replica."""
        now = asyncio.get_running_loop().time()
        refusals: dict[str, errors.TramontaneError] = {}
        for key in (None, (request.owner, request.priority)):
            valid = {
                replica: refusal
                for replica, refusal in self._refusals.pop(key, {}).items()
                if now < refusal[1]
            }
            # a raise extends its traceback
            refusals |= {replica: copy.copy(error) for replica, (error, _) in valid.items()}
            if valid:
                self._refusals[key] = valid
        return refusals

    def forget_full(self, replica: str) -> None:
        """Note that a request on this router has ended, which frees a slot or a queue entry."""
        for key, refusals in self._refusals.items():
            if key is not None:
                refusals.pop(replica, None)


class RouterSearch:
    """The routers that have refused one request, during the search for a router that accepts it.

    Routers that have just refused another request are asked only if there are no others. A pipeline
    that is being fenced again gets the request, which then waits, only if no other router accepts
    it.
    """

    def __init__(self, recent: RefusalTracker, request: Request) -> None:
        self._recent, self._request, self.may_wait = recent, request, False
        self.refused = recent.matching(request)  # by replica

    def add(
        self, replica: str, error: errors.TramontaneError, *, had_choice: bool
    ) -> errors.TramontaneError | None:
        """Note a refusal; return the reason if no router is left. ``had_choice``: the call was not
        for this router only.
        """
        has_others = replica not in self.refused or not had_choice
        self.refused[replica] = error
        self._recent.add(replica, error, self._request)
        if not has_others:
            recovering = [
                each
                for each, refusal in self.refused.items()
                if isinstance(refusal, errors.PipelineRecoveringError)
            ]
            if self.may_wait or not recovering:
                return most_useful_error(self.refused.values())
            self.may_wait = True
            for each in recovering:
                del self.refused[each]
        if not self.may_wait:  # other requests may have been refused since
            self.refused = self._recent.matching(self._request) | self.refused
        return None


def most_useful_error(refusals: Iterable[errors.TramontaneError]) -> errors.TramontaneError:
    """Choose among several routers' refusals: a version that is to come, then a queue with room
    soon, last another model.
    """

    def rank(refusal: errors.TramontaneError) -> int:
        if isinstance(refusal, errors.PipelineSupersededError):
            return 0
        if isinstance(refusal, errors.OverloadedError):
            return 1 + isinstance(refusal, errors.QueueFullError)
        return 3 + isinstance(refusal, errors.ModelMismatchError)

    return min(refusals, key=rank)


def _retry_after_s(since: float) -> int:
    """Return how long the oldest request has waited, in whole seconds: 0.2 s gives 1, 12.3 s gives
    13, 100 s gives 60.
    """
    waited_s = math.ceil(asyncio.get_running_loop().time() - since)
    return min(max(1, waited_s), MAX_RETRY_AFTER_S)
