"""A silent gRPC stream has HTTP/2 PINGs, seen by a client that speaks HTTP/2 byte by byte."""

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest
import ray.serve._private.grpc_util as rays

from tramontane.cluster.http.sse import KEEP_ALIVE_S
from tramontane.cluster.serve_patches.proxy import grpc_keep_alive_options, proxy_middlewares

DATA, HEADERS, SETTINGS, PING, ACK, END_HEADERS = 0, 1, 4, 6, 1, 4
PATH = "/tramontane.v1.Inference/Complete"
FIELDS = {
    ":method": "POST",
    ":scheme": "http",
    ":path": PATH,
    ":authority": "localhost",
    "content-type": "application/grpc",
    "te": "trailers",
}
NUM_PINGS = 4  # gRPC sends one at the start in any case, to measure the connection


def _frame(kind: int, flags: int, stream: int, content: bytes = b"") -> bytes:
    """A frame of RFC 9113, section 4.1."""
    head = len(content).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big")
    return head + content


def _field(name: str, value: str) -> bytes:
    """A header field of RFC 7541, section 6.2.2: literal, with a new name, without indexing."""
    return bytes([0, len(name)]) + name.encode() + bytes([len(value)]) + value.encode()


class _Silent(grpc.GenericRpcHandler):
    def service(self, _details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        async def never(_request: bytes, _context: object) -> AsyncIterator[bytes]:
            await asyncio.Event().wait()
            yield b""

        return grpc.unary_stream_rpc_method_handler(never)


async def _count_pings(server: "grpc.aio.Server", limit_s: float) -> int:
    """Open a stream that stays silent, answer PINGs, and count them, up to ``NUM_PINGS``."""
    server.add_generic_rpc_handlers((_Silent(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    fields = b"".join(_field(*each) for each in FIELDS.items())
    writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(SETTINGS, 0, 0))
    writer.write(_frame(HEADERS, END_HEADERS, 1, fields) + _frame(DATA, 1, 1, bytes(5)))
    count = 0
    try:
        async with asyncio.timeout(limit_s):
            while count < NUM_PINGS:
                head = await reader.readexactly(9)
                content = await reader.readexactly(int.from_bytes(head[:3], "big"))
                kind, flags = head[3], head[4]
                if kind == PING and not flags & ACK:
                    count += 1
                    writer.write(_frame(PING, ACK, 0, content))
                if kind == SETTINGS and not flags & ACK:
                    writer.write(_frame(SETTINGS, ACK, 0))
    except TimeoutError:
        pass
    finally:
        writer.close()
        await server.stop(0)
    return count


def test_a_silent_stream_has_pings() -> None:
    async def run() -> tuple[int, int]:
        kept = grpc.aio.server(options=grpc_keep_alive_options(0.2))
        plain = grpc.aio.server()
        return await _count_pings(kept, 60.0), await _count_pings(plain, 2.0)

    kept, plain = asyncio.run(run())
    assert kept == NUM_PINGS
    assert plain < NUM_PINGS


def test_ray_serves_servers_have_the_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """The proxy's own gRPC server is made with them, after Ray Serve's."""
    options = rays.DEFAULT_GRPC_SERVER_OPTIONS
    before = list(options)
    rays_own = [each for each in before if "message_length" in each[0]]
    options[:] = rays_own
    seen: list[tuple[str, object]] = []

    def record(_server: object, *, options: list[tuple[str, object]], **_: object) -> None:
        seen.extend(options)

    monkeypatch.setattr(rays.Server, "__init__", record)
    try:
        proxy_middlewares()
        rays.gRPCGenericServer(lambda **_: None)
    finally:
        options[:] = before
    assert set(rays_own) < set(seen)
    assert dict(seen)["grpc.keepalive_time_ms"] == KEEP_ALIVE_S * 1000
    assert dict(seen)["grpc.http2.min_ping_interval_without_data_ms"] == 10_000, "of clients"
