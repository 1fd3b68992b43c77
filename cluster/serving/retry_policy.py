"""How long a door tries to have a request go on that has lost its router."""

import asyncio
from collections.abc import Iterable

from tramontane.proto.errors import (
    FullError,
    HandedOverError,
    NotRunningError,
    OtherModelError,
    OverloadedError,
    PipelineError,
    RouterLostError,
    TramontaneError,
)

# Stages that are loading again are waited for so long: by their router (``RayStageChain.fence``), and by a door for what it had
# accepted. Where router and stage die together the next router is not there before the weights are.
LOADING_S = 600.0
NEW_VERSION_S = 120.0  # new requests wait so long for one that was announced; what only an old router could go on with, for that
UNACCEPTED_S = 50.0  # what no router has ever accepted can still be refused, and may find another server
MAX_LOSSES = 10  # of routers that had accepted the request and told no token of it: it may have waited, or be what they die of
TRY_EVERY_S = 0.2


class Patience:
    """Of one request, which a router may have accepted already. It is renewed with every token.

    ``since``: when it was left without a router, by the event loop's clock; until it has lost one, when it came.
    """

    def __init__(self, *, was_accepted: bool = False) -> None:
        self.renew()
        self.since = asyncio.get_running_loop().time()
        self._was_accepted = was_accepted

    def renew(self) -> None:
        self._failing_since: float | None = None
        self._num_losses = 0

    def bear(self, error: TramontaneError) -> None:
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
        may_wait = self._was_accepted or isinstance(error, HandedOverError)
        if isinstance(error, NotRunningError | OverloadedError) and not may_wait:
            raise error
        if now - self._failing_since <= self._limit_s(error):
            return
        if self._was_accepted:
            raise PipelineError(f"no router could go on with this request in time: {error}") from error
        raise NotRunningError("no pipeline was ready in time; try again later") from error

    def _limit_s(self, error: TramontaneError) -> float:
        """Without a token, in all, if this is the latest error."""
        if isinstance(error, OtherModelError):
            return NEW_VERSION_S
        if self._was_accepted:
            return LOADING_S
        return NEW_VERSION_S if isinstance(error, HandedOverError) else UNACCEPTED_S

    async def pause(self) -> None:
        """Until it is time to ask again."""
        await asyncio.sleep(TRY_EVERY_S)


def refusal_to_go_by(refusals: Iterable[TramontaneError]) -> TramontaneError:
    """Of those of several routers: one that is to come, then one that has room soon; one of another model is no help at all."""

    def rank(refusal: TramontaneError) -> int:
        if isinstance(refusal, HandedOverError):
            return 0
        if isinstance(refusal, OverloadedError):
            return 1 + isinstance(refusal, FullError)
        return 3 + isinstance(refusal, OtherModelError)

    return min(refusals, key=rank)
