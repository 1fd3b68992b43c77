"""Before any endpoint: who asks, as a number, and what the request is called in answers and logs."""

import logging
import time
import uuid

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tramontane.cluster.config.api_keys import ApiKeys
from tramontane.cluster.http import static_pages
from tramontane.cluster.http.errors import json_error
from tramontane.proto.log_fields import REQUEST_ID_HEADER, REQUEST_ID_PATTERN, request_fields

logger = logging.getLogger(__name__)

PUBLIC_PATHS = {"/health"} | static_pages.UI_PATHS  # whoever restarts servers has no key, nor has a browser that is to ask for it


class AuthMiddleware:
    """ASGI middleware around every route, whoever mounted it. Without a key nothing of a request is read.

    ``sends_id``: whether answers get the request's id from here; Ray Serve's proxies write it themselves.
    """

    def __init__(self, app: ASGIApp, keys: ApiKeys, sends_id: bool) -> None:
        self._app, self._keys, self._sends_id = app, keys, sends_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close"})
            return
        if scope["type"] != "http":  # the application's own beginning and end
            await self._app(scope, receive, send)
            return
        own_id = _id_of(scope)
        scope.setdefault("state", {})["request_id"] = own_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[REQUEST_ID_HEADER.decode()] = own_id
            await send(message)

        answer = send_with_id if self._sends_id else send
        if not logger.isEnabledFor(logging.INFO):
            await self._dispatch(scope, receive, answer)
            return
        logged = _AccessLog(answer)
        try:
            await self._dispatch(scope, receive, logged.send)
        finally:
            logged.write(scope, own_id)

    async def _dispatch(self, scope: Scope, receive: Receive, answer: Send) -> None:
        owner = 0 if _path(scope) in PUBLIC_PATHS else self._keys.authenticate(_authorization(scope))
        if owner is not None:
            scope["state"]["owner"] = owner
            await self._app(scope, receive, answer)
        else:
            refusal = json_error(
                401,
                "this server wants an API key; send a valid one as Authorization: Bearer KEY",
                "invalid_request_error",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
            await refusal(scope, receive, answer)


class _AccessLog:
    """One request's answer on its way, for a line about it when it has ended."""

    def __init__(self, send: Send) -> None:
        self._send, self._begun_at = send, time.monotonic()
        self._status = 0  # none: its client left before, or its last message was lost

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
        await self._send(message)

    def write(self, scope: Scope, own_id: str) -> None:
        """What asks whether we are well asks often."""
        path, seconds = f"{_path(scope):.100}", round(time.monotonic() - self._begun_at, 6)
        level = logging.DEBUG if path in PUBLIC_PATHS else logging.INFO
        words = "request %s: %s %r was answered with %d in %.3f s"
        extra = request_fields(own_id, method=scope["method"], path=path, status=self._status, seconds=seconds)
        logger.log(level, words, own_id, scope["method"], path, self._status, seconds, extra=extra)


def _id_of(scope: Scope) -> str:
    given = next((value for name, value in scope["headers"] if name == REQUEST_ID_HEADER), b"")
    return given.decode() if REQUEST_ID_PATTERN.fullmatch(given) else uuid.uuid4().hex


def _path(scope: Scope) -> str:
    """Below where the application is mounted."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


def _authorization(scope: Scope) -> str | None:
    """None also where there are several, of which others may read another."""
    given = [value for name, value in scope["headers"] if name == b"authorization"]
    return given[0].decode("latin-1") if len(given) == 1 else None
