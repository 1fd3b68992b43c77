"""Failover in Ray Serve's HTTP proxy: another ingress continues a response whose ingress is lost,
unseen by the client.
"""

import asyncio
import logging
import math

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tramontane.cluster.common.node_watch import DeadNodeWatcher
from tramontane.cluster.http.failover_response import SCOPE_RESUME, FailoverResponse
from tramontane.proto.request import REQUEST_ID_HEADER, request_fields

PATHS = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/fim/completions",
    "/v1/responses",
    "/v1/messages",
)
# before another attempt, after an ingress that was soon lost and sent no update
PAUSES_S = (0.1, 0.5, 2.0, 10.0, 30.0)
QUICK_FAILURE_S = 5.0  # an ingress that had the request for longer was healthy until then
# an ingress that refuses after longer has retried by itself, and the next one could do no more
MAX_ATTEMPT_S = 40.0
# for one response, while none of them sends an update: the request may be what they die of
MAX_INGRESSES = 20
MAX_BODY = 8 * 2**20  # as much as an ingress reads by default
MAX_BODIES = 256 * 2**20  # of all requests together; further requests are lost with their ingress

logger = logging.getLogger(__name__)


class FailoverMiddleware:
    """ASGI middleware of a proxy. Ray Serve shows the death of an ingress as a response that does
    not end, or does not start.

    It does not show the loss of the ingress's whole machine: nothing informs a caller that waits
    for a response over gRPC. So the ingress is given up when Ray declares its node dead. What the
    first ingress answers stands; only one that was to continue a response may be followed by
    another attempt when it is full or failing.
    """

    def __init__(self, app: ASGIApp, nodes: DeadNodeWatcher) -> None:
        self._app, self._nodes = app, nodes
        self._num_buffered = 0  # bytes of bodies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Relay a request; one for a completion may move to another ingress."""
        if (
            scope["type"] != "http"
            or scope["method"] != "POST"
            or not scope["path"].endswith(PATHS)
        ):
            await self._app(scope, receive, send)
            return
        body, response = _BufferedBody(receive), FailoverResponse(send, scope["path"])
        # else every ingress would get another id
        if all(name != REQUEST_ID_HEADER for name, _ in scope["headers"]):
            scope = {
                **scope,
                "headers": [*scope["headers"], (REQUEST_ID_HEADER, response.state.id.encode())],
            }
        budget = _FailoverBudget()
        try:
            while budget.is_left:
                is_node_lost = await self._attempt(
                    {**scope, SCOPE_RESUME: response.state},
                    self._replayable_receive(body),
                    response,
                )
                if (
                    response.has_ended
                    or body.is_disconnected
                    or not (body.is_buffered and response.is_resumable)
                ):
                    return
                message = "the ingress of answer %s is lost; another one continues it"
                logger.warning(message, response.state.id, extra=request_fields(_request_id(scope)))
                pause = budget.next_pause(response, is_node_lost)
                await asyncio.sleep(pause)
                response.retry(budget.waited_s)
            await response.fail(scope, receive)
        finally:
            self._num_buffered -= body.clear()

    async def _attempt(self, scope: Scope, receive: Receive, response: FailoverResponse) -> bool:
        """Run one ingress until it has answered or is lost; return whether its node was lost."""
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
            await answering  # raises what the application has raised
        return not is_answered

    def _replayable_receive(self, body: "_BufferedBody") -> Receive:
        """Make a ``receive`` that reads the body from its start."""
        is_replayed = not body.has_begun

        async def receive() -> Message:
            nonlocal is_replayed
            if not is_replayed:
                is_replayed = True
                return body.replay()
            message = await body.receive()
            if body.is_buffered and message["type"] == "http.request":
                self._num_buffered += body.add(message, max_bytes=MAX_BODIES - self._num_buffered)
            return message

        return receive


def _request_id(scope: Scope) -> str:
    return next(
        (str(value, "latin-1") for name, value in scope["headers"] if name == REQUEST_ID_HEADER), ""
    )


class _FailoverBudget:
    """Decides how often, and when, another ingress gets a response to continue.

    The pauses are few and fixed: their number bounds the attempts, and a client waits.
    """

    def __init__(self) -> None:
        self._num_updates = self._num_ingresses = 0
        self._pauses = iter(PAUSES_S)
        self._started_at = self._attempted_at = asyncio.get_running_loop().time()
        self.is_left = True

    @property
    def waited_s(self) -> float:
        """Seconds since the first ingress got the request."""
        return asyncio.get_running_loop().time() - self._started_at

    def next_pause(self, response: FailoverResponse, is_node_lost: bool) -> float:
        """Return how long to wait after an ingress was lost.

        Neither a lost node nor an ingress that had the request for some time counts against the
        request.
        """
        now, pause = asyncio.get_running_loop().time(), 0.0
        has_progressed = response.num_updates > self._num_updates
        if has_progressed or (
            response.node is not None and now - self._attempted_at > QUICK_FAILURE_S
        ):
            self._pauses = iter(PAUSES_S)
        self._num_ingresses = 0 if has_progressed else self._num_ingresses
        self._num_updates = response.num_updates
        if not is_node_lost:
            self._num_ingresses += 1
            pause = next(self._pauses, math.inf)
            was_long = response.is_refused and now - self._attempted_at > MAX_ATTEMPT_S
            self.is_left = pause < math.inf and self._num_ingresses < MAX_INGRESSES and not was_long
        self._attempted_at = now + pause
        return pause if self.is_left else 0.0


class _BufferedBody:
    """The body of one request, as far as it has been read; in one piece, since its parts may be
    millions of single bytes.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._buffer, self._has_more = bytearray(), True
        self.has_begun, self.is_buffered, self.is_disconnected = False, True, False

    def replay(self) -> Message:
        return {"type": "http.request", "body": bytes(self._buffer), "more_body": self._has_more}

    async def receive(self) -> Message:
        message = await self._receive()
        self.is_disconnected |= message["type"] == "http.disconnect"
        return message

    def add(self, message: Message, max_bytes: int) -> int:
        """Buffer a part, and return how many bytes more are buffered now. A body that gets too
        large is dropped whole.
        """
        part = message.get("body", b"")
        if len(self._buffer) + len(part) > MAX_BODY or len(part) > max_bytes:
            self.is_buffered = False
            return -self.clear()
        self._buffer += part
        self.has_begun, self._has_more = True, message.get("more_body", False)
        return len(part)

    def clear(self) -> int:
        """Drop the buffer, and return how many bytes it had."""
        num_bytes = len(self._buffer)
        self._buffer = bytearray()
        return num_bytes
