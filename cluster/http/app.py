"""The API server: bytes in, OpenAI's objects out. It is plain Starlette, so that it runs and is
tested without Ray.
"""

import json
import logging
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ExceptionHandler

from tramontane.cluster.config.api_keys import ApiKeys
from tramontane.cluster.config.measurements import (
    KEY,
    NO_EXPERTS,
    ExpertLoad,
    MeasuredLoad,
    parse_load,
)
from tramontane.cluster.http.body_reader import MAX_HELD_BYTES, BodyLimiter, BodyReader
from tramontane.cluster.http.errors import (
    ERROR_HANDLERS,
    internal_error_handler,
    json_error,
    not_found_handler,
)
from tramontane.cluster.http.failover import NodeAnnouncer
from tramontane.cluster.http.openapi import OPERATIONS, Operations, openapi
from tramontane.cluster.http.request_middleware import PUBLIC_PATHS, AuthMiddleware
from tramontane.cluster.http.slow_clients import SlowClientMiddleware
from tramontane.cluster.http.sse import Pacer
from tramontane.cluster.http.static_pages import docs_routes, root_route, ui_routes
from tramontane.cluster.http.token_endpoints import TokenEndpoints
from tramontane.proto.errors import ConfigError
from tramontane.proto.ports import TokenSource
from tramontane.router.engine.health import PipelineHealth
from tramontane.router.openai.json_limits import check_elements
from tramontane.router.openai.response_models import (
    ExpertTokens,
    Health,
    MoveExpertsResponse,
    Version,
)
from tramontane.router.openai.served_model import ModelCatalog, ServedModel, check_model_name
from tramontane.router.tokenization.chat import ChatTemplate, NoChatTemplate

logger = logging.getLogger(__name__)

ANTHROPIC_HEADER = "anthropic-version"  # of every request of Anthropic's clients
# of answers, which scripts of allowed origins may read
EXPOSED_HEADERS = ("x-request-id", "warning", "x-tramontane-fingerprint", "retry-after")

# Rebalances experts for a load; returns how many experts were loaded, and by how many pipelines.
MoveExperts = Callable[[ExpertLoad], Awaitable[tuple[int, int]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpAppConfig:
    """The services, model and limits of an ``HttpApp``.

    ``health`` returns the best health of any pipeline, ``expert_load`` the tokens routed
    to each expert so far. ``strict_requests``: bodies with unknown fields are refused.
    ``move_experts``: None if clients may not rebalance experts. ``chat``: renders conversations
    as prompts. ``extra_routes`` are further endpoints behind the same keys, and
    ``extra_operations`` describes them in ``/openapi.json``. ``sends_request_id`` and
    ``public_paths``: see ``AuthMiddleware``. ``allowed_origins``: of web pages (CORS).
    ``slow_client_timeout_s``: see ``SlowClientMiddleware``. ``node`` and ``model_digest``: see
    ``NodeAnnouncer``.
    """

    model: ServedModel
    source: TokenSource
    health: Callable[[], Awaitable[PipelineHealth]]
    expert_load: Callable[[], Awaitable[MeasuredLoad]]
    max_body_bytes: int
    pacer: Pacer
    strict_requests: bool = False
    move_experts: MoveExperts | None = None
    chat: ChatTemplate | None = None
    keys: ApiKeys = field(default_factory=ApiKeys)
    extra_routes: Sequence[Route] = ()
    extra_operations: Operations = field(default_factory=dict)
    sends_request_id: bool = True
    public_paths: frozenset[str] = PUBLIC_PATHS
    allowed_origins: Sequence[str] = ()
    slow_client_timeout_s: float = math.inf
    body_limiter: BodyLimiter | None = None
    node: str = ""
    model_digest: str = ""


class HttpApp:
    """The API server: the endpoints over HTTP, as a Starlette application."""

    def __init__(self, config: HttpAppConfig) -> None:
        self._config, self._model = config, config.model
        # a body of the maximum size fits
        limiter = config.body_limiter or BodyLimiter(max(MAX_HELD_BYTES, config.max_body_bytes))
        self._bodies = BodyReader(
            limiter,
            config.max_body_bytes,
            config.model.counts,
            refuses_unknown=config.strict_requests,
        )
        self._chat = config.chat or NoChatTemplate("this server has no chat format")
        self.tokens = TokenEndpoints(
            config.model, config.source, self._chat, self._bodies, config.pacer
        )
        self._openapi_page: dict[str, Any] | None = None
        self._catalog = ModelCatalog(config.model, self._chat, int(time.time()))

    def app(self) -> Starlette:
        """Build the Starlette application."""
        config, routes = self._config, self._routes()
        handlers: dict[Any, ExceptionHandler] = {
            HTTPException: not_found_handler(routes),
            **ERROR_HANDLERS,
            Exception: internal_error_handler(config.sends_request_id),
        }
        middleware = [
            Middleware(NodeAnnouncer, config.node, config.model_digest),
            *_cors(config.allowed_origins),
            Middleware(
                AuthMiddleware,
                keys=config.keys,
                sends_id=config.sends_request_id,
                public_paths=config.public_paths,
            ),
            Middleware(SlowClientMiddleware, limit_s=config.slow_client_timeout_s),
        ]
        app = Starlette(routes=routes, exception_handlers=handlers, middleware=middleware)
        app.router.redirect_slashes = False  # a client that follows a redirect sends a GET
        return app

    def _routes(self) -> list[Route]:
        return [
            *self.tokens.routes(),
            Route("/v1/models", self.models, methods=["GET"]),
            Route("/v1/models/{name:path}", self.model, methods=["GET"]),
            Route("/health", self.health, methods=["GET"]),
            Route("/ping", self.health, methods=["GET", "POST"]),
            Route("/version", self.version, methods=["GET"]),
            Route("/openapi.json", self.openapi, methods=["GET"], include_in_schema=False),
            root_route(),
            *docs_routes(),
            *ui_routes(),
            Route(
                "/experts",
                self.experts,
                methods=["GET", *(["POST"] if self._config.move_experts else [])],
            ),
            *self._config.extra_routes,
        ]

    async def models(self, request: Request) -> Response:
        """Answer ``GET /v1/models``."""
        catalog = self._catalog
        is_anthropic = ANTHROPIC_HEADER in request.headers
        return JSONResponse(
            (catalog.anthropic_list() if is_anthropic else catalog.list()).as_json()
        )

    async def model(self, request: Request) -> Response:
        """Answer ``GET /v1/models/{name}``."""
        name = request.path_params["name"]
        check_model_name(self._model, name)
        is_anthropic = ANTHROPIC_HEADER in request.headers
        entry = self._catalog.anthropic_entry if is_anthropic else self._catalog.entry
        return JSONResponse(entry(name).as_json())

    async def openapi(self, _request: Request) -> Response:
        """Answer ``GET /openapi.json``; the page is built for the first request, which few
        ingresses ever get.
        """
        if self._openapi_page is None:
            operations, config = {**OPERATIONS, **self._config.extra_operations}, self._config
            public = config.public_paths if config.keys.is_enabled else None
            self._openapi_page = openapi(
                self._routes(), operations, self._model.name, version("tramontane"), public
            )
        return JSONResponse(self._openapi_page)

    async def health(self, _request: Request) -> Response:
        """Answer ``GET /health`` and ``/ping``: 200 if requests are accepted and will be answered,
        else 503.
        """
        health = await self._config.health()
        if health.status == "ready":
            return JSONResponse(Health(status="ready").as_json())
        if health.status == "degraded":
            since_s = round(health.since_s, 1)
            return JSONResponse(
                Health(status="degraded", reason=health.reason, since_s=since_s).as_json()
            )
        message = f"no pipeline can make tokens now: {health.reason}"
        return json_error(503, message, "server_error", headers={"retry-after": "1"})

    async def version(self, _request: Request) -> Response:
        """Answer ``GET /version``."""
        return JSONResponse(Version(version=version("tramontane")).as_json())

    async def experts(self, request: Request) -> Response:
        """Answer ``GET /experts`` with the measured load; ``POST /experts`` rebalances experts for
        the load in its body.
        """
        if request.method == "POST":
            return await self._rebalance_experts(request)
        load = await self._config.expert_load()
        if not load.num_pipelines:
            return json_error(
                503,
                "no pipeline can report its load now",
                "server_error",
                headers={"retry-after": "1"},
            )
        if not load.tokens:
            return json_error(
                404, "the model has no experts", "invalid_request_error", code=NO_EXPERTS
            )
        tokens = [list(layer) for layer in load.tokens]
        return JSONResponse(
            ExpertTokens(tokens_per_expert=tokens, pipelines=load.num_pipelines).as_json()
        )

    async def _rebalance_experts(self, request: Request) -> Response:
        assert self._config.move_experts is not None
        load = await self._bodies.parse(request, _parse_expert_load)
        num_moved, num_pipelines = await self._config.move_experts(load)
        return JSONResponse(MoveExpertsResponse(moved=num_moved, pipelines=num_pipelines).as_json())


def _cors(origins: Sequence[str]) -> list[Middleware]:
    """Return the middleware that lets pages of these origins call the server; none without origins.

    It is outside of authentication, because browsers ask without a key before they send one.
    """
    if not origins:
        return []
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=list(origins),
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=EXPOSED_HEADERS,
        )
    ]


def _parse_expert_load(body: bytes) -> ExpertLoad:
    check_elements(body)
    try:
        return parse_load(json.loads(body.decode()))
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        raise ConfigError(
            f"the body must be JSON with {KEY}: a list of whole numbers for each layer"
        ) from error
