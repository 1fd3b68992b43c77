"""Histories as clients send them in OpenAI's JSON, most of which no chat format has as they are."""

import json
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

Json = dict[str, Any]
UUID = "6f1c7c1e-3b0e-4d8e-9f0e-0d6c1b2a3f4e"
ASK, GO = "What is the weather?", "And tomorrow?"


def said(role: str, content: Any = None, **more: Any) -> Json:
    return {"role": role, "content": content, **more}


def user(content: Any = ASK, **more: Any) -> Json:
    return said("user", content, **more)


def call(call_id: Any = "call_1", arguments: Any = '{"city": "Rome"}', name: str = "f") -> Json:
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def calls(*each: Json, content: Any = None, **more: Any) -> Json:
    return said("assistant", content, tool_calls=list(each), **more)


def result(call_id: Any = "call_1", content: Any = "sunny", **more: Any) -> Json:
    return said("tool", content, tool_call_id=call_id, **more)


def text(written: str, **more: Any) -> Json:
    return {"type": "text", "text": written, **more}


def thought(written: Any, **more: Any) -> Json:
    return {"type": "thinking", "thinking": written, **more}


def _with_id(call_id: str | None) -> list[Json]:
    return [user(), calls(call(call_id)), result(call_id), said("assistant", "Sunny."), user(GO)]


def _with_arguments(arguments: Any) -> list[Json]:
    return [user(), calls(call(arguments=arguments)), result(), user(GO)]


def _with_result(content: Any) -> list[Json]:
    return [user(), calls(call()), result(content=content), user(GO)]


def _answered(answer: Json) -> list[Json]:
    return [user(), answer, user(GO)]


def _nested(depth: int) -> str:
    return "[" * depth + "]" * depth


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
FILE = {"type": "file", "file": {"file_id": "file-1"}}
LEGACY = {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}}
CUSTOM = {"id": "call_1", "type": "custom", "custom": {"name": "f", "input": 'ls "a"'}}
STORED: Json = {
    "id": "msg_1",
    "annotations": [{"type": "url_citation"}],
    "audio": {"id": "audio_1"},
    "extra_content": {"google": {"thought_signature": "x"}},
    "provider_specific_fields": {"a": [1]},
    "reasoning_details": [{"type": "reasoning.text", "text": "hm"}],
    "refusal": None,
}

IDS: Mapping[str, list[Json]] = {
    "openai": _with_id("call_abcdefghijklmnopqrstuvwx"),
    "anthropic": _with_id("toolu_01A09q90qw90lq917835lq9"),
    "uuid": _with_id(UUID),
    "native": _with_id("abcDEF123"),
    "letters of another script": _with_id("\u00e9\u00e9\u00e9\u00e9\u00e9\u00e9\u00e9\u00e9\u00e9"),
    "a line break": _with_id("abcDEF123\n"),
    "empty": _with_id(""),
    "null": _with_id(None),
    "the word null": _with_id("null"),
    "twice in one message": [
        user(),
        calls(call("a"), call("a", name="g")),
        result("a", "one"),
        result("a", "two"),
    ],
    "twice in one message, native": [
        user(),
        calls(call("abcDEF123"), call("abcDEF123")),
        result("abcDEF123", "one"),
        result("abcDEF123", "two"),
        user(GO),
    ],
    "in two messages": [
        *_with_id("call_0"),
        calls(call("call_0")),
        result("call_0", "rain"),
        user("Thanks"),
    ],
    "of results alone": [user(), calls(call(None)), result("call_1"), user(GO)],
    "of calls alone": [user(), calls(call("call_1")), result(None), user(GO)],
    "missing": [
        user(),
        {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]},
        {"role": "tool", "content": "sunny"},
        user(GO),
    ],
}
ORDERS: Mapping[str, list[Json]] = {
    "calls without results": [user(), calls(call("a"), call("b")), user(GO)],
    "one result of two": [user(), calls(call("a"), call("b")), result("b"), user(GO)],
    "calls last": [user(), calls(call("a"))],
    "an answer after calls without results": [
        user(),
        calls(call("a")),
        said("assistant", "I cannot."),
        user(GO),
    ],
    "a text between call and result": [
        user(),
        calls(call("a")),
        said("assistant", "I look."),
        result("a"),
        user(GO),
    ],
    "results without calls": [user(), result("a"), said("assistant", "Sunny."), user(GO)],
    "results first": [result("a"), result("b", ""), user()],
    "a result alone": [result("a")],
    "two results of one call": [user(), calls(call("a")), result("a"), result("a", "rain")],
    "results out of order": [
        user(),
        calls(call("a"), call("b", name="g"), call("c")),
        result("c", "3"),
        result("a", "1"),
        result("b", "2"),
        user(GO),
    ],
    "results after the user": [
        user(),
        calls(call("a"), call("b")),
        user(GO),
        result("b"),
        result("a"),
    ],
    "results after the system": [
        user(),
        calls(call("a")),
        said("system", "Be brief."),
        result("a"),
        user(GO),
    ],
    "calls in messages in a row": [
        user(),
        calls(call("a"), content="One."),
        calls(call("b"), content="Two."),
        result("a"),
        result("b"),
        user(GO),
    ],
    "results interrupted by the user": [user(), calls(call("a")), result("a"), user(GO)],
    "calls first": [calls(call("a")), result("a"), user(GO)],
    "text before calls": [
        user(),
        calls(call("a"), content="I look."),
        result("a"),
        said("assistant", "Sunny."),
        user(GO),
    ],
    "results by names": [
        user(),
        calls(call("a"), call("b", name="g")),
        said("tool", "2", name="g"),
        said("tool", "1", name="f"),
        said("tool", "0", name="unknown"),
    ],
    "functions": [
        user(),
        LEGACY,
        {"role": "function", "name": "f", "content": "sunny"},
        said("assistant", "Sunny.", function_call=None),
        user(GO),
    ],
    "custom tools": [user(), calls(CUSTOM), result(), user(GO)],
    "calls of nothing": [user(), calls({"id": "a", "type": "custom"}, {}), result("a"), user(GO)],
    "300 calls of one answer": [
        user(),
        calls(*(call(f"call_{i}") for i in range(300))),
        *(result(f"call_{i}", str(i)) for i in range(150, 300)),
        user(GO),
    ],
    "300 calls": [
        user(),
        *(calls(*(call(f"call_{i}") for i in range(n, n + 100))) for n in (0, 100, 200)),
        *(result(f"call_{i}", str(i)) for i in range(300)),
        user(GO),
    ],
}
ROLES: Mapping[str, list[Json]] = {
    "empty answers": [user(), said("assistant", ""), user(GO), said("assistant"), user("Well?")],
    "empty lists of parts": [user([]), said("assistant", []), said("system", []), user(GO)],
    "nulls": [said("system"), user(None), said("assistant", tool_calls=None), user(GO)],
    "no contents": [{"role": "user"}, {"role": "assistant"}, {"role": "user"}],
    "an empty answer last": [user(), said("assistant", "")],
    "an empty answer alone": [said("assistant", "")],
    "a system message first": [said("system", "Be brief."), user()],
    "a system message in the middle": [
        user(),
        said("assistant", "Sunny."),
        said("system", "Be brief."),
        user(GO),
    ],
    "a system message last": [user(), said("assistant", "Sunny."), said("system", "Be brief.")],
    "a system message alone": [said("system", "Be brief.")],
    "developers everywhere": [
        said("developer", "Be brief."),
        user(),
        said("developer", [text("Be kind."), text("Rhyme.")]),
        said("assistant", "Sunny."),
        said("developer", "Be quick."),
        user(GO),
        said("developer", "Be exact."),
    ],
    "three users in a row": [user(), user("Hello?"), user(GO)],
    "three answers in a row": [
        user(),
        *(said("assistant", each) for each in ("One.", "Two.", "Three.")),
        user(GO),
    ],
    "an answer first": [said("assistant", "Hello!"), user()],
    "an answer alone": [said("assistant", "Hello")],
    "an answer last": [user(), said("assistant", "It is")],
    "an answer after results last": [user(), calls(call()), result(), said("assistant", "It is")],
    "two answers last": [user(), said("assistant", "It"), said("assistant", "is")],
    "blanks": [user(" "), said("assistant", "  "), user("\n"), said("assistant", "\n"), user(GO)],
    "names": [
        user(name="Ann"),
        said("assistant", "Sunny.", name="Bot"),
        said("system", "Be brief.", name="rules"),
        user(GO, name="</s>"),
    ],
}
THOUGHTS: Mapping[str, list[Json]] = {
    "as fields": _answered(said("assistant", "Sunny.", reasoning="hm", reasoning_content="hm")),
    "alone, as a field": _answered(said("assistant", None, reasoning_content="hm")),
    "as parts": _answered(said("assistant", [thought("hm"), text("Sunny."), thought([text("h")])])),
    "alone, as parts": _answered(said("assistant", [thought("hm", closed=False, signature="x")])),
    "of nulls": _answered(said("assistant", [thought("hm", closed=None), thought("")])),
    "of the system": [said("system", [text("Think:"), thought("hm"), text("so.")]), user()],
    "of the system alone": [said("system", [thought("hm")]), user()],
    "of the user": [user([thought("hm"), text(ASK)]), said("assistant", "Sunny."), user(GO)],
    "of a tool": _with_result([thought("hm"), text("sunny")]),
    "before calls": [
        user(),
        calls(call(), content=[thought("hm"), text("I look.")]),
        result(),
        said("assistant", "Sunny.", reasoning="so"),
        user(GO),
    ],
    "last": [user(), said("assistant", [thought("hm", closed=False)])],
    "redacted": _answered(said("assistant", [{"type": "redacted_thinking", "data": "x"}])),
}
ARGUMENTS: Mapping[str, list[Json]] = {
    "an object": _with_arguments({"city": "Rome", "deep": {"er": [1, None]}}),
    "null": _with_arguments(None),
    "nothing": _with_arguments(""),
    "cut": _with_arguments('{"city": "Ro'),
    "a list": _with_arguments([1, 2]),
    "the text of a list": _with_arguments("[1, 2]"),
    "a number": _with_arguments(7),
    "the text of a number": _with_arguments("7"),
    "a word": _with_arguments("Rome"),
    "nested deeply": _with_arguments('{"a": ' + _nested(40) + "}"),
    "nested too deeply": _with_arguments(_nested(400)),
    "nested far too deeply": _with_arguments(_nested(2000)),
    "nested and cut": _with_arguments("[" * 2000),
    "a long number": _with_arguments("7" * 5000),
    "half of a pair": _with_arguments('{"a": "\\ud83d"}'),
    "not a number": _with_arguments('{"a": NaN, "b": 1e999}'),
    "as a field of nulls": [
        user(),
        calls({"function": {"name": None, "arguments": None}}),
        user(GO),
    ],
    "a result nested too deeply": _with_result(_nested(2000)),
    "a result nested deeply": _with_result(_nested(600)),
    "a result with half of a pair": _with_result('{"a": "\\ud83d"}'),
    "a result of a long number": _with_result("7" * 5000),
    "a result of JSON": _with_result('{"a": [1, "\\u00e9", 1.50]}'),
    "a result of nothing": _with_result(None),
}
STORES: Mapping[str, list[Json]] = {
    "keys of every kind": [
        said("system", "Be brief.", cache_control={"type": "ephemeral"}),
        user([text(ASK, cache_control={"type": "ephemeral"})], **STORED),
        calls({**call(), "extra_content": {"a": 1}, "index": 0}, **STORED),
        result(is_error=True, cache_control={"type": "ephemeral"}, artifact=None, **STORED),
        said("assistant", [text("Sunny.", annotations=[])], **STORED | {"refusal": "No."}),
        user(GO),
    ],
    "a refusal as a part": _answered(said("assistant", [{"type": "refusal", "refusal": "No."}])),
    "a refusal as a field": _answered(said("assistant", None, refusal="No.")),
    "images and files": [
        user([text(ASK), IMAGE, FILE, {"type": "input_audio", "input_audio": {"data": "AA"}}]),
        said("assistant", [text("Sunny."), {"type": "image", "image": "x"}]),
        user(GO),
    ],
    "images alone": [user([IMAGE]), said("assistant", "A cat."), user(GO)],
    "unknown parts": [
        user([{"type": "hologram", "a": {"b": 1}}, text(ASK)]),
        said("assistant", [{"type": "hologram"}, text("Sunny.")]),
        user(GO),
    ],
    "an image as a result": _with_result([text("see"), IMAGE]),
    "a document": [
        user([{"type": "document", "source": {"type": "text", "data": "The tale."}}, text(ASK)]),
        said("assistant", "Nice."),
        user(GO),
    ],
    "200 parts": [
        user([text(f"part {i}") for i in range(200)]),
        said("assistant", [text(f"answer {i}") for i in range(200)]),
        user(GO),
    ],
}
TOPICS: Mapping[str, Mapping[str, list[Json]]] = MappingProxyType(
    {
        "ids": IDS,
        "orders": ORDERS,
        "roles": ROLES,
        "thoughts": THOUGHTS,
        "arguments": ARGUMENTS,
        "stores": STORES,
    }
)
CONVERSATIONS: Mapping[str, list[Json]] = MappingProxyType(
    {
        f"{topic}: {name}": conversation
        for topic, table in TOPICS.items()
        for name, conversation in table.items()
    }
)


def body_of(messages: list[Json]) -> bytes:
    return json.dumps({"messages": messages}).encode()


def user_texts(messages: list[Json]) -> Iterator[str]:
    """Yield the texts of the user that have more than spaces."""
    for message in messages:
        content = message.get("content")
        parts = content if isinstance(content, list) else [{"text": content}]
        for part in parts if message["role"] == "user" else ():
            written = part.get("text") or part.get("source", {}).get("data") or ""
            if written.strip():
                yield written
