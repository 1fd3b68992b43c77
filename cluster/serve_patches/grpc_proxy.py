"""What Ray Serve's gRPC proxy lacks: around each of its handlers."""

from collections.abc import AsyncIterator, Callable
from typing import Any

from grpc import StatusCode
from ray.serve._private.proxy_request_response import gRPCStreamingType

from tramontane.cluster.serve_patches.call_cancellation import cancel_on_disconnect
from tramontane.proto.log_fields import REQUEST_ID_PATTERN

LISTS_APPLICATIONS = "/ray.serve.RayServeAPIService/ListApplications"  # to everybody, without a key
ANSWERS_IN_STREAMS = (gRPCStreamingType.UNARY_STREAM, gRPCStreamingType.STREAM_STREAM)
REQUEST_ID = "request_id"  # in the metadata: Ray Serve writes it into logs, and sends it back


def wrap_handler_factory(make: Callable[..., Any], service_method: str, streaming_type: gRPCStreamingType) -> Callable[..., Any]:
    """What handles requests of this method."""
    if service_method == LISTS_APPLICATIONS:
        return _hide_applications
    handler: Callable[..., Any] = make(service_method, streaming_type)
    return _checked_stream(cancel_on_disconnect(handler)) if streaming_type in ANSWERS_IN_STREAMS else _with_id_check(handler)


async def _hide_applications(_request: Any, context: Any) -> None:  # noqa: ANN401
    await context.abort(StatusCode.UNIMPLEMENTED, "this server does not tell its applications")


def _with_id_check(handler: Callable[..., Any]) -> Callable[..., Any]:
    async def handle(request: Any, context: Any) -> Any:  # noqa: ANN401 - of gRPC
        await _check(context)
        return await handler(request, context)

    return handle


def _checked_stream(handler: Callable[..., AsyncIterator[Any]]) -> Callable[..., AsyncIterator[Any]]:
    async def handle(request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: ANN401 - of gRPC
        await _check(context)
        async for message in handler(request, context):
            yield message

    return handle


async def _check(context: Any) -> None:  # noqa: ANN401 - of gRPC
    """Ends the request where its id could pass for something else in a log."""
    given = [value for name, value in context.invocation_metadata() or () if name == REQUEST_ID]
    if not all(REQUEST_ID_PATTERN.fullmatch(value.encode(errors="surrogateescape")) for value in given):
        await context.abort(StatusCode.INVALID_ARGUMENT, f"{REQUEST_ID} must have 1 to 128 visible characters of ASCII")
