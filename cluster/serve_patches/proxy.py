"""The middlewares of Ray Serve's HTTP proxies, with those that end abandoned calls and remove Ray
Serve's control headers.
"""

from starlette.middleware import Middleware
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from tramontane.cluster.common.node_watch import DeadNodeWatcher
from tramontane.cluster.common.ray_api import list_dead_nodes
from tramontane.cluster.config.logging import LogSettings
from tramontane.cluster.http.failover import FailoverMiddleware
from tramontane.cluster.http.slow_clients import SlowClientMiddleware
from tramontane.cluster.observability.logging import use_serve_log
from tramontane.cluster.observability.tracing import enable_proxy_tracing
from tramontane.cluster.ray_internals.accessors import (
    cancel_calls,
    internal_request_id,
    replace_response_generators,
)
from tramontane.cluster.ray_internals.symbols import assert_supported
from tramontane.cluster.ray_internals.table import SERVE_SYMBOLS
from tramontane.cluster.serve_patches.grpc_proxy import bind_grpc_to_http_host
from tramontane.proto.request import REQUEST_ID_HEADER, REQUEST_ID_PATTERN
from tramontane.router.openai.errors import error_body

# With these a client could choose its replica and its timeout, and keep its request alive after it
# has left. The proxy also answers 500 if they are not UTF-8.
CONTROL_HEADERS = (
    b"serve-multiplexed-model-id",
    b"x-session-id",
    b"x-request-timeout-seconds",
    b"x-request-disconnect-disabled",
)
READ_BY_RAY_SERVE = (REQUEST_ID_HEADER, b"traceparent")  # it fails if they are not UTF-8

SERVE_PATHS = "/-/"  # Ray Serve's own paths, which ask for no key
HEALTH_PATH = "/-/healthz"  # answers as /health does; operators of clusters restart proxies by it


def proxy_middlewares() -> list[Middleware]:
    """Return a proxy's middlewares, innermost first, and patch Ray Serve in its process.

    Ray Serve's proxies call this by name before they open their ports: see
    ``ray_settings.SERVE_SETTINGS``. Raises ConfigError if this version of Ray lacks a private name
    that we need.
    """
    assert_supported(SERVE_SYMBOLS)
    bind_grpc_to_http_host()
    replace_response_generators()
    use_serve_log(LogSettings(), "proxy")
    enable_proxy_tracing()
    failover = Middleware(FailoverMiddleware, nodes=DeadNodeWatcher(list_dead_nodes))
    return [
        Middleware(CancelAbandonedCalls),
        failover,
        Middleware(StripControlHeaders),
        Middleware(SlowClientMiddleware),
    ]


class CancelAbandonedCalls:
    """ASGI middleware directly around Ray Serve's application, in the task in which Ray Serve sets
    the request's id.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer the request, then cancel its calls that have not ended."""
        try:
            await self._app(scope, receive, send)
        finally:
            cancel_calls(internal_request_id())


class StripControlHeaders:
    """ASGI middleware that removes Ray Serve's control headers and hides the paths that describe
    its other applications.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on without control headers, or answer 404 for a hidden path."""
        path = str(scope.get("path", "")).removeprefix(scope.get("root_path", ""))
        if scope["type"] == "http" and path.startswith(SERVE_PATHS) and path != HEALTH_PATH:
            response = JSONResponse(
                error_body(f"{path[:60]!r} is not here", "invalid_request_error"), 404
            )
            await response(scope, receive, send)
            return
        kept = [
            (name, value)
            for name, value in scope.get("headers", ())
            if not _is_control_header(name.replace(b"_", b"-"), value)
        ]
        await self._app({**scope, "headers": kept}, receive, send)


def _is_control_header(name: bytes, value: bytes) -> bool:
    return name in CONTROL_HEADERS or (
        name in READ_BY_RAY_SERVE and not REQUEST_ID_PATTERN.fullmatch(value)
    )
