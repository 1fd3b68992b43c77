"""Slots for lines of batch jobs, which tenants share equally."""

import asyncio
from collections import Counter, deque
from itertools import count

from tramontane.router.batch.outcomes import Sleep


class LineSlots:
    """So many lines are in progress at once. A free slot goes to the waiting tenant that holds the
    fewest.

    Of tenants that hold equally many it goes to the one whose last turn is longest ago; within a
    tenant slots are granted in the order in which they were requested. With 4 slots, one tenant
    that waits with a thousand jobs and another one with a single job hold 2 each; with one slot
    they alternate.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_free = num_slots
        self._held: Counter[str] = Counter()  # by tenant
        self._turns = count(1)
        self._last_turn: Counter[str] = Counter()  # by tenant; 0 if it had none
        # by tenant; empty while a slot is free
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    async def acquire(self, tenant: str) -> "LineSlot":
        """Wait for a slot."""
        granted = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(granted)
        self._grant()
        try:
            await granted
        except asyncio.CancelledError:
            if granted.cancelled():
                self._withdraw(tenant, granted)
            else:
                self.release(tenant)  # it was granted just before
            raise
        return LineSlot(self, tenant)

    def release(self, tenant: str) -> None:
        """Take a slot back."""
        self._held[tenant] -= 1
        self.num_free += 1
        self._grant()

    def _grant(self) -> None:
        while self.num_free and self._waiting:
            tenant = min(self._waiting, key=lambda each: (self._held[each], self._last_turn[each]))
            granted = self._waiting[tenant].popleft()
            if not self._waiting[tenant]:
                del self._waiting[tenant]
            if not granted.cancelled():
                self.num_free -= 1
                self._held[tenant] += 1
                self._last_turn[tenant] = next(self._turns)
                granted.set_result(None)

    def _withdraw(self, tenant: str, granted: "asyncio.Future[None]") -> None:
        waiting = self._waiting.get(tenant, deque())
        if granted in waiting:
            waiting.remove(granted)
        if not waiting:
            self._waiting.pop(tenant, None)


class LineSlot:
    """A slot that was acquired for a line."""

    def __init__(self, slots: LineSlots, tenant: str) -> None:
        self._slots, self._tenant, self._is_held = slots, tenant, True

    async def yield_during(self, seconds: float, sleep: Sleep, unless: asyncio.Event) -> None:
        """Release the slot for this time, then acquire it again. If ``unless`` is set, return at
        once without the slot.
        """
        self.release()
        waiting = [
            asyncio.ensure_future(each) for each in (self._reacquire(seconds, sleep), unless.wait())
        ]
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in waiting:
                each.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)

    async def _reacquire(self, seconds: float, sleep: Sleep) -> None:
        await sleep(seconds)
        await self._slots.acquire(self._tenant)
        self._is_held = True

    def release(self) -> None:
        """Release the slot if it is held."""
        if self._is_held:
            self._is_held = False
            self._slots.release(self._tenant)
