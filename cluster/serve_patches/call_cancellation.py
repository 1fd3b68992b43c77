"""In Ray Serve's proxies: the call to a replica ends with its client's request, whatever the proxy was about then.

A proxy that waits for the replica ends its call when the client leaves. One that is writing to the client does not, nor one whose
call has just begun: it forgets the call, the replica works on for nobody, and what it says stays in gRPC's buffers, in pieces of
64 KiB, until the proxy ends.
"""

from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

from ray.serve import context as serve_context
from starlette.types import ASGIApp, Receive, Scope, Send

StreamHandler = Callable[[Any, Any], AsyncIterator[Any]]


class CancelAbandonedCalls:
    """ASGI middleware, next to Ray Serve's own application: in the task in which that names the request."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._app(scope, receive, send)
        finally:
            _cancel_calls(_request_id())


def cancel_on_disconnect(handler: StreamHandler) -> StreamHandler:
    """What handles a gRPC request with many answers."""

    async def handle(request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: ANN401 - of gRPC
        is_known = False
        try:
            async for message in handler(request, context):
                if not is_known:
                    context.add_done_callback(partial(_cancel_calls, _request_id()))
                    is_known = True
                yield message
        finally:
            if not is_known:  # so this is its task still; later it may be anybody's that clears away what is left of it
                _cancel_calls(_request_id())

    return handle


def _request_id() -> str:
    """By which Ray Serve knows the request in here; empty before it has a replica."""
    return str(serve_context._get_serve_request_context()._internal_request_id)


def _cancel_calls(request_id: str, _context: object = None) -> None:
    """Those that have ended are not in the table any more."""
    if request_id:
        for call in tuple(serve_context._get_in_flight_requests(request_id).values()):  # type: ignore[no-untyped-call]
            call.cancel()
