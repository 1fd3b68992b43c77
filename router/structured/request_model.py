"""The base of client requests, the fields of a request that are ignored, and validators of fields
that a client may send and that have no effect.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Union

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr, ValidationInfo

from tramontane.proto.errors import MAX_NAME_CHARS
from tramontane.proto.request import SAMPLING_BOUNDS

MAX_DEPTH = 32  # of an object that may have any fields
MAX_IGNORED = 256  # different fields without effect of one request that are noted
MAX_COMPARED = 32  # unknown names of one request that may be misspellings
UNSUPPORTED = "this parameter is not supported; leave it out"


class RequestModel(BaseModel):
    """Base of client requests: values are not converted; unknown fields are kept apart."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)


class RequestBody(RequestModel):
    """A whole body, and which of its fields have no effect. ``has_history``: it is a conversation,
    in which the client repeats what it has got.
    """

    has_history: ClassVar[bool] = False
    _ignored: tuple[str, ...] = PrivateAttr(())
    _unknown: str = PrivateAttr("")

    @property
    def ignored(self) -> tuple[str, ...]:
        """Paths of all fields without effect, each once, without positions: ``messages[].id``."""
        return self._ignored

    @property
    def unknown(self) -> str:
        """Path of the first field that this server does not know, "" if it knows all."""
        return self._unknown

    def unused_fields(self) -> tuple[str, ...]:
        """Return the fields that have no effect in this request, because of others."""
        return ()

    def note_ignored(self, ignored: tuple[str, ...], unknown: str) -> None:
        """Set both, once the body is parsed."""
        self._ignored, self._unknown = ignored, unknown


NO_EFFECT = "no effect"
NoEffect = Annotated[Any, NO_EFFECT]  # a known field that cannot change an answer


class IgnoredField(NamedTuple):
    """A field without effect, of the object at ``place``: ("messages", 0). ``is_known``: it is a
    field of the model. ``siblings``: the objects of the same list.
    """

    model: RequestModel
    place: tuple[str | int, ...]
    name: str
    is_known: bool
    siblings: tuple[Any, ...] = ()

    @property
    def has_effect_elsewhere(self) -> bool:
        """Whether the field has an effect in another object of the list, of another type."""
        kinds = {
            kind
            for kind in set(map(type, self.siblings))  # few, of thousands of objects
            if issubclass(kind, RequestModel)
            and self.name in kind.model_fields
            and self.name not in no_effect_fields(kind)
        }
        return bool(kinds) and any(
            other.__dict__[self.name] is not None and self.name in other.__pydantic_fields_set__
            for other in self.siblings
            if type(other) in kinds
        )


def ignored_fields(
    model: RequestModel, place: tuple[str | int, ...] = (), siblings: tuple[Any, ...] = ()
) -> Iterator[IgnoredField]:
    """Yield every field of a request, at every depth, that is not null and has no effect."""
    if isinstance(model, OtherObject):
        if isinstance(model.text, Omitted):
            yield IgnoredField(model, place, f"type={model.type}", is_known=True)
        return
    if model.__pydantic_extra__:
        for name, value in model.__pydantic_extra__.items():
            if value is not None:
                yield IgnoredField(model, place, name, False, siblings)
    without_effect, values = no_effect_fields(type(model)), model.__dict__
    for name in sorted(model.__pydantic_fields_set__):  # those that the client has sent
        value = values.get(name)
        if value is not None and name in without_effect:
            yield IgnoredField(model, place, name, True, siblings)
        else:
            for at, item, items in _objects_in(value):
                yield from ignored_fields(item, (*place, name, *at), items)


def _objects_in(value: Any) -> Iterator[tuple[tuple[int, ...], RequestModel, tuple[Any, ...]]]:
    """Yield the objects of a field: their places in it, and the list that they are in."""
    if isinstance(value, RequestModel):
        yield (), value, ()
    elif isinstance(value, tuple) and value and isinstance(value[0], RequestModel):
        for index, item in enumerate(value):
            yield (index,), item, value


@cache
def no_effect_fields(kind: type[RequestModel]) -> frozenset[str]:
    """Return the known fields of a model that have no effect."""
    return frozenset(
        name for name, field in kind.model_fields.items() if NO_EFFECT in field.metadata
    )


# Names of other APIs and servers for fields that an object may have here.
OTHER_NAMES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        **dict.fromkeys(
            ("max_new_tokens", "num_predict", "maxOutputTokens", "maxCompletionTokens"),
            ("max_tokens", "max_output_tokens"),
        ),
        "max_tokens": ("max_output_tokens",),
        "max_completion_tokens": ("max_output_tokens", "max_tokens"),
        "max_output_tokens": ("max_tokens",),
        **dict.fromkeys(("stop_sequences", "stop_strings"), ("stop",)),
        "stop": ("stop_sequences",),
        "repeat_penalty": ("repetition_penalty",),
        "temp": ("temperature",),
        "topP": ("top_p",),
        "topK": ("top_k",),
        "format": ("response_format",),
        "response_format": ("text",),
        "text": ("content",),
        "input_schema": ("parameters",),
        "parameters": ("input_schema",),
    }
)


def other_name(name: str, known: Sequence[str]) -> str:
    """Return the known name of a field that another API or server calls so, "" if there is none."""
    return next((each for each in OTHER_NAMES.get(name, ()) if each in known), "")


def intended_name(name: str, known: Iterable[str]) -> str:
    """Return the known name of which this one is a misspelling, or "": at most two letters are
    changed, swapped, added or left out, and one in a name of at most five ("tempratur":
    temperature).
    """
    if not 3 <= len(name) <= MAX_NAME_CHARS:
        return ""
    most = 1 if len(name) <= 5 else 2
    letters = Counter(name)
    distances = {
        other: _edit_distance(name, other)
        for other in known
        # few names have nearly the same letters; only these are compared by their order
        if other != name
        and abs(len(name) - len(other)) <= most
        and max(len(name), len(other)) - (letters & Counter(other)).total() <= most
    }
    least = min(distances.values(), default=most + 1)
    nearest = [other for other, distance in distances.items() if distance == least <= most]
    return next(iter(get_close_matches(name, nearest, n=1, cutoff=0.0)), "")


def _edit_distance(one: str, other: str) -> int:
    """Return how many letters are changed, swapped with the next one, added or left out (optimal
    string alignment): 3 between "thread" and "stream". The time is the product of the lengths.
    """
    rows = [list(range(len(other) + 1))]
    for at, letter in enumerate(one):
        last, row = rows[-1], [at + 1]
        for to, its in enumerate(other):
            least = min(last[to + 1] + 1, row[to] + 1, last[to] + (letter != its))
            if at and to and (letter, one[at - 1]) == (other[to - 1], its):
                least = min(least, rows[-2][to - 1] + 1)
            row.append(least)
        rows.append(row)
    return rows[-1][-1]


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


# Contents that are a text or a list of parts, in every API: text parts become one text, and what is
# not text is left out.

MAX_PARTS = 4096
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
OMITTED: Mapping[str, str] = MappingProxyType(
    {
        "images": "image",
        "recordings of sound": "recording",
        "videos": "video",
        "files": "file",
        "documents": "document",
        "search results": "search result",
    }
)


def _document_text(part: Mapping[str, Any]) -> str | None:
    """Return the text of a document whose source is plain text; None for other sources."""
    source = part.get("source")
    data = source.get("data") if isinstance(source, dict) and source.get("type") == "text" else None
    return data if isinstance(data, str) else None


def _search_text(part: Mapping[str, Any]) -> str | None:
    """Return the title and the texts of a search result as lines; None for other contents."""
    found = part.get("content")
    parts = found if isinstance(found, list) else []
    lines = [part.get("title"), *(each.get("text") for each in parts if isinstance(each, dict))]
    texts = [line for line in lines if isinstance(line, str)]
    return "\n".join(texts) if texts else None


# Parts that contain a text of their own, by their type.
NESTED: Mapping[str, Callable[[Mapping[str, Any]], str | None]] = MappingProxyType(
    {"document": _document_text, "search_result": _search_text}
)


class Omitted(str):
    """The text that stands for a part that is not text: "[image omitted]"."""

    __slots__ = ("kind",)
    kind: str  # the type of the part

    @classmethod
    def of(cls, kind: str) -> "Omitted":
        """Return the text that stands for a part of this type."""
        made = cls(f"[{OMITTED[MEDIA[kind]] if kind in MEDIA else f'{kind:.40}'} omitted]")
        made.kind = kind
        return made


def refuse_omitted(texts: tuple[str, ...]) -> None:
    """Raise ValueError if one of the texts stands for a part that is not text."""
    for text in texts:
        if isinstance(text, Omitted):
            raise ValueError(
                f"the model serves text only; {MEDIA[text.kind]} are not supported"
                if text.kind in MEDIA
                else f"parts of the type {text.kind!r:.40} are not supported, only text is"
            )


@dataclass(frozen=True, slots=True)
class TextParts:
    """The text parts of one API, by their ``types``. ``hints``: further fields that they may have,
    which are known to have no effect.
    """

    types: tuple[str, ...] = ("text",)
    hints: frozenset[str] = frozenset()

    def texts(self, value: Any, info: ValidationInfo) -> tuple[str, ...]:  # any JSON
        """Return the texts of a text, a list of parts, or null. Raises ValueError."""
        if value is None:
            return ()
        if isinstance(value, str):
            return (check_text(value),)
        if not isinstance(value, list):
            raise ValueError("it must be a text or a list of parts")
        if len(value) > MAX_PARTS:
            raise ValueError(f"a list of parts may have at most {MAX_PARTS}")
        return tuple(self.text_of(part, info) for part in value)

    def result(self, value: Any, info: ValidationInfo) -> tuple[str, ...]:  # any JSON
        """Return the texts of the result of a call; what is neither a text nor a list of parts is
        JSON.
        """
        is_content = value is None or isinstance(value, str)
        if isinstance(value, list):
            is_content = all(
                isinstance(part, dict) and isinstance(part.get("type"), str) for part in value
            )
        if not is_content:
            return (check_text(json.dumps(value, ensure_ascii=False)),)
        return self.texts(value, info)

    def join(self, value: Any, info: ValidationInfo) -> str:  # any JSON
        """Return the texts of a content as lines of one text. Raises ValueError."""
        return "\n".join(self.texts(value, info))

    def text_of(self, part: Any, info: ValidationInfo | None = None) -> str:
        """Return the text of a part, ``Omitted`` if it is not text. Raises ValueError for what is
        not a part.
        """
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str):
            raise ValueError('a part must be an object with a type, {"type": "text", ...}')
        if kind in NESTED and (text := NESTED[kind](part)) is not None:
            return check_text(text)
        if kind == "refusal" and isinstance(part.get(kind), str):
            return check_text(part[kind])
        if kind not in self.types:
            _note(f"type={kind:.40}", info, is_known=True)
            return Omitted.of(kind)
        text = "" if part.get("text") is None else part["text"]
        if not isinstance(text, str):
            raise ValueError(f'a part must be as {{"type": "{kind}", "text": "..."}}')
        if len(part) > 2 or "text" not in part:
            note_ignored(part, ("type", "text"), self.hints, info)
        return check_text(text)


def check_text(text: str) -> str:
    """Return a text. Raises ValueError if it is not valid Unicode."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(
            "a text is not valid Unicode (it holds half of a surrogate pair)"
        ) from None
    return text


# Fields of parts that have no effect, by their path: whether they are known. The context in which a
# body is validated, because parts become texts.
NotedFields = dict[str, bool]


def note_ignored(
    part: Mapping[str, Any],
    known: tuple[str, ...],
    hints: frozenset[str],
    info: ValidationInfo | None,
) -> None:
    """Note the fields of a part except ``known`` ones. Raises ValueError for a misspelling.

    ``hints``: fields that are known to have no effect.
    """
    for name, value in part.items():
        if value is None or name in known:
            continue
        is_new = _note(name, info, is_known=name in hints)
        meant = intended_name(name, (*known, *hints)) if is_new else ""
        if meant and part.get(meant) is None:
            raise ValueError(f"{name!a} is not a field of a part; did you mean {meant}?")


def _note(name: str, info: ValidationInfo | None, *, is_known: bool) -> bool:
    """Note a field of a part. Returns whether it is unknown and was not noted before."""
    if info is None or not isinstance(info.context, dict) or len(info.context) >= MAX_IGNORED:
        return False
    path = f"{info.field_name}[].{name[:MAX_NAME_CHARS]}"
    is_new = path not in info.context
    info.context[path] = is_known
    return is_new and not is_known and len(info.context) <= MAX_COMPARED


OUTPUTS = ("output", "outputs", "results")  # fields of results of tools


def _is_image(value: Any) -> bool:  # any JSON
    return isinstance(value, dict) and "image" in str(value.get("type"))


class OtherObject(RequestModel):
    """An object of a type that an API has and that is not a text, or not only one."""

    type: str

    @property
    def text(self) -> str:
        """The text of a document or similar, or of a result, otherwise ``Omitted``."""
        part = {"type": self.type, **(self.__pydantic_extra__ or {})}
        return self.output or TextParts(()).text_of(part)

    @property
    def output(self) -> str:
        """The text of a result, "" if it has none. A list is JSON, without its images."""
        given = self.__pydantic_extra__ or {}
        output = next((given[name] for name in OUTPUTS if given.get(name)), "")
        if isinstance(output, list):
            texts = [each for each in output if not _is_image(each)]
            output = json.dumps(texts, ensure_ascii=False) if texts else ""
        return output if isinstance(output, str) else ""
