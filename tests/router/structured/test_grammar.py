"""From OpenAI's words to grammars: what a grammar takes and what not, and what is refused by the
ingress.
"""

import json
import resource
import signal
import subprocess
import sys
from typing import Any

import llguidance
import pytest
from llguidance import _lib
from pydantic import TypeAdapter, ValidationError

from tramontane.proto.errors import ParameterError
from tramontane.router.structured import schemas as constraints
from tramontane.router.structured import validator_process as grammar_child
from tramontane.router.structured.answer_rules import Constraint
from tramontane.router.structured.grammar import (
    Function,
    ResponseFormat,
    ThoughtRules,
    Tool,
    ToolChoice,
    build_grammar,
    visible_tools,
)
from tramontane.router.tokenization.chat import ToolFormat
from tramontane.router.tokenization.reasoning_parser import ReasoningFormat

# control tokens, after a token for every byte
CALLS, ARGS, THINK, END_THINK, CALL_ID = 256, 257, 258, 259, 260
LIST, BY_NAME = ToolFormat(CALLS), ToolFormat(CALLS, ARGS)
CITY = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/city"}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {
    "name": "weather",
    "parameters": CITY | {"$defs": {"city": {"enum": ["Paris", "Rome"]}}},
    "strict": True,
}
TIME = {"name": "time"}


class _Bytes:
    """A vocabulary of bytes."""

    eos_token_id = bos_token_id = None
    is_tokenizer_wrapper = True
    tokens = (
        *(bytes([i]) for i in range(256)),
        *(b"[CALLS]", b"[ARGS]", b"[THINK]", b"[/THINK]", b"[CALL_ID]"),
    )
    special_token_ids = (CALLS, ARGS, THINK, END_THINK, CALL_ID)

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


VOCABULARY = llguidance.LLTokenizer(_Bytes())  # type: ignore[arg-type]


def _takes(grammar: str, *said: str | int) -> bool:
    """Whether this is a whole answer; control tokens by their ids."""
    matcher = llguidance.LLMatcher(VOCABULARY, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    ids = [token for part in said for token in ([part] if isinstance(part, int) else part.encode())]
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def _format(schema: Any, **more: Any) -> ResponseFormat:
    return ResponseFormat.model_validate(
        {"type": "json_schema", "json_schema": {"name": "x", "schema": schema} | more}
    )


def _tools(*functions: dict[str, Any]) -> list[Tool]:
    return [
        Tool.model_validate({"type": "function", "function": function}) for function in functions
    ]


def _choice(value: object) -> ToolChoice:
    choice: ToolChoice = TypeAdapter(ToolChoice).validate_python(value)
    return choice


def test_without_a_wish_there_is_no_grammar() -> None:
    text = ResponseFormat.model_validate({"type": "text"})
    assert build_grammar(None) == build_grammar(text) == build_grammar(text, [], None, LIST) == ""
    assert (
        build_grammar(None, _tools(TIME), "none", LIST)
        == build_grammar(None, _tools(TIME), "none")
        == ""
    )


def test_any_object() -> None:
    grammar = build_grammar(ResponseFormat.model_validate({"type": "json_object"}))
    for text in ('{"a": [1, {"b": null}]}', '{"a":[1,2]}', " {}", '{"\u00e9": "\\n\\""}'):
        assert _takes(grammar, text)
    for text in (
        "[]",
        "{",
        '{"a":\n1}',
        '{"a":  1}',
        "{} ",
        '{"a": "\\ud800"}',
        '{"a": 01}',
        "",
        "x",
    ):
        assert not _takes(grammar, text)


def test_a_schema() -> None:
    grammar = build_grammar(_format(WEATHER["parameters"]))
    assert _takes(grammar, '{"city": "Rome"}')
    assert not _takes(grammar, '{"city": "Oslo"}')
    assert not _takes(grammar, "{}")


def test_no_property_passes_for_another_by_its_spelling() -> None:
    """To a reader both are the same, and the second one has the wrong type."""
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "additionalProperties": {"type": "string"},
    }
    grammar = build_grammar(_format(schema))
    assert _takes(grammar, '{"a": 1, "b": "x"}')
    assert not _takes(grammar, '{"a": 1, "\\u0061": "x"}')


def test_calls_as_a_list() -> None:
    grammar = build_grammar(None, _tools(WEATHER, TIME), "required", LIST)
    one, other = (
        '{"name": "weather", "arguments": {"city": "Rome"}}',
        '{"name": "time", "arguments": {"x": 1}}',
    )
    assert _takes(grammar, CALLS, f"[{one}]")
    assert _takes(grammar, CALLS, f" [{one}, {other}, {one}]")
    assert not _takes(grammar, CALLS, "[]")
    assert not _takes(grammar, CALLS, f"[{one.replace('Rome', 'Oslo')}]")
    assert not _takes(grammar, CALLS, f"[{one.replace('weather', 'time2')}]")
    assert not _takes(grammar, f"[{one}]"), "the control token, not what it looks like"
    assert not _takes(grammar, "Hm. ", CALLS, f"[{one}]")
    alone = build_grammar(None, _tools(WEATHER, TIME), "required", LIST, parallel=False)
    assert _takes(alone, CALLS, f"[{other}]")
    assert not _takes(alone, CALLS, f"[{one}, {other}]")


def test_calls_by_name() -> None:
    grammar = build_grammar(None, _tools(WEATHER, TIME), "required", BY_NAME)
    one, other = (CALLS, "weather", ARGS, '{"city": "Rome"}'), (CALLS, "time", ARGS, "{}")
    assert _takes(grammar, *one)
    assert _takes(grammar, *one, *other)
    assert not _takes(grammar, CALLS, "weather", ARGS, "{}")
    assert not _takes(grammar, CALLS, "weather", '{"city": "Rome"}')
    assert not _takes(grammar, "")
    alone = build_grammar(None, _tools(WEATHER, TIME), "required", BY_NAME, parallel=False)
    assert _takes(alone, *other)
    assert not _takes(alone, *one, *other)


def test_a_call_may_have_an_id_where_the_format_has_one() -> None:
    form = ToolFormat(CALLS, ARGS, CALL_ID)
    grammar = build_grammar(None, _tools(WEATHER, TIME), "required", form)
    named, unnamed = (
        (CALLS, "time", CALL_ID, "abcDEF123", ARGS, "{}"),
        (CALLS, "time", ARGS, "{}"),
    )
    for said in (named, unnamed, named + unnamed, unnamed + named, named + named):
        assert _takes(grammar, *said)
    for written in ("abcDEF12", "abcDEF1234", "call_1234", " abcDEF123", "abcDEF123 ", ""):
        assert not _takes(grammar, CALLS, "time", CALL_ID, written, ARGS, "{}")
    assert not _takes(grammar, CALLS, "time", CALL_ID, "abcDEF123", "{}")
    assert not _takes(grammar, CALLS, CALL_ID, "abcDEF123", ARGS, "{}")
    by_name = build_grammar(None, _tools(WEATHER, TIME), "required", BY_NAME)
    assert not _takes(by_name, *named)


def test_a_named_tool_is_the_only_one() -> None:
    named = _choice({"type": "function", "function": {"name": "time"}})
    grammar = build_grammar(None, _tools(WEATHER, TIME), named, BY_NAME)
    assert _takes(grammar, CALLS, "time", ARGS, "{}")
    assert not _takes(grammar, CALLS, "weather", ARGS, '{"city": "Rome"}')
    assert len(visible_tools(_tools(WEATHER, TIME), named)) == 2, "the model sees both"
    assert visible_tools(_tools(WEATHER), "none") == ()


@pytest.mark.parametrize("choice", [None, "auto"])
def test_text_or_calls_as_the_model_likes(choice: ToolChoice | None) -> None:
    grammar = build_grammar(None, _tools(TIME), choice, BY_NAME)
    call = (CALLS, "time", ARGS, "{}")
    for said in (("",), ("Some\ntext, with \u00e9.",), call, ("Let me see. ", *call)):
        assert _takes(grammar, *said)
    assert not _takes(grammar, *call, "and text")
    assert not _takes(grammar, "text", ARGS)


def test_an_answer_by_its_schema_or_calls() -> None:
    grammar = build_grammar(_format({"type": "integer"}), _tools(TIME), "auto", LIST)
    assert _takes(grammar, "17")
    assert _takes(grammar, CALLS, '[{"name": "time", "arguments": {}}]')
    assert not _takes(grammar, "text")
    required = build_grammar(_format({"type": "integer"}), _tools(TIME), "required", LIST)
    assert not _takes(required, "17")


MARKERS = {
    "Mistral's": ReasoningFormat("[THINK]", "[/THINK]", THINK, END_THINK),
    "tokens": ReasoningFormat("<think>", "</think>", THINK, END_THINK, trims=True),
    "text": ReasoningFormat("<think>", "</think>", trims=True),
}


@pytest.mark.parametrize("kind", MARKERS)
def test_an_answer_by_its_schema_follows_a_thought_that_says_anything(kind: str) -> None:
    form = MARKERS[kind]
    begin, end = (form.begin_id or form.begin, form.end_id or form.end)
    schema = _format(
        {
            "type": "object",
            "properties": {"a": {"type": "string"}},
            "required": ["a"],
            "additionalProperties": False,
        }
    )
    grammar = build_grammar(schema, thoughts=ThoughtRules(form, is_open=False))
    for said in (
        ('{"a": "x"}',),
        (begin, 'It is {"a": 1}, \u00e9\n\n< or >.', end, '{"a": "x"}'),
        (begin, end, ' {"a": "x"}'),
        *([(begin, "a\n", end, '\n\n{"a": "x"}')] if form.trims else []),
    ):
        assert _takes(grammar, *said), said
    for said in (
        (begin, "a", end),
        (begin, "a", end, '{"a": 1}'),
        (begin, "a", end, "text"),
        (begin, '{"a": "x"}'),
        ("a", end, '{"a": "x"}'),
        ('{"a": "x"}', begin, end),
        (begin, "a", end, begin, "b", end, '{"a": "x"}'),
    ):
        assert not _takes(grammar, *said), said


@pytest.mark.parametrize("kind", MARKERS)
def test_a_grammar_may_begin_inside_a_thought(kind: str) -> None:
    form = MARKERS[kind]
    end = form.end_id or form.end
    grammar = build_grammar(_format({"type": "integer"}), thoughts=ThoughtRules(form, is_open=True))
    assert _takes(grammar, "17 and a < b", end, "17")
    assert _takes(grammar, end, "17")
    assert not _takes(grammar, "17")
    assert not _takes(grammar, "17", end, "text")


@pytest.mark.parametrize("kind", MARKERS)
def test_calls_follow_a_thought(kind: str) -> None:
    form = MARKERS[kind]
    begin, end = (form.begin_id or form.begin, form.end_id or form.end)
    thoughts, call = ThoughtRules(form, is_open=False), (CALLS, "time", ARGS, "{}")
    required = build_grammar(None, _tools(TIME), "required", BY_NAME, thoughts=thoughts)
    assert _takes(required, begin, "I need the time.", end, *call, *call)
    assert _takes(required, *call)
    assert not _takes(required, begin, "I need the time.", end)
    assert not _takes(required, begin, "I need ", *call)
    free = build_grammar(None, _tools(TIME), None, BY_NAME, thoughts=thoughts)
    for said in (
        (begin, "a", end, "Text.", *call),
        (begin, "a", end, "Text."),
        (begin, "a", end),
        ("Text.", *call),
    ):
        assert _takes(free, *said), said
    assert not _takes(free, *call, begin, "a", end)
    either = build_grammar(
        _format({"type": "integer"}), _tools(TIME), "auto", BY_NAME, thoughts=thoughts
    )
    assert _takes(either, begin, "a", end, "17")
    assert _takes(either, begin, "a", end, *call)
    assert not _takes(either, begin, "a", end, "text")


def test_a_tool_that_is_not_strict_may_say_more_than_is_supported() -> None:
    parameters = {
        "properties": {"a": {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}},
        "required": ["a"],
    }
    grammar = build_grammar(
        None, _tools({"name": "f", "parameters": parameters}), "required", BY_NAME
    )
    assert _takes(grammar, CALLS, "f", ARGS, '{"a": [1, 1]}')
    assert not _takes(grammar, CALLS, "f", ARGS, '{"a": ["x"]}')
    strict = _tools(TIME, {"name": "f", "parameters": parameters, "strict": True})
    with pytest.raises(
        ParameterError,
        match=(
            r'tools\[1\]\.function\.parameters \("f"\) cannot be followed: Unimplemented keys:'
            r" \[.uniqueItems.\]$"
        ),
    ) as refused:
        build_grammar(None, strict, "required", BY_NAME)
    assert refused.value.parameter == "tools[1].function.parameters"


@pytest.mark.parametrize(
    ("schema", "complaint"),
    [
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"not": {"type": "string"}}, "not"),
        ({"type": "object", "properties": {"a": {"if": {}}}}, "if"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
        ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
        ({"type": "string", "pattern": "("}, "regex"),
        ({"type": "strnig"}, "strnig"),
        ({"type": 5}, "type"),
        ({"properties": []}, "object|properties"),
        ({"minimum": 5, "maximum": 3, "type": "integer"}, "minimum"),
        ({"$ref": "#/$defs/none"}, "does not exist"),
        ({"$ref": "https://example.com/schema"}, "not present"),
        ({"$ref": "file:///etc/passwd"}, "not present"),
        ({"$schema": "https://example.com/schema"}, "not present"),
        ({"enum": []}, "empty"),
        ({"x-guidance": {"lenient": True}, "not": {}}, "x-guidance is not supported"),
        ({"const": "\ud800"}, "cannot be followed"),
        ({"enum": ["x" * 140_000]}, "they may take 131072"),
        ({"type": "integer", "multipleOf": 10_007}, "multipleOf"),
        ({"multipleOf": 10**400}, "multipleOf"),
        ({"multipleOf": -(10**400)}, "multipleOf"),
        ({"multipleOf": 1e308}, "multipleOf"),
        ({"type": "integer", "maximum": 10**400}, "cannot be followed"),
        ({"type": "integer", "allOf": [{"multipleOf": 997}, {"multipleOf": 991}]}, "multipleOf"),
    ],
)
def test_a_schema_that_cannot_be_followed_is_refused_by_the_ingress(
    schema: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ParameterError, match=complaint) as refused:
        build_grammar(_format(schema))
    assert refused.value.parameter == "response_format.json_schema.schema"
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 500


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_numbers_that_json_does_not_have_are_in_no_schema(number: float) -> None:
    strict = {"name": "f", "strict": True}
    for schema in ({"multipleOf": number}, {"enum": [1, {"a": [number]}]}):
        with pytest.raises(ValidationError, match="NaN and Infinity are not JSON"):
            _format(schema)
        with pytest.raises(ValidationError, match=r"are not JSON \(in the schema of the tool 'f'"):
            _tools(strict | {"parameters": schema})


def test_the_depth_of_a_schema_is_bounded() -> None:
    def nested(depth: int) -> dict[str, Any]:
        schema: dict[str, Any] = {}
        for _ in range(depth - 1):
            schema = {"items": schema}
        return schema

    assert build_grammar(_format(nested(constraints.MAX_DEPTH)))
    for depth in (constraints.MAX_DEPTH + 1, 5000):
        with pytest.raises(ParameterError, match="nested more than 32 deep"):
            build_grammar(_format(nested(depth)))


def test_usual_multiples_are_taken() -> None:
    prices = {"type": "number", "multipleOf": 0.01}
    grammar = build_grammar(
        _format({"type": "array", "items": [prices, {"type": "integer", "multipleOf": 25}]})
    )
    assert _takes(grammar, "[12.34, 75]")
    assert not _takes(grammar, "[12.34, 76]")
    assert build_grammar(_format({"properties": {"multipleOf": {"type": "integer"}}}))


PATTERNS = [
    {"type": "string", "pattern": f"^[a-z]{{0,{i}}}x[a-z]{{0,{97 - i}}}$"} for i in range(2, 30)
]
LINKED = {
    f"d{i}": {"allOf": [pattern, {"$ref": f"#/$defs/d{i + 1}"}]}
    for i, pattern in enumerate(PATTERNS)
} | {"d28": {}}


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": PATTERNS},
        {"$defs": LINKED, "$ref": "#/$defs/d0"},
        {"allOf": [{"type": "array", "items": pattern} for pattern in PATTERNS]},
        {"allOf": [{"type": "object", "properties": {"a": pattern}} for pattern in PATTERNS]},
        {"allOf": [{"additionalProperties": pattern} for pattern in PATTERNS]},
    ],
)
def test_a_schema_that_takes_long_is_refused(schema: dict[str, Any]) -> None:
    """Left alone, each takes minutes and many GiB."""
    before = resource.getrusage(resource.RUSAGE_SELF)
    with pytest.raises(ParameterError, match="schema cannot be followed: it is too complicated"):
        build_grammar(_format(schema))
    after = resource.getrusage(resource.RUSAGE_SELF)
    assert after.ru_utime - before.ru_utime < grammar_child.MAX_CPU_S / 2, (
        "another process computes"
    )


# Without memory the library aborts; where the stack cannot grow, the kernel ends the process, some
# with SIGKILL.
OUT_OF_MEMORY = {signal.SIGABRT, signal.SIGSEGV, signal.SIGKILL}


@pytest.mark.parametrize(
    ("name", "value", "signals"),
    [("MAX_CPU_S", 60, OUT_OF_MEMORY), ("MAX_BYTES", 2**40, {signal.SIGPROF})],
)
def test_memory_and_computing_are_each_bounded(
    name: str, value: float, signals: set[signal.Signals]
) -> None:
    """With the other bound out of the way."""
    start = "from tramontane.router.structured import validator_process as child"
    code = f"{start}; child.{name} = {value}; child.main({_lib.__file__!r})"
    whole = 'start: %json {"allOf": ' + json.dumps(PATTERNS) + "}"
    child = subprocess.run(
        [sys.executable, "-c", code],
        input=json.dumps([whole]),
        text=True,
        capture_output=True,
        check=False,
    )
    assert -child.returncode in signals
    assert not child.stdout


def test_one_tool_that_takes_long_is_not_looked_for() -> None:
    slow = {"properties": {"a": {"allOf": PATTERNS}}}
    tools = _tools(TIME | {"strict": True}, {"name": "f", "parameters": slow, "strict": True})
    with pytest.raises(
        ParameterError, match="the schemas cannot be followed together: it is too complicated"
    ):
        build_grammar(None, tools, "required", LIST)


def test_what_was_checked_once_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    schema = {"title": "checked once", "type": "integer"}
    grammar = build_grammar(_format(schema))
    monkeypatch.setattr(sys, "executable", "nowhere")
    assert build_grammar(_format(schema)) == grammar
    with pytest.raises(FileNotFoundError):
        build_grammar(_format({"const": "never checked before"}))


def test_many_sequences_send_small_schemas_only() -> None:
    schema = _format({"enum": ["x" * 60_000]})
    assert build_grammar(schema, num_sequences=16)
    with pytest.raises(ParameterError, match="128 sequences"):
        build_grammar(schema, num_sequences=128)


@pytest.mark.parametrize(
    ("tools", "choice", "form", "complaint"),
    [
        ([TIME], "auto", None, "has no tools"),
        ([], "required", LIST, "only allowed with tools"),
        ([TIME, TIME], "auto", LIST, "same name"),
        ([{"name": f"f{i}"} for i in range(257)], "auto", LIST, "are 257 tools.* at most 256"),
        ([TIME], {"type": "function", "function": {"name": "date"}}, LIST, "no tool 'date'"),
        ([{"name": "f", "parameters": {"type": "string"}}], "auto", LIST, "must be object"),
        (
            [{"name": "f", "parameters": {"properties": 5}, "strict": True}],
            "auto",
            LIST,
            r'^tools\[0\]\.function\.parameters \("f"\) cannot be followed',
        ),
    ],
)
def test_tools_that_cannot_be_are_refused(
    tools: list[dict[str, Any]], choice: object, form: ToolFormat | None, complaint: str
) -> None:
    with pytest.raises(ParameterError, match=complaint):
        build_grammar(None, _tools(*tools), _choice(choice), form)


@pytest.mark.parametrize(
    "body",
    [
        {"type": "xml"},
        {"type": "json_schema", "json_schema": {"name": "a"}},
        {"type": "json_object", "schema": []},
        {"type": "json_schema", "json_schema": {"name": "a", "schema": []}},
    ],
)
def test_malformed_formats(body: object) -> None:
    with pytest.raises(ValidationError):
        ResponseFormat.model_validate(body)
    with pytest.raises(ParameterError, match=r"json_schema is missing"):
        build_grammar(ResponseFormat.model_validate({"type": "json_schema"}))


def test_nothing_in_a_schema_gets_out_of_it() -> None:
    """Whatever it says, it stays JSON inside the grammar."""
    nasty = '"}\nstart: /.*/ // %llguidance {} \\u0000 </'
    grammar = build_grammar(
        _format({"type": "object", "properties": {nasty: {"const": nasty}}, "required": [nasty]})
    )
    assert grammar.count("\n") == 2
    assert _takes(grammar, json.dumps({nasty: nasty}, ensure_ascii=False))
    assert not _takes(grammar, "x")


@pytest.mark.parametrize("where", [{"const": 2**1536}, {"enum": [1, {"a": [-(2**1536)]}]}])
def test_a_number_of_many_digits_is_refused_before_a_schema_is_written(
    where: dict[str, Any],
) -> None:
    """Writing it takes time quadratic in its length, and a schema has room for thousands; also
    where nothing is called.
    """
    with pytest.raises(ValidationError, match=r"more than 1536 bits .* of the tool 'f'"):
        Function(name="f", parameters=where, strict=True)
    with pytest.raises(ValidationError, match="more than 1536 bits"):
        _format(where)
    assert Function(name="f", parameters={"const": 2**1536 - 1}).parameters == {
        "const": 2**1536 - 1
    }


def test_a_schema_is_too_large_before_it_is_written() -> None:
    """By its names and texts; with all else, and many numbers, it may only be larger."""
    with pytest.raises(
        ParameterError, match="the schemas take 131076 characters; they may take 131072"
    ):
        build_grammar(_format({"enum": ["a" * 131072]}))


@pytest.mark.parametrize(
    ("constraint", "taken", "refused"),
    [
        (
            Constraint("choice", ("yes", 'no "/\n'), "guided_choice"),
            ["yes", 'no "/\n'],
            ["", "ye", " yes", "yesno"],
        ),
        (Constraint("regex", "[a-c/]+d?", "guided_regex"), ["a/c", "bd"], ["", "d", " a", "ad\n"]),
        (Constraint("regex", "^(a|b)$", "guided_regex"), ["a", "b"], ["ab", "^a$"]),
        (
            Constraint("regex", r"a\/b|c\\/d" + "|e\nf", "guided_regex"),
            ["a/b", "c\\/d", "e\nf"],
            [r"a\/b", "c/d", "ef"],
        ),
        (
            Constraint("json", CITY | {"$defs": {"city": {"const": "Rome"}}}, "guided_json"),
            ['{"city": "Rome"}'],
            ["Rome"],
        ),
    ],
)
def test_an_answer_is_one_of_several_texts_or_matches_a_pattern(
    constraint: Constraint, taken: list[str], refused: list[str]
) -> None:
    grammar = build_grammar(constraint)
    assert [_takes(grammar, text) for text in taken] == [True] * len(taken)
    assert [_takes(grammar, text) for text in refused] == [False] * len(refused)
    assert _takes(build_grammar(constraint, drops_space=True), f" {taken[0]}")


@pytest.mark.parametrize("regex", ["(", "a(?=b)", r"\bfoo", "x" * 140_000])
def test_a_pattern_that_cannot_be_followed_is_refused_with_its_place(regex: str) -> None:
    with pytest.raises(ParameterError) as refused:
        build_grammar(Constraint("regex", regex, "guided_regex"))
    assert refused.value.parameter == "guided_regex"


def test_an_answer_is_of_the_tokens_of_a_set() -> None:
    tokens = Constraint("tokens", (THINK, *b"ab"), "allowed_token_ids")
    thoughts = ThoughtRules(MARKERS["Mistral's"], is_open=True)
    grammar = build_grammar(tokens, thoughts=thoughts, drops_space=True)
    assert grammar == build_grammar(tokens)
    assert _takes(grammar, "abba", THINK, "a")
    for said in (("abc",), ("",), (" a",), ("a", END_THINK)):
        assert not _takes(grammar, *said)
    assert build_grammar(tokens, _tools(TIME), "none", LIST) == grammar
    for choice in (None, "auto", "required"):
        with pytest.raises(ParameterError, match="allowed_token_ids says what all") as refused:
            build_grammar(tokens, _tools(TIME), _choice(choice) if choice else None, LIST)
        assert refused.value.parameter == "allowed_token_ids"


def test_any_is_mistrals_word_for_required() -> None:
    assert _choice("any") == "required"
