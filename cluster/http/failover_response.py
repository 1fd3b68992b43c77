"""One response to a client, put together from those of several ingresses, and how an ingress
reports its progress to the proxy.

A client receives a response that is not streamed when it is complete. Until then the ingress
reports to its proxy, at intervals, what has been generated.
"""

import asyncio
from http import HTTPStatus
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tramontane.cluster.http.error_shapes import error_shape
from tramontane.router.openai.errors import HttpErrorSpec
from tramontane.router.openai.resume_state import ChoiceUpdate, ResumeState

# Keys in the scope, next to those of HTTP, where no client can write.
SCOPE_RESUME = "tramontane.resume"  # from the proxy: a ResumeState
# for the endpoints, where a proxy relays the response: a ProgressReporter
SCOPE_PROGRESS = "tramontane.report_progress"
# Messages, or keys of messages, from an ingress to its proxy, which does not pass them on.
# a message before all others: the node and the model of this ingress
MESSAGE_NODE = "tramontane.node"
# a message: updates of choices, and parts of a response that is not streamed
MESSAGE_PROGRESS = "tramontane.progress"
MESSAGE_UPDATES = "tramontane.updates"  # in each message of a stream: the updates that it makes
PROGRESS_INTERVAL_S = 1.0  # as much is computed again when an ingress dies
# of log-probabilities in one report, which Ray Serve pickles within some milliseconds
MAX_PROGRESS_BYTES = 2**18
# the client's own timeout has passed: another ingress could not help
DEADLINE_STATUS = HTTPStatus.GATEWAY_TIMEOUT
OTHER_MODEL = "the server has another model now; send the request again"
UNAVAILABLE = HttpErrorSpec(503, "server_error", code="unavailable")
LOST = "the server lost this request, and could not take it up again; send it again"


class ProgressReporter:
    """Reports the progress of one response that is not streamed, at most once per interval.

    After more than ``MAX_PROGRESS_BYTES`` in one interval it never reports again: what follows is
    computed again if the ingress dies.
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
        """Add what the response has grown by, about ``num_bytes`` of JSON, and report it if the
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
        # of the present ingress, once it has sent anything; empty if it does not name one
        self.node: str | None = None
        # from the present ingress, until the client gets something of it
        self._start: Message | None = None
        self._has_begun = self._is_retry = False
        self.is_refused = False  # by the present ingress, which was to continue
        self.has_ended, self.is_resumable = False, True

    def retry(self, waited_s: float) -> None:
        """Expect messages of another ingress. ``waited_s``: since the request has arrived."""
        # else that ingress never had the request
        self.state.num_lost_ingresses += self.node is not None
        self.state.waited_s = waited_s
        self._start, self._is_retry, self.is_refused, self.node = None, True, False, None

    async def send(self, message: Message) -> None:
        """Take a message of the present ingress, and pass it on where the client is to have it."""
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
            self.num_updates += 1
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
