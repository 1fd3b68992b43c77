"""JSON schemas as grammars need them: what counts towards their bounds, what is rewritten, and what
a tool's schema loses where it cannot be enforced.
"""

import itertools
import json
import re
from contextlib import suppress
from typing import Any

import llguidance
import pytest
from test_grammar import BY_NAME, CALLS, PATTERNS, WEATHER, _format, _takes, _tools

from tramontane.proto.errors import ParameterError
from tramontane.router.structured import validator
from tramontane.router.structured.grammar import Function, ResponseFormat, build_grammar
from tramontane.router.structured.schemas import (
    FORMATS,
    MAX_GRAMMAR_CHARS,
    MAX_NESTING,
    weaker_schema,
    without_lookahead,
)

ARGS = BY_NAME.args
DECIMAL = r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"  # as pydantic writes it up to 2.12
PLACES = r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d{0,2}0*$"
DIGITS = r"^(?!^[-+.]*$)[+-]?0*(?:\d{0,3}|(?=[\d.]{1,4}0*$)\d*\.\d*0*$)"
BOTH = r"^(?!^[-+.]*$)[+-]?0*(?:\d{0,2}|(?=[\d.]{1,4}0*$)\d{0,2}\.\d{0,1}0*$)"


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "additionalProperties": False} | (
        {"required": list(properties)} if properties else {}
    )


def _tool_takes(schema: Any, *arguments: str, name: str = "f") -> list[bool]:
    grammar = build_grammar(None, _tools({"name": name, "parameters": schema}), "required", BY_NAME)
    assert ARGS is not None
    return [_takes(grammar, CALLS, name, ARGS, text) for text in arguments]


# Values of a wrong type

KEYWORDS = (
    *("$defs", "$ref", "additionalProperties", "allOf", "anyOf", "const", "dependentRequired"),
    *("enum", "exclusiveMinimum", "format", "items", "maxItems", "maxLength", "minimum"),
    *("multipleOf", "oneOf", "not", "pattern", "patternProperties", "prefixItems", "properties"),
    *("required", "type", "x-guidance", "title", "default", "examples", "if", "definitions"),
)
VALUES = ([], {}, [[]], [{}], {"a": []}, "x", 1, -1.5, True, None, ["a", 1], [None])


@pytest.mark.parametrize("keyword", KEYWORDS)
def test_a_value_of_a_wrong_type_is_refused_or_left_out_and_never_a_defect(keyword: str) -> None:
    """``{"format": []}`` once was: a list can be in no set."""
    for value in VALUES:
        for schema in ({keyword: value}, {"type": "object", "properties": {"a": {keyword: value}}}):
            with suppress(ParameterError):
                build_grammar(_format(schema), None, None, BY_NAME)
            tool = {"name": "f", "parameters": schema}
            for is_strict in (True, False):
                with suppress(ParameterError):
                    build_grammar(None, _tools(tool | {"strict": is_strict}), "required", BY_NAME)


# Annotations


def test_descriptions_do_not_count() -> None:
    """58 tools of 143 KB of JSON, of which three quarters are descriptions."""
    text = "What the client should know about it. " * 5
    fields = {
        f"field_{j}": {"type": ("string", "integer")[j % 2], "description": text, "title": "Field"}
        for j in range(9)
    }
    tools = _tools(
        *(
            {"name": f"tool_{i}", "description": text, "parameters": _object(**fields)}
            for i in range(58)
        )
    )
    assert sum(len(tool.model_dump_json()) for tool in tools) > 143_000
    grammar = build_grammar(None, tools, "auto", BY_NAME)
    assert text not in grammar
    assert "field_8" in grammar
    assert len(grammar) < MAX_GRAMMAR_CHARS / 2
    assert tools[0].function.parameters == _object(**fields), "what the model sees"


ANNOTATED = {
    "description": "x",
    "title": "x",
    "examples": [1],
    "default": 1,
    "$comment": "x",
    "deprecated": True,
    "readOnly": True,
}


def test_annotations_change_nothing_at_any_depth() -> None:
    plain = {"type": "array", "items": {"anyOf": [{"type": "integer"}, {"enum": ["x"]}]}}
    noted = ANNOTATED | {
        "type": "array",
        "items": ANNOTATED
        | {"anyOf": [ANNOTATED | {"type": "integer"}, ANNOTATED | {"enum": ["x"]}]},
    }
    defined = {"$defs": {"a": ANNOTATED | {"type": "integer"}}, "$ref": "#/$defs/a"}
    assert build_grammar(_format(_object(a=noted))) == build_grammar(_format(_object(a=plain)))
    grammar = build_grammar(_format(defined))
    assert '"$defs":{"a":{"type":"integer"}}' in grammar


def test_a_property_may_have_the_name_of_an_annotation() -> None:
    schema = _object(**{name: {"type": "integer", "description": "x"} for name in ANNOTATED})
    grammar = build_grammar(_format(schema))
    assert _takes(grammar, json.dumps(dict.fromkeys(ANNOTATED, 7)))
    assert not _takes(grammar, json.dumps(dict.fromkeys(ANNOTATED, "x")))
    constants = _object(a={"const": {"title": "x", "default": 1}}, b={"enum": [{"title": "y"}]})
    assert _takes(
        build_grammar(_format(constants)),
        '{"a": {"title": "x", "default": 1}, "b": {"title": "y"}}',
    )


# Depth


def test_the_levels_of_objects_count_once() -> None:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(20):
        schema = _object(a={"anyOf": [schema, {"type": "null"}]})
    grammar = build_grammar(_format(schema))
    assert _takes(grammar, '{"a": ' * 20 + "1" + "}" * 20)
    assert not _takes(grammar, '{"a": ' * 20 + '"x"' + "}" * 20)


def test_values_and_alternatives_are_bounded_by_the_nesting_of_their_json() -> None:
    either: Any = {}
    for _ in range(MAX_NESTING // 2 + 1):
        either = {"anyOf": [either]}
    value: Any = 1
    for _ in range(MAX_NESTING):
        value = [value]
    for schema in (either, {"const": value}):
        with pytest.raises(ParameterError, match=f"more than {MAX_NESTING} lists and objects"):
            build_grammar(_format(schema))
    assert build_grammar(_format(either["anyOf"][0]["anyOf"][0]))


# Patterns


@pytest.mark.parametrize("pattern", [DECIMAL, PLACES])
def test_a_decimals_pattern_is_the_same_without_look_ahead(pattern: str) -> None:
    parts = without_lookahead(pattern)
    assert not any("(?" in part for part in parts)
    texts = ["".join(each) for n in range(6) for each in itertools.product("+-.019", repeat=n)]
    for text in texts:
        assert all(re.search(part, text) for part in parts) == bool(re.search(pattern, text)), text


@pytest.mark.parametrize("pattern", [DECIMAL, PLACES])
def test_a_grammar_follows_a_decimals_pattern(pattern: str) -> None:
    grammar = build_grammar(_format({"type": "string", "pattern": pattern}))
    for n in range(4):
        for each in itertools.product("+.0a", repeat=n):
            text = "".join(each)
            assert _takes(grammar, f'"{text}"') == bool(re.search(pattern, text)), text
    assert _takes(grammar, '"-12.50"')


@pytest.mark.parametrize(
    ("pattern", "taken", "refused"),
    [
        (DIGITS, ["1", "-12.3", "123", "0001.230", ".5"], ["1234", "12.34", "", ".", "-"]),
        (BOTH, ["1", "-12.3", "12.", "0012.300"], ["123", "1.23", "", ".", "-"]),
    ],
)
def test_a_decimal_with_a_number_of_digits_has_these(
    pattern: str, taken: list[str], refused: list[str]
) -> None:
    """Its pattern means any text, so every answer matches it."""
    grammar = build_grammar(_format({"type": "string", "pattern": pattern}))
    assert [_takes(grammar, f'"{text}"') for text in taken] == [True] * len(taken)
    assert [_takes(grammar, f'"{text}"') for text in refused] == [False] * len(refused)
    assert all(re.search(pattern, text) for text in taken)


@pytest.mark.parametrize("pattern", ["^(?!a)b", "^(?!^[a]*$)b|c", "a(?=b)", "(?i)a", "^(?:a|b)$"])
def test_other_patterns_stay_as_they_are(pattern: str) -> None:
    assert without_lookahead(pattern) == (pattern,)


def test_a_rewritten_pattern_keeps_what_else_a_schema_has() -> None:
    schema = {"type": "string", "pattern": DECIMAL, "allOf": [{"pattern": "5$"}], "maxLength": 3}
    grammar = build_grammar(_format(schema))
    assert _takes(grammar, '"2.5"')
    for text in ("2.4", "12.5", "5", "."):
        assert _takes(grammar, f'"{text}"') == (text == "5")


# Formats


def test_formats_that_are_enforced_are_those_that_the_library_knows() -> None:
    def is_known(name: str) -> bool:
        schema = {"type": "string", "format": name, "x-guidance": {"lenient": False}}
        return not llguidance.LLMatcher.validate_grammar(f"start: %json {json.dumps(schema)}")

    others = ("regex", "binary", "int64", "uri-reference", "idn-email", "iri", "json-pointer")
    assert all(map(is_known, FORMATS))
    assert not any(map(is_known, others))


@pytest.mark.parametrize("name", ["regex", "my-own", 5, None])
def test_an_unknown_format_is_an_annotation(name: object) -> None:
    grammar = build_grammar(_format(_object(a={"type": "string", "format": name})))
    assert _takes(grammar, '{"a": "anything ("}')
    assert not _takes(grammar, '{"a": 5}')
    dates = build_grammar(_format({"type": "string", "format": "date"}))
    assert not _takes(dates, '"anything"')


# Keywords that are null

NULLS = dict.fromkeys(
    [
        *("properties", "enum", "required", "items", "additionalProperties", "anyOf", "$ref"),
        *("minimum", "maxLength", "pattern", "format", "type", "title", "$defs", "x-guidance"),
    ]
)


def _takes_with(kind: str, schema: dict[str, Any], *texts: str) -> list[bool]:
    if kind == "response_format":
        return [_takes(build_grammar(_format(schema)), text) for text in texts]
    tools = _tools({"name": "f", "parameters": schema, "strict": kind == "strict"})
    grammar = build_grammar(None, tools, "required", BY_NAME)
    assert ARGS is not None
    return [_takes(grammar, CALLS, "f", ARGS, text) for text in texts]


KINDS = pytest.mark.parametrize("kind", ["response_format", "strict", "tool"])


@KINDS
def test_a_keyword_that_is_null_is_not_given_at_any_depth(kind: str) -> None:
    schema = NULLS | {"properties": {"a": NULLS | {"anyOf": [NULLS | {"type": "integer"}]}}}
    schema |= {"type": "object", "required": ["a"]}
    assert _takes_with(kind, schema, '{"a": 5}', '{"a": "x"}', "{}") == [True, False, False]
    closed = NULLS | {"type": "object", "additionalProperties": False}
    assert _takes_with(kind, closed, "{}", '{"a": 5}') == [True, False]


@KINDS
def test_null_is_a_value_where_values_are(kind: str) -> None:
    schema = _object(a={"const": None}, b={"enum": [None, 5]}, null={"type": "null"})
    assert _takes_with(
        kind,
        schema,
        '{"a": null, "b": null, "null": null}',
        '{"a": 5, "b": null, "null": null}',
        '{"a": null, "b": 6, "null": null}',
    ) == [True, False, False]


# ``response_format``

ONE_NUMBER = _object(a={"type": "integer"})


@pytest.mark.parametrize(
    "given",
    [
        {"type": "json_object", "schema": _object(a={"type": "integer"})},
        {"type": "json_schema", "schema": _object(a={"type": "integer"})},
        *(
            {
                "type": "json_schema",
                "json_schema": name | {"schema": _object(a={"type": "integer"})},
            }
            for name in ({}, {"name": None}, {"name": "a b"}, {"name": "x" * 200}, {"name": ""})
        ),
    ],
)
def test_a_schema_is_followed_wherever_it_is(given: dict[str, Any]) -> None:
    grammar = build_grammar(ResponseFormat.model_validate(given))
    assert _takes(grammar, '{"a": 1}')
    assert not _takes(grammar, '{"a": "x"}')
    assert not _takes(grammar, "{}")


def test_errors_name_the_schema_next_to_the_type() -> None:
    given = {"type": "json_object", "schema": {"not": {}}}
    with pytest.raises(ParameterError, match=r"^response_format\.schema cannot be") as refused:
        build_grammar(ResponseFormat.model_validate(given))
    assert refused.value.parameter == "response_format.schema"


# Schemas of tools that cannot be enforced

B = {"type": "integer", "minimum": 0}
A_AND_B = ('{"a": 5, "b": 1}', '{"a": 5, "b": -1}')


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "int"},
        {"type": ["int", "str"]},
        {"type": None},
        {"type": 5},
        {"type": {"type": "string"}},
        {"pattern": "^(?!x)y"},
        {"pattern": r"(a)\1"},
        {"pattern": r"\bfoo\b"},
        {"pattern": r"^a\Z"},
        {"pattern": 5},
        {"type": "integer", "minimum": "0"},
        {"minimum": None},
        {"type": "integer", "minimum": 7, "maximum": 3},
        {"type": "integer", "minLength": 1.5},
        {"minItems": -1},
        {"multipleOf": 0},
        {"multipleOf": "x"},
        {"multipleOf": 10_007},
        {"format": None},
        {"$ref": "#/$defs/none"},
        {"$ref": "https://example.com/schema"},
        {"$ref": "Other"},
        {"$ref": 5},
        {"$schema": "https://example.com/schema"},
        {"anyOf": {}},
        {"anyOf": []},
        {"oneOf": []},
        {"allOf": None},
        {"enum": []},
        {"enum": "x"},
        {"properties": []},
        {"properties": {"x": "string"}},
        {"properties": None, "additionalProperties": False},
        {"type": ["integer", "object"], "required": True},
        {"required": None},
        {"items": "string"},
        {"additionalProperties": 5},
        {"patternProperties": {"^(?!x)": {"type": "string"}}},
        {"not": {"const": 7}},
        {"x-guidance": {"lenient": False}},
    ],
)
def test_only_what_has_no_meaning_is_ignored(schema: dict[str, Any]) -> None:
    """The other property is enforced as before."""
    assert _tool_takes(_object(a=schema, b=B), *A_AND_B) == [True, False]


@pytest.mark.parametrize("kind", ["Object", "", "dict", 5, {}, [], ["Object", "null"], ["object"]])
def test_an_odd_type_of_the_arguments_is_an_object(kind: object) -> None:
    schema = _object(b=B) | {"type": kind}
    assert _tool_takes(schema, '{"b": 1}', '{"b": -1}', "5") == [True, False, False]
    strict = _tools({"name": "f", "parameters": schema, "strict": True})
    with pytest.raises(ParameterError, match=r'\("f"\): its type must be object'):
        build_grammar(None, strict, "required", BY_NAME)


@pytest.mark.parametrize("kind", ["array", ["string", "null"]])
def test_another_type_of_the_arguments_is_refused(kind: object) -> None:
    with pytest.raises(ParameterError, match=r'\("f"\): its type must be object'):
        _tool_takes({"type": kind}, "{}")


NAN, LONG = float("nan"), 10**479


@pytest.mark.parametrize("number", [NAN, float("inf"), -LONG], ids=["nan", "inf", "long"])
@pytest.mark.parametrize(
    "schema",
    [
        {"default": ...},
        {"default": {"a": [...]}},
        {"example": ...},
        {"const": ...},
        {"const": {"a": ...}},
        {"enum": [...]},
        {"minimum": 0, "maximum": ...},
        {"items": ...},
        {"anyOf": [...]},
        {"properties": [...]},
        {"not": [...]},
        {"x-mine": {"default": ...}},
    ],
    ids=str,
)
def test_what_json_cannot_say_is_left_out_of_a_schema(
    schema: dict[str, Any], number: float
) -> None:
    """The model does not see it either."""
    odd = _filled(schema, number)
    assert _tool_takes(_object(a=odd, b=B), *A_AND_B) == [True, False]
    (tool,) = _tools({"name": "f", "parameters": _object(a=odd, b=B)})
    kept = {"minimum": 0} if "minimum" in schema else {}
    assert tool.function.parameters == _object(a=kept, b=B)
    with pytest.raises(ValueError, match=r"parameters\n.*in the schema of the tool 'f'"):
        _tools({"name": "f", "parameters": _object(a=odd, b=B), "strict": True})


def _filled(schema: Any, number: float) -> Any:
    if isinstance(schema, dict):
        return {key: _filled(value, number) for key, value in schema.items()}
    if isinstance(schema, list):
        return [_filled(each, number) for each in schema]
    return number if schema is ... else schema


def test_what_json_can_say_stays_next_to_what_it_cannot() -> None:
    schema = _object(
        default={"enum": [NAN, "x", {"a": LONG}], "examples": [1, NAN], "title": "A"},
        b={"anyOf": [{"type": "integer", "default": NAN}, NAN, {"type": "null"}]},
        c=NAN,
    )
    (tool,) = _tools({"name": "f", "parameters": schema | {"default": LONG}})
    b = {"anyOf": [{"type": "integer"}, {"type": "null"}]}
    default = {"enum": ["x"], "examples": [1], "title": "A"}
    made = _object(default=default, b=b) | {"required": ["default", "b", "c"]}
    assert tool.function.parameters == made


def test_without_the_properties_that_are_named_others_are_allowed() -> None:
    wrong = {"type": "object", "properties": [], "additionalProperties": False}
    texts = ('{"a": {"x": 1}, "b": 1}', '{"a": {"x": 1}, "b": -1}')
    assert _tool_takes(_object(a=wrong, b=B), *texts) == [True, False]


@pytest.mark.parametrize(
    ("schema", "taken", "refused"),
    [
        ({"type": "integer", "minimum": 3, "exclusiveMinimum": True}, "4", "3"),
        ({"type": "integer", "minimum": 3, "exclusiveMinimum": False}, "3", "2"),
        ({"type": "integer", "maximum": 3, "exclusiveMaximum": True}, "2", "3"),
        ({"type": ["integer", "str"]}, "3", '"x"'),
        ({"type": "integer", "description": 5, "title": None}, "3", '"x"'),
        ({"type": "string", "pattern": DECIMAL}, '"2.5"', '"x"'),
        ({"items": {"pattern": "(?=x)"}, "type": "array"}, '["y"]', "3"),
        ({"$ref": "#/properties/b"}, "3", '"x"'),
    ],
)
def test_what_has_a_meaning_is_enforced(schema: dict[str, Any], taken: str, refused: str) -> None:
    given = _object(a=schema, b={"type": "integer"}, c={"pattern": "(?<=x)"})
    texts = [f'{{"a": {text}, "b": 1, "c": "x"}}' for text in (taken, refused)]
    assert _tool_takes(given, *texts) == [True, False]


def test_what_cannot_be_enforced_leaves_the_shape_and_then_any_object() -> None:
    two = _object(a={"type": "integer"}) | {
        "patternProperties": {"^x": {"type": "string"}, "x$": {"type": "integer"}}
    }
    assert _tool_takes(two, '{"a": 1, "xx": null}', '{"a": "x"}') == [True, False]
    huge = _object(a={"type": "number", "maximum": 1e300}, b=B)
    assert _tool_takes(huge, A_AND_B[0], '{"a": 5, "b": "x"}') == [True, False]
    never = _object(a={"type": "integer", "enum": ["x"]})
    assert _tool_takes(never, '{"a": null}', "{}", "[]") == [True, True, False]
    deep: dict[str, Any] = {}
    for _ in range(200):
        deep = {"items": deep}
    assert _tool_takes(_object(a=deep), '{"b": 1}', "1") == [True, False]


def test_a_tool_that_takes_long_loses_its_patterns() -> None:
    slow = _object(a={"type": "string", "allOf": PATTERNS}, b={"type": "integer"})
    assert _tool_takes(slow, '{"a": "?", "b": 1}', '{"a": "?", "b": "x"}') == [True, False]


def test_other_tools_keep_their_schemas() -> None:
    odd = {"name": "odd", "parameters": _object(a={"type": "int"})}
    grammar = build_grammar(None, _tools(odd, WEATHER), "required", BY_NAME)
    assert ARGS is not None
    assert _takes(grammar, CALLS, "odd", ARGS, '{"a": null}')
    assert _takes(grammar, CALLS, "weather", ARGS, '{"city": "Rome"}')
    assert not _takes(grammar, CALLS, "weather", ARGS, '{"city": "Oslo"}')
    strict = _tools(odd, odd | {"name": "strict", "strict": True})
    with pytest.raises(ParameterError, match=r'tools\[1\].*\("strict"\) cannot.*: int$'):
        build_grammar(None, strict, "required", BY_NAME)


def test_a_named_tools_error_has_its_own_index() -> None:
    from test_grammar import _choice

    tools = _tools(WEATHER, {"name": "f", "parameters": {"not": {}}, "strict": True})
    named = _choice({"type": "function", "function": {"name": "f"}})
    with pytest.raises(ParameterError, match=r'^tools\[1\]\.function\.parameters \("f"\)'):
        build_grammar(None, tools, named, BY_NAME)


def test_schemas_are_checked_a_bounded_number_of_times(monkeypatch: pytest.MonkeyPatch) -> None:
    from tramontane.router.structured import grammar

    checked: list[str] = []

    def refuse(whole: str, parts: tuple[str, ...]) -> tuple[validator.GrammarError, ...]:
        checked.append(whole)
        return validator.GrammarError(0, "no"), validator.GrammarError(1 + len(checked) % 9, "no")

    monkeypatch.setattr(grammar, "validate_grammar", refuse)
    tools = _tools(*({"name": f"f{i}", "parameters": _object(a={})} for i in range(9)))
    with pytest.raises(ParameterError, match="cannot be followed: no"):
        build_grammar(None, tools, "required", BY_NAME)
    assert len(checked) == grammar.MAX_WEAKENINGS + 1


def test_a_whole_that_takes_long_loses_its_patterns_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each check may take a second."""
    from tramontane.router.structured import grammar

    checked: list[str] = []

    def refuse(whole: str, parts: tuple[str, ...]) -> tuple[validator.GrammarError, ...]:
        checked.append(whole)
        return (validator.GrammarError(0, "slow"),) if "pattern" in whole else ()

    monkeypatch.setattr(grammar, "validate_grammar", refuse)
    tools = _tools({"name": "f", "parameters": _object(a={"pattern": "x"}, b=B)})
    build_grammar(None, tools, "required", BY_NAME)
    assert len(checked) == 2
    assert '"required":["a","b"]' in checked[-1]


def test_a_good_schema_is_checked_once_and_not_weakened(monkeypatch: pytest.MonkeyPatch) -> None:
    from tramontane.router.structured import answer_rules

    monkeypatch.setattr(answer_rules, "weaker_schema", lambda *_: pytest.fail("it is good"))
    number = validator.validate_grammar.cache_info().misses
    tools = _tools({"name": "f", "parameters": _object(once={"type": "integer"})})
    build_grammar(None, tools, "required", BY_NAME)
    assert validator.validate_grammar.cache_info().misses == number + 1


def test_weaker_schemas_allow_more() -> None:
    schema = _object(a={"type": "string", "pattern": "(?=a)", "minLength": 2})
    first, second, third = (weaker_schema(schema, number) for number in (1, 2, 3))
    assert first["properties"]["a"] == {"type": "string", "minLength": 2}
    assert second["properties"]["a"] == {"type": "string"}
    assert third == {"type": "object"}


# Names of tools


@pytest.mark.parametrize(
    "name", ["mcp__server__tool", "server/tool.v2", "a:b", "a.b-c_d", "x" * 128, "1"]
)
def test_a_tools_name_is_written_as_it_is(name: str) -> None:
    assert _tool_takes(_object(), "{}", name=name) == [True]
    listed = build_grammar(None, _tools({"name": name}), "required", type(BY_NAME)(BY_NAME.calls))
    assert _takes(listed, CALLS, f'[{{"name": "{name}", "arguments": {{}}}}]')


def test_a_name_that_was_not_checked_stays_a_text_of_the_grammar() -> None:
    """Names of the Responses API may have a namespace before them."""
    name = 'a" | /.*/ "\u00e9.b'
    (tool,) = _tools({"name": "b"})
    named = tool.model_copy(update={"function": tool.function.model_copy(update={"name": name})})
    grammar = build_grammar(None, [named], "required", BY_NAME)
    assert ARGS is not None
    assert _takes(grammar, CALLS, name, ARGS, "{}")
    assert not _takes(grammar, CALLS, "a", ARGS, "{}")
    listed = build_grammar(None, [named], "required", type(BY_NAME)(BY_NAME.calls))
    written = json.dumps(name, ensure_ascii=False)
    assert _takes(listed, CALLS, f'[{{"name": {written}, "arguments": {{}}}}]')


@pytest.mark.parametrize("name", ["", "x" * 129, "a b", 'a"b', "a\\b", "a\n", "\u00e9", "a{"])
def test_a_name_with_other_characters_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="name"):
        Function(name=name)
