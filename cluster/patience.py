"""How long a door tries to have a request go on that has lost its router."""

import asyncio
from collections.abc import Iterable

from tramontane.proto.errors import (
    FullError,
    HandedOverError,
    NotRunningError,
    OverloadedError,
    PipelineError,
    RouterLostError,
    TramontaneError,
)

SECONDS = 120.0  # a new router takes over within seconds; a pipeline that has to be loaded takes longer
UNACCEPTED_S = 50.0  # what no router has ever accepted can still be refused
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
        is_handed_over = isinstance(error, HandedOverError)
        self._failing_since = self._failing_since or now
        if isinstance(error, RouterLostError):
            self._was_accepted = True
            self._failing_since = self.since = now  # it was with a router until now, and may have waited there for long
            self._num_losses += 1
            if self._num_losses >= MAX_LOSSES:
                raise PipelineError(f"{MAX_LOSSES} routers were lost with this request: {error}") from error
        elif isinstance(error, NotRunningError | OverloadedError) and not (is_handed_over or self._was_accepted):
            raise error
        elif not (is_handed_over or self._was_accepted) and now - self._failing_since > UNACCEPTED_S:
            raise NotRunningError("no pipeline was ready in time; try again later") from error
        if now - self._failing_since > SECONDS:
            raise PipelineError(f"no router could go on with this request in time: {error}") from error

    async def pause(self) -> None:
        """Until it is time to ask again."""
        await asyncio.sleep(TRY_EVERY_S)


def refusal_to_go_by(refusals: Iterable[TramontaneError]) -> TramontaneError:
    """Of those of several routers: one that is to come, then one that has room soon."""

    def rank(refusal: TramontaneError) -> int:
        if isinstance(refusal, HandedOverError):
            return 0
        return 1 + isinstance(refusal, FullError) if isinstance(refusal, OverloadedError) else 3

    return min(refusals, key=rank)
