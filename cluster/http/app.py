"""HTTP: bytes in, OpenAI's objects out. Plain Starlette, so that it runs and is tested without Ray."""

import asyncio
import json
import logging
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from http import HTTPStatus
from importlib.metadata import version
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Match, Route
from starlette.types import ExceptionHandler

from tramontane.cluster.config.api_keys import ApiKeys
from tramontane.cluster.config.expert_load import KEY, NO_EXPERTS, ExpertLoad, MeasuredLoad, parse_load
from tramontane.cluster.http.body_limits import MAX_HELD, BodyLimiter
from tramontane.cluster.http.errors import ERROR_HANDLERS, json_error, request_id, request_owner
from tramontane.cluster.http.failover_response import SCOPE_PROGRESS, SCOPE_RESUME, NodeAnnouncer
from tramontane.cluster.http.openapi import OPERATIONS, Operations, openapi
from tramontane.cluster.http.request_middleware import AuthMiddleware
from tramontane.cluster.http.slow_clients import BackpressureMiddleware
from tramontane.cluster.http.sse import Pacer, SseResponse, StreamingAnswer, sse_events
from tramontane.cluster.http.static_pages import docs_routes, ui_routes
from tramontane.proto.errors import ConfigError, OverloadedError
from tramontane.proto.log_fields import request_fields
from tramontane.proto.ports import TokenSource
from tramontane.router.openai.chat_completion import ChatCompletion, NoChatTemplate
from tramontane.router.openai.chat_request import parse_chat
from tramontane.router.openai.completion import Completion, no_progress
from tramontane.router.openai.completion_request import parse_body, parse_completion
from tramontane.router.openai.request_context import TIMEOUT_HEADER, RequestTokenSource, parse_timeout
from tramontane.router.openai.responses import Health, MoveExpertsResponse
from tramontane.router.openai.resume_state import ResumeState
from tramontane.router.openai.served_model import ServedModel, check_model_name, model_entry, model_list
from tramontane.router.openai.tokenize import DetokenizeRequest, TokenizeRequest, detokenize, tokenize
from tramontane.router.tokenization.chat import ChatTemplate

logger = logging.getLogger(__name__)

MoveExperts = Callable[[ExpertLoad], Awaitable[tuple[int, int]]]


class HttpApp:
    """The endpoints. ``is_ready`` asks whether tokens can be made now, ``expert_load`` what experts have been given so far.

    ``rebalance_experts`` has every pipeline follow a plan for such a load, and returns how many experts were loaded for that,
    and by
    how many pipelines; None: clients may not ask for it. ``chat``: how conversations become prompts. ``extra_routes`` are other
    doors' endpoints, behind the same keys, and ``more_operations`` what the page of all endpoints says of them.
    ``sends_request_id``: see ``AuthMiddleware``. ``slow_reader_s``: see ``BackpressureMiddleware``.
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
        *,
        chat: ChatTemplate | None = None,
        keys: ApiKeys | None = None,
        extra_routes: Sequence[Route] = (),
        more_operations: Operations | None = None,
        sends_request_id: bool = True,
        slow_reader_s: float = math.inf,
        bodies: BodyLimiter | None = None,
        node_and_model: tuple[str, str] = ("", ""),
    ) -> None:
        self._model, self._source, self._is_ready, self._max_body = model, source, is_ready, max_body
        self._bodies = bodies or BodyLimiter(max(MAX_HELD, max_body))  # a body as large as allowed has room, at least alone
        self._expert_load, self._move_experts = expert_load, move_experts
        self._chat = chat or NoChatTemplate("this server has no chat format")
        self._keys = keys or ApiKeys()
        self._says_its_node = Middleware(NodeAnnouncer, *node_and_model)
        self._guard = Middleware(AuthMiddleware, keys=self._keys, sends_id=sends_request_id)
        self._operations = {**OPERATIONS, **(more_operations or {})}
        self._page: dict[str, Any] | None = None
        self._more_routes, self._sends_request_id = extra_routes, sends_request_id
        self._pacer, self._waits = Pacer(writes_per_s), Middleware(BackpressureMiddleware, limit_s=slow_reader_s)
        self._started_at = int(time.time())

    def app(self) -> Starlette:
        routes = self._routes()
        handlers: dict[Any, ExceptionHandler] = {
            HTTPException: _not_found_handler(routes),
            **ERROR_HANDLERS,
            Exception: _internal_error_handler(self._sends_request_id),
        }
        app = Starlette(routes=routes, exception_handlers=handlers, middleware=[self._says_its_node, self._guard, self._waits])
        app.router.redirect_slashes = False  # a client that follows would come back with a GET
        return app

    def _routes(self) -> list[Route]:
        return [
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/chat/completions", self.chat_completions, methods=["POST"]),
            Route("/v1/models", self.models, methods=["GET"]),
            Route("/v1/models/{name:path}", self.model, methods=["GET"]),
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/detokenize", self.detokenize, methods=["POST"]),
            Route("/health", self.health, methods=["GET"]),
            Route("/openapi.json", self.openapi, methods=["GET"], include_in_schema=False),
            *docs_routes(),
            *ui_routes(),
            Route("/experts", self.experts, methods=["GET", *(["POST"] if self._move_experts else [])]),
            *self._more_routes,
        ]

    async def models(self, _request: Request) -> Response:
        return JSONResponse(model_list(self._model, self._started_at).as_json())

    async def model(self, request: Request) -> Response:
        check_model_name(self._model, request.path_params["name"])
        return JSONResponse(model_entry(self._model, self._started_at).as_json())

    async def openapi(self, _request: Request) -> Response:
        """Made when somebody first asks, which few doors see."""
        if self._page is None:
            own = version("tramontane")
            self._page = openapi(self._routes(), self._operations, self._model.name, own, needs_key=self._keys.is_enabled)
        return JSONResponse(self._page)

    async def health(self, _request: Request) -> Response:
        if await self._is_ready():
            return JSONResponse(Health(status="ready").as_json())
        return json_error(503, "no pipeline can make tokens now", "server_error", headers={"retry-after": "1"})

    async def experts(self, request: Request) -> Response:
        if request.method == "POST":
            return await self._handle_move_experts(request)
        load = await self._expert_load()
        if not load.num_pipelines:
            return json_error(503, "no pipeline can tell its load now", "server_error", headers={"retry-after": "1"})
        if not load.tokens:
            return json_error(404, "the model has no experts", "invalid_request_error", code=NO_EXPERTS)
        return JSONResponse(load.as_data())

    async def _handle_move_experts(self, request: Request) -> Response:
        assert self._move_experts is not None
        load = _parsed_load(await self._body(request))
        num_moved, num_pipelines = await self._move_experts(load)
        return JSONResponse(MoveExpertsResponse(moved=num_moved, pipelines=num_pipelines).as_json())

    async def tokenize(self, request: Request) -> Response:
        parsed = parse_body(TokenizeRequest, await self._body(request))
        check_model_name(self._model, parsed.model)
        return JSONResponse((await tokenize(self._model, self._chat, parsed)).as_json())

    async def detokenize(self, request: Request) -> Response:
        parsed = parse_body(DetokenizeRequest, await self._body(request))
        check_model_name(self._model, parsed.model)
        return JSONResponse((await detokenize(self._model, parsed)).as_json())

    async def completions(self, request: Request) -> Response:
        arrived_at = time.monotonic()
        begun: ResumeState = request.scope.get(SCOPE_RESUME) or ResumeState()
        source = self._source_for(request, begun)
        parsed = parse_completion(await self._body(request))
        check_model_name(self._model, parsed.model)
        if not begun.is_resumed:
            source.check_capacity(parsed.num_sequences)
        completion = await Completion.prepare(self._model, parsed, arrived_at, resume_state=begun)
        if not parsed.stream:
            return JSONResponse(await completion.run(source, request.scope.get(SCOPE_PROGRESS, no_progress)))
        return await self._stream(request, completion, source, parsed.includes_usage)

    async def chat_completions(self, request: Request) -> Response:
        arrived_at = time.monotonic()
        begun: ResumeState = request.scope.get(SCOPE_RESUME) or ResumeState()
        source = self._source_for(request, begun)
        parsed = parse_chat(await self._body(request))
        check_model_name(self._model, parsed.model)
        if not begun.is_resumed:
            source.check_capacity(parsed.n)
        chat = await ChatCompletion.prepare(self._model, self._chat, parsed, arrived_at, begun)
        if not parsed.stream:
            return JSONResponse(await chat.run(source, request.scope.get(SCOPE_PROGRESS, no_progress)))
        return await self._stream(request, chat, source, parsed.includes_usage, chat.opening())

    def _source_for(self, request: Request, begun: ResumeState) -> RequestTokenSource:
        """Before the body is read and parsed. Raises DrainingError, and OverloadedError where not even one sequence has room."""
        source = RequestTokenSource(self._source, request_owner(request), _deadline(request, begun), request_id(request))
        if not begun.is_resumed:
            source.check_capacity(1)
        return source

    async def _stream(
        self,
        request: Request,
        answer: StreamingAnswer,
        source: TokenSource,
        includes_usage: bool,
        opening: dict[str, Any] | None = None,
    ) -> Response:
        """The first tokens decide between a stream and an error with a status of its own."""
        changes = answer.stream(source)
        first = await anext(changes)
        events = sse_events(
            self._pacer, answer, first, changes, request_id(request), includes_usage=includes_usage, opening=opening
        )
        return SseResponse(events, changes)

    async def _body(self, request: Request) -> bytes:
        try:
            return await self._bodies.read(request, self._max_body)
        except OverloadedError as error:
            self._model.counts.record_refusal(error)
            raise


def _deadline(request: Request, begun: ResumeState) -> float:
    """By the event loop's clock: of 30 s, another door that was lost has had 12, so 18 are left. Raises ParameterError."""
    return asyncio.get_running_loop().time() + parse_timeout(request.headers.getlist(TIMEOUT_HEADER)) - begun.waited_s


def _parsed_load(body: bytes) -> ExpertLoad:
    try:
        return parse_load(json.loads(body))
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        raise ConfigError(f"the body must be JSON with {KEY}: a list of whole numbers for each layer") from error


def _not_found_handler(routes: Sequence[Route]) -> Callable[[Request, Exception], Awaitable[Response]]:
    """No such path, or not with this method."""

    async def answer(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        path = f"{request.url.path!r:.100}"
        if error.status_code != HTTPStatus.METHOD_NOT_ALLOWED:
            return json_error(
                error.status_code, f"{path} is not here; GET /openapi.json lists what is, /docs shows it", "invalid_request_error"
            )
        methods = _methods(routes, request)  # of all routes with this path; the error knows one
        message = f"{path} does not take {request.method:.20}; it takes {' and '.join(m for m in methods if m != 'HEAD')}"
        return json_error(error.status_code, message, "invalid_request_error", headers={"allow": ", ".join(methods)})

    return answer


def _methods(routes: Sequence[Route], request: Request) -> list[str]:
    matching = [route for route in routes if route.matches(request.scope)[0] is not Match.NONE]
    return sorted({method for route in matching for method in route.methods or ()})


def _internal_error_handler(sends_request_id: bool) -> Callable[[Request, Exception], Awaitable[Response]]:
    async def answer(request: Request, error: Exception) -> Response:
        own_id = request_id(request)
        logger.error("request %s met a defect of the server", own_id, exc_info=error, extra=request_fields(own_id))
        headers = {"x-request-id": own_id} if sends_request_id else {}  # the guard is further inside, and does not see this
        return json_error(500, "the server has a defect; its log says more", "server_error", headers=headers)

    return answer
