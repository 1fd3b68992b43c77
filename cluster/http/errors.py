"""Error responses, with the status of each error."""

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from http import HTTPStatus
from types import MappingProxyType
from typing import Any, NamedTuple

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Match, Route
from starlette.types import ExceptionHandler

from tramontane.proto.errors import DEFECT, DrainingError, ErrorType, TramontaneError
from tramontane.proto.request import Identity, request_fields
from tramontane.router.chat_apis import responses_answer
from tramontane.router.chat_apis.responses_request import NOT_STORED
from tramontane.router.openai.errors import HttpErrorSpec, http_error_for
from tramontane.router.openai.response_models import Event, to_json

# The error format of each API, as the body of a response and as an event of a stream: OpenAI's in
# two ways, and Anthropic's.

RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages/"
# Anthropic's types of errors by status; its 529 is our 503, which proxies and load balancers know.
TYPES: Mapping[int, str] = MappingProxyType(
    {
        401: "authentication_error",
        403: "permission_error",
        404: "not_found_error",
        408: "timeout_error",
        413: "request_too_large",
        429: "rate_limit_error",
        500: "api_error",
        503: "overloaded_error",
        504: "timeout_error",
    }
)


class ErrorShape(NamedTuple):
    """Errors of one API, and what its streams send while they wait.

    ``body``: of a response. ``event``: with the body of a response and the event's number, where
    events have numbers. ``number_after``: a number above the numbers of all events of
    ``num_tokens`` tokens. ``keep_alive``: what clients of the API ignore.
    """

    body: Callable[[HttpErrorSpec, str], dict[str, Any]]
    event: Callable[[bytes, int], bytes]
    number_after: Callable[[int], int]
    keep_alive: bytes = b": keep-alive\n\n"  # a comment: WHATWG HTML, 9.2.6


def format_event(data: bytes, name: str = "") -> bytes:
    """Return a server-sent event, with a name if it has one."""
    head = b"event: " + name.encode() + b"\n" if name else b""
    return head + b"data: " + data + b"\n\n"


def encode_event(event: Event) -> bytes:
    """Return a small event as a server-sent one."""
    return format_event(to_json(event.data).encode(), event.name)


def error_shape(path: str) -> ErrorShape:
    """Return the error format of a path, wherever the application is mounted."""
    if MESSAGES in f"{path}/":
        return _ANTHROPIC
    return _RESPONSES if path.endswith(RESPONSES) else _OPENAI


def _anthropic_body(spec: HttpErrorSpec, message: str) -> dict[str, Any]:
    kind = TYPES.get(spec.status, "invalid_request_error" if spec.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


def _responses_event(body: bytes, number: int) -> bytes:
    return encode_event(responses_answer.error_event(body, number))


def _number_after(num_tokens: int) -> int:
    """Return a number for the next event, without knowledge of the blocks: a token rarely begins
    two.
    """
    return responses_answer.next_number(num_tokens, 2 * num_tokens + 2)


_OPENAI = ErrorShape(HttpErrorSpec.body, lambda body, _: format_event(body), lambda _: 0)
_RESPONSES = ErrorShape(HttpErrorSpec.body, _responses_event, _number_after)
_ANTHROPIC = ErrorShape(
    _anthropic_body,
    lambda body, _: format_event(body, "error"),
    lambda _: 0,
    format_event(b'{"type": "ping"}', "ping"),
)


logger = logging.getLogger(__name__)

CLIENT_CLOSED_REQUEST = 499
NEEDING_V1 = ("/chat/completions", "/completions", "/responses", "/messages", "/models")
OTHER_PATHS = "there are /v1/chat/completions, /v1/models, /ui and more: see /docs or /openapi.json"
METRICS = (
    "Ray exports the metrics of every node, at /metrics of the port in"
    " /tmp/ray/session_latest/metrics_export_port_* there; see Metrics in docs/observability.md"
)


def error_response(
    error: TramontaneError, path: str = "", headers: Mapping[str, str] = MappingProxyType({})
) -> JSONResponse:
    """Return the response for an error at a path, with ``retry-after`` where a client should try
    again.
    """
    spec, wait_s = http_error_for(error), error.retry_after_s
    if wait_s is not None:
        headers = {**headers, "retry-after": str(wait_s)}
    return JSONResponse(error_shape(path).body(spec, str(error)), spec.status, headers)


def log_and_respond(error: TramontaneError, request_id: str, path: str = "") -> JSONResponse:
    """Return ``error_response``, and log errors that are not the client's fault, unless the server
    refuses on purpose.
    """
    response = error_response(error, path)
    if response.status_code >= HTTPStatus.INTERNAL_SERVER_ERROR and not isinstance(
        error, DrainingError
    ):
        logger.warning("request %s failed: %s", request_id, error, extra=request_fields(request_id))
    return response


def request_id(request: Request) -> str:
    """Return the request's id: the client's or a proxy's, or the one that ``AuthMiddleware``
    made.
    """
    return str(getattr(request.state, "request_id", "-"))


def request_identity(request: Request) -> Identity:
    """Return the identity of the client, as ``AuthMiddleware`` set it."""
    identity: Identity = getattr(request.state, "identity", Identity())
    return identity


async def _failed(request: Request, error: Exception) -> Response:
    assert isinstance(error, TramontaneError)
    return log_and_respond(error, request_id(request), request.url.path)


async def _client_closed(_request: Request, _error: Exception) -> Response:
    """Return a status that no client sees, but that a server requires."""
    return Response(status_code=CLIENT_CLOSED_REQUEST)


# Handlers of all our applications.
ERROR_HANDLERS: Mapping[Any, ExceptionHandler] = MappingProxyType(
    {TramontaneError: _failed, ClientDisconnect: _client_closed}
)


def json_error(
    status: int,
    message: str,
    type: ErrorType,
    param: str | None = None,
    code: str | None = None,
    headers: dict[str, str] | None = None,
    path: str = "",
) -> JSONResponse:
    """Return an error response in the shape of the API that the path belongs to."""
    return JSONResponse(
        error_shape(path).body(HttpErrorSpec(status, type, param, code), message), status, headers
    )


def not_found_handler(
    routes: Sequence[Route],
) -> Callable[[Request, Exception], Awaitable[Response]]:
    """Make the handler for paths that do not exist, and for methods that a path does not have."""

    async def answer(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        path = f"{request.url.path!r:.100}"
        if error.status_code != HTTPStatus.METHOD_NOT_ALLOWED:
            message = f"{path} is not here; {_advice(request.url.path)}"
            return json_error(
                error.status_code, message, "invalid_request_error", path=request.url.path
            )
        # of all routes with this path; the error lists only one route's methods
        methods = _methods(routes, request)
        message = (
            f"{path} does not take {request.method:.20}; it takes"
            f" {' and '.join(m for m in methods if m != 'HEAD')}"
        )
        headers = {"allow": ", ".join(methods)}
        return json_error(
            error.status_code,
            message,
            "invalid_request_error",
            headers=headers,
            path=request.url.path,
        )

    return answer


def _advice(path: str) -> str:
    if "/v1/v1/" in path:
        return "a base URL with /v1 is for clients that do not add it; leave /v1 out of yours"
    if not path.startswith("/v1/") and path.endswith(NEEDING_V1):
        return "the client's base URL needs /v1 at its end"
    if "/v1/responses/" in path:  # the path of one response, to read, cancel or delete it
        return NOT_STORED
    return METRICS if path.rstrip("/").endswith("/metrics") else OTHER_PATHS


def _methods(routes: Sequence[Route], request: Request) -> list[str]:
    matching = [route for route in routes if route.matches(request.scope)[0] is not Match.NONE]
    return sorted({method for route in matching for method in route.methods or ()})


def internal_error_handler(
    sends_request_id: bool,
) -> Callable[[Request, Exception], Awaitable[Response]]:
    """Make the handler for defects. ``sends_request_id``: see ``AuthMiddleware``, which does not
    see this response.
    """

    async def answer(request: Request, error: Exception) -> Response:
        failed_id = request_id(request)
        logger.error(
            "request %s failed by a defect of the server",
            failed_id,
            exc_info=error,
            extra=request_fields(failed_id),
        )
        headers = {"x-request-id": failed_id} if sends_request_id else {}
        return json_error(500, DEFECT, "server_error", headers=headers, path=request.url.path)

    return answer
