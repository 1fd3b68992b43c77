"""The middlewares of Ray Serve's HTTP proxies, including those that end abandoned calls and remove
Ray Serve's control headers.
"""

from collections.abc import AsyncIterator, Callable
from functools import partial
from ipaddress import IPv6Address, ip_address
from typing import Any
from urllib.parse import unquote

import ray
from grpc import StatusCode
from starlette.middleware import Middleware
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from tramontane.cluster.common.node_watch import DeadNodeWatcher
from tramontane.cluster.common.ray_api import list_dead_nodes
from tramontane.cluster.config.logging import LogSettings
from tramontane.cluster.http.failover import FailoverMiddleware
from tramontane.cluster.http.slow_clients import ProxySlowClientMiddleware, buffered_messages
from tramontane.cluster.http.sse import KEEP_ALIVE_S
from tramontane.cluster.observability.logging import use_serve_log
from tramontane.cluster.observability.tracing import enable_proxy_tracing
from tramontane.cluster.ray_internals.accessors import (
    cancel_calls,
    internal_request_id,
    is_streaming,
    replace_response_generators,
    replace_response_queues,
    serve_controller,
)
from tramontane.cluster.ray_internals.table import (
    ADD_GRPC_ADDRESS,
    ADD_PORT,
    GRPC_SERVER_OPTIONS,
    SERVE_SYMBOLS,
    assert_supported,
)
from tramontane.proto.request import REQUEST_ID_HEADER, REQUEST_ID_PATTERN
from tramontane.router.openai.errors import error_body

# Changes to Ray Serve in a replica's process: the address of its internal port, and the length of
# its response queues.

ALL_INTERFACES = "[::]:"


def bind_internal_port_to_node() -> None:
    """Make a replica's internal gRPC port listen on the node's own address only. To be called in
    its constructor.

    Ray Serve opens one port per replica, on all interfaces and without authentication, and reads
    pickles from it. Other replicas reach it under the address by which Ray knows the node, so it
    listens there: 127.0.0.1 in a cluster that we started. Ray Serve has no option for this;
    ``tests/test_serve_command.py`` checks the sockets.
    """
    add_port = ADD_PORT.value
    node_address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]

    def add_port_on_node_address(server: Any, address: str) -> Any:
        return add_port(server, replace_all_interfaces(address, node_address))

    ADD_PORT.replace(add_port_on_node_address)


def track_response_queues() -> None:
    """Let the queues through which a replica passes responses on publish their lengths to the
    requests they are made for.

    To be called in a replica's constructor.
    """
    replace_response_queues(buffered_messages.set)


def replace_all_interfaces(address: str, host: str) -> str:
    """Return an address of Ray Serve's with a host: ``[::]:9000`` and ``127.0.0.1`` give
    ``127.0.0.1:9000``.
    """
    assert address.startswith(ALL_INTERFACES), (
        "Ray Serve has changed the address that this replaces"
    )
    return address.replace(ALL_INTERFACES, f"{format_host(host)}:")


def format_host(host: str) -> str:
    """Return the host in its form before a port: ``::1`` gives ``[::1]``."""
    return f"[{host}]" if ":" in host else host


# Changes to Ray Serve's gRPC proxy: the address of clients' gRPC, and wrappers around every
# handler.

LOOPBACK = ("127.0.0.1", "localhost", "::1")
# Ray Serve's own method, which requires no key
LIST_APPLICATIONS = "/ray.serve.RayServeAPIService/ListApplications"
REQUEST_ID = "request_id"  # in the metadata: Ray Serve writes it into logs, and sends it back

StreamHandler = Callable[[Any, Any], AsyncIterator[Any]]


def bind_grpc_to_http_host() -> None:
    """Make clients' gRPC listen on the host of HTTP. To be called in a proxy before it opens its
    ports.

    Ray Serve has an option for the port only, and listens on all interfaces. The function that adds
    the port does not know the host and cannot await it, so the port is added when the server
    starts. Handlers are wrapped too.
    """

    def add_port_at_start(grpc_server: Any, server_address: str) -> None:
        start = grpc_server.start

        async def start_on_http_host() -> None:
            host = (await serve_controller().get_http_config.remote()).host
            grpc_server.add_insecure_port(replace_all_interfaces(server_address, host))
            await start()

        grpc_server.start = start_on_http_host
        grpc_server.service_handler_factory = partial(
            wrap_handler_factory, grpc_server.service_handler_factory
        )

    ADD_GRPC_ADDRESS.replace(add_port_at_start)


def grpc_keep_alive_options(interval_s: float = KEEP_ALIVE_S) -> list[tuple[str, int]]:
    """Return the options of a gRPC server that sends an HTTP/2 PING after each ``interval_s``
    without anything from the client, and permits pings of clients, one in 10 s.

    See https://github.com/grpc/grpc/blob/master/doc/keepalive.md. A client that does not answer
    one in 20 s is disconnected.
    """
    return [
        ("grpc.keepalive_time_ms", round(interval_s * 1000)),
        ("grpc.keepalive_timeout_ms", 20_000),
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ]


def wrap_handler_factory(
    make: Callable[..., Any], service_method: str, streaming_type: Any
) -> Callable[..., Any]:
    """Make the handler of a method with Ray Serve's ``make``, and wrap it; ``streaming_type`` is
    Ray Serve's.
    """
    if service_method == LIST_APPLICATIONS:
        return _hide_applications
    handler: Callable[..., Any] = make(service_method, streaming_type)
    return (
        _checked_stream(cancel_on_disconnect(handler))
        if is_streaming(streaming_type)
        else _with_id_check(handler)
    )


async def _hide_applications(_request: Any, context: Any) -> None:
    await context.abort(StatusCode.UNIMPLEMENTED, "this server does not list its applications")


def _with_id_check(handler: Callable[..., Any]) -> Callable[..., Any]:
    async def handle(request: Any, context: Any) -> Any:  # of gRPC
        await _check_request_id(context)
        return await handler(request, context)

    return handle


def _checked_stream(handler: StreamHandler) -> StreamHandler:
    async def handle(request: Any, context: Any) -> AsyncIterator[Any]:  # of gRPC
        await _check_request_id(context)
        async for message in handler(request, context):
            yield message

    return handle


async def _check_request_id(context: Any) -> None:  # of gRPC
    """Abort the call if its id has characters that could forge a line of a log."""
    given = [value for name, value in context.invocation_metadata() or () if name == REQUEST_ID]
    if not all(
        REQUEST_ID_PATTERN.fullmatch(value.encode(errors="surrogateescape")) for value in given
    ):
        await context.abort(
            StatusCode.INVALID_ARGUMENT,
            f"{REQUEST_ID} must have 1 to 128 visible characters of ASCII",
        )


def cancel_on_disconnect(handler: StreamHandler) -> StreamHandler:
    """Wrap the handler of a method with a streamed response, so that its call ends with the stream;
    see ``cancel_calls``.
    """

    async def handle(request: Any, context: Any) -> AsyncIterator[Any]:  # of gRPC
        is_known = False
        try:
            async for message in handler(request, context):
                if not is_known:
                    context.add_done_callback(partial(_on_done, internal_request_id()))
                    is_known = True
                yield message
        finally:
            # then this still is the request's task; a later clean-up may run in any other one
            if not is_known:
                cancel_calls(internal_request_id())

    return handle


def _on_done(call_id: str, _context: object) -> None:
    cancel_calls(call_id)


def is_loopback(peer: str) -> bool:
    """Return whether a gRPC peer, ``ipv4:127.0.0.1:50123`` or ``ipv6:%5B::1%5D:50123``, is on a
    loopback address.
    """
    kind, _, address = peer.partition(":")
    if kind == "unix":
        return True
    try:
        ip = ip_address(unquote(address).rpartition(":")[0].strip("[]"))
    except ValueError:
        return False
    return ((isinstance(ip, IPv6Address) and ip.ipv4_mapped) or ip).is_loopback


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
    GRPC_SERVER_OPTIONS.value.extend(grpc_keep_alive_options())
    replace_response_generators()
    use_serve_log(LogSettings(), "proxy")
    enable_proxy_tracing()
    failover = Middleware(FailoverMiddleware, nodes=DeadNodeWatcher(list_dead_nodes))
    return [
        Middleware(CancelAbandonedCalls),
        failover,
        Middleware(StripControlHeaders),
        Middleware(ProxySlowClientMiddleware),
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
