"""One response to a client, made of what several doors say.

Whole answers, of which clients are told nothing until the end: their proxy hears now and then how far they are.
"""

import asyncio
from http import HTTPStatus
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tramontane.router.openai.errors import error_body
from tramontane.router.openai.resume_state import ChoiceUpdate, ResumeState

SCOPE_PROGRESS = "tramontane.tell"  # in the scope that a door's endpoints get, where a proxy relays the answer: a Teller
MESSAGE_PROGRESS = "tramontane.told"  # a message that goes no further than the proxy
REPORT_EVERY_S = 1.0  # as much is computed again when a door dies


class ProgressReporter:
    """Of one answer."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._news: list[ChoiceUpdate] = []
        self._parts: list[dict[str, Any]] = []
        self._told_at = asyncio.get_running_loop().time()

    async def __call__(self, news: list[ChoiceUpdate], parts: list[dict[str, Any]]) -> None:
        """The answer has grown by this."""
        self._news += news
        self._parts += parts
        if asyncio.get_running_loop().time() - self._told_at < REPORT_EVERY_S:
            return
        message: Message = {"type": MESSAGE_PROGRESS, "news": self._news, "parts": self._parts}
        self._news, self._parts, self._told_at = [], [], asyncio.get_running_loop().time()
        await self._send(message)


SCOPE_RESUME = "tramontane.answer"  # a ResumeState, in the scope that a door gets: beside HTTP, where no client can write
MESSAGE_UPDATES = (
    "tramontane.news"  # in each message of a stream: what it tells of the choices; comes from doors only, and goes no further
)
MESSAGE_NODE = (
    "tramontane.node"  # a message of its own, before all others: on which node this door is, and its model; it stays here, too
)
TOO_LATE = HTTPStatus.GATEWAY_TIMEOUT  # for this client: the time that it gave is over
OTHER_MODEL = "the server has another model now; send the request again"
LOST = "the server lost this request, and could not take it up again; send it again"


def event_of(data: bytes) -> bytes:
    """A server-sent event."""
    return b"data: " + data + b"\n\n"


class FailoverResponse:
    """The client hears of a response once there is something of its body: until then another door may answer instead."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.answer, self.num_news = ResumeState(), 0
        self.node: str | None = None  # of the present door, once it has said anything; empty where it does not tell
        self._start: Message | None = None  # as the present door says it, until the client hears something of it
        self._has_begun = self._is_another = False
        self.is_refused = False  # by the present door, which was to go on
        self.has_ended, self.can_go_on = False, True

    def retry(self, waited_s: float) -> None:
        """What comes now is another door's. ``waited_s``: since the request has arrived."""
        self.answer.num_lost_ingresses += self.node is not None  # else that door has not heard of the request
        self.answer.waited_s = waited_s
        self._start, self._is_another, self.is_refused, self.node = None, True, False, None

    async def send(self, message: Message) -> None:
        """For the present door."""
        if message["type"] != MESSAGE_NODE and self.node is None:
            self.node = ""  # it is well, and none of ours
        if message["type"] == MESSAGE_NODE:
            self.node = message["id"]
            self.answer.bind_model(message["model"])
        elif message["type"] == MESSAGE_PROGRESS:
            self.answer.add(message["news"])
            self.answer.parts += message["parts"]
            self.num_news += 1
        elif message["type"] == "http.response.start":
            self._start, status = message, message["status"]
            # Ray Serve says "not found" where the application is being deployed.
            is_failing = status >= HTTPStatus.INTERNAL_SERVER_ERROR and status != TOO_LATE
            is_full = status == HTTPStatus.TOO_MANY_REQUESTS and self.answer.is_resumed
            self.is_refused = self._is_another and (status == HTTPStatus.NOT_FOUND or is_full or is_failing)
        elif message["type"] != "http.response.body":
            await self._send(message)
        elif not self.is_refused:
            await self._send_body(message)

    async def _send_body(self, message: Message) -> None:
        news = message.pop(MESSAGE_UPDATES, None)
        self.has_ended = not message.get("more_body", False)
        if news is not None:
            self.answer.add(news)
            self.num_news += 1
        elif not self.has_ended:
            self.can_go_on = False  # no stream of ours
        if self._start is not None and not self._has_begun:
            await self._send(self._start)
            self._has_begun = True
        elif self._start is not None and self._start["status"] != HTTPStatus.OK:  # of an answer that was going well
            message["body"] = event_of(message.get("body", b""))
        await self._send(message)

    async def fail(self, scope: Scope, receive: Receive) -> None:
        """No door is to be had."""
        answer = JSONResponse(
            error_body(LOST, "server_error", code="unavailable"), HTTPStatus.SERVICE_UNAVAILABLE, {"retry-after": "1"}
        )
        if self._has_begun:
            await self._send({"type": "http.response.body", "body": event_of(bytes(answer.body)), "more_body": False})
        else:
            await answer(scope, receive, self._send)


class NodeAnnouncer:
    """ASGI middleware of a door that knows its node, for a proxy that relays its answer. Another model's is not taken up."""

    def __init__(self, app: ASGIApp, node: str, model: str) -> None:
        self._app, self._node, self._model = app, node, model

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer: ResumeState | None = scope.get(SCOPE_RESUME)
        if self._node and answer is not None:
            await send({"type": MESSAGE_NODE, "id": self._node, "model": self._model})
            answer.bind_model(self._model)
            if answer.model != self._model:
                await JSONResponse(error_body(OTHER_MODEL, "server_error"), HTTPStatus.SERVICE_UNAVAILABLE)(scope, receive, send)
                return
            scope = {**scope, SCOPE_PROGRESS: ProgressReporter(send)}
        await self._app(scope, receive, send)
