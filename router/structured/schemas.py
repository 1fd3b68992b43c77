"""JSON schemas of requests as grammars need them: bounded, without annotations, and with weaker
forms for tools whose arguments need not follow their schema.

A subschema is found by the keyword that holds it, so a property may have the name of a keyword.
"""

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from decimal import Decimal
from types import MappingProxyType
from typing import Annotated, Any
from urllib.parse import unquote

from pydantic import AfterValidator, ValidationInfo

from tramontane.proto.errors import ParameterError

MAX_GRAMMAR_CHARS = 2**17  # total of one request's schemas, without annotations
MAX_DEPTH = 32  # levels of values that a schema describes
MAX_NESTING = 96  # lists and objects in one another, of a schema's own JSON
# of a whole number in a schema, 462 digits: writing one takes time quadratic in its length
MAX_NUMBER_BITS = 1536
# product of all different values of ``multipleOf``: compiling takes 5 microseconds per remainder
MAX_MULTIPLE = 10_000
OPTIONS = "x-guidance"  # key of llguidance's options in a schema

Schema = dict[str, Any]
ANY_OBJECT: Mapping[str, Any] = MappingProxyType({"type": "object"})

# Keywords by what they hold: one schema, a list of schemas, or schemas by name.
HOLD_ONE = frozenset(
    [
        "additionalItems",
        "additionalProperties",
        "contains",
        "else",
        "if",
        "items",
        "not",
        "propertyNames",
        "then",
        "unevaluatedItems",
        "unevaluatedProperties",
    ]
)
HOLD_LIST = frozenset(("allOf", "anyOf", "items", "oneOf", "prefixItems"))
HOLD_NAMED = frozenset(
    ("$defs", "definitions", "dependentSchemas", "patternProperties", "properties")
)
# Of these, the ones whose schemas describe the same value, or none.
SAME_LEVEL = frozenset(("allOf", "anyOf", "oneOf", "not", "if", "then", "else"))
SAME_LEVEL |= {"$defs", "definitions"}
ANNOTATIONS = frozenset(
    [
        "$comment",
        "contentEncoding",
        "contentMediaType",
        "contentSchema",
        "default",
        "deprecated",
        "description",
        "example",
        "examples",
        "readOnly",
        "title",
        "writeOnly",
    ]
)
# The formats that llguidance enforces; others are annotations.
FORMATS = frozenset(
    [
        "date",
        "date-time",
        "duration",
        "email",
        "hostname",
        "ipv4",
        "ipv6",
        "time",
        "unknown",
        "uri",
        "uuid",
    ]
)
TYPES = frozenset(("array", "boolean", "integer", "null", "number", "object", "string"))


def check_numbers(schema: Schema) -> Schema:
    """Return the schema. Raises ValueError for a number that JSON does not support, or an integer
    that is too long to write.
    """
    if fault := _fault_of_numbers(schema):
        raise ValueError(fault)
    return schema


def _fault_of_numbers(value: Any) -> str:  # any JSON
    """Return why a value cannot be written as JSON, "" if it can."""
    level: list[Any] = [value]
    while level:
        if any(isinstance(node, int) and node.bit_length() > MAX_NUMBER_BITS for node in level):
            return f"a number has more than {MAX_NUMBER_BITS} bits"
        if any(isinstance(node, float) and not math.isfinite(node) for node in level):
            return "NaN and Infinity are not JSON"
        level = [child for node in level for child in _children(node)]
    return ""


def _check_tool_numbers(schema: Schema, info: ValidationInfo) -> Schema:
    """Return the schema as ``check_numbers`` does, with the tool's name in errors."""
    if fault := _fault_of_numbers(schema):
        raise ValueError(f"{fault} (in the schema of the tool {info.data.get('name')!r})")
    return schema


JsonSchema = Annotated[Schema, AfterValidator(check_numbers)]
ToolSchema = Annotated[Schema, AfterValidator(_check_tool_numbers)]  # in a model with a ``name``


def writable_schema_of(field: str) -> Callable[[Any], Any]:
    """Return a validator of whole tools, before their fields: of the schema in this field of a tool
    that is not ``strict`` it leaves out what cannot be written as JSON.
    """

    def leave_out(tool: Any) -> Any:  # any JSON
        schema = tool.get(field) if isinstance(tool, dict) else None
        if not isinstance(schema, dict) or tool.get("strict") or not _fault_of_numbers(schema):
            return tool
        return tool | {field: edited(schema, _without_unwritable)}

    return leave_out


def as_enforced(schema: Mapping[str, Any], label: str, where: str) -> Schema:
    """Return a schema without annotations and unknown formats, and with look-ahead in patterns
    rewritten where that is possible.

    ``label`` is how errors name the schema, ``where`` its parameter. Raises ParameterError if it
    is nested too deep, too large, or too hard to compile.
    """
    if is_too_deep(schema):
        raise ParameterError(
            f"{label} is nested more than {MAX_DEPTH} deep, or more than {MAX_NESTING} lists and"
            " objects deep",
            where,
        )
    made: Schema = edited(dict(schema), _without_annotations)
    if math.prod(_check_chars(made, label, where)) > MAX_MULTIPLE:
        raise ParameterError(
            f"{label}: the values of multipleOf are too large, their product may be at most"
            f" {MAX_MULTIPLE}",
            where,
        )
    return made


def as_lenient(schema: Mapping[str, Any], label: str, where: str) -> Schema:
    """Return a schema as ``as_enforced`` does, without what that would refuse, except for its
    size.
    """
    if is_too_deep(schema):
        return dict(ANY_OBJECT)
    kept = {key: value for key, value in schema.items() if key != OPTIONS}
    made: Schema = edited(kept, _without_annotations)
    if math.prod(_check_chars(made, label, where)) > MAX_MULTIPLE:
        made = edited(made, lambda each: _without(each, {"multipleOf"}))
    return made


def is_too_deep(schema: Any) -> bool:  # any JSON
    """Return whether a schema is nested deeper than it may be."""
    level = [schema]
    for _ in range(MAX_NESTING):
        level = [child for node in level for child in _children(node)]
        level = [node for node in level if isinstance(node, dict | list)]
    return bool(level) or _num_levels(schema) > MAX_DEPTH


def too_large(num_chars: int, where: str, label: str = "") -> ParameterError:
    """Return the error for schemas of this number of characters."""
    return ParameterError(
        f"{label}{': ' * bool(label)}the schemas take {num_chars} characters; they may take"
        f" {MAX_GRAMMAR_CHARS} without their descriptions",
        where,
    )


def edited(schema: Any, edit: Callable[[Schema], Schema]) -> Any:  # any JSON
    """Return a schema with all of its subschemas edited, the innermost first."""
    if not isinstance(schema, dict):
        return schema
    made: Schema = {}
    for key, value in schema.items():
        if key in HOLD_NAMED and isinstance(value, dict):
            made[key] = {name: edited(each, edit) for name, each in value.items()}
        elif key in HOLD_LIST and isinstance(value, list):
            made[key] = [edited(each, edit) for each in value]
        else:
            made[key] = edited(value, edit) if key in HOLD_ONE else value
    return edit(made)


def _num_levels(schema: Any) -> int:
    """Return how many levels of values a schema describes: 2 for a list of texts."""
    deepest = 0
    for key, child in _subschemas(schema):
        deepest = max(deepest, _num_levels(child) - (key in SAME_LEVEL))
    return deepest + 1


def _subschemas(schema: Any) -> Iterator[tuple[str, Any]]:
    """Yield the subschemas of a schema, each with the keyword that holds it."""
    for key, value in schema.items() if isinstance(schema, dict) else ():
        if key in HOLD_NAMED and isinstance(value, dict):
            yield from ((key, each) for each in value.values())
        elif key in HOLD_LIST and isinstance(value, list):
            yield from ((key, each) for each in value)
        elif key in HOLD_ONE:
            yield key, value


def _children(value: object) -> Sequence[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else ()


def _check_chars(schema: object, label: str, where: str) -> set[int]:
    """Return the digits of every ``multipleOf``: 125 of 12.5. Raises ParameterError if a schema is
    too large.
    """
    level: list[Any] = [schema]
    multiples: set[int] = set()
    num_chars = 0  # without numbers and punctuation
    while level:
        num_chars += sum(len(node) for node in level if isinstance(node, str))
        num_chars += sum(len(name) for node in level if isinstance(node, dict) for name in node)
        values = [node.get("multipleOf") for node in level if isinstance(node, dict)]
        multiples |= {_digits(value) for value in values if isinstance(value, int | float)}
        level = [child for node in level for child in _children(node)]
    if num_chars > MAX_GRAMMAR_CHARS:
        raise too_large(num_chars, where, label)
    return multiples


def _digits(number: float) -> int:
    if isinstance(number, int):
        return abs(number)  # may be too large for a float
    decimal = Decimal(str(number)).normalize()
    exponent = decimal.as_tuple().exponent
    assert isinstance(exponent, int)
    return int(abs(decimal.scaleb(-min(exponent, 0))))


def _without(schema: Schema, keys: Collection[str]) -> Schema:
    return {key: value for key, value in schema.items() if key not in keys}


def _without_unwritable(schema: Schema) -> Schema:
    """Return a schema without keywords, examples and values of ``enum`` that cannot be written as
    JSON. Its subschemas are done already.
    """
    made: Schema = {}
    for key, value in schema.items():
        if key in HOLD_NAMED and isinstance(value, dict):
            made[key] = {name: each for name, each in value.items() if _is_writable(each)}
        elif key in HOLD_LIST | {"enum", "examples"} and isinstance(value, list):
            is_value = key not in HOLD_LIST
            kept = [each for each in value if _is_writable(each, is_value=is_value)]
            if kept or not value:
                made[key] = kept
        elif _is_writable(value, is_value=key not in HOLD_ONE):
            made[key] = value
    return made


def _is_writable(value: Any, *, is_value: bool = False) -> bool:
    """Return whether a value, or what should be a schema, can be written as JSON."""
    return (isinstance(value, dict) and not is_value) or not _fault_of_numbers(value)


def _without_annotations(schema: Schema) -> Schema:
    """Return a schema without annotations, and without keywords that are null: not given."""
    made = _without(schema, ANNOTATIONS)
    made = {key: value for key, value in made.items() if value is not None or key == "const"}
    if not isinstance(name := made.get("format", "date"), str) or name not in FORMATS:
        del made["format"]
    if isinstance(pattern := made.get("pattern"), str) and "(?" in pattern:
        first, *others = without_lookahead(pattern)
        made["pattern"] = first
        if others and isinstance(also := made.get("allOf", []), list):
            made["allOf"] = [*also, *({"pattern": other} for other in others)]
    return made


# Patterns with look-ahead, which grammars do not have, as several patterns that a text must all
# match. "Not only of these characters" becomes "one other character".

NOT_ONLY = re.compile(r"\^\(\?!\^?\[([^\]\\^][^\]\\]*)\]\*\$\)(.*)", re.DOTALL)
# What pydantic 2.12 writes for decimals with a number of digits. It means anything, as its first
# choice has no end; the text after ``$`` is what was meant.
OF_DIGITS = re.compile(
    r"\^\(\?!\^\[-\+\.\]\*\$\)\[\+-\]\?0\*\(\?:(?P<whole>\\d\{0,\d+\})"
    r"\|\(\?=(?P<chars>\[\\d\.\]\{1,\d+\})0\*\$\)(?P<fraction>\\d\S{1,9}\\\.\\d\S{1,9})0\*\$\)"
)


def without_lookahead(pattern: str) -> tuple[str, ...]:
    r"""Return patterns without look-ahead that a text matches together as it matches this one; the
    pattern itself where there is no such form.

    ``^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$`` is ``^[+-]?0*\d*\.?\d*$`` with ``[^-+.]``.
    """
    if found := OF_DIGITS.fullmatch(pattern):
        number = f"^[+-]?0*(?:{found['whole']}|{found['fraction']}0*)$"
        return number, f"^[+-]?0*{found['chars']}0*$", "[0-9]"
    found = NOT_ONLY.fullmatch(pattern)
    if found is None or "|" in found[2]:
        return (pattern,)
    return f"^{found[2]}", f"[^{found[1]}]"


# Weaker schemas, for a tool whose calls need not follow its own: each allows what the one before
# does, and more.

NUM_WEAKER = 3
SHAPE = frozenset(
    [
        "$defs",
        "$ref",
        "additionalProperties",
        "anyOf",
        "const",
        "definitions",
        "enum",
        "items",
        "prefixItems",
        "properties",
        "required",
        "type",
    ]
)
WITH_LOOK_AROUND = re.compile(r"\(\?[=!<]|\\[1-9bBkZ]")


def weaker_schema(schema: Schema, number: int) -> Schema:
    """Return a schema that allows more, by its number from 1 on: without keywords that have no
    meaning, with those alone that say which values there are, and any object.
    """
    if number == NUM_WEAKER:
        return dict(ANY_OBJECT)
    made: Schema = edited(schema, lambda each: _repaired(each, schema))
    return made if number == 1 else edited(made, _shape)


def _repaired(schema: Schema, root: Schema) -> Schema:
    """Return a schema without keywords whose values are not as JSON Schema has them, or which
    contradict one another.
    """
    made = {key: _with_schemas(key, value) for key, value in schema.items()}
    wrong = {key for key, value in made.items() if not _is_meaningful(key, value, root)}
    for low, high in LIMITS:
        given = [made[key] for key in (low, high) if key in made and key not in wrong]
        if len(given) == 2 and not any(map(_is_truth, given)) and given[0] > given[1]:
            wrong |= {low, high}
    if wrong & {"properties", "patternProperties"}:
        wrong.add("additionalProperties")  # it is about the properties that are not named
    made = _without(made, wrong)
    if isinstance(types := made.get("type"), list):
        made["type"] = [each for each in types if each in TYPES]
    return made


def _with_schemas(key: str, value: Any) -> Any:  # any JSON
    """Return the value of a keyword with ``true`` in place of what should be a schema in it."""
    if key in HOLD_NAMED and isinstance(value, dict):
        return {name: each if _is_schema(each) else True for name, each in value.items()}
    if key in HOLD_LIST and isinstance(value, list):
        return [each if _is_schema(each) else True for each in value]
    return value


def _is_meaningful(key: str, value: Any, root: Schema) -> bool:
    if key in HOLD_ONE:
        return _is_schema(value) or (key in HOLD_LIST and isinstance(value, list))
    if key in HOLD_LIST:
        return isinstance(value, list) and bool(value)
    if key in HOLD_NAMED:
        return isinstance(value, dict) and not (
            key == "patternProperties" and any(map(WITH_LOOK_AROUND.search, value))
        )
    check = MEANINGFUL.get(key)
    if check is not None:
        return check(value)
    return key != "$ref" or (isinstance(value, str) and _leads_somewhere(value, root))


def _is_schema(value: Any) -> bool:
    return isinstance(value, dict | bool)


def _is_truth(value: Any) -> bool:
    return isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not _is_truth(value)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not _is_truth(value) and value >= 0


def _is_type(value: Any) -> bool:
    types = value if isinstance(value, list) else [value]
    return any(isinstance(each, str) and each in TYPES for each in types)


def _is_pattern(value: Any) -> bool:
    return isinstance(value, str) and WITH_LOOK_AROUND.search(value) is None


LIMITS = (
    ("minimum", "maximum"),
    ("minLength", "maxLength"),
    ("minItems", "maxItems"),
    ("minProperties", "maxProperties"),
)
MEANINGFUL: Mapping[str, Callable[[Any], bool]] = MappingProxyType(
    {
        **dict.fromkeys((name for pair in LIMITS[1:] for name in pair), _is_count),
        **dict.fromkeys(LIMITS[0], _is_number),
        **dict.fromkeys(
            ("exclusiveMinimum", "exclusiveMaximum"),
            lambda value: _is_truth(value) or _is_number(value),
        ),
        "multipleOf": lambda value: _is_number(value) and value > 0,
        "type": _is_type,
        "pattern": _is_pattern,
        "format": lambda value: isinstance(value, str),
        "enum": lambda value: isinstance(value, list) and bool(value),
        "required": lambda value: (
            isinstance(value, list) and all(isinstance(each, str) for each in value)
        ),
        "$schema": lambda value: False,
        "$id": lambda value: False,
        OPTIONS: lambda value: False,
    }
)


def _leads_somewhere(reference: str, root: Schema) -> bool:
    """Return whether a JSON pointer of a schema to itself is right."""
    first, *names = unquote(reference).split("/")
    found: Any = root
    for name in names:
        key = name.replace("~1", "/").replace("~0", "~")
        found = found.get(key) if isinstance(found, dict) else None
    return first == "#" and _is_schema(found)


def _shape(schema: Schema) -> Schema:
    made = {key: value for key, value in schema.items() if key in SHAPE}
    if "patternProperties" in schema:
        made.pop("additionalProperties", None)
    return made
