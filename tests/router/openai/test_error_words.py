"""Whatever a client sends, the answer is in our words and names the place: pydantic's are about
classes and validators.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from tramontane.proto.errors import ParameterError, describe_value
from tramontane.proto.jobs import Endpoint
from tramontane.router.batch.input_lines import InputLine, parse_line
from tramontane.router.batch.schema import BatchRequest
from tramontane.router.chat_apis.messages_request import CountTokensRequest, MessagesRequest
from tramontane.router.chat_apis.responses_request import ResponsesRequest
from tramontane.router.client.messages import PARAMETERS
from tramontane.router.openai.chat_request import ChatRequest
from tramontane.router.openai.completion_request import CompletionRequest, parse_body
from tramontane.router.openai.errors import describe_json_error
from tramontane.router.openai.fim import FimRequest
from tramontane.router.openai.tokenize import DetokenizeRequest, TokenizeRequest

SAMPLING: dict[str, Any] = {
    **{
        "random_seed": 1,
        "stop_token_ids": [1],
        "include_stop_str_in_output": True,
        "skip_special_tokens": True,
    },
    **{
        "spaces_between_special_tokens": True,
        "detokenize": True,
        "safety_identifier": "a",
        "prompt_cache_key": "a",
    },
    **{
        "prompt_cache_retention": "a",
        "metadata": {"a": "b"},
        "service_tier": "auto",
        "request_id": "a",
    },
    "prompt_cache_options": {"mode": "explicit"},
    **{
        "guided_json": {"type": "object"},
        "guided_regex": "a",
        "guided_choice": ["a"],
        "guided_json_object": True,
    },
    "guided_decoding_backend": "a",
    "structured_outputs": {
        **{"json": {"type": "object"}, "regex": "a", "choice": ["a"], "json_object": True},
        **{"disable_any_whitespace": True, "disable_fallback": True},
    },
    **{
        "model": "m",
        "user": "u",
        "seed": 1,
        "n": 1,
        "stop": ["a"],
        "stream": True,
        "stream_options": {"include_usage": True},
    },
    **{
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "min_tokens": 0,
        "ignore_eos": False,
        "logit_bias": {"1": 1},
    },
    **{
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "return_token_ids": True,
    },
    "response_format": {
        "type": "json_schema",
        "json_schema": {
            "name": "x",
            "description": "d",
            "schema": {"type": "object"},
            "strict": True,
        },
    },
}
FUNCTION = {"name": "f", "description": "d", "parameters": {"type": "object"}, "strict": True}
TOOL = {"type": "function", "function": FUNCTION}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
MESSAGES = [
    {
        "role": "system",
        "content": [
            {"type": "text", "text": "a"},
            {"type": "thinking", "thinking": "a", "closed": False},
        ],
    },
    {"role": "user", "content": [{"type": "text", "text": "a"}]},
    {
        "role": "assistant",
        "content": "a",
        "reasoning_content": "a",
        "reasoning": "a",
        "tool_calls": [CALL],
    },
    {"role": "tool", "content": "a", "tool_call_id": "1", "name": "f"},
]
NEUTRAL = dict.fromkeys(
    ("user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"), "a"
)
ITEMS = [
    {
        "role": "developer",
        "type": "message",
        "id": "a",
        "status": "completed",
        "phase": "commentary",
        "content": "a",
    },
    {"role": "assistant", "content": [{"type": "output_text", "text": "a"}]},
    {
        "type": "reasoning",
        "id": "a",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": "a"}],
    },
    {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "1", "output": "a", "name": "f"},
]
CACHED = {"cache_control": {"type": "ephemeral", "ttl": "5m"}}
RESULT = {"type": "tool_result", "tool_use_id": "1", "content": "a", "is_error": False, **CACHED}
TURNS = [
    {"role": "system", "content": "a"},
    {"role": "user", "content": [{"type": "text", "text": "a", "citations": [], **CACHED}]},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "a", "signature": ""},
            {"type": "tool_use", "id": "1", "name": "f", "input": {}, **CACHED},
        ],
    },
    {"role": "user", "content": [RESULT]},
]
DEFINITION = {
    **{
        "type": "custom",
        "name": "f",
        "description": "d",
        "input_schema": {"type": "object"},
        "strict": True,
    },
    **{"eager_input_streaming": True, **CACHED},
}
COUNTED: dict[str, Any] = {
    **{
        "model": "m",
        "messages": TURNS,
        "system": "a",
        "tools": [DEFINITION],
        "user_profile_id": "a",
        **CACHED,
    },
    "tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": True},
    "thinking": {"type": "enabled", "budget_tokens": 1024, "display": "omitted"},
    "output_config": {
        "effort": "low",
        "format": {"type": "json_schema", "schema": {"type": "object"}},
    },
}
# Every field of every model, with a value that is allowed.
REQUESTS: dict[type[BaseModel], dict[str, Any]] = {
    ChatRequest: (
        SAMPLING
        | {
            "messages": MESSAGES,
            "max_tokens": 5,
            "max_completion_tokens": 5,
            "logprobs": True,
            "top_logprobs": 1,
            "tools": [TOOL],
        }
        | {
            "tool_choice": {"type": "function", "function": {"name": "f"}},
            "parallel_tool_calls": True,
        }
        | {"reasoning_effort": "low"}
        | {
            "chat_template_kwargs": {"a": 1},
            "continue_final_message": True,
            "add_generation_prompt": True,
        }
    ),
    CompletionRequest: (
        SAMPLING
        | {
            "prompt": ["a"],
            "max_tokens": 5,
            "logprobs": 1,
            "prompt_logprobs": 1,
            "echo": True,
            "return_experts": [1],
        }
        | {"suffix": "a", "add_special_tokens": True}
    ),
    TokenizeRequest: {
        **{"model": "m", "prompt": "a", "messages": MESSAGES, "tools": [TOOL]},
        **{"reasoning_effort": "low", "chat_template_kwargs": {"a": 1}},
        **{
            "add_special_tokens": True,
            "add_generation_prompt": True,
            "continue_final_message": True,
        },
    },
    DetokenizeRequest: {"model": "m", "tokens": [1]},
    FimRequest: SAMPLING | {"prompt": "a", "suffix": "b", "max_tokens": 5},
    ResponsesRequest: (
        NEUTRAL
        | {
            "model": "m",
            "input": ITEMS,
            "instructions": "a",
            "max_output_tokens": 5,
            "temperature": 1.0,
            "top_p": 1.0,
        }
        | {
            "parallel_tool_calls": True,
            "include": ["message.output_text.logprobs"],
            "top_logprobs": 1,
            "stream": True,
        }
        | {"tools": [{"type": "function", **FUNCTION, "output_schema": {"type": "object"}}]}
        | {
            "tool_choice": {"type": "function", "name": "f"},
            "metadata": {"a": "b"},
            "prompt_cache_options": {"mode": "explicit"},
        }
        | {
            "reasoning": {"effort": "low", "summary": "auto", "generate_summary": "auto"},
            "service_tier": "auto",
            "max_tool_calls": 1,
        }
        | {
            "text": {
                "format": {
                    "type": "json_schema",
                    "name": "x",
                    "schema": {"type": "object"},
                    "description": "d",
                    "strict": True,
                }
            }
        }
    ),
    CountTokensRequest: COUNTED,
    MessagesRequest: (
        COUNTED
        | {
            "max_tokens": 5,
            "stop_sequences": ["a"],
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": 1,
            "stream": True,
        }
        | {
            "metadata": {"user_id": "a"},
            "service_tier": "auto",
            "inference_geo": "a",
            "diagnostics": {"previous_message_id": "a"},
        }
    ),
    BatchRequest: {
        **{"input_file_id": "x", "endpoint": "/v1/completions", "completion_window": "24h"},
        **{"metadata": {"a": "b"}, "keeps_order": True},
    },
}
ABSENT = object()
WRONG = [
    *(
        None,
        True,
        False,
        1,
        -1,
        2,
        -(10**6),
        1.5,
        10**30,
        -(10**30),
        1e300,
        float("nan"),
        float("inf"),
        "x",
        "",
        "x" * 5000,
    ),
    *(
        [],
        {},
        [1],
        [[]],
        [None],
        {"a": 1},
        [1] * 3000,
        ["a"] * 3000,
        [TOOL] * 200,
        [MESSAGES[1]],
        ABSENT,
    ),
]
# in the place of lists only: its validation takes a hundred times as long as that of others
TOO_MANY = [MESSAGES[1]] * 3000
EXPECTED_TYPES = {
    *(
        "int_type",
        "float_type",
        "bool_type",
        "string_type",
        "tuple_type",
        "dict_type",
        "model_type",
        "finite_number",
    ),
    *(
        "greater_than",
        "greater_than_equal",
        "less_than",
        "less_than_equal",
        "too_long",
        "string_too_long",
        "too_short",
    ),
    *("string_too_short", "list_type"),
    *(
        "missing",
        "extra_forbidden",
        "literal_error",
        "union_tag_invalid",
        "union_tag_not_found",
        "value_error",
    ),
    "string_pattern_mismatch",
}


def _paths(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:  # JSON
    yield path
    items: Any = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, inner in items:
        yield from _paths(inner, (*path, key))


def _with(whole: Any, path: tuple[str | int, ...], value: Any) -> Any:
    if not path:
        return value
    changed = json.loads(json.dumps(whole))  # in which no object is in two places
    owner = changed
    for key in path[:-1]:
        owner = owner[key]
    if value is ABSENT:
        del owner[path[-1]]
    else:
        owner[path[-1]] = value
    return changed


def _mistakes(whole: dict[str, Any]) -> Iterator[tuple[tuple[str | int, ...], bytes]]:
    """Bodies in which one value is wrong, absent, or has a member too many, with its place."""
    for path in _paths(whole):
        owner: Any = whole
        for key in path:
            owner = owner[key]
        wrong = [value for value in WRONG if path or value is not ABSENT] + [TOO_MANY] * isinstance(
            owner, list
        )
        yield from ((path, json.dumps(_with(whole, path, value)).encode()) for value in wrong)
        if isinstance(owner, dict):
            yield path, json.dumps(_with(whole, path, owner | {"extra": 1})).encode()


def _as_openai_writes(path: tuple[str | int, ...]) -> str:
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path).removeprefix(
        "."
    )


def test_the_requests_of_these_tests_have_every_field_with_an_effect() -> None:
    for kind, whole in REQUESTS.items():
        kind.model_validate_json(json.dumps(whole))
        supported = {
            name for name, field in kind.model_fields.items() if field.annotation is not Any
        }
        assert set(whole) == supported, kind


def test_nothing_that_pydantic_says_reaches_a_client() -> None:
    found = set()
    for kind, whole in REQUESTS.items():
        for path, body in _mistakes(whole):
            try:
                kind.model_validate_json(body)
            except ValidationError as error:
                first = error.errors(include_url=False)[0]
            else:
                continue
            with pytest.raises(ParameterError) as refused:
                parse_body(kind, body)
            message = str(refused.value)
            found.add(first["type"])
            theirs = (
                first["msg"].removeprefix("Value error, ")
                if first["type"] != "value_error"
                else "Value error"
            )
            assert theirs.lower() not in message.lower(), message
            assert "not allowed here" not in message, f"no words for {first['type']}"
            named = refused.value.parameter
            owner = _as_openai_writes(path[:-1])
            assert (
                not path if named is None else named.startswith(owner) or owner.startswith(named)
            ), f"{named}: {message}"
    assert found == EXPECTED_TYPES, "each has a sentence, and this test has one of each"


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        (
            ChatRequest,
            {"messages": [{"role": "bot", "content": "a"}]},
            "messages[0].role is 'bot'; it must be one of 'system', ",
        ),
        (
            ChatRequest,
            {"messages": [{"role": None, "content": "a"}]},
            "messages[0].role is null; it must be one of 'system', ",
        ),
        (ChatRequest, {"messages": ["a"]}, "messages[0] is 'a'; it must be an object"),
        (
            ChatRequest,
            {"messages": [*MESSAGES, {"role": "user", "content": 5}]},
            "messages[4].content is 5; it must be a text",
        ),
        (
            ChatRequest,
            {"messages": [MESSAGES[0], MESSAGES[2] | {"tool_calls": [CALL | {"type": "tool"}]}]},
            "messages[1].tool_calls[0].type is 'tool'; it must be 'function'",
        ),
        (
            ChatRequest,
            {"tools": [TOOL] * 257},
            "tools is a list of 257 items; it must be a list of at most 256 items",
        ),
        (ChatRequest, {"tools": [{"type": "function"}]}, "tools[0].function is missing"),
        (
            ChatRequest,
            {"tool_choice": "bot"},
            "tool_choice: it must be one of none, auto, required, any, or {",
        ),
        (ChatRequest, {"tool_choice": {"type": "function"}}, "tool_choice.function is missing"),
        (
            ChatRequest,
            {"tool_choice": {"type": "x", "function": {}}},
            "tool_choice.type is 'x'; it must be 'function'",
        ),
        (ChatRequest, {"max_tokens": "5"}, "max_tokens is '5'; it must be a whole number"),
        (ChatRequest, {"stream": 1}, "stream is 1; it must be true or false"),
        (ChatRequest, {"temperature": -0.5}, "temperature is -0.5; it must be at least 0"),
        (
            ChatRequest,
            {"repetition_penalty": 0},
            "repetition_penalty is 0; it must be at least 0.01",
        ),
        (ChatRequest, {"n": 129}, "n is 129; it must be at most 128"),
        (ChatRequest, {"seed": 2**63}, f"seed is {2**63}; it must be below {2**63}"),
        (CompletionRequest, {"user": {"a": 1}}, "user is an object; it must be a text"),
        (DetokenizeRequest, {"tokens": [1, -1]}, "tokens[1] is -1; it must be at least 0"),
        (BatchRequest, {"metadata": {"a": 1}}, "metadata.a is 1; it must be a text"),
        (
            ResponsesRequest,
            {"input": [*ITEMS, {"role": "bot", "content": "a"}]},
            "input[5].role is 'bot'; it must be 'user', ",
        ),
        (
            ResponsesRequest,
            {"input": [*ITEMS, {"type": "web_search_call"}]},
            "input[5]: items of the type 'web_search_call' are ",
        ),
        (
            ResponsesRequest,
            {"input": [*ITEMS, {"type": "message", "role": "user"}]},
            "input[5].content is missing",
        ),
        (
            MessagesRequest,
            {"messages": [{"role": "tool", "content": "a"}]},
            "messages[0].role is 'tool'; it must be one of 'user'",
        ),
        (
            MessagesRequest,
            {"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]},
            (
                "messages[0].content[0]: blocks of the type 'tool_use' are not supported here, only"
                " text and tool_result"
            ),
        ),
        (
            MessagesRequest,
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "messages[0].content[0].text is missing",
        ),
        (MessagesRequest, {"tool_choice": {"type": "tool"}}, "tool_choice.name is missing"),
    ],
)
def test_a_wrong_value_is_named_with_what_it_must_be(
    kind: type[BaseModel], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ParameterError) as refused:
        parse_body(kind, json.dumps(REQUESTS[kind] | changes).encode())
    assert str(refused.value).startswith(message)
    assert refused.value.parameter == message.split(" ")[0].rstrip(":")


DOCS = Path(__file__).parents[3] / "docs"
PAGES = {
    **dict.fromkeys((ChatRequest, CompletionRequest, FimRequest), "http-api.md"),
    **dict.fromkeys((ResponsesRequest, MessagesRequest, CountTokensRequest), "chat-apis.md"),
}


@pytest.mark.parametrize("kind", PAGES)
def test_every_parameter_is_in_the_documentation(kind: type[BaseModel]) -> None:
    page = (DOCS / PAGES[kind]).read_text("utf-8")
    assert [name for name in kind.model_fields if not re.search(rf"`{name}\b", page)] == []


def test_every_parameter_that_grpc_lacks_is_named_as_such() -> None:
    page, http = ((DOCS / name).read_text("utf-8") for name in ("grpc.md", "http-api.md"))
    table = http.partition("## Fields of other servers\n")[2].partition("\n## ")[0]
    lacking = (
        CompletionRequest.model_fields.keys()
        - PARAMETERS
        - {"prompt", "stream", "return_token_ids"}
    )
    assert [name for name in sorted(lacking) if not re.search(rf"`{name}\b", page + table)] == []


CLIENTS_OWN = {
    "schema",
    "parameters",
    "logit_bias",
    "metadata",
    "guided_json",
    "json",
    "chat_template_kwargs",
    "content",
    "input_schema",
    "output_schema",
    "prompt_cache_options",
}  # objects without fields of ours; content has other words


@pytest.mark.parametrize("kind", REQUESTS)
def test_a_misspelt_field_gets_the_field_of_its_place(kind: type[BaseModel]) -> None:
    """At every place of every request."""
    for path in _paths(REQUESTS[kind]):
        owner: Any = REQUESTS[kind]
        for key in path:
            owner = owner[key]
        for field in owner if isinstance(owner, dict) and CLIENTS_OWN.isdisjoint(path) else ():
            name = _as_openai_writes((*path, f"{field}_x"))
            with pytest.raises(ParameterError) as refused:
                parse_body(
                    kind,
                    json.dumps(_with(REQUESTS[kind], path, owner | {f"{field}_x": 1})).encode(),
                )
            if len(field) > 2:  # of two letters another may be as close
                assert (
                    str(refused.value)
                    == f"{name} is not a parameter of this endpoint; did you mean {field}?"
                )
            assert refused.value.parameter == name


@pytest.mark.parametrize(
    ("kind", "changes", "name"),
    [
        (ChatRequest, {"stream_options": {"temperatur": 1}}, "stream_options.temperatur"),
        (
            ChatRequest,
            {"messages": [{"role": "user", "content": "a", "tool_call": 1}]},
            "messages[0].tool_call",
        ),
        (
            ChatRequest,
            {"tool_choice": TOOL | {"function": {"name": "f"}, "nam": 1}},
            "tool_choice.nam",
        ),
        (
            ChatRequest,
            {"tool_choice": TOOL | {"function": {"name": "f", "typ": 1}}},
            "tool_choice.function.typ",
        ),
        (ChatRequest, {"tools": [TOOL | {"parameter": {}}]}, "tools[0].parameter"),
        (TokenizeRequest, {"temperatur": 1}, "temperatur"),
    ],
)
def test_what_is_not_at_a_place_is_not_suggested_there(
    kind: type[BaseModel], changes: dict[str, Any], name: str
) -> None:
    with pytest.raises(ParameterError) as refused:
        parse_body(kind, json.dumps(REQUESTS[kind] | changes).encode())
    assert str(refused.value) == f"{name} is not a parameter of this endpoint"


def test_a_kind_of_error_that_is_not_known_is_not_described_in_other_words_than_ours() -> None:
    problem = {
        "type": "url_scheme",
        "msg": "URL scheme should be 'http'",
        "ctx": {"expected_schemes": "'http'"},
    }
    assert (
        describe_value("url", "'x'", problem)
        == "url is 'x'; this value is not allowed here, see /docs"
    )


BROKEN_JSON = {
    "": "it ends too early (column 0)",
    "{": "it ends too early (column 1)",
    "prompt=hi": "a request begins with { (column 1)",
    "--": "a number is not written as in JSON (column 2)",
    '{"a"\n: tru}': (
        "there is a word that JSON does not have; its words are true, false and null (line 2,"
        " column 6)"
    ),
    '{"a" 1}': "a colon is missing after a key (column 6)",
    '{"a": [1 2]}': "a comma or ] is missing (column 10)",
    '{"a": 1 "b": 2}': "a comma or } is missing (column 9)",
    "{'a': 1}": "a key is not in double quotes (column 2)",
    '{"a": 1,}': "there is a comma after the last item (column 9)",
    '{"a": }': "a value is missing (column 7)",
    '{"a": 01}': "a number is not written as in JSON (column 8)",
    '{"a": "\n"}': (
        "a text holds a line break or another control character; write it as \\n (line 2, column 0)"
    ),
    '{"a": "\\x"}': "a backslash stands before a character that JSON does not escape (column 9)",
    '{"a": "\\ud800"}': "an escape \\u is cut off, or half of a surrogate pair (column 14)",
    '{"a": "\\ud800\\u0041"}': "an escape \\u is half of a surrogate pair (column 19)",
    '{"a": 1} x': "there is more after its end (column 10)",
    '{"a": %s}' % ("[" * 1000): "it is nested too deeply (column 207)",
    '{"a": %s}' % ("9" * 5000): "a number has too many digits (column 4308)",
}


@pytest.mark.parametrize("text", BROKEN_JSON)
def test_what_is_not_json_is_described_with_its_place(text: str) -> None:
    with pytest.raises(ParameterError) as refused:
        parse_body(CompletionRequest, text.encode())
    assert str(refused.value) == f"the body is not JSON: {BROKEN_JSON[text]}"


@pytest.mark.parametrize("text", BROKEN_JSON)
def test_a_line_of_a_batch_job_that_is_not_json_is_described_in_the_same_words(text: str) -> None:
    endpoint: Endpoint = "/v1/completions"
    assert (
        parse_line(InputLine(7, text.encode()), endpoint, 2**20).problem
        == f"line 7: it is not JSON: {BROKEN_JSON[text]}"
    )


def test_an_unknown_message_of_the_json_parser_is_not_repeated() -> None:
    assert (
        describe_json_error("Invalid JSON: surprise at line 3 column 4")
        == "it cannot be read (line 3, column 4)"
    )
    assert describe_json_error("surprise") == "it cannot be read"
