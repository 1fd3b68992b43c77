"""How each API writes errors, as the body of a response and as an event of a stream: OpenAI's in
two ways, and Anthropic's.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from tramontane.router.chat_apis import responses_events
from tramontane.router.openai.chunks import Event
from tramontane.router.openai.errors import HttpErrorSpec
from tramontane.router.openai.responses import to_json

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
    """Errors of one API.

    ``body``: of a response. ``event``: with the body of a response and the event's number, where
    events have numbers. ``number_after``: a number above those of all events of so many tokens.
    """

    body: Callable[[HttpErrorSpec, str], dict[str, Any]]
    event: Callable[[bytes, int], bytes]
    number_after: Callable[[int], int]


def format_event(data: bytes, name: str = "") -> bytes:
    """Return a server-sent event, with a name if it has one."""
    head = b"event: " + name.encode() + b"\n" if name else b""
    return head + b"data: " + data + b"\n\n"


def encode_event(event: Event) -> bytes:
    """Return a small event as a server-sent one."""
    return format_event(to_json(event.data).encode(), event.name)


def error_shape(path: str) -> ErrorShape:
    """Return how errors of a path are written, wherever the application is mounted."""
    if MESSAGES in f"{path}/":
        return _ANTHROPIC
    return _RESPONSES if path.endswith(RESPONSES) else _OPENAI


def _anthropic_body(spec: HttpErrorSpec, message: str) -> dict[str, Any]:
    kind = TYPES.get(spec.status, "invalid_request_error" if spec.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


def _responses_event(body: bytes, number: int) -> bytes:
    return encode_event(responses_events.error_event(body, number))


def _number_after(num_tokens: int) -> int:
    """Return a number for the next event, without knowledge of the blocks, of which a token hardly
    begins two.
    """
    return responses_events.next_number(num_tokens, 2 * num_tokens + 2)


_OPENAI = ErrorShape(HttpErrorSpec.body, lambda body, _: format_event(body), lambda _: 0)
_RESPONSES = ErrorShape(HttpErrorSpec.body, _responses_event, _number_after)
_ANTHROPIC = ErrorShape(_anthropic_body, lambda body, _: format_event(body, "error"), lambda _: 0)
