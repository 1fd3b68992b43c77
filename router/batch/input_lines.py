"""Lines of a job's input: cut out of pieces, and checked one by one; a bad one is only itself bad."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from pydantic_core import from_json

from tramontane.proto.errors import RequestError
from tramontane.proto.jobs import Endpoint

MAX_CUSTOM_ID = 256  # characters
KEYS = {"custom_id", "method", "url", "body"}
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class JobLimits:
    """``max_open_jobs``: that have not ended. ``keep_s``: for so long jobs stay after their end, and files; None: for ever."""

    max_line_bytes: int = 2**20
    max_lines: int = 2**22
    max_bytes: int = 2**32
    max_open_jobs: int = 1000
    keep_s: float | None = None


class InputLine(NamedTuple):
    number: int  # from 1
    text: bytes | None  # None: it was too long


class ParsedLine(NamedTuple):
    """``problem``: why it is no request; else ``text`` is one, and has a ``custom_id``."""

    number: int
    custom_id: str | None
    text: str | None
    problem: str | None


class LineSplitter:
    """Lines of a text that comes in pieces, cut anywhere. Of a line that is too long nothing is kept.

    Pieces ``ab``, ``c\\nd`` and the end give the lines ``abc`` and ``d``.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._number = 0
        self._begun = bytearray()
        self._is_too_long = False

    def feed(self, piece: bytes) -> Iterator[InputLine]:
        """Lines that end in this piece. To be exhausted before the next."""
        start = 0
        while (end := piece.find(b"\n", start)) >= 0:
            self._add(piece[start:end])
            yield self._ended()
            start = end + 1
        self._add(piece[start:])

    def finish(self) -> Iterator[InputLine]:
        """The last line, if nothing ended it."""
        if self._begun or self._is_too_long:
            yield self._ended()

    def _add(self, part: bytes) -> None:
        if len(self._begun) + len(part) > self._max_bytes:
            self._is_too_long = True
            self._begun.clear()
        elif not self._is_too_long:
            self._begun += part

    def _ended(self) -> InputLine:
        self._number += 1
        text = None if self._is_too_long else bytes(self._begun)
        if text is not None and self._number == 1:
            text = text.removeprefix(BYTE_ORDER_MARK)
        self._begun.clear()
        self._is_too_long = False
        return InputLine(self._number, text)


def parse_line(raw: InputLine, endpoint: Endpoint, max_bytes: int) -> ParsedLine:
    """What is wrong with a line is said in it, never raised."""
    custom_id = None
    try:
        if raw.text is None:
            raise RequestError(f"it is longer than {max_bytes} bytes")
        request = _parsed(raw.text)
        custom_id = _custom_id(request)
        _check_request(request, endpoint)
        return ParsedLine(raw.number, custom_id, raw.text.decode(), None)
    except RequestError as error:
        return ParsedLine(raw.number, custom_id, None, f"line {raw.number}: {error}")


def body_of(text: str) -> dict[str, Any]:
    """Of a line that was found good."""
    body: dict[str, Any] = from_json(text)["body"]
    return body


def _parsed(text: bytes) -> dict[str, Any]:
    try:
        request = from_json(text, allow_inf_nan=False)
    except ValueError as error:
        raise RequestError(f"it is not JSON: {error}") from error
    if not isinstance(request, dict):
        raise RequestError("it is not a JSON object")
    return request


def _custom_id(request: dict[str, Any]) -> str:
    custom_id = request.get("custom_id")
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= MAX_CUSTOM_ID or "\0" in custom_id:
        raise RequestError(f"custom_id must be a text of 1 to {MAX_CUSTOM_ID} characters")
    return custom_id


def _check_request(request: dict[str, Any], endpoint: Endpoint) -> None:
    if request.get("url", endpoint) != endpoint:
        raise RequestError(
            f"url is {request['url']!r:.80}, but the job's endpoint (--endpoint) is {endpoint}; change one of the two"
        )
    if request.get("method", "POST") != "POST":
        raise RequestError(f"method is {request['method']!r:.80}; it must be POST")
    if not isinstance(request.get("body"), dict):
        raise RequestError("body must be a JSON object")
    if unknown := sorted(request.keys() - KEYS):
        raise RequestError(f"{unknown[0]!r:.80} is not a key of a line")
