"""Errors in OpenAI's format, for HTTP requests and for the lines of batch jobs: their location in a
request, and readable messages for JSON parser errors.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tramontane.proto import errors
from tramontane.proto.errors import ErrorType
from tramontane.router.openai.response_models import Error, ErrorDetails

TYPE_TAG = "type="
MAX_NAME_CHARS = 64


def error_body(
    message: str, type: ErrorType, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """Return OpenAI's object for an error, and the message where Mistral's clients look for it."""
    error = ErrorDetails(message=message, type=type, param=param, code=code)
    return Error(error=error, message=message).as_json()


@dataclass(frozen=True, slots=True)
class HttpErrorSpec:
    """The parts of an error response except its message."""

    status: int
    type: ErrorType
    param: str | None = None
    code: str | None = None

    def body(self, message: str) -> dict[str, Any]:
        """Return the response's body."""
        return error_body(message, self.type, self.param, self.code)


def http_error_for(error: errors.TramontaneError) -> HttpErrorSpec:
    """Return the description of an error in a response."""
    return HttpErrorSpec(error.http_status, error.openai_type, error.parameter, error.openai_code)


def unknown_parameter(path: str) -> errors.ParameterError:
    """Return the error for a field that no API has, where such fields are refused."""
    return errors.ParameterError(f"{path} is not a parameter of this endpoint", path)


UNAVAILABLE = http_error_for(errors.PipelineError())


def is_form(place: Sequence[str | int], index: int) -> bool:
    """Return whether a part of a location is the union member that pydantic chose, which is not in
    the client's JSON.

    It puts the role of a message after its index, ("messages", 0, "user", "content"), after
    ``tool_choice`` its form, and after an object that its ``type`` tells apart ``type=`` with that:
    ("input", 0, "type=message", "role").
    """
    return index == {"messages": 2, "tool_choice": 1}.get(str(place[0])) or str(
        place[index]
    ).startswith(TYPE_TAG)


# Problems of a text that is not JSON, by the beginning of the parser's message.
_JSON_PROBLEMS = (
    ("EOF while parsing", "it ends too early"),
    ("expected `:`", "a colon is missing after a key"),
    ("expected `,` or `]`", "a comma or ] is missing"),
    ("expected `,` or `}`", "a comma or } is missing"),
    (
        "expected ident",
        "there is a word that JSON does not have; its words are true, false and null",
    ),
    ("expected value", "a value is missing"),
    ("invalid escape", "a backslash stands before a character that JSON does not escape"),
    ("invalid number", "a number is not written as in JSON"),
    ("number out of range", "a number has too many digits"),
    (
        "control character",
        "a text holds a line break or another control character; write it as \\n",
    ),
    ("key must be a string", "a key is not in double quotes"),
    ("trailing comma", "there is a comma after the last item"),
    ("trailing characters", "there is more after its end"),
    ("recursion limit exceeded", "it is nested too deeply"),
    ("invalid unicode", "an escape \\u is not a character"),
    ("lone leading surrogate", "an escape \\u is half of a surrogate pair"),
    ("unexpected end of hex escape", "an escape \\u is cut off, or half of a surrogate pair"),
)
_POSITION = re.compile(r" at line (\d+) column (\d+)$")


def describe_json_error(message: str) -> str:
    """Return a readable form of the parser's message: ``there is a comma after the last item (line
    2, column 5)``.

    A text of one line has only the column.
    """
    text = message.removeprefix("Invalid JSON: ")
    reason = next(
        (ours for theirs, ours in _JSON_PROBLEMS if text.startswith(theirs)), "it cannot be read"
    )
    if (position := _POSITION.search(text)) is None:
        return reason
    line, column = position.groups()
    # prompt=hi, like a form
    if text.startswith("expected value") and (line, column) == ("1", "1"):
        reason = "a request begins with {"
    return f"{reason} ({f'line {line}, ' * (line != '1')}column {column})"


def preview(value: Any) -> str:
    """Return the first 60 characters without formatting a value of megabytes; null, true and false
    are as JSON has them.
    """
    match value:
        case None | True | False:
            return {None: "null", True: "true", False: "false"}[value]
        case list():
            return "a list of 1 item" if len(value) == 1 else f"a list of {len(value)} items"
        case dict():
            return "an object"
        case _:
            start = value[:60] if isinstance(value, str) else value
            return f"{start!r:.60}"


def printable_path(path: Iterable[str | int]) -> str:
    """Return a path as OpenAI writes it: ``messages[0].role``."""
    parts = (f"[{part}]" if isinstance(part, int) else f".{printable_name(part)}" for part in path)
    return "".join(parts).removeprefix(".")


def printable_name(part: str) -> str:
    """Return a client's name for a parameter in one short printable line."""
    name = "".join(char if char.isprintable() else "?" for char in part[:MAX_NAME_CHARS])
    return name or '""'
