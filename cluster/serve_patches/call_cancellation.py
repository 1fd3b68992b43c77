"""End a proxy's call to a replica with its client's request, whatever the proxy is doing when the client leaves.

Ray Serve cancels the call if the proxy waits for the replica at that moment. It forgets the call if the proxy is writing to
the client, or has just made the call: the replica then works for no client, and what it sends stays in gRPC's buffers, in
pieces of 64 KiB, until the proxy ends.
"""

from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from tramontane.cluster.ray_internals.serve import in_flight_calls, internal_request_id

StreamHandler = Callable[[Any, Any], AsyncIterator[Any]]


class CancelAbandonedCalls:
    """ASGI middleware directly around Ray Serve's application, in the task in which Ray Serve sets the request's id."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer the request, then cancel its calls that have not ended."""
        try:
            await self._app(scope, receive, send)
        finally:
            _cancel_calls(internal_request_id())


def cancel_on_disconnect(handler: StreamHandler) -> StreamHandler:
    """Wrap the handler of a gRPC method that answers with a stream."""

    async def handle(request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: ANN401 - of gRPC
        is_known = False
        try:
            async for message in handler(request, context):
                if not is_known:
                    context.add_done_callback(partial(_cancel_calls, internal_request_id()))
                    is_known = True
                yield message
        finally:
            if not is_known:  # then this still is the request's task; a later clean-up may run in any other one
                _cancel_calls(internal_request_id())

    return handle


def _cancel_calls(request_id: str, _context: object = None) -> None:
    """Cancel the calls of a request that have not ended."""
    if request_id:
        for call in in_flight_calls(request_id):
            call.cancel()
