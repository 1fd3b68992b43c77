"""gRPC reflection: what services there are, told to those who may ask."""

from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from grpc_reflection.v1alpha import reflection

from tramontane.proto import inference_pb2
from tramontane.proto.errors import RequestError
from tramontane.router.grpc.handlers import Malformed

OURS = sorted(service.full_name for service in inference_pb2.DESCRIPTOR.services_by_name.values())


async def reflected(requests: AsyncIterator[Any]) -> AsyncGenerator[Any, None]:
    """One answer for each question. Raises RequestError for what is none."""
    answers = reflection.aio.ReflectionServicer([*OURS, reflection.SERVICE_NAME])  # type: ignore[attr-defined]
    async for answer in answers.ServerReflectionInfo(_questions(requests), None):
        yield answer


async def _questions(requests: AsyncIterator[Any]) -> AsyncGenerator[Any, None]:
    async for request in requests:
        if isinstance(request, Malformed):
            raise RequestError(request.message)
        yield request
