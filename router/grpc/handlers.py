"""Registration of the services of ``inference.proto`` and of reflection at a gRPC server.

Unlike the generated code it passes bytes that cannot be parsed to the servicer, which returns a
proper error.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass
from operator import methodcaller
from typing import Any

import grpc
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha import reflection, reflection_pb2

from tramontane.proto import inference_pb2
from tramontane.proto.errors import RequestError
from tramontane.proto.units import format_bytes

# Of a request that is one message. Parsing cannot be divided: 4 MiB with a number or an empty text
# in each byte or two took 43 ms, in which no stream is written to. The prompt of the longest
# context has less.
MAX_MESSAGE_BYTES = 2 * 2**20


@dataclass(frozen=True, slots=True)
class MalformedMessage:
    """Replaces a message that cannot be parsed. gRPC itself would answer UNKNOWN and log a
    traceback.
    """

    message: str


# as in the generated code, which this replaces
def add_inference(servicer: Any, server: Any) -> None:
    """Register the service Inference, and reflection. Ray Serve's proxies call this by name: see
    ``cluster/serving/app.py``.

    The servicer's reflection requires an API key; Ray Serve's own does not.
    """
    _add(inference_pb2.DESCRIPTOR.services_by_name["Inference"], servicer, server)
    _add(reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"], servicer, server)


def add_batch_jobs(servicer: Any, server: Any) -> None:
    """Register the service BatchJobs."""
    _add(inference_pb2.DESCRIPTOR.services_by_name["BatchJobs"], servicer, server)


def _add(service: ServiceDescriptor, servicer: Any, server: Any) -> None:
    handlers = {
        method.name: _handler(method, getattr(servicer, method.name)) for method in service.methods
    }
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(service.full_name, handlers),)
    )


def _handler(method: MethodDescriptor, implementation: Callable[..., Any]) -> Any:
    kinds = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }
    make = kinds[method.client_streaming, method.server_streaming]
    max_bytes = None if method.client_streaming else MAX_MESSAGE_BYTES
    parse = _parser(GetMessageClass(method.input_type), max_bytes)
    # the answer may be a SerializedMessage
    return make(implementation, parse, methodcaller("SerializeToString"))


def _parser(
    kind: type[Message], max_bytes: int | None
) -> Callable[[bytes], Message | MalformedMessage]:
    def parse(data: bytes) -> Message | MalformedMessage:
        if max_bytes is not None and len(data) > max_bytes:
            return MalformedMessage(
                f"the message is larger than {format_bytes(max_bytes)}; send less at once"
            )
        try:
            message = kind.FromString(data)
        except DecodeError:
            return MalformedMessage(f"the message is not a {kind.DESCRIPTOR.full_name}")
        if kind.DESCRIPTOR.file is inference_pb2.DESCRIPTOR and _drop_unknown(message):
            return MalformedMessage(
                "the request has a field that this server does not know; is its inference.proto"
                " older than yours?"
            )
        return message

    return parse


def _drop_unknown(message: Message) -> bool:
    """Drop the unknown fields of a message and of its nested messages; return whether there were
    any.

    Both sizes are computed in milliseconds, where a list of the unknown fields of 4 MiB would take
    a second.
    """
    num_bytes = message.ByteSize()
    message.DiscardUnknownFields()
    return message.ByteSize() < num_bytes


async def reflection_responses(requests: AsyncIterator[Any]) -> AsyncGenerator[Any, None]:
    """Yield one reflection response per request. Raises RequestError for a malformed one."""
    names = sorted(
        service.full_name for service in inference_pb2.DESCRIPTOR.services_by_name.values()
    )
    servicer = reflection.aio.ReflectionServicer([*names, reflection.SERVICE_NAME])  # type: ignore[attr-defined]
    async for response in servicer.ServerReflectionInfo(_requests(requests), None):
        yield response


async def _requests(requests: AsyncIterator[Any]) -> AsyncGenerator[Any, None]:
    async for request in requests:
        if isinstance(request, MalformedMessage):
            raise RequestError(request.message)
        yield request
