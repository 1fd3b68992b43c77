"""What a client cannot take back: contents, ids, arguments and results of many forms in a history,
and fields there that are not ours.
"""

import json
from typing import Any

import pytest

from tramontane.proto.errors import ParameterError
from tramontane.router.chat_apis.messages_request import parse_messages
from tramontane.router.chat_apis.responses_request import (
    MAX_NAME,
    ResponsesRequest,
    parse_responses,
)
from tramontane.router.openai.chat_request import parse_chat
from tramontane.router.openai.completion_request import parse_body
from tramontane.router.tokenization.chat import ChatMessage

QUESTION = {"role": "user", "content": "a"}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}
OBJECT = {"b": [1, None, "c"]}


def _body(fields: Any) -> bytes:
    return json.dumps(fields).encode()


def _chat(*messages: Any) -> list[ChatMessage]:
    return parse_chat(_body({"messages": [QUESTION, *messages]})).conversation()[1:]


def _messages(*turns: Any) -> list[ChatMessage]:
    body = {"messages": [QUESTION, *turns], "max_tokens": 1}
    return parse_messages(_body(body)).request.conversation()[1:]


def _responses(*items: Any, **fields: Any) -> list[ChatMessage]:
    body = {"input": [QUESTION, *items]} | fields
    return parse_responses(_body(body)).request.conversation()[1:]


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (OBJECT, json.dumps(OBJECT)),
        ([OBJECT], json.dumps([OBJECT])),
        (7, "7"),
        (True, "true"),
        (["a", None], '["a", null]'),
        ([{"type": "text", "text": "b"}, {"type": "text", "text": "c"}], "b\nc"),
        (None, ""),
        ([], ""),
    ],
)
def test_a_result_may_be_any_json(content: Any, text: str) -> None:
    results = [
        _chat({"role": "tool", "tool_call_id": 5, "content": content})[0],
        _messages(
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": 5, "content": content}],
            }
        )[0],
        _responses({"type": "function_call_output", "call_id": 5, "output": content})[0],
    ]
    assert {(each.role, each.content, each.tool_call_id) for each in results} == {
        ("tool", text, "5")
    }


def test_ids_of_calls_may_be_numbers() -> None:
    call = {"id": 7, "function": {"name": "f", "arguments": {"x": 1}}}
    [made] = _chat({"role": "assistant", "tool_calls": [call]})
    assert [(call.id, call.arguments) for call in made.tool_calls] == [("7", '{"x":1}')]


@pytest.mark.parametrize(
    ("fields", "arguments"),
    [
        ({"arguments": {"z": 1}}, '{"z":1}'),
        ({"arguments": '{"z":1}', "input": ""}, '{"z":1}'),
        ({"input": "ls"}, '{"input":"ls"}'),
        ({"arguments": None, "name": None}, "{}"),
    ],
)
def test_a_call_of_a_function_keeps_its_arguments(fields: dict[str, Any], arguments: str) -> None:
    call = {"type": "function_call", "call_id": "c", "name": "f"} | fields
    assert _responses(call)[0].tool_calls[0].arguments == arguments
    custom = {"type": "custom_tool_call", "call_id": "c", "name": "f", "input": "", "arguments": 1}
    assert _responses(custom)[0].tool_calls[0].arguments == '{"input":""}'


@pytest.mark.parametrize(
    ("item", "role", "text"),
    [
        ({"type": "shell_call_output", "output": [{"stdout": "a.txt"}]}, "tool", "a.txt"),
        ({"type": "mcp_call", "output": "sunny"}, "tool", "sunny"),
        ({"type": "file_search_call", "results": [{"text": "found"}]}, "tool", "found"),
        (
            {
                "type": "code_interpreter_call",
                "outputs": [{"type": "logs", "logs": "42"}, {"type": "image", "url": "data:x"}],
            },
            "tool",
            "42",
        ),
        ({"type": "refusal", "refusal": "No."}, "user", "No."),
    ],
)
def test_results_of_tools_of_other_servers_keep_their_texts(
    item: dict[str, Any], role: str, text: str
) -> None:
    [made] = _responses(item)
    assert made.role == role
    assert text in made.content
    assert "data:x" not in made.content
    if role == "tool":
        assert made.name == item["type"]
    assert parse_responses(_body({"input": [QUESTION, item]})).ignored == ()


def test_what_has_no_text_is_left_out_and_named() -> None:
    picture = {"type": "computer_call_output", "output": {"image_url": "data:x"}}
    found = parse_responses(_body({"input": [QUESTION, picture]}))
    assert len(found.request.messages) == 1
    assert found.ignored == ("input[].type=computer_call_output",)


def test_blocks_of_other_types_in_an_answer_keep_their_texts() -> None:
    blocks = [
        {"type": "document", "source": {"type": "text", "data": "DOC"}},
        {"type": "foo", "output": "OUT"},
        {"type": "foo"},
        {"type": "text", "text": "a"},
    ]
    [made] = _messages({"role": "assistant", "content": blocks})
    assert made.content == "DOC\nOUT\na"
    assert _messages({"role": "developer", "content": "b"})[0].role == "system"


@pytest.mark.parametrize("half", ["\\ud83d", "\\ude00", "\\\\\\ud83d", "\\ude00\\ud83d"])
def test_half_an_emoji_in_a_history_becomes_the_replacement_character(half: str) -> None:
    given = f'[{{"role": "user", "content": "cut {half}, \\ud83d\\ude00 \\\\ud83d"}}]'
    mended = half.replace("\\ud83d", "\ufffd").replace("\\ude00", "\ufffd").replace("\\\\", "\\")
    text = f"cut {mended}, \U0001f600 \\ud83d"
    chat = parse_chat(f'{{"messages": {given}}}'.encode())
    assert chat.conversation()[0].content == text
    messages = parse_messages(f'{{"max_tokens": 1, "messages": {given}}}'.encode())
    assert messages.request.conversation()[0].content == text
    items = parse_responses(f'{{"input": {given}}}'.encode())
    assert items.request.conversation()[0].content == text


def test_a_very_long_text_with_half_an_emoji_is_refused() -> None:
    body = '{"messages": [{"role": "user", "content": "\\ud83d' + "a" * 2**18 + '"}]}'
    with pytest.raises(ParameterError, match="half of a surrogate pair"):
        parse_chat(body.encode())


@pytest.mark.parametrize("name", ["contents", "context", "tool_call", "toolCalls"])
def test_a_field_that_is_nearly_one_of_ours_is_a_misspelling_only_without_it(name: str) -> None:
    call = {"id": "c", "function": {"name": "f", "arguments": "{}"}}
    whole = {"role": "assistant", "content": "a", "tool_calls": [call]}
    parsed = parse_chat(_body({"messages": [QUESTION, whole | {name: "x"}, QUESTION]}))
    assert parsed.ignored == (f"messages[].{name}",)
    meant = "content" if name.startswith("cont") else "tool_calls"
    others = {key: value for key, value in whole.items() if key != meant}
    with pytest.raises(ParameterError, match=f"did you mean {meant}"):
        parse_chat(_body({"messages": [QUESTION, others | {name: "x"}, QUESTION]}))


def test_a_field_is_named_with_its_number_where_others_of_the_list_have_an_effect() -> None:
    function = {"type": "function", "name": "h", "description": "USED"}
    space = {"type": "namespace", "name": "m", "description": "NOT", "tools": [function]}
    named = parse_responses(_body({"input": "a", "tools": [space, function | {"name": "g"}]}))
    assert named.ignored == ("tools[0].description",)
    alone = parse_responses(_body({"input": "a", "tools": [space]}))
    assert alone.ignored == ("tools[].description",)
    call = {"type": "function_call", "call_id": "c", "name": "h", "namespace": "m"}
    result = {"type": "function_call_output", "call_id": "c", "output": "x", "namespace": "m"}
    items = parse_responses(_body({"input": [QUESTION, call, result], "tools": [space]}))
    assert items.ignored == ("input[2].namespace", "tools[].description")


@pytest.mark.parametrize(
    "answer", [{"content": "{"}, {"content": ""}, {"content": "{", "prefix": True}]
)
def test_an_image_is_refused_before_the_beginning_of_an_answer(answer: dict[str, Any]) -> None:
    seen = {"role": "user", "content": [IMAGE, {"type": "text", "text": "LOOK"}]}
    begun = {"role": "assistant"} | answer
    with pytest.raises(ParameterError, match="images are not supported") as refused:
        parse_chat(
            _body({"messages": [QUESTION, {"role": "assistant", "content": "b"}, seen, begun]})
        )
    assert refused.value.parameter == "messages[2].content"
    assert len(_chat(seen, begun, QUESTION)) == 3, "earlier in a conversation it is left out"


def _tools(*tools: dict[str, Any]) -> dict[str, tuple[str, str | None]]:
    request = parse_body(ResponsesRequest, _body({"input": "a", "tools": tools}))
    return {name: (tool.name, space) for name, (tool, space) in request.functions().items()}


def _space(name: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "name": each} for each in names]
    return {"type": "namespace", "name": name, "tools": tools}


def test_a_function_of_a_namespace_gives_way_to_one_outside_in_any_order() -> None:
    own = {"type": "function", "name": "f"}
    for tools in ((_space("n", "f", "g"), own), (own, _space("n", "f", "g"))):
        assert _tools(*tools) == {"f": ("f", None), "n.f": ("f", "n"), "g": ("g", "n")}


def test_names_with_namespaces_have_the_letters_and_the_length_of_functions() -> None:
    names = list(_tools(_space("x", "g"), _space('a"b c', "g")))
    assert names == ["g", "a_b_c.g"]
    name = "g" * 100
    [_, long] = _tools(_space("x", name), _space("y" * 10**6, name))
    assert (len(long), long[-102:]) == (MAX_NAME, f"y.{name}")


def test_all_functions_of_namespaces_count() -> None:
    spaces = [_space(f"n{number}", *(f"f{each}" for each in range(100))) for number in range(3)]
    with pytest.raises(ParameterError, match="there are 300 tools; there may be at most 256"):
        _tools(*spaces)


def test_an_answer_repeats_all_tools_of_a_namespace() -> None:
    echo = parse_responses(_body({"input": "a", "tools": [_space("n", "f", "g")]})).echo
    assert [tool["name"] for tool in echo["tools"][0]["tools"]] == ["f", "g"]


def test_a_refusal_is_the_text_of_an_answer_and_an_old_call_is_a_call() -> None:
    old = {"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}}
    refused, called = _chat({"role": "assistant", "refusal": "No."}, old)
    assert refused.content == "No."
    assert [(call.name, call.arguments) for call in called.tool_calls] == [("f", "{}")]


def test_a_call_without_an_object_for_its_function_keeps_its_name_and_arguments() -> None:
    call = {"id": "x", "name": "f", "arguments": {"a": 1}}
    [made] = _chat({"role": "assistant", "tool_calls": [call]})
    assert [(call.name, call.arguments) for call in made.tool_calls] == [("f", '{"a":1}')]
