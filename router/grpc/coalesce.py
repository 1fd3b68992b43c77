"""Coalesces items that are ready into one message."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, aclosing, nullcontext
from typing import TypeVar

T = TypeVar("T")


async def coalesce(source: AsyncIterator[T], size: Callable[[T], int], max_size: int) -> AsyncGenerator[list[T], None]:
    """Yield lists of the items, in order, that are ready, up to ``max_size`` in total; a larger item is alone in its list.

    Sizes 3, 4, 5 that are all ready, and a ``max_size`` of 8: first the items of 3 and 4, then that of 5. Closing this
    closes the source.
    """
    async with aclosing_if_generator(source):
        upcoming = asyncio.create_task(_next(source))
        try:
            while items := await upcoming:
                num_left = max_size - size(items[0])
                while True:
                    upcoming = asyncio.create_task(_next(source))
                    await asyncio.sleep(0)  # an item that is ready arrives during this
                    if not upcoming.done() or upcoming.exception():
                        break
                    following = upcoming.result()
                    if not following or size(following[0]) > num_left:
                        break
                    items += following
                    num_left -= size(following[0])
                yield items
        finally:
            upcoming.cancel()
            await asyncio.wait([upcoming])
            if not upcoming.cancelled():
                upcoming.exception()  # retrieved, so that asyncio does not log it


def aclosing_if_generator(source: AsyncIterator[T]) -> AbstractAsyncContextManager[object]:
    """Return a context manager that closes ``source`` if it is a generator."""
    return aclosing(source) if isinstance(source, AsyncGenerator) else nullcontext()


async def _next(source: AsyncIterator[T]) -> list[T]:
    """Return a list of the next item, or an empty one at the end."""
    try:
        return [await anext(source)]
    except StopAsyncIteration:
        return []
