"""Error responses in OpenAI's shape, with the status of each error."""

import logging
from collections.abc import Mapping
from http import HTTPStatus
from types import MappingProxyType
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ExceptionHandler

from tramontane.cluster.http.body_limits import BodyTooLargeError, BodyTooSlowError
from tramontane.proto.errors import DrainingError, OverloadedError, PipelineError, TramontaneError
from tramontane.proto.request import Identity, request_fields
from tramontane.router.openai.errors import HttpErrorSpec, error_body, http_error_for
from tramontane.router.openai.responses import ErrorType

logger = logging.getLogger(__name__)

CLIENT_CLOSED_REQUEST = 499
DRAIN_RETRY_S = "5"  # another server may have taken over by then


def error_response(error: TramontaneError) -> JSONResponse:
    """Return the response for an error, with ``retry-after`` where a client should try again."""
    spec = _error_spec(error)
    headers: dict[str, str] = {}
    if isinstance(error, OverloadedError):
        headers["retry-after"] = str(error.retry_after_s)
    elif isinstance(error, DrainingError | PipelineError):
        headers["retry-after"] = DRAIN_RETRY_S if isinstance(error, DrainingError) else "1"
    return JSONResponse(spec.body(str(error)), spec.status, headers)


def _error_spec(error: TramontaneError) -> HttpErrorSpec:
    match error:
        case BodyTooLargeError():
            return HttpErrorSpec(413, "invalid_request_error")
        case BodyTooSlowError():
            return HttpErrorSpec(408, "invalid_request_error")
    return http_error_for(error)


def log_and_respond(error: TramontaneError, request_id: str) -> JSONResponse:
    """Return ``error_response``, and log errors that are not the client's fault, unless the server refuses on purpose."""
    response = error_response(error)
    if response.status_code >= HTTPStatus.INTERNAL_SERVER_ERROR and not isinstance(error, DrainingError):
        logger.warning("request %s failed: %s", request_id, error, extra=request_fields(request_id))
    return response


def request_id(request: Request) -> str:
    """Return the request's id: the client's or a proxy's, or the one that ``AuthMiddleware`` made."""
    return str(getattr(request.state, "request_id", "-"))


def request_identity(request: Request) -> Identity:
    """Return who sends the request, as ``AuthMiddleware`` set it."""
    identity: Identity = getattr(request.state, "identity", Identity())
    return identity


async def _failed(request: Request, error: Exception) -> Response:
    assert isinstance(error, TramontaneError)
    return log_and_respond(error, request_id(request))


async def _client_closed(_request: Request, _error: Exception) -> Response:
    """Return a status that no client sees, but that a server requires."""
    return Response(status_code=CLIENT_CLOSED_REQUEST)


# Handlers that every application of ours has.
ERROR_HANDLERS: Mapping[Any, ExceptionHandler] = MappingProxyType({TramontaneError: _failed, ClientDisconnect: _client_closed})


def json_error(
    status: int,
    message: str,
    type: ErrorType,
    param: str | None = None,
    code: str | None = None,
    headers: dict[str, str] | None = None,
) -> JSONResponse:
    """Return an error response in OpenAI's shape."""
    return JSONResponse(error_body(message, type, param, code), status, headers)
