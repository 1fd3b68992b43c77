"""Which nodes are gone: their systems cannot close the connections of those who wait for something from there."""

import asyncio
import logging
import time
from collections.abc import Callable

import ray

logger = logging.getLogger(__name__)

ASK_EVERY_S = 1.0
ACK_TIMEOUT_S = 2.0  # whoever is asked says at once on which node that is
UNKNOWN_FOR_S = 30.0  # Ray Serve may still ask a door of a node that has died, until it has looked


class DeadNodeWatcher:
    """As Ray has declared them dead. It is asked while somebody wants to know, and once for all of them."""

    def __init__(self, ask: Callable[[], set[str]] | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._ask, self._clock = ask or _dead_nodes, clock
        self._asked_at = -ASK_EVERY_S
        self._asking: asyncio.Task[set[str]] | None = None
        self._died_at: dict[str, float] = {}

    async def wait_until_dead(self, node: Callable[[], str | None]) -> None:
        """Until that is among them; or, where whoever was asked has not even said its node, until that could be."""
        began = self._clock()
        while True:
            await asyncio.sleep(ASK_EVERY_S)
            await self._refresh()
            if (known := node()) is not None:
                if known in self._died_at:
                    return
            elif self._clock() - began >= ACK_TIMEOUT_S and any(at > began - UNKNOWN_FOR_S for at in self._died_at.values()):
                return

    async def _refresh(self) -> None:
        if self._asking is None or (self._asking.done() and self._clock() - self._asked_at >= ASK_EVERY_S):
            self._asked_at = self._clock()
            self._asking = asyncio.create_task(asyncio.to_thread(self._ask))
        try:
            found = await asyncio.shield(self._asking)
        except Exception as error:  # of Ray, whose head node may be away: nobody is lost for that
            logger.warning("lost nodes could not be looked for: %s", error)
            return
        for dead in found:
            self._died_at.setdefault(dead, self._asked_at)


def _dead_nodes() -> set[str]:
    nodes = ray.nodes()  # type: ignore[no-untyped-call]
    return {node["NodeID"] for node in nodes if not node["Alive"]}
