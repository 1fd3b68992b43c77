"""The base of what clients send, and validators of fields that a client may send and that have no
effect.
"""

from typing import Annotated, Any, Literal, Union

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

MAX_DEPTH = 32  # of an object that may have any fields
UNSUPPORTED = "this parameter is not supported; leave it out"


class RequestModel(BaseModel):
    """Base of what clients send: nothing is converted, and other fields are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


def check_depth(value: Any, max_depth: int = MAX_DEPTH) -> Any:  # any JSON
    """Return the value. Raises ValueError if its lists and objects are nested more than
    ``max_depth`` deep.
    """
    level = [value]
    for _ in range(max_depth):
        parts = [each for each in level if isinstance(each, dict | list)]
        level = [
            child for part in parts for child in (part.values() if isinstance(part, dict) else part)
        ]
    if any(isinstance(each, dict | list) for each in level):
        raise ValueError(f"it is nested more than {max_depth} deep")
    return value


def default_if_null(default: Any) -> BeforeValidator:
    """Replace null with ``default``: OpenAI's clients may send null for an absent field."""
    return BeforeValidator(lambda value: default if value is None else value)


def unsupported_except(*allowed: Any, reason: str = UNSUPPORTED) -> BeforeValidator:
    """Refuse a parameter with ``reason`` unless its value has no effect: null, false, or one of
    ``allowed``.
    """

    def check(value: Any) -> Any:
        is_neutral = (
            value is None
            or value is False
            or (value is not True and any(value == each for each in allowed))
        )
        if not is_neutral:
            raise ValueError(reason)
        return value

    shapes = [_literal_type(value) for value in allowed]
    return BeforeValidator(check, json_schema_input_type=Union[None, Literal[False], *shapes])


def only_true(reason: str) -> BeforeValidator:
    """Refuse false with ``reason``; use it for ``Literal[True] | None``."""

    def check(value: Any) -> Any:
        if value is False:
            raise ValueError(reason)
        return value

    return BeforeValidator(check, json_schema_input_type=Literal[True] | None)


def _literal_type(value: Any) -> Any:
    """Return the type that has only this value, for the OpenAPI schema."""
    if isinstance(value, list | dict):
        items = list[str] if isinstance(value, list) else dict[str, str]
        return Annotated[items, Field(min_length=len(value), max_length=len(value))]
    if isinstance(value, float):
        return Annotated[float, Field(ge=value, le=value)]
    return Literal[value]
