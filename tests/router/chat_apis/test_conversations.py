"""Conversations of both APIs as messages of a chat, in their order, with the client's place of each
message.
"""

import json
from typing import Any

import pytest

from tramontane.proto.errors import ParameterError
from tramontane.router.chat_apis.messages_request import parse_messages
from tramontane.router.chat_apis.responses_request import parse_responses
from tramontane.router.openai.chat_request import MAX_CALLS
from tramontane.router.structured.grammar import Tool, build_grammar
from tramontane.router.tokenization.chat import ToolFormat

CALL = {"type": "function_call", "call_id": "123456789", "name": "f", "arguments": "{}"}
RESULT = {"type": "function_call_output", "call_id": "123456789", "output": "x"}
USE = {"type": "tool_use", "id": "123456789", "name": "f", "input": {"a": [1, "\u00e9"]}}
TEXT = {"type": "text", "text": "a"}


def test_items_of_an_answer_are_one_message() -> None:
    thought = {
        "type": "reasoning",
        "id": "rs_1",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": "hm"}],
    }
    said = {"type": "message", "role": "assistant", "content": "a"}
    items = [
        {"role": "user", "content": "q"},
        thought,
        said,
        CALL,
        CALL,
        RESULT,
        RESULT,
        thought,
        said,
        thought,
        CALL,
    ]
    conversation = parse_responses(json.dumps({"input": items}).encode())
    messages = [message.message() for message in conversation.request.messages]
    assert [
        (each.role, each.content, each.thoughts, len(each.tool_calls)) for each in messages
    ] == [
        ("user", "q", "", 0),
        ("assistant", "a", "hm", 2),
        ("tool", "x", "", 0),
        ("tool", "x", "", 0),
        ("assistant", "a", "hm", 0),
        ("assistant", "", "hm", 1),
    ]
    assert conversation.places == (
        "input[0]",
        "input[1]",
        "input[5]",
        "input[6]",
        "input[7]",
        "input[9]",
    )


def test_texts_and_results_of_a_user_keep_their_order() -> None:
    result = {
        "type": "tool_result",
        "tool_use_id": "123456789",
        "content": [TEXT, TEXT],
        "is_error": True,
    }
    turns = [
        {"role": "assistant", "content": [TEXT, TEXT, USE]},
        {"role": "user", "content": [TEXT, TEXT, result, TEXT]},
    ]
    conversation = parse_messages(json.dumps({"messages": turns, "max_tokens": 1}).encode())
    messages = [message.message() for message in conversation.request.messages]
    assert [(each.role, each.content) for each in messages] == [
        ("assistant", "a\na"),
        ("user", "a\na"),
        ("tool", "a\na"),
        ("user", "a"),
    ]
    assert messages[0].tool_calls[0].arguments == '{"a":[1,"\u00e9"]}'
    assert conversation.places == ("messages[0]", *("messages[1]",) * 3)


def test_a_result_may_have_the_name_of_its_function_and_no_content() -> None:
    [call, named] = parse_responses(
        json.dumps({"input": [CALL, RESULT | {"name": "f"}]}).encode()
    ).request.messages
    assert (call.message().name, named.message().name) == ("", "f")
    turns = [
        {"role": "assistant", "content": [USE]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a"}]},
    ]
    conversation = parse_messages(json.dumps({"messages": turns, "max_tokens": 1}).encode())
    assert conversation.request.messages[1].message().content == ""


def _deep(depth: int) -> Any:
    return {"a": _deep(depth - 1)} if depth else 1


WITHOUT_NUMBERS = '{"a":null,"b":[1.5,null]}'


@pytest.mark.parametrize(
    ("change", "name", "arguments"),
    [
        (
            {"input": {"a": float("nan"), "b": [1.5, float("-inf")]}},
            "f",
            '{"a":null,"b":[1.5,null]}',
        ),
        ({"input": _deep(150)}, "f", '{"a":' * 150 + "1" + "}" * 150),
        ({"input": '{"a": 1'}, "f", '{"a": 1'),
        ({"input": None}, "f", "{}"),
        ({"name": None}, "", "{}"),
    ],
)
def test_a_call_in_a_history_is_never_refused(
    change: dict[str, Any], name: str, arguments: str
) -> None:
    use = {"type": "tool_use", "id": "a", "name": "f", "input": {}} | change
    turns = [
        {"role": "user", "content": [{"type": "text", "text": None}]},
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": "a"},
    ]
    request = parse_messages(json.dumps({"messages": turns, "max_tokens": 1}).encode()).request
    [call] = request.messages[1].message().tool_calls
    assert (call.name, call.arguments) == (name, arguments)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), 10**500])
def test_numbers_that_cannot_be_written_are_refused_wherever_an_answer_may_repeat_them(
    number: float,
) -> None:
    """Also where no grammar is made of them: in tools that are not to be called, and in a schema of
    an answer that is a call.
    """
    schema = {"type": "object", "maximum": number}
    function = {"type": "function", "name": "f", "parameters": schema}
    form = {"format": {"type": "json_schema", "name": "x", "schema": schema}}
    uncalled, called = (
        {"tools": [function], "tool_choice": "none"},
        {"tools": [function | {"parameters": {}}]},
    )
    for more, parameter in (
        (uncalled, "tools[0].parameters"),
        (called | {"tool_choice": "required", "text": form}, "text.format.schema"),
    ):
        with pytest.raises(ParameterError) as refused:
            parse_responses(json.dumps({"input": "a"} | more).encode())
        assert refused.value.parameter == parameter


def test_calls_in_a_row_may_be_many() -> None:
    [message] = parse_responses(json.dumps({"input": [CALL] * 300}).encode()).request.messages
    assert len(message.message().tool_calls) == 300


def test_calls_of_one_message_are_bounded() -> None:
    turns = [{"role": "assistant", "content": [USE] * (MAX_CALLS + 1)}, {"role": "user"}]
    with pytest.raises(ParameterError, match=f"at most {MAX_CALLS} calls"):
        parse_messages(json.dumps({"messages": turns, "max_tokens": 1}).encode())


@pytest.mark.parametrize("content", [None, []])
def test_thoughts_of_nothing_are_a_conversation_of_an_empty_question(content: Any) -> None:
    conversation = parse_responses(
        json.dumps({"input": [{"type": "reasoning", "summary": [], "content": content}]}).encode()
    )
    [message] = [each.message() for each in conversation.request.messages]
    assert (message.role, message.content, message.parts) == ("user", "", ())


def test_texts_after_calls_and_results_of_the_assistant_stay_in_an_answer() -> None:
    """Other servers run tools of their own, whose calls and results are in one answer."""
    ran = [
        {"type": "server_tool_use", "id": "a", "name": "web_search", "input": {}},
        {"type": "web_search_tool_result", "tool_use_id": "a", "content": []},
    ]
    turns = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": [USE, TEXT, *ran, TEXT]},
        {"role": "user", "content": "a"},
    ]
    conversation = parse_messages(json.dumps({"messages": turns, "max_tokens": 1}).encode())
    message = conversation.request.messages[1].message()
    assert (message.content, [call.name for call in message.tool_calls]) == ("a\na", ["f"])
    assert conversation.ignored == (
        "messages[].content[].type=server_tool_use",
        "messages[].content[].type=web_search_tool_result",
    )


IMAGE = {"type": "image", "source": {"type": "base64", "data": "x"}}


def test_an_image_is_refused_in_the_last_question_and_has_a_name_before_it() -> None:
    """Also in the result of a tool, which the client may not be able to send otherwise."""
    asked, said = {"role": "user", "content": [TEXT, IMAGE]}, {"role": "assistant", "content": "b"}
    result = {"type": "tool_result", "tool_use_id": USE["id"], "content": [TEXT, IMAGE]}
    turns = [
        asked,
        said,
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": [USE]},
        {"role": "user", "content": [result, TEXT]},
    ]
    conversation = parse_messages(json.dumps({"messages": turns, "max_tokens": 1}).encode())
    messages = [message.message() for message in conversation.request.messages]
    assert [message.content for message in messages] == [
        *("a\n[image omitted]", "b", "c", "", "a\n[image omitted]", "a"),
    ]
    assert "messages[].content[].type=image" in conversation.ignored
    for refused_turns, place in (([asked], 0), ([asked, said, asked], 2), ([asked, asked], 1)):
        with pytest.raises(ParameterError, match="serves text only; images are not") as refused:
            parse_messages(json.dumps({"messages": refused_turns, "max_tokens": 1}).encode())
        assert refused.value.parameter == f"messages[{place}].content"


@pytest.mark.parametrize(
    ("block", "text"),
    [
        ({"type": "refusal"}, None),
        ({"type": "refusal", "refusal": 5}, None),
        ({"type": "refusal", "refusal": "no"}, "no"),
        (
            {
                "type": "document",
                "source": {"type": "text", "media_type": "text/plain", "data": "d"},
            },
            "d",
        ),
        (
            {"type": "search_result", "title": "t", "content": [{"type": "text", "text": "u"}]},
            "t\nu",
        ),
        ({"type": "document", "source": {"type": "url"}}, None),
    ],
)
def test_a_block_of_another_type_is_its_text_or_is_refused(
    block: dict[str, Any], text: str | None
) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": [block]}], "max_tokens": 1})
    if text is None:
        with pytest.raises(ParameterError, match="not supported") as refused:
            parse_messages(body.encode())
        assert refused.value.parameter == "messages[0].content"
    else:
        [message] = parse_messages(body.encode()).request.messages
        assert message.message().content == text


def test_an_error_names_the_place_of_the_client() -> None:
    conversation = parse_responses(
        json.dumps(
            {"input": [{"role": "user", "content": "q"}, RESULT], "instructions": "b"}
        ).encode()
    )
    renamed = conversation.renamed(
        ParameterError("look at messages[2], not messages[3]", "messages")
    )
    assert (str(renamed), renamed.parameter) == ("look at input[1], not messages[3]", "input")
    named = conversation.renamed(
        ParameterError("tools[1].function.parameters: no", "tools[1].function.parameters")
    )
    assert (str(named), named.parameter) == ("tools[1].parameters: no", "tools[1].parameters")


# Schemas of tools


def _parsed_tool(schema: str, *, strict: bool = False) -> Tool:
    tool = f'{{"name": "f", "strict": {json.dumps(strict)}, "input_schema": {schema}}}'
    turns = '[{"role": "user", "content": "a"}]'
    body = f'{{"max_tokens": 5, "messages": {turns}, "tools": [{tool}]}}'
    (parsed,) = parse_messages(body.encode()).request.tools or ()
    return parsed


@pytest.mark.parametrize("kind", ['"Object"', '""', "null", "[]"])
def test_an_input_schema_of_an_odd_type_is_an_objects(kind: str) -> None:
    tool = _parsed_tool(f'{{"type": {kind}, "required": ["a"]}}')
    grammar = build_grammar(None, [tool], "required", ToolFormat(1, 2))
    assert '%json {"type":"object","required":["a"],' in grammar


@pytest.mark.parametrize("number", ["NaN", "1e999", "9" * 480])
def test_an_input_schema_loses_what_json_cannot_say(number: str) -> None:
    schema = f'{{"properties": {{"a": {{"default": {number}, "type": "string"}}}}}}'
    left = {"properties": {"a": {"type": "string"}}}
    assert _parsed_tool(schema).function.parameters == left
    with pytest.raises(ParameterError, match="in the schema of the tool 'f'") as refused:
        _parsed_tool(schema, strict=True)
    assert refused.value.parameter == "tools[0].input_schema"
