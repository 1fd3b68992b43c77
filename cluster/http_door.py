"""HTTP: bytes in, OpenAI's objects out. Plain Starlette, so that it runs and is tested without Ray."""

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing, suppress
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from tramontane.cluster.expert_load import KEY, NO_EXPERTS, ExpertLoad, MeasuredLoad, load_from
from tramontane.proto.errors import ConfigError, OverloadedError, PipelineError, RequestError, TramontaneError, UserError
from tramontane.proto.ports import TokenSource
from tramontane.router.completions import Completion, ServedModel, UnknownModelError, check_model_name, model_entry, model_list
from tramontane.router.openai_schema import ErrorType, ParameterError, error_body, parse_completion

logger = logging.getLogger(__name__)

CLIENT_CLOSED_REQUEST = 499
MoveExperts = Callable[[ExpertLoad], Awaitable[tuple[int, int]]]


class Pacer:
    """Spreads ``writes_per_s`` evenly over the streams that are open.

    Every write has a price of its own, in Ray Serve more than in most servers. Tokens that
    become ready while a stream waits for its turn travel together. At 500 writes a second
    one stream waits 2 ms after a write, and each of 64 streams 128 ms.
    """

    def __init__(self, writes_per_s: int) -> None:
        self._writes_per_s = writes_per_s
        self.num_streams = 0

    async def turn(self, last_write: float) -> None:
        """Wait until a stream that wrote at ``last_write`` (of the event loop's clock) may write again."""
        wait = last_write + self.num_streams / self._writes_per_s - asyncio.get_running_loop().time()
        if wait > 0:
            await asyncio.sleep(wait)


class EventStream(StreamingResponse):
    """Server-sent events, whose sources are closed when the client leaves, wherever that happens.

    Without this they would wait for Python's garbage collector, and hold their places until then.
    """

    def __init__(self, events: AsyncGenerator[bytes, None], changes: AsyncGenerator[Any, None]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"cache-control": "no-cache"})
        self._sources = (events, changes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        events, changes = self._sources
        async with aclosing(changes), aclosing(events):
            with suppress(ClientDisconnect):
                await super().__call__(scope, receive, send)


class HttpDoor:
    """The endpoints. ``is_ready`` asks whether tokens can be made now, ``expert_load`` what experts have been given so far.

    ``move_experts`` has every pipeline follow a plan for such a load, and returns how many experts were loaded for that, and by
    how many pipelines; None: clients may not ask for it.
    """

    def __init__(
        self,
        model: ServedModel,
        source: TokenSource,
        is_ready: Callable[[], Awaitable[bool]],
        expert_load: Callable[[], Awaitable[MeasuredLoad]],
        max_body: int,
        writes_per_s: int,
        move_experts: MoveExperts | None = None,
    ) -> None:
        self._model, self._source, self._is_ready, self._max_body = model, source, is_ready, max_body
        self._expert_load, self._move_experts = expert_load, move_experts
        self._pacer = Pacer(writes_per_s)
        self._started_at = int(time.time())

    def app(self) -> Starlette:
        routes = [
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/models", self.models, methods=["GET"]),
            Route("/v1/models/{name:path}", self.model, methods=["GET"]),
            Route("/health", self.health, methods=["GET"]),
            Route("/experts", self.experts, methods=["GET", *(["POST"] if self._move_experts else [])]),
        ]
        app = Starlette(routes=routes, exception_handlers={HTTPException: _http_error, Exception: _our_fault})
        app.router.redirect_slashes = False  # a client that follows would come back with a GET
        return app

    async def models(self, _request: Request) -> Response:
        return JSONResponse(model_list(self._model, self._started_at))

    async def model(self, request: Request) -> Response:
        try:
            check_model_name(self._model, request.path_params["name"])
        except UnknownModelError as error:
            return error_response(error)
        return JSONResponse(model_entry(self._model, self._started_at))

    async def health(self, _request: Request) -> Response:
        if await self._is_ready():
            return JSONResponse({"status": "ready"})
        return _error(503, "no pipeline can make tokens now", "server_error", headers={"retry-after": "1"})

    async def experts(self, request: Request) -> Response:
        if request.method == "POST":
            return await self._moved_experts(request)
        load = await self._expert_load()
        if not load.num_pipelines:
            return _error(503, "no pipeline can tell its load now", "server_error", headers={"retry-after": "1"})
        if not load.tokens:
            return _error(404, "the model has no experts", "invalid_request_error", code=NO_EXPERTS)
        return JSONResponse(load.as_data())

    async def _moved_experts(self, request: Request) -> Response:
        assert self._move_experts is not None
        try:
            load = _parsed_load(await self._body(request))
            num_moved, num_pipelines = await self._move_experts(load)
        except TramontaneError as error:
            return error_response(error)
        return JSONResponse({"moved": num_moved, "pipelines": num_pipelines})

    async def completions(self, request: Request) -> Response:
        arrived_at = time.monotonic()
        try:
            parsed = parse_completion(await self._body(request))
            check_model_name(self._model, parsed.model)
            completion = await Completion.prepare(self._model, parsed, arrived_at)
            if not parsed.stream:
                return JSONResponse(await completion.run(self._source))
            # The first tokens decide between a stream and an error with a status of its own.
            changes = completion.stream(self._source)
            first = await anext(changes)
        except ClientDisconnect:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        except TramontaneError as error:
            return error_response(error)
        events = self._events(completion, first, changes, parsed.includes_usage)
        return EventStream(events, changes)

    async def _body(self, request: Request) -> bytes:
        declared = request.headers.get("content-length", "")
        body = bytearray()
        if not (declared.isdecimal() and int(declared[:20]) > self._max_body):
            async for part in request.stream():
                body += part
                if len(body) > self._max_body:
                    break
            else:
                return bytes(body)
        raise _BodyTooLargeError(f"the body is larger than {self._max_body} bytes; send less at once")

    async def _events(
        self,
        completion: Completion,
        first: list[dict[str, Any]],
        changes: AsyncGenerator[list[dict[str, Any]], None],
        includes_usage: bool,
    ) -> AsyncGenerator[bytes, None]:
        """Server-sent events, as many in one piece as there is to say."""
        clock = asyncio.get_running_loop().time
        self._pacer.num_streams += 1
        try:
            async with aclosing(changes):
                ready = _event(completion.chunk(first))
                while not completion.is_finished:
                    yield ready
                    await self._pacer.turn(clock())
                    ready = _event(completion.chunk(await anext(changes)))
            yield ready + (_event(completion.last_chunk()) if includes_usage else b"") + b"data: [DONE]\n\n"
        except TramontaneError as error:
            yield b"data: " + error_response(error).body + b"\n\n"
        finally:
            self._pacer.num_streams -= 1


class _BodyTooLargeError(RequestError):
    pass


def _event(data: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def error_response(error: TramontaneError) -> JSONResponse:
    """OpenAI's shape, with the status that fits."""
    match error:
        case OverloadedError():
            headers = {"retry-after": str(error.retry_after_s)}
            return _error(429, str(error), "rate_limit_error", code="rate_limit_exceeded", headers=headers)
        case UnknownModelError():
            return _error(404, str(error), "invalid_request_error", param="model", code="model_not_found")
        case _BodyTooLargeError():
            return _error(413, str(error), "invalid_request_error")
        case ParameterError():
            return _error(400, str(error), "invalid_request_error", param=error.parameter)
        case RequestError():
            return _error(400, str(error), "invalid_request_error", param="prompt")
        case UserError():
            return _error(400, str(error), "invalid_request_error")
        case _:
            logger.warning("a request failed: %s", error)
            headers = {"retry-after": "1"} if isinstance(error, PipelineError) else {}
            return _error(503, str(error), "server_error", code="unavailable", headers=headers)


def _error(
    status: int,
    message: str,
    type: ErrorType,
    param: str | None = None,
    code: str | None = None,
    headers: dict[str, str] | None = None,
) -> JSONResponse:
    return JSONResponse(error_body(message, type, param, code), status, headers)


def _parsed_load(body: bytes) -> ExpertLoad:
    try:
        return load_from(json.loads(body))
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        raise ConfigError(f"the body must be JSON with {KEY}: a list of whole numbers for each layer") from error


async def _http_error(request: Request, error: Exception) -> Response:
    """No such path, or not with this method."""
    assert isinstance(error, HTTPException)
    there = "POST /v1/completions, GET /v1/models, GET /health, GET /experts"
    message = f"{request.method} {request.url.path:.100} is not here; there are {there}"
    return _error(error.status_code, message, "invalid_request_error", headers=dict(error.headers or {}))


async def _our_fault(_request: Request, error: Exception) -> Response:
    logger.error("a defect of the server", exc_info=error)
    return _error(500, "the server has a defect; its log says more", "server_error")
