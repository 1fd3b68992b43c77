"""Detection of dead nodes, whose operating systems cannot close the connections of peers that wait
for an answer.

Imports no Ray, so that the API server does not load it.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from contextvars import Context
from dataclasses import dataclass

logger = logging.getLogger(__name__)

POLL_INTERVAL_S = 1.0
ACK_TIMEOUT_S = 2.0  # a living peer announces its node at once
# for so long Ray Serve may still send requests to a replica on a node that has died
RECENT_DEATH_S = 30.0


@dataclass(eq=False, slots=True)
class _Waiter:
    """A call that waits. ``began``: by the watcher's clock."""

    node: Callable[[], str | None]
    began: float
    ended: asyncio.Future[None]


class NodeLossDetector:
    """Whether a node in use has died between two checks.

    ``list_used`` returns the nodes in use now, ``list_dead`` all dead nodes. Nodes a and b were
    used, b has died, and its work runs on c: the check returns True, and the next check does only
    if a or c has died.
    """

    def __init__(
        self, list_used: Callable[[], set[str]], list_dead: Callable[[], set[str]]
    ) -> None:
        self._list_used, self._list_dead = list_used, list_dead
        self._used: set[str] = set()

    def check(self) -> bool:
        """Return True if a node that was used at the last check has died since."""
        has_lost = not self._used.isdisjoint(self._list_dead())
        self._used = self._list_used()
        return has_lost


class DeadNodeWatcher:
    """Nodes that Ray has declared dead. One task calls ``list_dead`` for all callers, and only
    while one waits.
    """

    def __init__(
        self, list_dead: Callable[[], set[str]], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._list_dead, self._clock = list_dead, clock
        self._waiters: set[_Waiter] = set()
        self._polling: asyncio.Task[None] | None = None
        self._died_at: dict[str, float] = {}

    async def wait_until_dead(self, node: Callable[[], str | None]) -> None:
        """Wait until a peer's node is declared dead.

        While ``node`` returns None, as the peer has not announced its node, ACK_TIMEOUT_S have to
        pass; then the death of any node within RECENT_DEATH_S before the call, or since, ends the
        wait.
        """
        waiter = _Waiter(node, self._clock(), asyncio.get_running_loop().create_future())
        self._waiters.add(waiter)
        if self._polling is None or self._polling.done():
            # not of the caller, which it outlives
            self._polling = asyncio.create_task(self._poll(), context=Context())
        try:
            await waiter.ended
        finally:
            self._waiters.discard(waiter)

    async def _poll(self) -> None:
        """List dead nodes once for all waiters, every POLL_INTERVAL_S, until no caller waits."""
        while self._waiters:
            await asyncio.sleep(POLL_INTERVAL_S)
            polled_at = self._clock()
            try:
                dead = await asyncio.to_thread(self._list_dead)
            # of Ray, while its head node is unreachable: no node counts as dead then
            except Exception as error:
                logger.warning(
                    "Ray could not list the cluster's nodes, so dead ones are not detected: %s",
                    error,
                )
                continue
            for node in dead:
                self._died_at.setdefault(node, polled_at)
            for waiter in self._waiters if self._died_at else ():
                if self._is_over(waiter) and not waiter.ended.done():
                    waiter.ended.set_result(None)

    def _is_over(self, waiter: _Waiter) -> bool:
        if (known := waiter.node()) is not None:
            return known in self._died_at
        has_waited = self._clock() - waiter.began >= ACK_TIMEOUT_S
        return has_waited and any(
            at > waiter.began - RECENT_DEATH_S for at in self._died_at.values()
        )
