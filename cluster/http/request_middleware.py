"""Authentication, request ids and the access log, around all endpoints."""

import logging
import time
import uuid

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tramontane.cluster.config.api_keys import ApiKeys
from tramontane.cluster.http import static_pages
from tramontane.cluster.http.errors import error_response
from tramontane.proto.errors import AuthenticationError
from tramontane.proto.request import REQUEST_ID_HEADER, REQUEST_ID_PATTERN, Identity, request_fields

logger = logging.getLogger(__name__)

# Health checks have no key, and a browser shows the form for the key before it has one.
PUBLIC_PATHS = frozenset({"/health", "/ping"}) | static_pages.PUBLIC_PATHS


class AuthMiddleware:
    """ASGI middleware around all routes. It does not read the body of a request without a valid
    key.

    ``sends_id``: whether it adds the request's id to responses; Ray Serve's proxies do that
    themselves. ``public_paths``: paths that need no key.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: ApiKeys,
        sends_id: bool,
        public_paths: frozenset[str] = PUBLIC_PATHS,
    ) -> None:
        self._app, self._keys, self._sends_id, self._public_paths = (
            app,
            keys,
            sends_id,
            public_paths,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Authenticate the request, assign its id, answer it and log the outcome."""
        if scope["type"] == "websocket":
            await send({"type": "websocket.close"})
            return
        if scope["type"] != "http":  # the application's start and end
            await self._app(scope, receive, send)
            return
        request_id = _request_id(scope)
        scope.setdefault("state", {})["request_id"] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[REQUEST_ID_HEADER.decode()] = request_id
            await send(message)

        respond = send_with_id if self._sends_id else send
        if not logger.isEnabledFor(logging.INFO):
            await self._dispatch(scope, receive, respond)
            return
        access_log = _AccessLog(respond, self._public_paths)
        try:
            await self._dispatch(scope, receive, access_log.send)
        finally:
            access_log.write(scope, request_id)

    async def _dispatch(self, scope: Scope, receive: Receive, respond: Send) -> None:
        identity = (
            Identity()
            if _path(scope) in self._public_paths
            else self._keys.authenticate(_credentials(scope))
        )
        if identity is not None:
            scope["state"]["identity"] = identity
            await self._app(scope, receive, respond)
        else:
            error = AuthenticationError(
                "this server wants an API key; send a valid one as Authorization: Bearer KEY, or as"
                " x-api-key: KEY"
            )
            refusal = error_response(error, _path(scope), {"www-authenticate": "Bearer"})
            await refusal(scope, receive, respond)


class _AccessLog:
    """Observes the response to one request, and logs one line when it has ended."""

    def __init__(self, send: Send, public_paths: frozenset[str]) -> None:
        self._send, self._public_paths, self._started_at = send, public_paths, time.monotonic()
        self._status = 0  # no response: the client disconnected, or its last message was lost

    async def send(self, message: Message) -> None:
        """Pass a message on, and note the status."""
        if message["type"] == "http.response.start":
            self._status = message["status"]
        await self._send(message)

    def write(self, scope: Scope, request_id: str) -> None:
        """Log the outcome of the request; on level debug for public paths, which are polled
        often.
        """
        path, seconds = f"{_path(scope):.100}", round(time.monotonic() - self._started_at, 6)
        level = logging.DEBUG if path in self._public_paths else logging.INFO
        message = "request %s: %s %r was answered with %d in %.3f s"
        extra = request_fields(
            request_id, method=scope["method"], path=path, status=self._status, seconds=seconds
        )
        logger.log(
            level, message, request_id, scope["method"], path, self._status, seconds, extra=extra
        )


def _request_id(scope: Scope) -> str:
    """Return the header's id, or a new one if it is missing or malformed."""
    given = next((value for name, value in scope["headers"] if name == REQUEST_ID_HEADER), b"")
    return given.decode() if REQUEST_ID_PATTERN.fullmatch(given) else uuid.uuid4().hex


def _path(scope: Scope) -> str:
    """Return the path below the application's mount point."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


def _credentials(scope: Scope) -> str | None:
    """Return the header Authorization, or Anthropic's x-api-key in its form.

    None also if there are several different credentials, as another server may read another one.
    """
    given = [value for name, value in scope["headers"] if name == b"authorization"]
    keys = [b"Bearer " + value for name, value in scope["headers"] if name == b"x-api-key"]
    if len(given) > 1 or len(keys) > 1 or (given and keys and given != keys):
        return None
    return (given or keys)[0].decode("latin-1") if given or keys else None
