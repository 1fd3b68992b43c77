"""Histories of Anthropic's and of OpenAI's Responses clients are repaired and not refused, in every
chat format, with every text of the user.
"""

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import pytest
from chat_formats import FORMATS, chat_format

from tramontane.router.chat_apis.conversation import Conversation
from tramontane.router.chat_apis.messages_request import parse_messages
from tramontane.router.chat_apis.responses_request import parse_responses
from tramontane.router.tokenization.chat import ChatMessage
from tramontane.router.tokenization.history import INTERRUPTED, HistoryFormat, repair_history

ASK, GO = "What is the weather?", "And tomorrow?"
FULL = HistoryFormat(frozenset(("assistant", "system")), has_mistral_ids=False)


def _text(text: str = ASK, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": text, **more}


def _use(call_id: str | None = "toolu_01A09q90qw90lq917835lq9", **more: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id, "name": "f", "input": {"city": "Rome"}} | more


def _result(call_id: str | None = "toolu_01A09q90qw90lq917835lq9", **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call_id, "content": "sunny"} | more


def _user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def _assistant(*blocks: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


IMAGE = {"type": "image", "source": {"type": "base64", "data": "AAAA"}}
END = _user(_text(GO))
TURNS: Mapping[str, list[dict[str, Any]]] = MappingProxyType(
    {
        "a call and its result": [_user(_text()), _assistant(_use()), _user(_result(), _text(GO))],
        "the text before the result": [
            _user(_text()),
            _assistant(_text("I look."), _use()),
            _user(_text(GO), _result()),
        ],
        "no result": [_user(_text()), _assistant(_use()), END],
        "no call": [_user(_result(), _text()), _assistant(_text("Sunny.")), END],
        "no ids": [
            _user(_text()),
            _assistant(_use(None), _use("")),
            _user(_result(None), _result("")),
        ],
        "one id twice": [_user(_text()), _assistant(_use(), _use()), _user(_result(), _result())],
        "results out of order": [
            _user(_text()),
            _assistant(_use("a"), _use("b")),
            _user(_result("b"), _result("a", content=None), _result("c")),
        ],
        "nothing": [{"role": "user"}, {"role": "assistant", "content": None}, _assistant(), END],
        "empty texts": [_user(_text("")), _assistant(_text("")), END],
        "thoughts": [
            _user(_text()),
            _assistant(
                {"type": "thinking", "thinking": "hm", "signature": "x"},
                {"type": "redacted_thinking", "data": "x"},
                _text("I look.", citations=[]),
                _use(),
            ),
            _user(_result(is_error=True, cache_control={"type": "ephemeral"})),
        ],
        "a thought alone": [
            _user(_text()),
            _assistant({"type": "thinking", "thinking": "hm"}),
            END,
        ],
        "null thoughts": [_user(_text()), _assistant({"type": "thinking", "thinking": None}), END],
        "tools of another server": [
            _user(_text()),
            _assistant(
                {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {}},
                {"type": "web_search_tool_result", "tool_use_id": "srvtoolu_1", "content": []},
                _text("Sunny."),
            ),
            END,
        ],
        "images": [
            _user(IMAGE, _text(), {"type": "hologram"}),
            _assistant(_use()),
            _user(_result(content=[IMAGE, _text("a map")])),
            _assistant(_text("Sunny.")),
            END,
        ],
        "null input": [_user(_text()), _assistant(_use(input=None, caller={"type": "x"})), END],
        "assistants in a row": [
            _user(_text()),
            _assistant(_use("a")),
            _assistant(_use("b")),
            _assistant(_text("Wait.")),
            _user(_result("b"), _result("a")),
        ],
        "system turns": [
            {"role": "system", "content": "Be brief."},
            _user(_text()),
            _assistant(_use()),
            {"role": "system", "content": [_text("Be kind.")]},
            _user(_result()),
        ],
        "300 calls": [
            _user(_text()),
            _assistant(*(_use(f"toolu_{i}") for i in range(300))),
            _user(*(_result(f"toolu_{i}") for i in range(300)), _text(GO)),
        ],
        "an answer last": [_user(_text()), _assistant(_text("It is"))],
    }
)


def _item(role: str, content: Any = ASK, **more: Any) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": content, **more}


def _call(call_id: str | None = "call_1", **more: Any) -> dict[str, Any]:
    arguments = '{"city": "Rome"}'
    return {"type": "function_call", "call_id": call_id, "name": "f", "arguments": arguments} | more


def _output(call_id: str | None = "call_1", **more: Any) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": "sunny"} | more


ITEMS: Mapping[str, list[dict[str, Any]]] = MappingProxyType(
    {
        "a call and its output": [_item("user"), _call(), _output(), _item("user", GO)],
        "a message between": [
            _item("user"),
            _call(),
            _item("assistant", "I look."),
            _output(),
            _item("user", GO),
        ],
        "no output": [_item("user"), _call(), _item("user", GO)],
        "no call": [_item("user"), _output(), _output("call_2", output=None), _item("user", GO)],
        "no ids": [_item("user"), _call(None), _call(""), _output(None), _output("")],
        "cut arguments": [_item("user"), _call(arguments='{"city": "Ro'), _output()],
        "null arguments": [_item("user"), _call(arguments=None, id="fc_1", status="completed")],
        "reasoning": [
            _item("user"),
            {
                "type": "reasoning",
                "id": "rs_1",
                "summary": [{"type": "summary_text", "text": "hm"}],
                "content": None,
                "encrypted_content": "x",
            },
            {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]},
            _call(),
            {"type": "reasoning", "content": []},
            _call("call_2"),
            _output("call_2"),
            _output(),
        ],
        "a thought last": [_item("user"), {"type": "reasoning", "content": "hm"}],
        "tools of another server": [
            _item("user"),
            {"type": "web_search_call", "id": "ws_1", "status": "completed"},
            {"type": "local_shell_call", "id": "sh_1", "action": {"command": ["ls"]}},
            {"type": "local_shell_call_output", "id": "sh_1", "output": "a.txt"},
            {"type": "computer_call_output", "call_id": "c_1", "output": {"image_url": "x"}},
            {"type": "item_reference", "id": "msg_1"},
            _item("assistant", [{"type": "output_text", "text": "Sunny.", "annotations": []}]),
            _item("user", GO),
        ],
        "custom tools": [
            _item("user"),
            {"type": "custom_tool_call", "call_id": "call_1", "name": "f", "input": "ls </s>"},
            {"type": "custom_tool_call_output", "call_id": "call_1", "output": "a.txt"},
        ],
        "images": [
            _item("user", [{"type": "input_text", "text": ASK}, {"type": "input_image"}]),
            _item("assistant", [{"type": "refusal", "refusal": "No."}], id="msg_1", phase="final"),
            _item("user", GO),
        ],
        "an output of parts": [
            _item("user"),
            _call(),
            _output(output=[{"type": "input_text", "text": "sunny"}, {"type": "input_image"}]),
        ],
        "developers everywhere": [
            _item("developer", "Be brief."),
            _item("user"),
            _item("developer", "Be kind."),
            _call(),
            _item("system", None),
            _output(),
            _item("developer", "Be exact."),
        ],
        "nothing": [_item("assistant", None), _item("user", []), _item("assistant", "")],
        "300 calls": [
            _item("user"),
            *(_call(f"call_{i}") for i in range(300)),
            *(_output(f"call_{i}") for i in range(300)),
        ],
    }
)


def _messages(turns: list[dict[str, Any]]) -> Conversation:
    return parse_messages(json.dumps({"messages": turns, "max_tokens": 1}).encode())


def _responses(items: list[dict[str, Any]]) -> Conversation:
    return parse_responses(json.dumps({"input": items}).encode())


@pytest.mark.parametrize("kind", FORMATS)
def test_histories_of_both_apis_are_written_in_every_format(kind: str) -> None:
    form = chat_format(kind)
    conversations = [*map(_messages, TURNS.values()), *map(_responses, ITEMS.values())]
    for given, parsed in zip([*TURNS.values(), *ITEMS.values()], conversations, strict=True):
        written = form.tokenizer.decode(form.chat.encode(parsed.request.conversation()))
        for text in (ASK, GO):
            assert (text in written) == (text in str(given)), given


def _roles(messages: list[ChatMessage]) -> list[str]:
    return [each.content if each.content == INTERRUPTED else each.role for each in messages]


@pytest.mark.parametrize(
    ("conversation", "expected"),
    [
        (_messages(TURNS["the text before the result"]), ["user", "assistant", "tool", "user"]),
        (_messages(TURNS["no result"]), ["user", "assistant", INTERRUPTED, "user"]),
        (
            _messages(TURNS["assistants in a row"]),
            ["user", "assistant", "tool", "tool", "assistant"],
        ),
        (
            _responses(ITEMS["a message between"]),
            ["user", "assistant", "tool", "assistant", "user"],
        ),
        (_responses(ITEMS["reasoning"]), ["user", "assistant", "tool", "tool"]),
        (_responses(ITEMS["null arguments"]), ["user", "assistant", INTERRUPTED]),
        (_responses(ITEMS["tools of another server"]), ["user", "user", "assistant", "user"]),
    ],
)
def test_results_are_with_their_calls(conversation: Conversation, expected: list[str]) -> None:
    repaired = repair_history(conversation.request.conversation(), FULL)
    assert _roles(repaired) == expected
