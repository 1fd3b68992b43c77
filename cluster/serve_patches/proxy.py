"""Around Ray Serve's HTTP proxies: keeps what clients would tell or ask Ray Serve, rather than us, from reaching it."""

from starlette.middleware import Middleware
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from tramontane.cluster.config.logging import LogSettings
from tramontane.cluster.http.failover import FailoverMiddleware
from tramontane.cluster.http.slow_clients import SlowClientMiddleware
from tramontane.cluster.observability.logging import use_serve_log
from tramontane.cluster.observability.tracing import enable_proxy_tracing
from tramontane.cluster.serve_patches.call_cancellation import CancelAbandonedCalls
from tramontane.cluster.serve_patches.ports import bind_grpc_to_http_host
from tramontane.proto.log_fields import REQUEST_ID_HEADER, REQUEST_ID_PATTERN
from tramontane.router.openai.errors import error_body

# With these a client could route, time and unwatch its own request; the proxy also answers 500 if they are not UTF-8.
CONTROL_HEADERS = (
    b"serve-multiplexed-model-id",
    b"x-session-id",
    b"x-request-timeout-seconds",
    b"x-request-disconnect-disabled",
)
READ_BY_RAY_SERVE = (REQUEST_ID_HEADER, b"traceparent")  # which fails where they are not UTF-8

RAY_SERVES_OWN = "/-/"  # its paths, which ask for no key
HEALTH = "/-/healthz"  # says what /health says; operators of clusters restart proxies by it


def proxy_middlewares() -> list[Middleware]:
    """Ray Serve's proxies call it by name, before they open their ports: see ``ray_settings.SERVE_SETTINGS``."""
    bind_grpc_to_http_host()
    use_serve_log(LogSettings(), "proxy")
    enable_proxy_tracing()
    inside_out = CancelAbandonedCalls, FailoverMiddleware, StripControlHeaders, SlowClientMiddleware
    return [Middleware(each) for each in inside_out]


class StripControlHeaders:
    """An ASGI application that sees the other headers, and none of the paths that say what else Ray Serve has."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = str(scope.get("path", "")).removeprefix(scope.get("root_path", ""))
        if scope["type"] == "http" and path.startswith(RAY_SERVES_OWN) and path != HEALTH:
            answer = JSONResponse(error_body(f"{path[:60]!r} is not here", "invalid_request_error"), 404)
            await answer(scope, receive, send)
            return
        kept = [
            (name, value) for name, value in scope.get("headers", ()) if not _is_control_header(name.replace(b"_", b"-"), value)
        ]
        await self._app({**scope, "headers": kept}, receive, send)


def _is_control_header(name: bytes, value: bytes) -> bool:
    return name in CONTROL_HEADERS or (name in READ_BY_RAY_SERVE and not REQUEST_ID_PATTERN.fullmatch(value))
