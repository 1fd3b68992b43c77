"""Changes to Ray Serve's gRPC proxy: where clients' gRPC listens, and what is around every
handler.
"""

from collections.abc import AsyncIterator, Callable
from functools import partial
from ipaddress import IPv6Address, ip_address
from typing import Any
from urllib.parse import unquote

from grpc import StatusCode

from tramontane.cluster.ray_internals.accessors import (
    cancel_calls,
    internal_request_id,
    is_streaming,
    serve_controller,
)
from tramontane.cluster.ray_internals.table import ADD_GRPC_ADDRESS
from tramontane.cluster.serve_patches.replica import replace_all_interfaces
from tramontane.proto.request import REQUEST_ID_PATTERN

LOOPBACK = ("127.0.0.1", "localhost", "::1")
# Ray Serve's own method, which asks for no key
LIST_APPLICATIONS = "/ray.serve.RayServeAPIService/ListApplications"
REQUEST_ID = "request_id"  # in the metadata: Ray Serve writes it into logs, and sends it back

StreamHandler = Callable[[Any, Any], AsyncIterator[Any]]


def bind_grpc_to_http_host() -> None:
    """Let clients' gRPC listen on the host of HTTP. To be called in a proxy before it opens its
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
    """Wrap the handler of a method that answers with a stream, so that its call ends with it; see
    ``cancel_calls``.
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
