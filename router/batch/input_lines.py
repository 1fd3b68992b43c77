"""Lines of a job's input: split, and validated one by one. An invalid line does not affect the
others.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

from pydantic_core import from_json

from tramontane.proto.errors import RequestError
from tramontane.proto.jobs import Endpoint
from tramontane.proto.units import format_bytes
from tramontane.router.openai.errors import describe_json_error
from tramontane.router.openai.json_limits import check_elements, is_utf16
from tramontane.router.structured.request_model import intended_name

MAX_CUSTOM_ID = 256  # characters
KEYS = {"custom_id", "method", "url", "body"}
PROMPT = re.compile(r'"(?:messages|prompt)"\s*:')
SEARCHED_CHARACTERS = 2**14  # for the prompt, which few lines have further back
COMPARED_CHARACTERS = 256  # some fifty tokens: a shorter prefix is not worth another order
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class JobLimits:
    """Limits of one job or file, and of one tenant's total.

    ``keep_s``: how long ended jobs and files stay; None: forever.
    """

    max_line_bytes: int = 2**20
    max_lines: int = 2**22
    max_bytes: int = 2**32
    max_open_jobs: int = 1000  # of a tenant, that have not ended
    max_open_lines: int = 2**24  # in these jobs
    max_stored_bytes: int = 2**36  # in all jobs and files of a tenant
    keep_s: float | None = None


class InputLine(NamedTuple):
    """A line as it was sent."""

    number: int  # from 1
    text: bytes | None  # None: it was too long


class HasText(Protocol):
    """A line whose text can be read."""

    @property
    def text(self) -> str:
        """The request as it was sent."""


Line = TypeVar("Line", bound=HasText)


class ParsedLine(NamedTuple):
    """A validated line: either ``problem`` says why it is invalid, or ``text`` is a request and has
    a ``custom_id``.
    """

    number: int
    custom_id: str | None
    text: str | None
    problem: str | None


class LineSplitter:
    r"""Splits a text that arrives in pieces, cut anywhere, into lines. The text of an overlong line
    is dropped.

    The pieces ``ab``, ``c\nd`` and the end give the lines ``abc`` and ``d``.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._number = 0
        self._partial = bytearray()
        self._is_too_long = False

    def feed(self, piece: bytes) -> Iterator[InputLine]:
        """Yield the lines that end in this piece. Exhaust the generator before the next call."""
        start = 0
        while (end := piece.find(b"\n", start)) >= 0:
            self._add(piece[start:end])
            yield self._take_line()
            start = end + 1
        self._add(piece[start:])

    def finish(self) -> Iterator[InputLine]:
        """Yield the last line, if no line end followed it."""
        if self._partial or self._is_too_long:
            yield self._take_line()

    def _add(self, part: bytes) -> None:
        if len(self._partial) + len(part) > self._max_bytes:
            self._is_too_long = True
        elif not self._is_too_long:
            self._partial += part

    def _take_line(self) -> InputLine:
        self._number += 1
        text = None if self._is_too_long else bytes(self._partial)
        if text is not None and self._number == 1:
            text = text.removeprefix(BYTE_ORDER_MARK)
        self._partial.clear()
        self._is_too_long = False
        return InputLine(self._number, text)


def parse_line(
    raw: InputLine, endpoint: Endpoint, max_bytes: int, is_quoted: bool = True
) -> ParsedLine:
    """Validate a line. A problem is part of the result, not raised.

    ``is_quoted``: problems may repeat parts of the line; False for a text that the client has not
    sent itself.
    """
    custom_id = None
    try:
        if raw.text is None:
            raise RequestError(f"it is longer than {format_bytes(max_bytes)}")
        request = _parse_json(raw.text)
        custom_id = _custom_id(request)
        _check_request(request, endpoint, is_quoted)
        return ParsedLine(raw.number, custom_id, raw.text.decode(), None)
    except RequestError as error:
        return ParsedLine(raw.number, custom_id, None, f"line {raw.number}: {error}")


def extract_body(text: str) -> dict[str, Any]:
    """Return the body of a valid line."""
    body: dict[str, Any] = from_json(text)["body"]
    return body


def _parse_json(text: bytes) -> dict[str, Any]:
    if is_utf16(text):
        raise RequestError("it is UTF-16, which JSON is not; send the file as UTF-8")
    check_elements(text, "it")
    try:
        request = from_json(text, allow_inf_nan=False)
    except ValueError as error:
        raise RequestError(f"it is not JSON: {describe_json_error(str(error))}") from error
    if not isinstance(request, dict):
        raise RequestError("it is not a JSON object")
    return request


def _custom_id(request: dict[str, Any]) -> str:
    custom_id = request.get("custom_id")
    if (
        not isinstance(custom_id, str)
        or not 0 < len(custom_id) <= MAX_CUSTOM_ID
        or "\0" in custom_id
    ):
        raise RequestError(f"custom_id must be a text of 1 to {MAX_CUSTOM_ID} characters")
    return custom_id


def _check_request(request: dict[str, Any], endpoint: Endpoint, is_quoted: bool) -> None:
    def quote(value: object, otherwise: str) -> str:
        return f"{value!r:.80}" if is_quoted else otherwise

    url = request.get("url", endpoint)
    # some clients write the whole address, or leave out /v1
    path = re.sub(r"^https?://[^/]*", "", url) if isinstance(url, str) else ""
    if path not in (endpoint, endpoint.removeprefix("/v1")):
        found = quote(url, "another one")
        raise RequestError(
            f"url is {found}, but the job's endpoint (--endpoint) is {endpoint}; change one of"
            " the two"
        )
    if (method := request.get("method", "POST")) != "POST":
        raise RequestError(f"method is {quote(method, 'another one')}; it must be POST")
    if not isinstance(request.get("body"), dict):
        raise RequestError("body must be a JSON object")
    for key in request.keys() - KEYS:
        if meant := intended_name(key, KEYS):
            raise RequestError(
                f"{quote(key, 'one of its keys')} is not a key of a line; did you mean {meant}?"
            )


def by_prefix(lines: Iterable[Line]) -> list[Line]:
    """Group lines whose prompts share a prefix, in the order of the first line of each group; other
    lines keep their order.

    Prefixes a, b, a, c, b: a, a, b, b, c.
    """
    groups: dict[str, list[Line]] = {}
    for line in lines:
        found = PROMPT.search(line.text, 0, SEARCHED_CHARACTERS)
        start = found.end() if found else 0
        groups.setdefault(line.text[start : start + COMPARED_CHARACTERS], []).append(line)
    return [line for group in groups.values() for line in group]
