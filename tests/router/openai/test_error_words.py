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
from tramontane.router.openai.completion_request import HISTORIES, CompletionRequest, parse_body
from tramontane.router.openai.errors import describe_json_error
from tramontane.router.openai.fim import FimRequest
from tramontane.router.openai.tokenize import DetokenizeRequest, TokenizeRequest
from tramontane.router.structured.request_model import RequestBody, intended_name, no_effect_fields

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
    **{
        "prompt_cache_options": {"mode": "explicit"},
        "store": True,
        "priority": 1,
        "models": ["a"],
        "top_a": 0.5,
    },
    **{
        "guided_json": {"type": "object"},
        "guided_regex": "a",
        "guided_choice": ["a"],
        "guided_json_object": True,
    },
    "guided_decoding_backend": "a",
    "allowed_token_ids": [1],
    "cache_salt": "a",
    "structured_outputs": {
        **{"json": {"type": "object"}, "regex": "a", "choice": ["a"], "json_object": True},
        **{"disable_any_whitespace": True, "disable_fallback": True},
        **{"grammar": None, "structural_tag": None, "whitespace_pattern": None},
        "disable_additional_properties": None,
    },
    **{
        "model": "m",
        "user": "u",
        "seed": 1,
        "n": 1,
        "stop": ["a"],
        "stream": True,
        "stream_options": {
            "stream_tool_calls": True,
            "include_usage": True,
            "continuous_usage_stats": True,
            "include_obfuscation": True,
        },
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
        "schema": {"type": "object"},
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
CALLED = {"name": "f", "arguments": "{}"}
CUSTOM = {"name": "f", "input": "a"}
CALL = {
    **{"id": "1", "type": "function", "index": 0, "function": CALLED, "custom": CUSTOM},
    **{"name": "f", "arguments": "{}"},
}
CACHED = {"cache_control": {"type": "ephemeral", "ttl": "5m"}}
CACHED_PART = {**CACHED, "prompt_cache_breakpoint": {"mode": "explicit"}}
MESSAGES = [
    {
        "role": "system",
        "content": [
            {"type": "text", "text": "a"},
            {"type": "thinking", "thinking": "a", "closed": False},
        ],
        "name": "a",
    },
    {"role": "user", "content": [{"type": "text", "text": "a", **CACHED_PART}], "name": "a"},
    {
        **{"role": "assistant", "content": "a", "refusal": "a", "prefix": True, "name": "a"},
        **{"reasoning_content": "a", "reasoning": "a", "tool_calls": [CALL]},
        **{"function_call": CALLED, "audio": {"id": "a"}, "annotations": [{"type": "a"}]},
    },
    {"role": "tool", "content": "a", "tool_call_id": "1", "name": "f"},
]
NEUTRAL = dict.fromkeys(
    ("user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"), "a"
)
DIRECT = {"caller": {"type": "direct"}, "namespace": "a"}
OF_ANSWERS = {"id": "a", "status": "completed"}
OUTPUT_PART = {
    **{"type": "output_text", "text": "a", "annotations": [{"type": "a"}]},
    **{"logprobs": [], **CACHED_PART},
}
ITEMS = [
    {
        **{"role": "developer", "type": "message", "phase": "commentary", "content": "a"},
        **OF_ANSWERS,
    },
    {"role": "assistant", "content": [OUTPUT_PART]},
    {
        **{"type": "reasoning", "summary": [{"type": "summary_text"}], "encrypted_content": "a"},
        **{"content": [{"type": "reasoning_text", "text": "a"}], **OF_ANSWERS},
    },
    {
        **{"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        **{"input": "a", **DIRECT, **OF_ANSWERS},
    },
    {
        **{"type": "function_call_output", "call_id": "1", "output": "a", "name": "f"},
        **{**DIRECT, **OF_ANSWERS},
    },
]
OFFERED = {"allowed_callers": ["direct"], "defer_loading": True}
OUR_FUNCTION = {
    **{"type": "function", **FUNCTION, "output_schema": {"type": "object"}, **OFFERED},
}
CUSTOM = {
    **{"type": "custom", "name": "c", "description": "d", **OFFERED},
    "format": {"type": "grammar", "syntax": "regex", "definition": "a"},
}
NAMESPACE = {"type": "namespace", "name": "n", "description": "d", "tools": [OUR_FUNCTION]}
RESULT = {"type": "tool_result", "tool_use_id": "1", "content": "a", "is_error": False, **CACHED}
TURNS = [
    {"role": "system", "content": "a"},
    {
        "role": "user",
        "content": [{"type": "text", "text": "a", "citations": [{"type": "a"}], **CACHED}],
    },
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "a", "signature": "a"},
            {
                **{"type": "tool_use", "id": "1", "name": "f", "input": {}, **CACHED},
                "caller": {"type": "direct"},
            },
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
    **{"eager_input_streaming": True, "input_examples": [{"a": 1}], **CACHED, **OFFERED},
}
COUNTED: dict[str, Any] = {
    **{
        "model": "m",
        "messages": TURNS,
        "system": "a",
        "tools": [DEFINITION],
        "user_profile_id": "a",
        "context_management": {"edits": []},
        "speed": "fast",
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
        | {"verbosity": "low", "prediction": {"type": "content"}}
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
        | {"suffix": "a", "add_special_tokens": True, "truncate_prompt_tokens": 5}
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
        | {"tools": [OUR_FUNCTION, CUSTOM, NAMESPACE]}
        | {"truncation": "auto", "store": True, "client_metadata": {"a": "b"}, "seed": 1}
        | {"context_management": [{"type": "a"}], "stream_options": {}}
        | {
            "tool_choice": {"type": "function", "name": "f"},
            "metadata": {"a": "b"},
            "prompt_cache_options": {"mode": "explicit"},
        }
        | {
            "reasoning": {
                **{"effort": "low", "summary": "auto", "generate_summary": "auto"},
                **{"context": "auto", "mode": "pro"},
            },
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
                },
                "verbosity": "low",
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
            "container": "a",
            "store": True,
        }
    ),
    BatchRequest: {
        **{"input_file_id": "x", "endpoint": "/v1/completions", "completion_window": "24h"},
        **{"metadata": {"a": "b"}, "keeps_order": True, "output_expires_after": {"seconds": 1}},
    },
}
# What a client sends under these names is its own: no fields of ours are in it.
CLIENTS_OWN = {
    *("schema", "parameters", "logit_bias", "metadata", "guided_json", "json", "input_schema"),
    *("chat_template_kwargs", "output_schema", "prompt_cache_options", "cache_control"),
    *("prompt_cache_breakpoint", "annotations", "citations", "audio", "caller", "summary"),
    *("context_management", "diagnostics", "input_examples", "client_metadata", "prediction"),
    "output_expires_after",
}
OF_PARTS = ("cache_control", "prompt_cache_breakpoint")
IGNORED_SAMPLING = {
    *NEUTRAL,
    *("prompt_cache_options", "metadata", "service_tier", "store", "request_id", "priority"),
    *("spaces_between_special_tokens", "guided_decoding_backend", "models", "top_a"),
    *("structured_outputs.disable_any_whitespace", "structured_outputs.disable_fallback"),
    "stream_options.include_obfuscation",
}
IGNORED_MESSAGES = {
    *(f"messages[].content[].{name}" for name in OF_PARTS),
    *(f"messages[].{name}" for name in ("audio", "annotations")),
    "messages[].tool_calls[].index",
}
IGNORED_COUNTED = {
    *("user_profile_id", "context_management", "speed", "cache_control"),
    *("thinking.budget_tokens", "thinking.display"),
    *(
        f"tools[].{name}"
        for name in ("eager_input_streaming", "input_examples", "cache_control", *OFFERED)
    ),
    *(
        f"messages[].content[].{name}"
        for name in ("cache_control", "citations", "signature", "caller", "is_error")
    ),
}
IGNORED: dict[type[BaseModel], set[str]] = {
    ChatRequest: {*IGNORED_SAMPLING, *IGNORED_MESSAGES, "verbosity", "prediction"},
    CompletionRequest: IGNORED_SAMPLING,
    TokenizeRequest: IGNORED_MESSAGES,
    DetokenizeRequest: set(),
    FimRequest: IGNORED_SAMPLING,
    ResponsesRequest: {
        *NEUTRAL,
        *("prompt_cache_options", "service_tier", "max_tool_calls", "truncation", "store"),
        *("client_metadata", "context_management", "stream_options", "text.verbosity"),
        *(f"reasoning.{name}" for name in ("summary", "generate_summary", "context", "mode")),
        *(f"tools[].{name}" for name in ("output_schema", *OFFERED)),
        "tools[2].description",  # of a namespace; that of a function has an effect
        *(
            f"input[].{name}"
            for name in ("id", "status", "phase", "summary", "encrypted_content", "caller")
        ),
        "input[4].namespace",  # of a result; that of a call has an effect
        *(f"input[].content[].{name}" for name in ("annotations", "logprobs", *OF_PARTS)),
    },
    CountTokensRequest: IGNORED_COUNTED,
    MessagesRequest: {
        *IGNORED_COUNTED,
        *("metadata", "service_tier", "inference_geo", "diagnostics", "container", "store"),
    },
    BatchRequest: {"output_expires_after"},
}
# In these requests a content of parts is a text once it is parsed.
PART = {"text": "a", "tone": "red", "size": None, **CACHED}
HAVE_PARTS = (ChatRequest, TokenizeRequest, ResponsesRequest)
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
    "string_too_short",
    *(
        "missing",
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


def _at(whole: Any, path: tuple[str | int, ...]) -> Any:
    for key in path:
        whole = whole[key]
    return whole


def _objects(whole: dict[str, Any]) -> Iterator[tuple[tuple[str | int, ...], dict[str, Any]]]:
    """Every object within a request, with its place."""
    for path in _paths(whole):
        if isinstance(owner := _at(whole, path), dict):
            yield path, owner


def _body(whole: Any) -> bytes:
    return json.dumps(whole).encode()


def test_the_requests_of_these_tests_have_every_field_that_is_not_refused() -> None:
    for kind, whole in REQUESTS.items():
        parse_body(kind, _body(whole))
        taken = {
            name
            for name, field in kind.model_fields.items()
            if field.annotation is not Any or name in no_effect_fields(kind)
        }
        assert set(whole) == taken, kind


@pytest.mark.parametrize("kind", REQUESTS)
def test_the_requests_of_these_tests_have_every_object_of_the_schema_whole(
    kind: type[RequestBody],
) -> None:
    """Else what holds of every field within them would hold of few fields."""
    objects = [owner for _, owner in _objects(REQUESTS[kind])]
    described = kind.model_json_schema().get("$defs", {})
    for name, schema in described.items():
        fields = schema.get("properties", {})
        if not fields.keys() - {"type", "disable_parallel_tool_use"}:
            continue  # forms that have no field but their name
        types = [fields[key] for key in ("type", "role") if key in fields]
        words = {word for each in types for word in each.get("enum", [each.get("const")])} - {None}
        assert any(
            fields.keys() <= owner.keys()
            and (not words or words & {owner.get("type"), owner.get("role")})
            for owner in objects
        ), name


@pytest.mark.parametrize("kind", REQUESTS)
def test_null_is_not_given_at_every_depth(kind: type[RequestBody]) -> None:
    """A field that may be left out may be null, and a field that must be there may not."""
    whole = REQUESTS[kind]
    for path in _paths(whole):
        if not path or isinstance(path[-1], int) or not CLIENTS_OWN.isdisjoint(path[:-1]):
            continue
        without, null = (_outcome(kind, _with(whole, path, value)) for value in (ABSENT, None))
        assert without == null, _as_openai_writes(path)


def _outcome(kind: type[RequestBody], whole: Any) -> Any:
    """What a body is parsed to and which of its fields are ignored; None if it is refused."""
    try:
        parsed = parse_body(kind, _body(whole))
    except ParameterError:
        return None
    return parsed.__dict__, parsed.ignored


@pytest.mark.parametrize("kind", REQUESTS)
def test_every_field_without_effect_is_named_as_ignored_and_no_other_field_is(
    kind: type[RequestBody],
) -> None:
    parsed = parse_body(kind, _body(REQUESTS[kind]))
    assert set(parsed.ignored) == IGNORED[kind]
    assert list(parsed.ignored) == sorted(IGNORED[kind])
    assert parsed.unknown == ""


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
            "messages[4].content: it must be a text or a list of parts",
        ),
        (
            ChatRequest,
            {"messages": [{"role": "user", "content": [5]}]},
            "messages[0].content: a part must be an object with a type, {",
        ),
        (
            ChatRequest,
            {"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]},
            'messages[0].content: a part must be as {"type": "text", "text": "..."}',
        ),
        (
            ChatRequest,
            {"messages": [MESSAGES[0], MESSAGES[2] | {"tool_calls": [{"function": 5}]}]},
            "messages[1].tool_calls[0].function is 5; it must be an object",
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
        (ChatRequest, {"seed": 1.5}, "seed is 1.5; it must be a whole number"),
        (ChatRequest, {"n": -1}, "n is -1; it must be at least 1"),
        (CompletionRequest, {"model": {"a": 1}}, "model is an object; it must be a text"),
        (DetokenizeRequest, {"tokens": [1, -1]}, "tokens[1] is -1; it must be at least 0"),
        (BatchRequest, {"metadata": {"a": 1}}, "metadata.a is 1; it must be a text"),
        (
            ResponsesRequest,
            {"input": [*ITEMS, {"role": "bot", "content": "a"}]},
            "input[5].role is 'bot'; it must be 'user', ",
        ),
        (
            ResponsesRequest,
            {"input": [*ITEMS, 5]},
            "input[5] is 5; it must be an object",
        ),
        (
            MessagesRequest,
            {"messages": [{"role": "tool", "content": "a"}]},
            "messages[0].role is 'tool'; it must be one of 'user'",
        ),
        (
            MessagesRequest,
            {"messages": [{"role": "user", "content": 5}]},
            "messages[0].content is 5; it must be a list",
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


@pytest.mark.parametrize("kind", REQUESTS)
def test_a_misspelt_field_is_refused_with_the_field_of_its_place(kind: type[RequestBody]) -> None:
    """At every place of every request; in a conversation only without the field itself. A name of
    three letters at most has no misspellings: in one of five only one letter may differ.
    """
    num_refused = 0
    for path, owner in _objects(REQUESTS[kind]):
        for field in owner if CLIENTS_OWN.isdisjoint(path) else ():
            name = _as_openai_writes((*path, f"{field}_x"))
            body = _body(_with(REQUESTS[kind], path, owner | {f"{field}_x": 1}))
            if len(field) <= 3 or (is_deep := path[:1] in HISTORIES):
                assert re.sub(r"\[\d+\]", "[]", name) in parse_body(kind, body).ignored
            if len(field) <= 3 or (is_deep and field in ("type", "role")):
                continue
            if is_deep:
                others = {key: value for key, value in owner.items() if key != field}
                body = _body(_with(REQUESTS[kind], path, others | {f"{field}_x": 1}))
            with pytest.raises(ParameterError) as refused:
                parse_body(kind, body)
            num_refused += 1
            if kind in HAVE_PARTS and "content" in path:
                whole = _as_openai_writes(path[: path.index("content") + 1])
                assert (str(refused.value), refused.value.parameter) == (
                    f"{whole}: '{field}_x' is not a field of a part; did you mean {field}?",
                    whole,
                )
                continue
            assert (
                str(refused.value)
                == f"{name} is not a parameter of this endpoint; did you mean {field}?"
            )
            assert refused.value.parameter == name
    assert num_refused


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
    kind: type[RequestBody], changes: dict[str, Any], name: str
) -> None:
    """It is an unknown field there, which is ignored."""
    before, parsed = (
        parse_body(kind, _body(REQUESTS[kind] | more))
        for more in ({key: REQUESTS[kind].get(key) for key in changes}, changes)
    )
    assert parsed.unknown == name
    without_positions = re.sub(r"\[\d+\]", "[]", name)
    assert without_positions in parsed.ignored
    assert without_positions not in before.ignored


@pytest.mark.parametrize(
    ("known", "name", "meant"),
    [
        (["temperature"], "tempratur", "temperature"),
        (["temperature"], "tmprtr", ""),
        (["seed"], "sed", "seed"),
        (["seed"], "sede", "seed"),
        (["seed"], "see", "seed"),
        (["seed"], "sees", "seed"),
        (["seed"], "seas", ""),
        (["stop", "store"], "stope", "stop"),
        (["n"], "ni", ""),
        (["model"], "medol", ""),
        (["models"], "medols", "models"),
        (["max_tokens", "max_completion_tokens"], "max_tokenss", "max_tokens"),
        (["tools"], "tools", ""),
        (["a" * 64], "a" * 65, ""),
    ],
)
def test_a_misspelling_is_one_letter_off_or_two_in_a_name_of_six(
    known: list[str], name: str, meant: str
) -> None:
    assert intended_name(name, known) == meant


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        (ChatRequest, {"messages": [{"role": "user", "content": [{"type": "text", **PART}]}]}),
        (ResponsesRequest, {"input": [{"role": "user", "content": [{"type": "text", **PART}]}]}),
        (
            ResponsesRequest,
            {"input": [{"type": "function_call_output", "output": [{"type": "text", **PART}]}]},
        ),
        (MessagesRequest, {"system": [{"type": "text", **PART}]}),
        (
            MessagesRequest,
            {"messages": [{"role": "system", "content": [{"type": "text", **PART}]}]},
        ),
    ],
)
def test_unknown_fields_of_parts_are_named_too(
    kind: type[RequestBody], changes: dict[str, Any]
) -> None:
    parsed = parse_body(kind, _body(REQUESTS[kind] | changes))
    [unknown] = [path for path in parsed.ignored if path.endswith("[].tone")]
    assert unknown.startswith(next(iter(changes)))
    assert parsed.unknown == unknown, "for servers that refuse unknown fields"
    assert not any(path.endswith(".size") for path in parsed.ignored), "null is not given"
    assert any(path.endswith("[].cache_control") for path in parsed.ignored)


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
