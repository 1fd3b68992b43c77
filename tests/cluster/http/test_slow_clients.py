"""A client that does not read its answer: it stands still, is dropped after a while with a reason,
and gives its place back.
"""

import asyncio
import itertools
import json
import logging
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import ray.serve._private.replica
import uvicorn
from event_loops import in_event_loop
from scripted_token_source import TOKENIZER, ScriptedSource, client_for, http_app_for
from starlette.types import Message, Receive, Scope, Send

from tramontane.cluster.http.slow_clients import (
    MAX_BUFFERED,
    PIECE_BYTES,
    TIMEOUT_HEADER,
    ProxySlowClientMiddleware,
    SlowClientError,
    num_buffered,
    with_backpressure,
)
from tramontane.cluster.serve_patches.proxy import track_response_queues

NUM_TOKENS = 100


def _source() -> ScriptedSource:
    return ScriptedSource(TOKENIZER.encode("x")[1:2] * NUM_TOKENS)


async def _request(app: Any, send: Send, stays: asyncio.Event, *, stream: bool = True) -> None:
    body = json.dumps(
        {"prompt": "ROMEO:", "max_tokens": NUM_TOKENS, "stream": stream, "ignore_eos": True}
    ).encode()
    messages = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def receive() -> Message:
        try:
            return next(messages)
        except StopIteration:
            await stays.wait()
            return {"type": "http.disconnect"}

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/completions",
        "headers": [],
        "query_string": b"",
        "root_path": "",
    }
    await app(scope | {"asgi": {"version": "3.0", "spec_version": "2.3"}}, receive, send)


async def _settled(source: ScriptedSource) -> int:
    """How many tokens it has produced, once it produces no more."""
    before = -1
    while before != source.num_outputs:
        before = source.num_outputs
        for _ in range(50):
            await asyncio.sleep(0)
    return before


@in_event_loop
async def test_an_unread_stream_stops_and_continues_once_it_is_read() -> None:
    source, reads, written = _source(), asyncio.Event(), 0

    async def send(message: Message) -> None:
        nonlocal written
        written += 1
        if written > 5:
            await reads.wait()

    request_task = asyncio.create_task(
        _request(http_app_for(source, slow_client_timeout_s=3600.0).app(), send, asyncio.Event())
    )
    assert await _settled(source) < 10
    reads.set()
    await request_task
    assert (source.num_outputs, source.num_open) == (NUM_TOKENS, 0)


@pytest.mark.parametrize("through_ray_serve", [False, True])
def test_a_client_that_does_not_read_for_too_long_is_dropped(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, through_ray_serve: bool
) -> None:
    """Where Ray Serve is between, writing does not wait; its queue grows instead."""
    monkeypatch.setattr(
        ray.serve._private.replica, "MessageQueue", ray.serve._private.replica.MessageQueue
    )
    track_response_queues()

    async def scenario() -> int:
        source, num_sent = _source(), 0
        queue: Any = ray.serve._private.replica.MessageQueue() if through_ray_serve else None  # type: ignore[attr-defined]

        async def send(message: Message) -> None:
            nonlocal num_sent
            num_sent += 1
            if queue is not None:
                queue.put_nowait(message)
            elif num_sent > 5:
                await asyncio.Event().wait()

        await _request(http_app_for(source, slow_client_timeout_s=0.2).app(), send, asyncio.Event())
        assert source.num_open == 0
        return num_sent

    with caplog.at_level(logging.WARNING):
        num_sent = asyncio.run(scenario())
    assert num_sent == (MAX_BUFFERED + 1 if through_ray_serve else 6)
    (record,) = caplog.records
    assert "was dropped: its client did not read for 0.2 s" in record.getMessage()


@pytest.mark.parametrize("request_body", [{"stream": False}, {"stream": True}])
def test_also_a_whole_answer_is_given_up(
    caplog: pytest.LogCaptureFixture, request_body: dict[str, Any]
) -> None:
    async def send(_message: Message) -> None:
        await asyncio.Event().wait()

    source = _source()
    with caplog.at_level(logging.WARNING):
        asyncio.run(
            _request(
                http_app_for(source, slow_client_timeout_s=0.05).app(),
                send,
                asyncio.Event(),
                **request_body,
            )
        )
    assert source.num_open == 0
    (record,) = caplog.records
    assert "was dropped: its client did not read for 0.05 s" in record.getMessage()


@in_event_loop
async def test_a_client_that_reads_what_ray_serve_has_gets_all_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        ray.serve._private.replica, "MessageQueue", ray.serve._private.replica.MessageQueue
    )
    track_response_queues()

    queue: Any = ray.serve._private.replica.MessageQueue()  # type: ignore[attr-defined]

    async def read() -> bytes:
        got = b""
        while not got.endswith(b"[DONE]\n\n"):
            await queue.wait_for_message()
            assert num_buffered() <= MAX_BUFFERED + 1
            got += b"".join(message.get("body", b"") for message in queue.get_messages_nowait())
        return got

    async def send(message: Message) -> None:
        queue.put_nowait(message)

    reading = asyncio.create_task(read())
    await _request(
        http_app_for(_source(), slow_client_timeout_s=3600.0).app(), send, asyncio.Event()
    )
    assert (await reading).count(b"data: {") == NUM_TOKENS


class Connection:
    """As uvicorn's: ``send`` waits until the client reads, or the transport is closed."""

    def __init__(self) -> None:
        self.transport = self
        self.closed, self.started = asyncio.Event(), asyncio.Event()
        self.headers: dict[bytes, bytes] = {}

    def get_extra_info(self, _name: str) -> None:
        return None

    def get_write_buffer_size(self) -> int:
        return 1

    def abort(self) -> None:
        self.closed.set()

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.headers = dict(message["headers"])
            return
        await self.closed.wait()


async def _answer(
    limit: bytes | None, during: Callable[[Send], Awaitable[None]], send: Send
) -> None:
    async def app(_scope: Scope, _receive: Receive, send: Send) -> None:
        headers = [(b"a", b"b")] + ([(TIMEOUT_HEADER.encode(), limit)] if limit is not None else [])
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await during(send)

    async def nothing() -> Message:
        raise AssertionError

    await ProxySlowClientMiddleware(app)({"type": "http"}, nothing, send)


async def _one_write(send: Send) -> None:
    await send({"type": "http.response.body", "body": b"x", "more_body": True})


@in_event_loop
async def test_the_proxy_cuts_a_connection_that_takes_nothing_as_long_as_its_ingress_allows() -> (
    None
):
    connection = Connection()
    await _answer(b"0.05", _one_write, connection.send)
    assert connection.closed.is_set()
    assert connection.headers == {b"a": b"b"}, "the ingress's header is not for clients"


class Buffering(Connection):
    """As uvicorn's, too: it takes the first write however large it is, and the next one waits."""

    def __init__(self, reads: bool) -> None:
        super().__init__()
        self.written: list[Message] = []
        self._reads = reads

    def get_write_buffer_size(self) -> int:
        return 0 if self._reads else sum(len(message["body"]) for message in self.written)

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.body":
            if self.written and not self._reads:
                await self.closed.wait()
            self.written.append(message)


@pytest.mark.parametrize("reads", [True, False])
def test_a_timer_is_only_made_where_something_is_unread(
    reads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    timers: list[float | None] = []
    make = asyncio.timeout
    monkeypatch.setattr(asyncio, "timeout", lambda limit_s: timers.append(limit_s) or make(limit_s))

    async def two_writes(send: Send) -> None:
        await _one_write(send)
        await _one_write(send)

    async def scenario() -> None:
        connection = Buffering(reads)
        await _answer(b"0.05", two_writes, connection.send)
        assert connection.closed.is_set() is not reads

    asyncio.run(scenario())
    assert timers == ([] if reads else [0.05])


@in_event_loop
async def test_uvicorn_cuts_a_client_that_stops_reading() -> None:
    """Its connection takes a piece at once while nothing is unsent, and lets one wait when more is
    unsent than it holds.
    """
    pieces = itertools.count()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        async def endless(send: Send) -> None:
            while (await receive_or_nothing())["type"] != "http.disconnect":
                await send(
                    {"type": "http.response.body", "body": bytes(PIECE_BYTES), "more_body": True}
                )
                next(pieces)

        async def receive_or_nothing() -> Message:
            return {"type": "http.disconnect"} if transport.is_closing() else {"type": "nothing"}

        transport = send.__self__.transport  # type: ignore[attr-defined]
        await _answer(b"0.1", endless, send)

    server = uvicorn.Server(uvicorn.Config(app, port=0, lifespan="off", log_level="critical"))
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    reader, writer = await asyncio.open_connection(*server.servers[0].sockets[0].getsockname())
    writer.write(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
    assert await reader.readexactly(10 * PIECE_BYTES)
    reader._transport.pause_reading()  # type: ignore[attr-defined]
    while not serving.done() and server.server_state.connections:
        await asyncio.sleep(0.01)
    assert next(pieces) > 10
    writer.transport.abort()
    server.should_exit = True
    await serving


@pytest.mark.parametrize(
    "size", [0, 1, PIECE_BYTES, PIECE_BYTES + 1, 2 * PIECE_BYTES, 5 * PIECE_BYTES - 1]
)
@in_event_loop
async def test_a_whole_answer_is_written_in_pieces_so_that_its_connection_can_be_cut(
    size: int,
) -> None:
    body = bytes(number % 251 for number in range(size))

    async def whole(send: Send) -> None:
        await send({"type": "http.response.body", "body": body})

    reading, waiting = Buffering(reads=True), Buffering(reads=False)
    await _answer(b"60", whole, reading.send)
    *others, last = reading.written
    assert b"".join(message["body"] for message in reading.written) == body
    assert [message["more_body"] for message in others] == [True] * len(others)
    assert not last.get("more_body", False)
    assert not reading.closed.is_set()
    await _answer(b"0.05", whole, waiting.send)
    assert waiting.closed.is_set() == (size > PIECE_BYTES)


@in_event_loop
async def test_ingresses_state_for_every_answer_how_long_it_may_be_unread() -> None:
    async with client_for(http_app_for(_source(), slow_client_timeout_s=30.0).app()) as client:
        request_body = {"prompt": "ROMEO:", "max_tokens": 2}
        answers = [
            await client.post("/v1/completions", json=request_body | {"stream": stream})
            for stream in (True, False)
        ]
        answers += [await client.get("/v1/models"), await client.get("/nowhere")]
        assert [answer.headers.get(TIMEOUT_HEADER) for answer in answers] == ["30"] * 4


@in_event_loop
async def test_the_proxy_waits_without_bound_where_no_ingress_states_one() -> None:
    connection = Connection()
    answering = asyncio.create_task(_answer(None, _one_write, connection.send))
    await asyncio.wait([answering], timeout=0.2)
    assert not answering.done()
    connection.abort()
    await answering


def test_a_proxy_that_cannot_cut_says_so() -> None:
    async def stuck(message: Message) -> None:
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()

    with pytest.raises(SlowClientError):
        asyncio.run(_answer(b"0.05", _one_write, stuck))
    with pytest.raises(SlowClientError):
        asyncio.run(_one_write(with_backpressure(stuck, 0.05)))


def test_the_limit_counts_for_each_piece_so_that_a_slow_reader_gets_the_whole_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the event loop's clock, which the connection moves on: each piece takes 40 s of the 60 s,
    and all of them 200 s.
    """
    size = 5 * PIECE_BYTES

    class Slow(Buffering):
        async def send(self, message: Message) -> None:
            nonlocal now
            now += 40.0
            for _ in range(3):  # what waits for this time has its turn
                await asyncio.sleep(0)
            await super().send(message)

    async def whole(send: Send) -> None:
        await send({"type": "http.response.body", "body": bytes(size)})

    async def scenario() -> None:
        connection = Slow(reads=True)
        monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: now)
        await _answer(b"60", whole, connection.send)
        assert not connection.closed.is_set()
        assert sum(len(message["body"]) for message in connection.written) == size

    now = 0.0
    asyncio.run(scenario())


class SocketConnection(Connection):
    """Of a client over TCP."""

    def __init__(self, connection: socket.socket) -> None:
        super().__init__()
        self._connection = connection

    def get_extra_info(self, name: str) -> Any:
        return self._connection if name == "socket" else None

    def abort(self) -> None:
        self._connection.close()
        super().abort()


def test_a_connection_that_is_cut_is_reset_and_what_is_unsent_is_discarded() -> None:
    """If it were closed in order the system would keep the rest, for a client that never reads
    it.
    """
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as client,
    ):
        connection = SocketConnection(listener.accept()[0])
        asyncio.run(_answer(b"0.05", _one_write, connection.send))
        assert connection.closed.is_set()
        client.settimeout(60)
        with pytest.raises(ConnectionResetError):
            client.recv(1)
