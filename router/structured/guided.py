"""vLLM's fields that constrain an answer, by their new name (``structured_outputs``) and their old
ones (``guided_*``).
"""

from typing import Annotated, Any

from pydantic import BeforeValidator, Field
from pydantic_core import from_json

from tramontane.proto.errors import ParameterError
from tramontane.router.structured.answer_rules import Constraint
from tramontane.router.structured.grammar import ResponseFormat
from tramontane.router.structured.request_model import (
    NoEffect,
    RequestModel,
    check_depth,
    unsupported_except,
)
from tramontane.router.structured.schemas import MAX_GRAMMAR_CHARS, MAX_NESTING, check_numbers

MAX_CHOICES = 1024


def _check_schema(value: Any) -> Any:  # any JSON
    if value is not None and not isinstance(value, dict | str):
        raise ValueError("it must be a JSON schema, as an object or as the text of one")
    if isinstance(value, str) and len(value) > MAX_GRAMMAR_CHARS:
        raise ValueError(f"its text has {len(value)} characters; it may have {MAX_GRAMMAR_CHARS}")
    return check_numbers(check_depth(value, MAX_NESTING)) if isinstance(value, dict) else value


SchemaInput = dict[str, Any] | Annotated[str, Field(max_length=MAX_GRAMMAR_CHARS)] | None
SchemaOrText = Annotated[
    dict[str, Any] | str | None, BeforeValidator(_check_schema, json_schema_input_type=SchemaInput)
]
Pattern = Annotated[str, Field(min_length=1, max_length=MAX_GRAMMAR_CHARS)]
Choices = Annotated[
    tuple[Annotated[str, Field(min_length=1)], ...],
    Field(min_length=1, max_length=MAX_CHOICES, strict=False, fail_fast=True),
]
GRAMMAR_REASON = (
    "grammars are not supported, since their cost per token has no bound; use a JSON schema, regex"
    " or choice"
)
Grammar = Annotated[Any, unsupported_except(reason=GRAMMAR_REASON)]
Whitespace = Annotated[Any, unsupported_except(reason="JSON is written on one line; leave it out")]


MAX_ALLOWED_TOKENS, MAX_TOKEN_ID = 1024, 2**31
AllowedTokens = Annotated[
    tuple[Annotated[int, Field(ge=0, lt=MAX_TOKEN_ID)], ...],
    Field(min_length=1, max_length=MAX_ALLOWED_TOKENS, strict=False, fail_fast=True),
]


class StructuredOutputs(RequestModel):
    """One of the first four fields constrains the answer."""

    json_: SchemaOrText = Field(None, alias="json")
    regex: Pattern | None = None
    choice: Choices | None = None
    json_object: bool | None = None
    grammar: Grammar = None
    structural_tag: Annotated[Any, unsupported_except()] = None
    disable_additional_properties: Annotated[Any, unsupported_except()] = None
    whitespace_pattern: Whitespace = None
    disable_any_whitespace: NoEffect = None  # there is at most one space in a place
    disable_fallback: NoEffect = None  # there is one backend


class GuidedFields(RequestModel):
    """Fields of both completion endpoints that constrain an answer."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: SchemaOrText = None
    guided_regex: Pattern | None = None
    guided_choice: Choices | None = None
    guided_json_object: bool | None = None
    guided_grammar: Grammar = None
    guided_whitespace_pattern: Whitespace = None
    guided_decoding_backend: NoEffect = None  # there is one
    allowed_token_ids: AllowedTokens | None = None


def answer_constraint(request: GuidedFields) -> ResponseFormat | Constraint | None:
    """Return the constraint on the answer; None for text. Raises ParameterError if several fields
    set one, or JSON none.
    """
    given: list[ResponseFormat | Constraint] = [
        *_constraints(
            "guided_",
            request.guided_json,
            request.guided_regex,
            request.guided_choice,
            request.guided_json_object,
        )
    ]
    if (outputs := request.structured_outputs) is not None:
        given += _constraints(
            "structured_outputs.", outputs.json_, outputs.regex, outputs.choice, outputs.json_object
        )
    if request.allowed_token_ids is not None:
        given.append(Constraint("tokens", request.allowed_token_ids, "allowed_token_ids"))
    names = [each.where for each in given if isinstance(each, Constraint)]
    if request.response_format is not None and request.response_format.type != "text":
        given.append(request.response_format)
        names.append("response_format")
    if len(given) > 1:
        raise ParameterError(
            f"{names[0]} and {names[1]} both say what the answer must be; give one of them",
            names[0],
        )
    return given[0] if given else None


def _constraints(
    prefix: str,
    schema: dict[str, Any] | str | None,
    regex: str | None,
    choice: tuple[str, ...] | None,
    is_object: bool | None,
) -> list[Constraint]:
    found: list[Constraint] = []
    if schema is not None:
        found.append(Constraint("json", _schema(schema, f"{prefix}json"), f"{prefix}json"))
    if regex is not None:
        found.append(Constraint("regex", regex, f"{prefix}regex"))
    if choice is not None:
        found.append(Constraint("choice", choice, f"{prefix}choice"))
    if is_object:
        found.append(Constraint("json", {"type": "object"}, f"{prefix}json_object"))
    return found


def _schema(schema: dict[str, Any] | str, where: str) -> dict[str, Any]:
    """Return a schema that is given as an object or as its JSON."""
    if not isinstance(schema, str):
        return schema
    try:
        parsed = from_json(schema)
        if isinstance(parsed, dict):
            return check_numbers(parsed)
    except ValueError as error:
        raise ParameterError(
            f"{where} is not the JSON of a schema: {error!s:.200}", where
        ) from None
    raise ParameterError(f"{where} must be a JSON schema, which is an object", where)
