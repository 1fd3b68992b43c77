"""Arbitrary HTTP request bodies, and the shape that every error response must have."""

import json
from typing import Any

from hypothesis import strategies as st
from pydantic import BaseModel

from tramontane.router.chat_apis.messages_request import MessagesRequest
from tramontane.router.chat_apis.responses_request import ResponsesRequest
from tramontane.router.openai.chat_request import ChatRequest
from tramontane.router.openai.completion_request import MAX_PROMPTS, CompletionRequest
from tramontane.router.openai.tokenize import DetokenizeRequest, TokenizeRequest

NUMBERS = (
    st.integers()
    | st.integers(-2, 130)
    | st.floats()
    | st.sampled_from([10**30, 2**31 - 1, 1e-320, 1e308])
)
SCALARS = st.none() | st.booleans() | NUMBERS | st.text(max_size=12)
VALUES = SCALARS | st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=8,
)
PROMPTS = (
    st.text(max_size=40)
    | st.lists(st.text(max_size=8), max_size=3)
    | st.lists(st.integers(-1, 1001), max_size=70)
)
SENSIBLE = st.fixed_dictionaries(
    {"prompt": PROMPTS},
    optional={
        "max_tokens": st.integers(0, 80),
        "temperature": st.sampled_from([0, 1e-320, 1e-6, 0.7, 1, 1e30, 1e308]),
        "top_p": st.floats(0, 1),
        "top_k": st.integers(-2, 1001),
        "seed": st.integers(-(2**63), 2**63),
        "n": st.integers(0, 9),
        "stop": st.text(max_size=3) | st.lists(st.text(max_size=2), max_size=3),
        "stream": st.booleans(),
        "echo": st.booleans(),
        "ignore_eos": st.booleans(),
        "return_token_ids": st.booleans(),
        "return_experts": st.lists(st.integers(-1, 3), max_size=3),
        "min_p": st.floats(0, 1),
        "presence_penalty": st.floats(-2, 2),
        "frequency_penalty": st.floats(-2, 2),
        "repetition_penalty": st.floats(0.01, 100),
        "logit_bias": st.dictionaries(
            st.integers(0, 1001).map(str), st.floats(-100, 100), max_size=4
        ),
        "min_tokens": st.integers(0, 9),
        "logprobs": st.integers(0, 21),
        "prompt_logprobs": st.integers(0, 21),
        "stream_options": st.fixed_dictionaries({}, optional={"include_usage": st.booleans()}),
    },
)
FIELDS = st.dictionaries(
    st.sampled_from(sorted(CompletionRequest.model_fields)), VALUES, max_size=3
)


SIZES = st.integers(-2, 9) | st.sampled_from([10**400, -(10**400), 2**63, 1e308, 1e-320, 0.1])
CONTENTS = (
    st.sampled_from(
        ["string", "integer", "number", "array", "object", "^a+$", "(", "uuid", "#", "\ud800"]
    )
    | SIZES
    | VALUES
)
KEYWORDS = {
    **dict.fromkeys(
        (
            "multipleOf",
            "minimum",
            "exclusiveMaximum",
            "minLength",
            "maxLength",
            "minItems",
            "maxProperties",
        ),
        SIZES,
    ),
    **dict.fromkeys(("type", "const", "pattern", "format", "$ref", "required"), CONTENTS),
    "enum": st.lists(CONTENTS, max_size=3),
}
SCHEMAS = st.recursive(
    st.fixed_dictionaries({}, optional=KEYWORDS),
    lambda inner: st.builds(
        lambda name, parts: {
            name: parts
            if name.endswith("Of")
            else {"a": parts[0]}
            if name == "properties"
            else parts[0]
        },
        st.sampled_from(
            ["anyOf", "allOf", "oneOf", "items", "properties", "additionalProperties", "not"]
        ),
        st.lists(inner, min_size=1, max_size=3),
    ),
    max_leaves=4,
)


def _with_schema(schema: dict[str, Any]) -> dict[str, Any]:
    return {
        "prompt": "a",
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
    }


def _as_body(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields).encode()


@st.composite
def _damaged(draw: st.DrawFn) -> bytes:
    whole = _as_body(draw(SENSIBLE))
    at, length = draw(st.integers(0, len(whole))), draw(st.integers(0, 6))
    return whole[:at] + draw(st.binary(max_size=6)) + whole[at + length :]


BODIES = {
    "bytes": st.binary(max_size=80),
    "damaged requests": _damaged(),
    "sensible requests": SENSIBLE.map(_as_body),
    "schemas": SCHEMAS.map(lambda schema: _as_body(_with_schema(schema) | {"max_tokens": 2})),
    "any value in any field": st.builds(
        lambda sensible, any_field: _as_body(sensible | any_field), SENSIBLE, FIELDS
    ),
}


def _many(head: bytes, item: bytes, tail: bytes = b"]}") -> bytes:
    return head + b",".join([item] * 2000) + tail


USER = b'{"messages":[{"role":"user","content":"a"}],'
MANY_MISTAKES: dict[str, tuple[type[BaseModel], bytes]] = {
    "messages": (ChatRequest, _many(b'{"messages":[', b"{}")),
    "calls": (
        ChatRequest,
        _many(b'{"messages":[{"role":"assistant","tool_calls":[', b'{"id":[]}', b"]}]}"),
    ),
    "tools": (ChatRequest, _many(USER + b'"tools":[', b"{}")),
    "good tools": (
        ChatRequest,
        _many(USER + b'"tools":[', b'{"type":"function","function":{"name":"f"}}'),
    ),
    "tools of a conversation": (TokenizeRequest, _many(USER + b'"tools":[', b"{}")),
    "tokens": (DetokenizeRequest, _many(b'{"tokens":[', b'""')),
    "layers": (CompletionRequest, _many(b'{"prompt":"a","return_experts":[', b"-1")),
    "items": (ResponsesRequest, _many(b'{"input":[', b"{}")),
    "tools of a response": (ResponsesRequest, _many(b'{"input":"a","tools":[', b"{}")),
    "turns": (MessagesRequest, _many(b'{"max_tokens":1,"messages":[', b"{}")),
    "blocks": (
        MessagesRequest,
        _many(b'{"max_tokens":1,"messages":[{"role":"user","content":[', b"{}", b"]}]}"),
    ),
    "prompts": (CompletionRequest, b'{"prompt":[' + b",".join([b'""'] * (MAX_PROMPTS + 1)) + b"]}"),
}


def check_error(
    body: bytes, param: str | None = None, code: str | None = None, path: str = ""
) -> dict[str, Any]:
    """Check that the body is an error of OpenAI's shape, or of Anthropic's where the path is of its
    API, and return the error.
    """
    parsed = json.loads(body)
    if path.startswith("/v1/messages"):
        assert parsed.keys() == {"type", "error"}
        assert parsed["error"].keys() == {"type", "message"}
        anthropics: dict[str, Any] = parsed["error"]
        return anthropics
    assert parsed.keys() == {"error", "message"}
    error: dict[str, Any] = parsed["error"]
    assert parsed["message"] == error["message"]  # where Mistral's clients look for it
    assert error.keys() == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert error["message"]
    assert error["type"] in ("invalid_request_error", "rate_limit_error", "server_error")
    assert param is None or error["param"] == param
    assert code is None or error["code"] == code
    return error
