"""Requests of the service BatchJobs: uploads and parameters; and the coalescing of results into
messages.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import Any, TypeVar

from tramontane.proto import inference_pb2 as pb
from tramontane.proto.errors import ParameterError, RequestError
from tramontane.proto.grpc_messages import parse_options
from tramontane.proto.jobs import Job, JobService
from tramontane.router.grpc.handlers import MalformedMessage

MAX_OFFSET = 2**53

T = TypeVar("T")


async def submit(jobs: JobService, requests: AsyncIterator[Any]) -> Job:
    """Submit an upload: a message with options, then either the pieces of a text or one URL. Raises
    RequestError.
    """
    first = await anext(requests, None)
    if isinstance(first, MalformedMessage):
        raise RequestError(first.message)
    if first is None or first.WhichOneof("part") != "options":
        raise RequestError("the first message must hold options")
    options = parse_options(first.options)
    key = first.request_key if first.HasField("request_key") else None
    second = await anext(requests, None)
    if isinstance(second, pb.SubmitJobRequest) and second.WhichOneof("part") == "url":
        if await anext(requests, None) is not None:
            raise RequestError("nothing may follow a url")
        return await jobs.submit_url(second.url, options, key)
    return await jobs.submit(_pieces(second, requests), options, key)


async def _pieces(first: Any, rest: AsyncIterator[Any]) -> AsyncGenerator[bytes, None]:
    message = first
    while message is not None:
        if isinstance(message, MalformedMessage):
            raise RequestError(message.message)
        if message.WhichOneof("part") != "data":
            raise RequestError("after the options there must be either data or one url")
        yield message.data
        message = await anext(rest, None)
    # Ray Serve's stream ends without an error when its client has left
    if getattr(rest, "is_cancelled", lambda: False)():
        raise RequestError("the upload was broken off")


def validate_offset(offset: int) -> int:
    """Return ``offset``. Raises ParameterError if it is out of range."""
    if not 0 <= offset < MAX_OFFSET:
        raise ParameterError(
            f"offset is {offset}; it must be a number of results, from 0", "offset"
        )
    return offset


def parse_limit(request: pb.ListJobsRequest) -> int:
    """Return how many jobs to list, 20 by default. Raises ParameterError."""
    limit = request.limit if request.HasField("limit") else 20
    if not 1 <= limit <= 100:
        raise ParameterError(f"limit is {limit}; it must be from 1 to 100", "limit")
    return limit


async def coalesce(
    source: AsyncGenerator[T, None], size: Callable[[T], int], max_size: int
) -> AsyncGenerator[list[T], None]:
    """Yield lists of the items, in order, that are ready, up to ``max_size`` in total; a larger
    item is alone in its list.

    Sizes 3, 4, 5 that are all ready, and a ``max_size`` of 8: first the items of 3 and 4, then that
    of 5. Closing this closes the source.
    """
    async with aclosing(source):
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


async def _next(source: AsyncGenerator[T, None]) -> list[T]:
    """Return a list of the next item, or an empty one at the end."""
    try:
        return [await anext(source)]
    except StopAsyncIteration:
        return []
