"""In Ray Serve's HTTP proxy: an answer whose door dies goes on with another door, unseen by the client."""

import asyncio
import logging
import math

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tramontane.cluster.common.node_watch import DeadNodeWatcher
from tramontane.cluster.http.failover_response import SCOPE_RESUME, FailoverResponse
from tramontane.proto.log_fields import REQUEST_ID_HEADER, request_fields

PATHS = ("/v1/completions", "/v1/chat/completions")
PAUSES_S = (0.1, 0.5, 2.0, 10.0, 30.0)  # before a door is asked again that was soon gone and told nothing
QUICK_FAILURE_S = 5.0  # a door that had a request for longer was well until then
PATIENT_S = 40.0  # a door that refuses after longer has tried by itself, and the next one could do no more
MAX_DOORS = 20  # for one answer, while none of them tells anything: it may be what they die of
MAX_BODY = 8 * 2**20  # as much as a door takes, unless it is told otherwise
MAX_BODIES = 256 * 2**20  # of all requests together; beyond that a request is as mortal as its door

logger = logging.getLogger(__name__)


class FailoverMiddleware:
    """ASGI middleware. Ray Serve shows a door's death as a response that does not end, or does not even begin.

    That of a door's whole machine it does not show: who waits for a response over gRPC is not told. So the door is given up when
    Ray declares its node dead.
    What a door itself has answered stands; only a door that is asked to go on may be asked again when it is full or failing.
    """

    def __init__(self, app: ASGIApp, nodes: DeadNodeWatcher | None = None) -> None:
        self._app = app
        self._nodes = nodes or DeadNodeWatcher()
        self._num_kept = 0  # bytes of bodies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or not scope["path"].endswith(PATHS):
            await self._app(scope, receive, send)
            return
        body, response = _BufferedBody(receive), FailoverResponse(send)
        if all(name != REQUEST_ID_HEADER for name, _ in scope["headers"]):  # else every door would be given another one
            scope = {**scope, "headers": [*scope["headers"], (REQUEST_ID_HEADER, response.answer.id.encode())]}
        tries = _FailoverBudget()
        try:
            while tries.are_left:
                was_lost = await self._ask({**scope, SCOPE_RESUME: response.answer}, self._replayable_receive(body), response)
                if response.has_ended or body.has_left or not (body.is_kept and response.can_go_on):
                    return
                why = "the door of answer %s is gone; another is asked to go on"
                logger.warning(why, response.answer.id, extra=request_fields(_request_id(scope)))
                pause = tries.pause_after(response, was_lost)
                await asyncio.sleep(pause)
                response.retry(tries.waited_s)
            await response.fail(scope, receive)
        finally:
            self._num_kept -= body.forget()

    async def _ask(self, scope: Scope, receive: Receive, response: FailoverResponse) -> bool:
        """One door, until it has answered or is known to be lost with its node, which is returned."""
        answering = asyncio.ensure_future(self._app(scope, receive, response.send))
        losing = asyncio.ensure_future(self._nodes.wait_until_dead(lambda: response.node))
        try:
            await asyncio.wait((answering, losing), return_when=asyncio.FIRST_COMPLETED)
        finally:
            is_answered = answering.done()
            for task in (answering, losing):
                task.cancel()
            await asyncio.wait((answering, losing))
        if is_answered:
            await answering  # raises what it has raised
        return not is_answered

    def _replayable_receive(self, body: "_BufferedBody") -> Receive:
        """What a door reads, from the beginning again."""
        knows_all = not body.has_begun

        async def receive() -> Message:
            nonlocal knows_all
            if not knows_all:
                knows_all = True
                return body.so_far()
            message = await body.receive()
            if body.is_kept and message["type"] == "http.request":
                self._num_kept += body.keep(message, room=MAX_BODIES - self._num_kept)
            return message

        return receive


def _request_id(scope: Scope) -> str:
    return next((str(value, "latin-1") for name, value in scope["headers"] if name == REQUEST_ID_HEADER), "")


class _FailoverBudget:
    """How often, and when, another door is asked to go on with one answer."""

    def __init__(self) -> None:
        self._num_news = self._num_doors = 0
        self._pauses = iter(PAUSES_S)
        self._began_at = self._asked_at = asyncio.get_running_loop().time()
        self.are_left = True

    @property
    def waited_s(self) -> float:
        """Since the first door was asked."""
        return asyncio.get_running_loop().time() - self._began_at

    def pause_after(self, response: FailoverResponse, was_lost: bool) -> float:
        """Of a door that is gone. A lost node does not count against the answer, nor does a door that had it for some time."""
        now, pause = asyncio.get_running_loop().time(), 0.0
        is_news = response.num_news > self._num_news
        if is_news or (response.node is not None and now - self._asked_at > QUICK_FAILURE_S):
            self._pauses = iter(PAUSES_S)
        self._num_doors = 0 if is_news else self._num_doors
        self._num_news = response.num_news
        if not was_lost:
            self._num_doors += 1
            pause = next(self._pauses, math.inf)
            was_tried = response.is_refused and now - self._asked_at > PATIENT_S
            self.are_left = pause < math.inf and self._num_doors < MAX_DOORS and not was_tried
        self._asked_at = now + pause
        return pause if self.are_left else 0.0


class _BufferedBody:
    """Of one request, as far as it has been read; in one piece, since the parts may be millions of a byte each."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._kept, self._has_more = bytearray(), True
        self.has_begun, self.is_kept, self.has_left = False, True, False

    def so_far(self) -> Message:
        return {"type": "http.request", "body": bytes(self._kept), "more_body": self._has_more}

    async def receive(self) -> Message:
        message = await self._receive()
        self.has_left |= message["type"] == "http.disconnect"
        return message

    def keep(self, message: Message, room: int) -> int:
        """Returns how many bytes more are kept now. Where it is too much, nothing of this body is kept any more."""
        part = message.get("body", b"")
        if len(self._kept) + len(part) > MAX_BODY or len(part) > room:
            self.is_kept = False
            return -self.forget()
        self._kept += part
        self.has_begun, self._has_more = True, message.get("more_body", False)
        return len(part)

    def forget(self) -> int:
        """Returns how many bytes it has kept."""
        num_bytes = len(self._kept)
        self._kept = bytearray()
        return num_bytes
