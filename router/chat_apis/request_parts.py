"""What the requests of both APIs share: fields that are refused with a reason, and objects that are
chosen by their ``type``.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from tramontane.router.openai.errors import TYPE_TAG
from tramontane.router.structured.request_model import RequestModel, unsupported_except
from tramontane.router.structured.text_parts import refuse_media

MAX_METADATA, MAX_KEY, MAX_VALUE = 16, 64, 512  # as OpenAI bounds them
NO_SEED = "this API has none; use temperature: 0 for repeatable answers, or /v1/chat/completions"
# how much a model is to think, if it knows that
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
ShortText = Annotated[str, Field(max_length=MAX_VALUE)]


def refused(reason: str, *allowed: Any) -> BeforeValidator:  # any JSON
    """Refuse a parameter with a reason, unless its value has no effect: null, false, or one of
    ``allowed``.
    """
    return unsupported_except(*allowed, reason=reason)


Caller = Annotated[
    Any, refused("the server runs no programs, so calls are the model's own", {"type": "direct"})
]


def typed(name: str) -> Tag:
    """Mark one of several objects: it is the one with this ``type``. Names of parameters in errors
    leave the mark out.
    """
    return Tag(f"{TYPE_TAG}{name}")


def by_type(default: str = "") -> Discriminator:
    """Choose one of several objects by its ``type``; ``default``: where it has none."""

    def tag(value: Any) -> str:
        name = value.get("type") if isinstance(value, dict) else value.type
        return f"{TYPE_TAG}{default if name is None else name}"

    return Discriminator(tag)


def known_types(names: Sequence[str], reason: str, default: str = "") -> BeforeValidator:
    """Refuse objects of other types than these.

    ``reason`` is what a client reads about an object of another type, whose name replaces
    ``{type}``.
    """

    def check(value: Any) -> Any:
        if isinstance(value, RequestModel):
            return value
        if not isinstance(value, dict):
            raise ValueError(f"it must be an object with a type, one of {', '.join(names)}")
        name = default if value.get("type") is None else value["type"]
        if not name:
            raise ValueError(f"its type is missing, which is one of {', '.join(names)}")
        refuse_media(name)
        if not isinstance(name, str) or name not in names:
            raise ValueError(
                reason.replace("{type}", f"{name!r:.40}" if isinstance(name, str) else "it has")
            )
        return value

    return BeforeValidator(check)


def _check_metadata(value: Any) -> Any:
    if not isinstance(value, dict) or len(value) > MAX_METADATA:
        raise ValueError(f"it must be an object of at most {MAX_METADATA} texts")
    if not all(
        isinstance(text, str) and len(text) <= MAX_VALUE and len(key) <= MAX_KEY
        for key, text in value.items()
    ):
        raise ValueError(
            f"its values must be texts of at most {MAX_VALUE} characters, its names of at most"
            f" {MAX_KEY}"
        )
    return value


MetadataInput = Annotated[
    dict[Annotated[str, Field(max_length=MAX_KEY)], ShortText], Field(max_length=MAX_METADATA)
]
RequestMetadata = Annotated[
    dict[str, str], BeforeValidator(_check_metadata, json_schema_input_type=MetadataInput)
]
