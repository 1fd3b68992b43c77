"""What is around every handler of Ray Serve's gRPC proxy."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from grpc import StatusCode
from ray.serve._private.proxy_request_response import gRPCStreamingType

from tramontane.cluster.serve_patches.proxy import LIST_APPLICATIONS, wrap_handler_factory

STREAMS = (gRPCStreamingType.UNARY_STREAM, gRPCStreamingType.STREAM_STREAM)


class _EndedError(Exception):
    pass


class _Context:
    def __init__(self, *metadata: tuple[str, str]) -> None:
        self.metadata, self.code = metadata, StatusCode.OK
        self.callbacks: list[Callable[[object], None]] = []

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return self.metadata

    def add_done_callback(self, callback: Callable[[object], None]) -> None:
        self.callbacks.append(callback)

    async def abort(self, code: StatusCode, details: str) -> None:
        self.code = code
        raise _EndedError(details)


def _make(_method: str, streaming_type: gRPCStreamingType) -> Callable[..., Any]:
    async def one(request: str, _context: object) -> str:
        return f"{request}!"

    async def many(request: str, _context: object) -> AsyncIterator[str]:
        yield f"{request}!"

    return many if streaming_type in STREAMS else one


def _answers(
    context: _Context,
    streaming_type: gRPCStreamingType,
    method: str = "/tramontane.v1.Inference/Any",
) -> list[str]:
    handler = wrap_handler_factory(_make, method, streaming_type)

    async def run() -> list[str]:
        if streaming_type in STREAMS:
            return [message async for message in handler("O", context)]
        return [await handler("O", context)]

    return asyncio.run(run())


@pytest.mark.parametrize("streaming_type", list(gRPCStreamingType))
@pytest.mark.parametrize("name", ["request_id", "another"])
def test_a_request_is_handled_and_the_call_of_a_stream_will_be_ended(
    streaming_type: gRPCStreamingType, name: str
) -> None:
    context = _Context((name, "mine-1"))
    assert _answers(context, streaming_type) == ["O!"]
    assert len(context.callbacks) == (streaming_type in STREAMS)


@pytest.mark.parametrize("streaming_type", list(gRPCStreamingType))
@pytest.mark.parametrize(
    "request_id",
    ["", "a b", "x\nWARNING 2026-01-01 all is lost", "\x1b[31m", "x" * 129, "é", "\udcff"],
)
def test_a_request_id_that_could_pass_for_something_else_in_a_log_is_refused(
    streaming_type: gRPCStreamingType, request_id: str
) -> None:
    context = _Context(("request_id", "mine-1"), ("request_id", request_id))
    with pytest.raises(
        _EndedError, match="request_id must have 1 to 128 visible characters of ASCII"
    ):
        _answers(context, streaming_type)
    assert context.code == StatusCode.INVALID_ARGUMENT


def test_applications_are_not_listed() -> None:
    context = _Context()
    with pytest.raises(_EndedError):
        _answers(context, gRPCStreamingType.UNARY_UNARY, LIST_APPLICATIONS)
    assert context.code == StatusCode.UNIMPLEMENTED
