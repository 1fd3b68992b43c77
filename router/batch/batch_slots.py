"""How many lines are in progress at once, over all jobs."""

import asyncio

from tramontane.router.batch.outcome_writer import Sleep


class Slot:
    """One of ``slots``, which its owner has acquired for a line. Whoever asked first gets the next that is free."""

    def __init__(self, slots: asyncio.Semaphore) -> None:
        self._slots, self._is_held = slots, True

    async def sleep(self, seconds: float, sleep: Sleep, unless: asyncio.Event) -> None:
        """Others have it meanwhile; afterwards it is waited for. ``unless`` ends that at once, and the slot is not had then."""
        self.give_back()
        waiting = [asyncio.ensure_future(each) for each in (self._again(seconds, sleep), unless.wait())]
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in waiting:
                each.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)

    async def _again(self, seconds: float, sleep: Sleep) -> None:
        await sleep(seconds)
        await self._slots.acquire()
        self._is_held = True

    def give_back(self) -> None:
        """Once, however often it is called."""
        if self._is_held:
            self._is_held = False
            self._slots.release()
