"""Bodies that are many, large or slow: they are read within bounds, and none that would be refused
anyway.
"""

import asyncio
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from batch_jobs import new_batch_harness
from event_loops import in_event_loop
from scripted_token_source import MAX_BODY, MODEL, ScriptedSource, http_app_for
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.types import ASGIApp, Message

from tramontane.cluster.http.batch_endpoints import MAX_BATCH_BODY, BatchEndpoints
from tramontane.cluster.http.body_reader import (
    MIN_PROGRESS_BYTES,
    BodyLimiter,
    BodyReader,
    BodyTooSlowError,
)
from tramontane.cluster.http.errors import ERROR_HANDLERS
from tramontane.proto.errors import DrainingError, QueueFullError, TramontaneError
from tramontane.router.openai.json_limits import SMALL_BODY
from tramontane.router.openai.request_context import RequestStats

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
REQUEST_BODY = json.dumps({"prompt": "What news?", "max_tokens": 2}).encode()
FORM = (b"content-type", b"multipart/form-data; boundary=b")


class Sender:
    """Of one request, by hand. Where its body is not whole it waits after the last part, and then
    leaves.
    """

    def __init__(
        self,
        parts: Iterable[bytes],
        is_whole: bool = True,
        headers: Iterable[tuple[bytes, bytes]] = (),
    ) -> None:
        self._parts, self._is_whole, self._headers = list(parts), is_whole, list(headers)
        self.num_received, self.sent = 0, list[Message]()
        self.waits, self.resumed = asyncio.Event(), asyncio.Event()

    async def send_to(self, app: ASGIApp, path: str = COMPLETIONS) -> "Sender":
        scope: dict[str, Any] = {
            "type": "http",
            "method": "POST",
            "path": path,
            "headers": self._headers,
        }
        await app(scope | {"query_string": b"", "root_path": ""}, self.receive, self._send)
        return self

    async def receive(self) -> Message:
        if self.num_received == len(self._parts):
            self.waits.set()
            await self.resumed.wait()
            return {"type": "http.disconnect"}
        self.num_received += 1
        is_last = self._is_whole and self.num_received == len(self._parts)
        return {
            "type": "http.request",
            "body": self._parts[self.num_received - 1],
            "more_body": not is_last,
        }

    async def _send(self, message: Message) -> None:
        self.sent.append(message)

    @property
    def status(self) -> int:
        return int(self.sent[0]["status"])

    @property
    def error(self) -> dict[str, Any]:
        error: dict[str, Any] = json.loads(
            b"".join(message.get("body", b"") for message in self.sent)
        )["error"]
        return error


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(
    ("refusal", "status"), [(DrainingError("draining"), 503), (QueueFullError("full", 3), 429)]
)
@in_event_loop
async def test_what_would_be_refused_anyway_is_not_even_read(
    path: str, refusal: TramontaneError, status: int
) -> None:
    sender = await Sender([b"x" * MAX_BODY]).send_to(
        http_app_for(ScriptedSource(refusal=refusal)).app(), path
    )
    assert (sender.status, sender.num_received) == (status, 0)
    assert any(name == b"retry-after" for name, _ in sender.sent[0]["headers"])


@in_event_loop
async def test_bodies_that_are_not_whole_have_room_together_and_no_more() -> None:
    """100 bytes of one that stands still leave 100 of 200."""
    bodies, num_refused = BodyLimiter(max_held=200), MODEL.counts.refused["overloaded"]
    app = http_app_for(ScriptedSource(), body_limiter=bodies).app()
    waiting = Sender([b"x" * 60, b"x" * 40], is_whole=False)
    request_task = asyncio.create_task(waiting.send_to(app))
    await waiting.waits.wait()
    assert bodies.num_held == 100
    assert (await Sender([REQUEST_BODY.ljust(100)]).send_to(app)).status == 200
    refused = await Sender([REQUEST_BODY.ljust(60), b" " * 41, b" "]).send_to(app)
    assert (refused.status, refused.error["type"], refused.num_received) == (
        429,
        "rate_limit_error",
        2,
    )
    assert (b"retry-after", b"5") in refused.sent[0]["headers"]
    assert MODEL.counts.refused["overloaded"] == num_refused + 1
    assert bodies.num_held == 100, "what was refused is not held"
    waiting.resumed.set()
    assert (await request_task).status == 499
    assert bodies.num_held == 0
    assert (await Sender([REQUEST_BODY.ljust(200)]).send_to(app)).status == 200


@pytest.mark.parametrize("size", [SMALL_BODY, SMALL_BODY + 1])
@in_event_loop
async def test_a_body_counts_as_held_until_it_is_parsed(size: int) -> None:
    """Large ones wait for one thread, so hundreds could wait."""
    bodies = BodyLimiter()
    request = Request({"type": "http", "headers": []}, Sender([b"a" * size]).receive)
    assert await bodies.parse(request, size, lambda body: (len(body), bodies.num_held)) == (
        size,
        size,
    )
    assert bodies.num_held == 0
    request = Request({"type": "http", "headers": []}, Sender([b"a" * size]).receive)
    with pytest.raises(ValueError, match="invalid literal"):
        await bodies.parse(request, size, int)
    assert bodies.num_held == 0


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/tokenize", "/detokenize"])
@in_event_loop
async def test_a_body_that_stands_still_is_given_up(path: str) -> None:
    bodies = BodyLimiter(progress_timeout_s=0.01)
    sender = await Sender([REQUEST_BODY[:9]], is_whole=False).send_to(
        http_app_for(ScriptedSource(), body_limiter=bodies).app(), path
    )
    assert (sender.status, sender.error["type"], bodies.num_held) == (
        408,
        "invalid_request_error",
        0,
    )
    assert "within 0.01 s" in sender.error["message"]


def test_a_file_that_stands_still_is_given_up(tmp_path: Path) -> None:
    harness = new_batch_harness(tmp_path)

    async def scenario() -> None:
        limiter = BodyLimiter(progress_timeout_s=0.01)
        bodies = BodyReader(limiter, MAX_BATCH_BODY, RequestStats())
        endpoints = BatchEndpoints(harness.service(), bodies)
        app = Starlette(routes=endpoints.routes(), exception_handlers=ERROR_HANDLERS)
        assert (
            await Sender([b"--b\r\n"], is_whole=False, headers=[FORM]).send_to(app, "/v1/files")
        ).status == 408
        assert (await Sender([b"{"], is_whole=False).send_to(app, "/v1/batches")).status == 408

    asyncio.run(scenario())
    harness.close()


@pytest.mark.parametrize(
    ("sizes", "every_s", "is_read"),
    [
        # 40 KiB each: a minute in all, and never 30 s without 64 KiB
        ([MIN_PROGRESS_BYTES * 5 // 8] * 6, 10.0, True),
        ([MIN_PROGRESS_BYTES, 1, 1], 10.0, True),
        ([MIN_PROGRESS_BYTES, 1, 1, 1], 10.0, False),
        ([1] * 3, 10.0, False),
        ([1, 1], 29.0, False),
    ],
)
@in_event_loop
async def test_a_large_body_may_take_long_and_one_that_trickles_may_not(
    sizes: list[int], every_s: float, is_read: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: now)
    sender = Sender(b" " * size for size in sizes)

    async def receive() -> Message:
        nonlocal now
        now += every_s
        for _ in range(3):  # what waits for this time has its turn
            await asyncio.sleep(0)
        return await sender.receive()

    bodies = BodyLimiter(progress_timeout_s=30.0)
    reading = bodies.parse(Request({"type": "http", "headers": []}, receive), 2**20, bytes)
    if is_read:
        assert len(await reading) == sum(sizes)
    else:
        with pytest.raises(BodyTooSlowError):
            await reading
    assert bodies.num_held == 0
