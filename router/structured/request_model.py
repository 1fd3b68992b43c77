"""The base of client requests, and validators of fields that a client may send and that have no
effect.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, Literal, Union

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from tramontane.proto.request import SAMPLING_BOUNDS

MAX_DEPTH = 32  # of an object that may have any fields
UNSUPPORTED = "this parameter is not supported; leave it out"


class RequestModel(BaseModel):
    """Base of client requests: values are not converted, and other fields are refused."""

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


def bounded(name: str) -> Any:  # pydantic's Field is declared so, too
    """Bound a field as the sampling parameter ``name`` is."""
    return Field(**SAMPLING_BOUNDS[name])


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


# Contents that are a text or a list of parts, in every API: text parts become one text, other parts
# are refused.

MAX_PARTS = 128
MEDIA: Mapping[str, str] = MappingProxyType(  # by the type of a part or block
    {
        **dict.fromkeys(
            ("image_url", "input_image", "image", "image_pil", "image_embeds"), "images"
        ),
        **dict.fromkeys(("input_audio", "audio_url", "audio"), "recordings of sound"),
        **dict.fromkeys(("video_url", "video"), "videos"),
        **dict.fromkeys(("file", "input_file", "document_url", "container_upload"), "files"),
        "document": "documents",
        "search_result": "search results",
    }
)


def refuse_media(kind: object) -> None:
    """Raise ValueError if content of this type is not text but an image, a file or similar."""
    if isinstance(kind, str) and kind in MEDIA:
        raise ValueError(f"the model serves text only; {MEDIA[kind]} are not supported")


@dataclass(frozen=True, slots=True)
class TextParts:
    """The text parts of one API, by their ``types``. ``ignored``: further fields that they may
    have, without effect.
    """

    types: tuple[str, ...] = ("text",)
    ignored: frozenset[str] = frozenset()

    def join(self, value: Any) -> Any:  # any JSON
        """Return a list of parts as lines of one text, and any other value unchanged. Raises
        ValueError.
        """
        if not isinstance(value, list):
            return value
        if not value or len(value) > MAX_PARTS:
            raise ValueError(f"a list of parts must have 1 to {MAX_PARTS}")
        return "\n".join(map(self.text_of, value))

    def text_of(self, part: Any) -> str:
        """Return the text of a part. Raises ValueError for another one."""
        kind = part.get("type") if isinstance(part, dict) else None
        refuse_media(kind)
        if not isinstance(kind, str) or kind not in self.types:
            raise ValueError(f"only parts of the type {' or '.join(self.types)} are supported")
        text = part.get("text")
        if not part.keys() <= {"type", "text", *self.ignored} or not isinstance(text, str):
            raise ValueError(f'a part must be as {{"type": "{kind}", "text": "..."}}')
        return text
