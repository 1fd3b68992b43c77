"""Detection of dead nodes, whose operating systems cannot close the connections of peers that wait for an answer.

Imports no Ray, so that the API server does not load it.
"""

import asyncio
import logging
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)

POLL_INTERVAL_S = 1.0
ACK_TIMEOUT_S = 2.0  # a living peer announces its node at once
RECENT_DEATH_S = 30.0  # for so long Ray Serve may still send requests to a replica on a node that has died


class NodeLossDetector:
    """Whether a node that something uses has died between two checks.

    ``list_used`` returns the nodes that it uses now, ``list_dead`` all dead ones. Nodes a and b were used, b has died, and what
    was there runs on c: the check returns True, and the next one does only if a or c has died.
    """

    def __init__(self, list_used: Callable[[], set[str]], list_dead: Callable[[], set[str]]) -> None:
        self._list_used, self._list_dead = list_used, list_dead
        self._used: set[str] = set()

    def check(self) -> bool:
        """Return True if a node that was used at the last check has died since."""
        has_lost = not self._used.isdisjoint(self._list_dead())
        self._used = self._list_used()
        return has_lost


class DeadNodeWatcher:
    """Nodes that Ray has declared dead. ``list_dead`` is called only while a caller waits, and once for all callers."""

    def __init__(self, list_dead: Callable[[], set[str]], clock: Callable[[], float] = time.monotonic) -> None:
        self._list_dead, self._clock = list_dead, clock
        self._polled_at = -POLL_INTERVAL_S
        self._poll: asyncio.Task[set[str]] | None = None
        self._died_at: dict[str, float] = {}

    async def wait_until_dead(self, node: Callable[[], str | None]) -> None:
        """Wait until a peer's node is declared dead.

        While ``node`` returns None, as the peer has not announced its node, ACK_TIMEOUT_S have to pass; then the death of
        any node within RECENT_DEATH_S before the call, or since, ends the wait.
        """
        began = self._clock()
        while True:
            await asyncio.sleep(POLL_INTERVAL_S)
            await self._refresh()
            if (known := node()) is not None:
                if known in self._died_at:
                    return
            elif self._clock() - began >= ACK_TIMEOUT_S and any(at > began - RECENT_DEATH_S for at in self._died_at.values()):
                return

    async def _refresh(self) -> None:
        if self._poll is None or (self._poll.done() and self._clock() - self._polled_at >= POLL_INTERVAL_S):
            self._polled_at = self._clock()
            self._poll = asyncio.create_task(asyncio.to_thread(self._list_dead))
        try:
            dead = await asyncio.shield(self._poll)
        except Exception as error:  # of Ray, while its head node is away: no node counts as dead for that
            logger.warning("Ray could not list the cluster's nodes, so dead ones are not detected: %s", error)
            return
        for node in dead:
            self._died_at.setdefault(node, self._polled_at)
