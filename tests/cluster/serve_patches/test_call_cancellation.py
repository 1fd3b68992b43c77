"""A proxy's calls to replicas end with the request, whatever the proxy was about when that
ended.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
from ray.serve import context as serve_context
from starlette.types import Message, Receive, Scope, Send

from tramontane.cluster.serve_patches.proxy import CancelAbandonedCalls, cancel_on_disconnect

SCOPE: Scope = {"type": "http"}


class _Call:
    """As Ray Serve's: in the table from its beginning until it has ended."""

    def __init__(self, request_id: str) -> None:
        self.was_cancelled = False
        context: Any = serve_context._RequestContext(_internal_request_id=request_id)
        serve_context._serve_request_context.set(context)
        serve_context._add_in_flight_request(request_id, "its only call", self)  # type: ignore[no-untyped-call]

    def cancel(self) -> None:
        self.was_cancelled = True


@pytest.fixture
def calls() -> Iterator[list[_Call]]:
    yield []
    serve_context._in_flight_requests.clear()


async def _nothing() -> Message:
    raise AssertionError


def test_the_call_of_a_request_that_ends_while_it_is_written_to_is_cancelled_and_no_other(
    calls: list[_Call],
) -> None:
    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        calls.append(_Call(scope["id"]))
        await send({"type": "http.response.body"})

    async def stand_still(_message: Message) -> None:
        await asyncio.Event().wait()

    async def run() -> None:
        app = CancelAbandonedCalls(serve)
        staying, leaving = (
            asyncio.create_task(app({**SCOPE, "id": name}, _nothing, stand_still))
            for name in ("a", "b")
        )
        await asyncio.sleep(0)
        leaving.cancel()
        await asyncio.wait([leaving])
        assert [call.was_cancelled for call in calls] == [False, True]
        staying.cancel()
        await asyncio.wait([staying])

    asyncio.run(run())
    assert [call.was_cancelled for call in calls] == [True, True]


def test_what_the_application_raises_is_raised_when_the_call_is_cancelled(
    calls: list[_Call],
) -> None:
    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        calls.append(_Call("a"))
        await send({"type": "http.response.body"})

    async def fail(_message: Message) -> None:
        raise ConnectionError("reset by the client")

    with pytest.raises(ConnectionError, match="reset by the client"):
        asyncio.run(CancelAbandonedCalls(serve)(SCOPE, _nothing, fail))
    assert calls[0].was_cancelled


def test_a_request_that_got_no_replica_ends_no_call_of_nobodys(calls: list[_Call]) -> None:
    """As Ray Serve calls what is part of no request."""

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        calls.append(_Call(""))

    asyncio.run(CancelAbandonedCalls(serve)(SCOPE, _nothing, _nothing))  # type: ignore[arg-type]
    assert not calls[0].was_cancelled


class _Context:
    """Of a gRPC request."""

    def __init__(self) -> None:
        self.callbacks: list[Callable[[object], None]] = []

    def add_done_callback(self, callback: Callable[[object], None]) -> None:
        self.callbacks.append(callback)


def test_a_grpc_stream_ends_its_call_once_it_is_over(calls: list[_Call]) -> None:
    async def answer(request: str, _context: Any) -> AsyncIterator[str]:
        calls.append(_Call(request))
        for number in range(3):
            yield f"{request} {number}"

    async def run() -> None:
        context = _Context()
        messages = cancel_on_disconnect(answer)("a", context)
        assert [await anext(messages), await anext(messages)] == ["a 0", "a 1"]
        assert len(context.callbacks) == 1
        assert not calls[0].was_cancelled
        # as gRPC does, whether the client has left or has had everything
        context.callbacks[0](context)

    asyncio.run(run())
    assert calls[0].was_cancelled


def test_a_grpc_stream_that_has_said_nothing_yet_ends_its_call_with_itself(
    calls: list[_Call],
) -> None:
    async def answer(request: str, _context: Any) -> AsyncIterator[str]:
        calls.append(_Call(request))
        await asyncio.Event().wait()
        yield "never"

    async def run() -> None:
        request_task = asyncio.ensure_future(anext(cancel_on_disconnect(answer)("a", _Context())))
        await asyncio.sleep(0)
        request_task.cancel()
        await asyncio.wait([request_task])

    asyncio.run(run())
    assert calls[0].was_cancelled
