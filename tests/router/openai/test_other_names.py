"""Names of other APIs and servers for parameters: refused with ours, because an answer without them
is another one.
"""

import json
from typing import Any

import pytest

from tramontane.proto.errors import ParameterError
from tramontane.router.chat_apis.messages_request import parse_messages
from tramontane.router.chat_apis.responses_request import parse_responses
from tramontane.router.openai.chat_request import parse_chat
from tramontane.router.openai.completion_request import parse_completion

USER = {"role": "user", "content": "a"}
PARSERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "chat": (parse_chat, {"messages": [USER]}),
    "completions": (parse_completion, {"prompt": "a"}),
    "responses": (parse_responses, {"input": "a"}),
    "messages": (parse_messages, {"messages": [USER], "max_tokens": 5}),
}


def _parse(api: str, **fields: Any) -> Any:
    parse, body = PARSERS[api]
    return parse(json.dumps(body | fields).encode())


@pytest.mark.parametrize(
    ("api", "name", "meant"),
    [
        ("responses", "max_tokens", "max_output_tokens"),
        ("responses", "max_completion_tokens", "max_output_tokens"),
        ("responses", "response_format", "text"),
        ("messages", "stop", "stop_sequences"),
        ("chat", "max_output_tokens", "max_tokens"),
        ("chat", "max_new_tokens", "max_tokens"),
        ("chat", "num_predict", "max_tokens"),
        ("chat", "stop_sequences", "stop"),
        ("chat", "repeat_penalty", "repetition_penalty"),
        ("completions", "temp", "temperature"),
        ("completions", "topP", "top_p"),
        ("chat", "format", "response_format"),
    ],
)
def test_another_name_is_refused_with_ours(api: str, name: str, meant: str) -> None:
    with pytest.raises(ParameterError, match=f"{name} is not .* did you mean {meant}") as refused:
        _parse(api, **{name: 1})
    assert refused.value.parameter == name


def test_another_name_is_ignored_together_with_ours() -> None:
    assert _parse("chat", max_new_tokens=5, max_tokens=6).ignored == ("max_new_tokens",)
    assert _parse("messages", max_completion_tokens=5).ignored == ("max_completion_tokens",)


def test_a_message_whose_content_has_another_name_is_refused() -> None:
    with pytest.raises(ParameterError, match="did you mean content"):
        _parse("chat", messages=[{"role": "user", "text": "Weather?"}])
    said = {"role": "user", "text": "b", "content": "a"}
    assert _parse("chat", messages=[said]).ignored == ("messages[].text",)


def test_the_schema_of_a_tool_under_another_name_is_refused() -> None:
    function = {"name": "f", "input_schema": {"type": "object"}}
    with pytest.raises(ParameterError, match="did you mean parameters"):
        _parse("chat", tools=[{"type": "function", "function": function}])
    with pytest.raises(ParameterError, match='"parameters", did you mean "input_schema"'):
        _parse("messages", tools=[{"name": "f", "parameters": {"type": "object"}}])
    with pytest.raises(ParameterError, match="functions of chats have another form"):
        _parse("messages", tools=[{"type": "function", "function": {"name": "f"}}])


@pytest.mark.parametrize(
    ("api", "body", "advice"),
    [
        ("chat", {"prompt": "a"}, "messages is missing; prompt is for /v1/completions"),
        ("chat", {"input": "a"}, "messages is missing; input is for /v1/responses"),
        (
            "completions",
            {"messages": []},
            "prompt is missing; messages is for /v1/chat/completions",
        ),
        ("responses", {"prompt": None}, "input is missing"),
    ],
)
def test_the_body_of_another_endpoint_is_recognized(
    api: str, body: dict[str, Any], advice: str
) -> None:
    with pytest.raises(ParameterError, match=f"^{advice}"):
        PARSERS[api][0](json.dumps(body).encode())
