"""Keeps what clients would tell Ray Serve, rather than us, from reaching it."""

import re

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Receive, Scope, Send

from tramontane.cluster.serve_ports import keep_grpc_door_on_http_host

# With these a client could route, time and unwatch its own request; the proxy also answers 500 if they are not UTF-8.
FOR_RAY_SERVE = (
    b"serve-multiplexed-model-id",
    b"x-session-id",
    b"x-request-timeout-seconds",
    b"x-request-disconnect-disabled",
)
REQUEST_ID = b"x-request-id"
GOOD_ID = re.compile(rb"[!-~]{1,128}")  # what may go into headers and logs


def proxy_middlewares() -> list[Middleware]:
    """Ray Serve's proxies call it by name, before they open their ports: see ``pipeline.SERVE_SETTINGS``."""
    keep_grpc_door_on_http_host()
    return [Middleware(WithoutOrders)]


class WithoutOrders:
    """An ASGI application that sees the other headers."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        kept = [(name, value) for name, value in scope.get("headers", ()) if not _is_order(name.replace(b"_", b"-"), value)]
        await self._app({**scope, "headers": kept}, receive, send)


def _is_order(name: bytes, value: bytes) -> bool:
    return name in FOR_RAY_SERVE or (name == REQUEST_ID and not GOOD_ID.fullmatch(value))
