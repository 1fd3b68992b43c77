"""Checks around every handler of Ray Serve's gRPC proxy."""

from collections.abc import AsyncIterator, Callable
from typing import Any

from grpc import StatusCode

from tramontane.cluster.ray_internals.serve import is_streaming
from tramontane.cluster.serve_patches.call_cancellation import cancel_on_disconnect
from tramontane.proto.log_fields import REQUEST_ID_PATTERN

LIST_APPLICATIONS = "/ray.serve.RayServeAPIService/ListApplications"  # Ray Serve's own method, which asks for no key
REQUEST_ID = "request_id"  # in the metadata: Ray Serve writes it into logs, and sends it back


def wrap_handler_factory(make: Callable[..., Any], service_method: str, streaming_type: Any) -> Callable[..., Any]:  # noqa: ANN401
    """Make the handler of a method with Ray Serve's ``make``, and wrap it; ``streaming_type`` is Ray Serve's."""
    if service_method == LIST_APPLICATIONS:
        return _hide_applications
    handler: Callable[..., Any] = make(service_method, streaming_type)
    return _checked_stream(cancel_on_disconnect(handler)) if is_streaming(streaming_type) else _with_id_check(handler)


async def _hide_applications(_request: Any, context: Any) -> None:  # noqa: ANN401
    await context.abort(StatusCode.UNIMPLEMENTED, "this server does not list its applications")


def _with_id_check(handler: Callable[..., Any]) -> Callable[..., Any]:
    async def handle(request: Any, context: Any) -> Any:  # noqa: ANN401 - of gRPC
        await _check_request_id(context)
        return await handler(request, context)

    return handle


def _checked_stream(handler: Callable[..., AsyncIterator[Any]]) -> Callable[..., AsyncIterator[Any]]:
    async def handle(request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: ANN401 - of gRPC
        await _check_request_id(context)
        async for message in handler(request, context):
            yield message

    return handle


async def _check_request_id(context: Any) -> None:  # noqa: ANN401 - of gRPC
    """Abort the call if its id has characters that could forge a line of a log."""
    given = [value for name, value in context.invocation_metadata() or () if name == REQUEST_ID]
    if not all(REQUEST_ID_PATTERN.fullmatch(value.encode(errors="surrogateescape")) for value in given):
        await context.abort(StatusCode.INVALID_ARGUMENT, f"{REQUEST_ID} must have 1 to 128 visible characters of ASCII")
