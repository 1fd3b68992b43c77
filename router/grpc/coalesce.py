"""What is ready travels together."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, aclosing, nullcontext
from typing import TypeVar

T = TypeVar("T")


async def coalesce(source: AsyncIterator[T], size: Callable[[T], int], most: int) -> AsyncGenerator[list[T], None]:
    """The items in order, as many at once as are ready; of ``size`` ``most`` together, unless one alone is larger.

    Sizes 3, 4, 5 that are all ready, and a ``most`` of 8: first the items of 3 and 4, then that of 5. Closing this closes
    the source.
    """
    async with aclosing_if_generator(source):
        upcoming = asyncio.create_task(_next(source))
        try:
            while bunch := await upcoming:
                room = most - size(bunch[0])
                while True:
                    upcoming = asyncio.create_task(_next(source))
                    await asyncio.sleep(0)  # what is ready is there after this
                    if not upcoming.done() or upcoming.exception():
                        break
                    following = upcoming.result()
                    if not following or size(following[0]) > room:
                        break
                    bunch += following
                    room -= size(following[0])
                yield bunch
        finally:
            upcoming.cancel()
            await asyncio.wait([upcoming])
            if not upcoming.cancelled():
                upcoming.exception()  # nobody waits for it any more


def aclosing_if_generator(source: AsyncIterator[T]) -> AbstractAsyncContextManager[object]:
    """Closed at the end, if it is something that can be."""
    return aclosing(source) if isinstance(source, AsyncGenerator) else nullcontext()


async def _next(source: AsyncIterator[T]) -> list[T]:
    """One item, or none at the end."""
    try:
        return [await anext(source)]
    except StopAsyncIteration:
        return []
