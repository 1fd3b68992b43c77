"""What an answer or the arguments of a call must be, as rules of a grammar (llguidance's Lark),
within bounds.
"""

import json
import math
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Annotated, Any, Literal, NamedTuple

from llguidance import LLMatcher
from pydantic import AfterValidator

from tramontane.proto.errors import ParameterError

MAX_GRAMMAR_CHARS = 2**16  # of all of one request's schemas
MAX_DEPTH = 32  # of a schema, counting every list and object
# of a whole number in a schema, 462 digits: writing one takes time quadratic in its length
MAX_NUMBER_BITS = 1536
# product of all different values of ``multipleOf``: compiling takes 5 microseconds per remainder
MAX_MULTIPLE = 10_000
# No numeric escapes: "\u0061" would count as a property that the schema does not name, although it
# reads as "a".
JSON_STYLE = {
    "whitespace_flexible": False,
    "item_separator": ", ?",
    "key_separator": ": ?",
    "json_allowed_escapes": 'nrbtf\\"',
}
OPTIONS = "x-guidance"  # key of llguidance's options in a schema


def check_numbers(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema. Raises ValueError for a number that JSON does not have, or a whole one
    that is too long to write.
    """
    level: list[Any] = [schema]
    while level:
        if any(isinstance(node, int) and node.bit_length() > MAX_NUMBER_BITS for node in level):
            raise ValueError(f"a number has more than {MAX_NUMBER_BITS} bits")
        if any(isinstance(node, float) and not math.isfinite(node) for node in level):
            raise ValueError("NaN and Infinity are not JSON")
        level = [child for node in level for child in _children(node)]
    return schema


JsonSchema = Annotated[dict[str, Any], AfterValidator(check_numbers)]


class Constraint(NamedTuple):
    """What the answer must be: JSON of a schema (a dictionary), one of several texts, or a text
    that matches a pattern.

    ``where``: the parameter of the request.
    """

    kind: Literal["json", "choice", "regex"]
    value: Any
    where: str


class AnswerRule(NamedTuple):
    """A rule of the grammar. ``where``: its place in the request."""

    rule: str
    where: str
    definition: str


def constraint_rule(rule: str, constraint: Constraint) -> AnswerRule:
    """Return the rule for a constraint. Raises ParameterError for one that is too large."""
    kind, value, where = constraint
    if kind == "json":
        return json_rule(rule, value, where)
    if (num_chars := len(value) if kind == "regex" else sum(map(len, value))) > MAX_GRAMMAR_CHARS:
        raise too_large(num_chars, where)
    if kind == "choice":
        return AnswerRule(
            rule, where, " | ".join(json.dumps(text, ensure_ascii=False) for text in value)
        )
    # llguidance writes a pattern between slashes, with an escape for those in it.
    written = json.loads(LLMatcher.grammar_from_regex(value))["grammars"][0]["lark_grammar"]
    return AnswerRule(rule, where, written.removeprefix("start: "))


def json_rule(
    rule: str, schema: Mapping[str, Any], where: str, *, lenient: bool = False
) -> AnswerRule:
    """Return the rule for JSON of a schema. Raises ParameterError for one that is too large or too
    deep.

    ``lenient``: keywords that are not supported are ignored.
    """
    if OPTIONS in schema:
        raise ParameterError(f"{where}: {OPTIONS} is not supported; leave it out", where)
    multiples = _multiple_ofs(schema, where)
    text = json.dumps({**schema, OPTIONS: JSON_STYLE | {"lenient": lenient}}, allow_nan=False)
    # bounds the product below, whose factors may have hundreds of digits
    if len(text) > MAX_GRAMMAR_CHARS:
        raise too_large(len(text), where)
    if math.prod(multiples) > MAX_MULTIPLE:
        raise ParameterError(
            f"{where}: the values of multipleOf are too large, their product may be at most"
            f" {MAX_MULTIPLE}",
            where,
        )
    return AnswerRule(rule, where, f"%json {text}")


def too_large(num_chars: int, where: str) -> ParameterError:
    """Return the error for schemas of so many characters."""
    return ParameterError(
        f"the schemas take {num_chars} characters; they may take {MAX_GRAMMAR_CHARS}", where
    )


def _multiple_ofs(schema: object, where: str) -> set[int]:
    """Return the digits of every ``multipleOf``: 125 of 12.5. Raises ParameterError if a schema is
    too deep or too large.
    """
    level: list[Any] = [schema]
    multiples: set[int] = set()
    num_chars = 0  # without numbers and punctuation
    for _ in range(MAX_DEPTH):
        num_chars += sum(len(node) for node in level if isinstance(node, str))
        num_chars += sum(len(name) for node in level if isinstance(node, dict) for name in node)
        values = [node.get("multipleOf") for node in level if isinstance(node, dict)]
        multiples |= {_digits(value) for value in values if isinstance(value, int | float)}
        level = [child for node in level for child in _children(node)]
    if level:
        raise ParameterError(f"{where} is nested more than {MAX_DEPTH} deep", where)
    if num_chars > MAX_GRAMMAR_CHARS:
        raise too_large(num_chars, where)
    return multiples


def _digits(number: float) -> int:
    if isinstance(number, int):
        return abs(number)  # may be too large for a float
    decimal = Decimal(str(number)).normalize()
    exponent = decimal.as_tuple().exponent
    assert isinstance(exponent, int)
    return int(abs(decimal.scaleb(-min(exponent, 0))))


def _children(value: object) -> Sequence[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else ()
