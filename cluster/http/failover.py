"""Failover in Ray Serve's HTTP proxy: another ingress continues a response whose ingress is lost,
transparently to the client.
"""

import asyncio
import logging
import math
from http import HTTPStatus
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tramontane.cluster.common.node_watch import DeadNodeWatcher
from tramontane.cluster.http.errors import error_shape
from tramontane.proto.request import REQUEST_ID_HEADER, request_fields
from tramontane.proto.timing import ATTEMPT_PAUSES_S, MAX_ATTEMPT_S, QUICK_FAILURE_S
from tramontane.router.openai.errors import UNAVAILABLE, HttpErrorSpec
from tramontane.router.openai.resume_state import ChoiceUpdate, ResumeState

# One response to a client, assembled from the responses of several ingresses, and how an ingress
# reports its progress to the proxy.
#
# A client receives a response that is not streamed when it is complete. Until then the ingress
# reports the generated output to its proxy at intervals.

# Keys in the ASGI scope, which clients cannot write.
SCOPE_RESUME = "tramontane.resume"  # from the proxy: a ResumeState
# for the endpoints, where a proxy relays the response: a ProgressReporter
SCOPE_PROGRESS = "tramontane.report_progress"
# Messages, or keys of messages, from an ingress to its proxy, which does not pass them on.
# a message before all others: the node and the model of this ingress
MESSAGE_NODE = "tramontane.node"
# a message: updates of choices, and parts of a response that is not streamed
MESSAGE_PROGRESS = "tramontane.progress"
MESSAGE_UPDATES = "tramontane.updates"  # in each message of a stream: the updates that it makes
PROGRESS_INTERVAL_S = 1.0  # the maximum work that the loss of an ingress repeats
# of log-probabilities in one report, which Ray Serve pickles within some milliseconds
MAX_PROGRESS_BYTES = 2**18
# the client's own timeout has passed: another ingress cannot help
DEADLINE_STATUS = HTTPStatus.GATEWAY_TIMEOUT
OTHER_MODEL = "the server has another model now; send the request again"
LOST = "the server lost this request, and could not take it up again; send it again"


class ProgressReporter:
    """Reports the progress of one response that is not streamed, at most once per interval.

    After more than ``MAX_PROGRESS_BYTES`` in one interval it stops reporting: later output is
    generated again if the ingress dies.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self._num_bytes = 0
        self._updates: list[ChoiceUpdate] = []
        self._parts: list[dict[str, Any]] = []
        self._reported_at = asyncio.get_running_loop().time()

    async def __call__(
        self, updates: list[ChoiceUpdate], parts: list[dict[str, Any]], num_bytes: int
    ) -> None:
        """Add new output of the response, about ``num_bytes`` of JSON, and report it if the
        interval has passed.
        """
        self._num_bytes += num_bytes
        if self._num_bytes > MAX_PROGRESS_BYTES:
            return
        self._updates += updates
        self._parts += parts
        if asyncio.get_running_loop().time() - self._reported_at < PROGRESS_INTERVAL_S:
            return
        message: Message = {
            "type": MESSAGE_PROGRESS,
            "updates": self._updates,
            "parts": self._parts,
        }
        self._updates, self._parts, self._num_bytes, self._reported_at = (
            [],
            [],
            0,
            asyncio.get_running_loop().time(),
        )
        await self._send(message)


class FailoverResponse:
    """The proxy's side of a response.

    Its start is held back until there is a part of its body; until then another ingress may answer
    instead.
    """

    def __init__(self, send: Send, path: str = "") -> None:
        self._send, self._shape = send, error_shape(path)
        self.state, self.num_updates = ResumeState(), 0
        # node of the current ingress, once it has sent anything; empty if it does not name one
        self.node: str | None = None
        # from the current ingress, until the client receives its output
        self._start: Message | None = None
        self._has_begun = self._is_retry = False
        self.is_refused = False  # the current ingress, which was to continue
        self.has_ended, self.is_resumable = False, True

    def retry(self, waited_s: float) -> None:
        """Expect messages of another ingress. ``waited_s``: since the arrival of the request."""
        # otherwise that ingress never received the request
        self.state.num_lost_ingresses += self.node is not None
        self.state.waited_s = waited_s
        self._start, self._is_retry, self.is_refused, self.node = None, True, False, None

    async def send(self, message: Message) -> None:
        """Take a message of the current ingress, and forward it if the client is to receive it."""
        if message["type"] != MESSAGE_NODE and self.node is None:
            self.node = ""  # a healthy application that is not ours
        if message["type"] == MESSAGE_NODE:
            self.node = message["id"]
            self.state.bind_model(message["model"])
        elif message["type"] == MESSAGE_PROGRESS:
            self.state.add(message["updates"])
            self.state.parts += message["parts"]
            self.num_updates += 1
        elif message["type"] == "http.response.start":
            self._start, status = message, message["status"]
            # Ray Serve answers "not found" while the application is being deployed.
            is_failing = status >= HTTPStatus.INTERNAL_SERVER_ERROR and status != DEADLINE_STATUS
            is_full = status == HTTPStatus.TOO_MANY_REQUESTS and self.state.is_resumed
            self.is_refused = self._is_retry and (
                status == HTTPStatus.NOT_FOUND or is_full or is_failing
            )
        elif message["type"] != "http.response.body":
            await self._send(message)
        elif not self.is_refused:
            await self._send_body(message)

    async def _send_body(self, message: Message) -> None:
        updates = message.pop(MESSAGE_UPDATES, None)
        self.has_ended = not message.get("more_body", False)
        if updates is not None:
            self.state.add(updates)
            self.num_updates += bool(updates)  # a comment that keeps a stream alive has none
        elif not self.has_ended:
            self.is_resumable = False  # a stream that is not ours
        if self._start is not None and not self._has_begun:
            await self._send(self._start)
            self._has_begun = True
        # an error within a stream that has begun
        elif self._start is not None and self._start["status"] != HTTPStatus.OK:
            message["body"] = self._error_event(message.get("body", b""))
        await self._send(message)

    async def fail(self, scope: Scope, receive: Receive) -> None:
        """End the response with an error, because no ingress can continue it."""
        response = JSONResponse(
            self._shape.body(UNAVAILABLE, LOST), UNAVAILABLE.status, {"retry-after": "1"}
        )
        if self._has_begun:
            event = self._error_event(bytes(response.body))
            await self._send({"type": "http.response.body", "body": event, "more_body": False})
        else:
            await response(scope, receive, self._send)

    def _error_event(self, body: bytes) -> bytes:
        num_tokens = sum(len(choice.token_ids) for choice in self.state.choices.values())
        return self._shape.event(body, self._shape.number_after(num_tokens))


class NodeAnnouncer:
    """ASGI middleware of an ingress: names its node and model to the proxy, and refuses to continue
    another model's response.
    """

    def __init__(self, app: ASGIApp, node: str, model: str) -> None:
        self._app, self._node, self._model = app, node, model

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Announce the node, then answer the request."""
        state: ResumeState | None = scope.get(SCOPE_RESUME)
        if self._node and state is not None:
            await send({"type": MESSAGE_NODE, "id": self._node, "model": self._model})
            state.bind_model(self._model)
            if state.model != self._model:
                spec = HttpErrorSpec(503, "server_error")
                body = error_shape(scope["path"]).body(spec, OTHER_MODEL)
                await JSONResponse(body, spec.status)(scope, receive, send)
                return
            scope = {**scope, SCOPE_PROGRESS: ProgressReporter(send)}
        await self._app(scope, receive, send)


PATHS = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/fim/completions",
    "/v1/responses",
    "/v1/messages",
)
# for one response, while no ingress sends an update: the request may crash them
MAX_INGRESSES = 20
MAX_BODY = 8 * 2**20  # the default limit of an ingress
MAX_BODIES = 256 * 2**20  # of all requests together; further requests are lost with their ingress

logger = logging.getLogger(__name__)


class FailoverMiddleware:
    """ASGI middleware of a proxy. Ray Serve shows the death of an ingress as a response that does
    not end, or does not start.

    It does not show the loss of the ingress's whole machine: a caller that waits for a response
    over gRPC is not notified. So the ingress counts as lost when Ray declares its node dead. The
    response of the first ingress is final; only an ingress that was to continue a response may be
    followed by another attempt when it is full or failing.
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
        # otherwise every ingress would get another id
        if all(name != REQUEST_ID_HEADER for name, _ in scope["headers"]):
            scope = {
                **scope,
                "headers": [*scope["headers"], (REQUEST_ID_HEADER, response.state.id.encode())],
            }
        budget = _IngressFailoverBudget()
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
            await answering  # raises the application's errors
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


class _IngressFailoverBudget:
    """Decides how often, and when, another ingress gets a response to continue.

    The pauses are few and fixed: their number bounds the attempts, and a client waits.
    """

    def __init__(self) -> None:
        self._num_updates = self._num_ingresses = 0
        self._pauses = iter(ATTEMPT_PAUSES_S)
        self._started_at = self._attempted_at = asyncio.get_running_loop().time()
        self.is_left = True

    @property
    def waited_s(self) -> float:
        """Seconds since the first ingress got the request."""
        return asyncio.get_running_loop().time() - self._started_at

    def next_pause(self, response: FailoverResponse, is_node_lost: bool) -> float:
        """Return how long to wait after an ingress was lost.

        A lost node does not count against the request, nor does an ingress that had the request for
        some time.
        """
        now, pause = asyncio.get_running_loop().time(), 0.0
        has_progressed = response.num_updates > self._num_updates
        if has_progressed or (
            response.node is not None and now - self._attempted_at > QUICK_FAILURE_S
        ):
            self._pauses = iter(ATTEMPT_PAUSES_S)
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
    """The body of one request, as far as it has been read; in one buffer, since its parts may be
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
        """Buffer a part, and return how many more bytes are buffered now. A body that gets too
        large is dropped completely.
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
