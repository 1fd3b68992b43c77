"""In Ray Serve's HTTP proxy: an answer whose door dies goes on with another door, unseen by the client."""

import asyncio
import logging

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tramontane.cluster.lost_nodes import LostNodes
from tramontane.cluster.relayed_response import ANSWER, RelayedResponse

REQUEST_ID = b"x-request-id"
PATHS = ("/v1/completions", "/v1/chat/completions")
PAUSES_S = (0.1, 0.5, 2.0, 10.0, 30.0)  # before a door is asked again, unless something was told since the last time
MAX_BODY = 8 * 2**20  # as much as a door takes, unless it is told otherwise
MAX_BODIES = 256 * 2**20  # of all requests together; beyond that a request is as mortal as its door

logger = logging.getLogger(__name__)


class DoorRelay:
    """ASGI middleware. Ray Serve shows a door's death as a response that does not end, or does not even begin.

    That of a door's whole machine it does not show: who waits for a response over gRPC is not told. So the door is given up when
    Ray declares its node dead.
    What a door itself has answered stands; only a door that is asked to go on may be asked again when it is full or failing.
    """

    def __init__(self, app: ASGIApp, nodes: LostNodes | None = None) -> None:
        self._app = app
        self._nodes = nodes or LostNodes()
        self._num_kept = 0  # bytes of bodies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or not scope["path"].endswith(PATHS):
            await self._app(scope, receive, send)
            return
        body, response = _Body(receive), RelayedResponse(send)
        if all(name != REQUEST_ID for name, _ in scope["headers"]):  # else every door would be given another one
            scope = {**scope, "headers": [*scope["headers"], (REQUEST_ID, response.answer.id.encode())]}
        pauses = iter(PAUSES_S)
        try:
            while True:
                num_news = response.num_news
                await self._ask({**scope, ANSWER: response.answer}, self._keeping(body), response)
                if response.has_ended or body.has_left or not (body.is_kept and response.can_go_on):
                    return
                pauses = iter(PAUSES_S) if response.num_news > num_news else pauses
                if (pause := next(pauses, None)) is None:
                    break
                logger.warning("the door of answer %s is gone; another is asked to go on", response.answer.id)
                response.begin_again()
                await asyncio.sleep(pause)
            await response.give_up(scope, receive)
        finally:
            self._num_kept -= body.forget()

    async def _ask(self, scope: Scope, receive: Receive, response: RelayedResponse) -> None:
        """One door, until it has answered or is known to be lost."""
        answering = asyncio.ensure_future(self._app(scope, receive, response.send))
        losing = asyncio.ensure_future(self._nodes.until_lost(lambda: response.node))
        try:
            await asyncio.wait((answering, losing), return_when=asyncio.FIRST_COMPLETED)
        finally:
            is_answered = answering.done()
            for task in (answering, losing):
                task.cancel()
            await asyncio.wait((answering, losing))
        if is_answered:
            await answering  # raises what it has raised

    def _keeping(self, body: "_Body") -> Receive:
        """What a door reads, from the beginning again."""
        place = 0

        async def receive() -> Message:
            nonlocal place
            if place < len(body.parts):
                place += 1
                return body.parts[place - 1]
            message = await body.receive()
            if body.is_kept and message["type"] == "http.request":
                self._num_kept += body.keep(message, room=MAX_BODIES - self._num_kept)
                place += 1
            return message

        return receive


class _Body:
    """Of one request, as far as it has been read."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self.parts: list[Message] = []
        self._num_bytes = 0
        self.is_kept, self.has_left = True, False

    async def receive(self) -> Message:
        message = await self._receive()
        self.has_left |= message["type"] == "http.disconnect"
        return message

    def keep(self, message: Message, room: int) -> int:
        """Returns how many bytes that adds. Where it is too much, nothing of this body is kept any more."""
        size = len(message.get("body", b""))
        if self._num_bytes + size > MAX_BODY or size > room:
            self.is_kept = False
            self.parts.clear()
            return 0
        self.parts.append(message)
        self._num_bytes += size
        return size

    def forget(self) -> int:
        """Returns how many bytes it has added in all."""
        self.parts.clear()
        return self._num_bytes
