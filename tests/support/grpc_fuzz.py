"""Malformed and hostile messages for every gRPC method, and the status codes that may come back."""

import asyncio
import random
from collections.abc import Iterator
from typing import Any

import grpc
from grpc import StatusCode

from tramontane.proto import inference_pb2 as pb

REFUSALS = {
    StatusCode.INVALID_ARGUMENT,
    StatusCode.NOT_FOUND,
    StatusCode.RESOURCE_EXHAUSTED,
    StatusCode.UNIMPLEMENTED,
}
METHODS = [
    (f"/{service.full_name}/{method.name}", method.client_streaming, method.server_streaming)
    for service in pb.DESCRIPTOR.services_by_name.values()
    for method in service.methods
]


def hostile_messages() -> Iterator[bytes]:
    rng = random.Random(7)
    yield from (rng.randbytes(rng.randrange(1, 200)) for _ in range(20))
    yield b"\x12\x04\xff\xfe\xfd\xfc"  # field 2, a text, that is not UTF-8
    yield b"\x0a\x04\xff\xfe\xfd\xfc"  # field 1
    yield b"\x12\xff\xff\xff\xff\x0f"  # a length of 4 GiB without content
    yield b"\x0b" * 5000  # nested groups
    yield b"\x18" + b"\xff" * 9 + b"\x01"  # field 3: -1
    yield pb.GenerateRequest(text="x" * 10**6).SerializeToString()
    yield pb.GenerateRequest(text="a", max_tokens=-(2**63)).SerializeToString()
    yield pb.GenerateRequest(text="a", max_tokens=2**62, n=2**62).SerializeToString()
    yield pb.GenerateRequest(text="a", temperature=float("nan")).SerializeToString()
    yield pb.GenerateRequest(text="a", top_p=float("inf"), seed=-(2**63)).SerializeToString()
    yield pb.GenerateRequest(token_ids=pb.TokenIds(ids=[-5, 2**40])).SerializeToString()
    yield pb.GenerateRequest(token_ids=pb.TokenIds(ids=[3] * 10**5)).SerializeToString()
    yield pb.GenerateRequest(text="a", stop=["\x00"] * 10**4).SerializeToString()
    yield pb.GenerateRequest(text="a", model="\u202e\n\x00" * 1000).SerializeToString()
    yield pb.GenerateRequest(text="a", logit_bias={-1: float("nan")}).SerializeToString()
    yield pb.StreamResultsRequest(job_id="../../etc/passwd\x00", offset=-1).SerializeToString()
    yield pb.ListJobsRequest(limit=2**62, after="x" * 10**5).SerializeToString()
    yield pb.SubmitJobRequest(data=b"no options first").SerializeToString()
    many = pb.JobOptions(metadata={str(number): "x" * 1000 for number in range(1000)})
    yield pb.SubmitJobRequest(options=many).SerializeToString()


async def code_of(
    channel: grpc.aio.Channel, method: tuple[str, bool, bool], message: bytes, timeout_s: float = 60
) -> StatusCode:
    code, _ = await end_of(channel, method, message, timeout_s)
    return code


async def end_of(
    channel: grpc.aio.Channel, method: tuple[str, bool, bool], message: bytes, timeout_s: float = 60
) -> tuple[StatusCode, str]:
    """Return the status code and details of a call with only this message; its responses are read
    and dropped.
    """
    path, sends_stream, gets_stream = method
    kind = ("stream" if sends_stream else "unary") + "_" + ("stream" if gets_stream else "unary")
    call: Any = getattr(channel, kind)(path)
    answer = call(iter([message]) if sends_stream else message, timeout=timeout_s)
    try:
        if gets_stream:
            async for _ in answer:
                pass
        else:
            await answer
    except grpc.aio.AioRpcError as error:
        details = error.details() or ""
        assert "\n" not in details
        assert "Traceback" not in details
    return await answer.code(), await answer.details() or ""


async def every_code(channel: grpc.aio.Channel) -> dict[StatusCode, int]:
    """Return how often each status code ended a call, over all messages and methods."""
    codes: dict[StatusCode, int] = {}
    for method in METHODS:
        for code in await asyncio.gather(
            *(code_of(channel, method, message) for message in hostile_messages())
        ):
            codes[code] = codes.get(code, 0) + 1
    return codes
