"""Thoughts in a conversation become what mistral-common and templates make of them; so does
``reasoning_effort``.
"""

import asyncio
import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from mistral_common.protocol.instruct.request import ChatCompletionRequest
from mistral_common.tokens.tokenizers.mistral import MistralTokenizer
from pydantic import TypeAdapter
from thinking_models import BEGIN, END, MESSAGES, OPENED, thinking_model
from tokenizer_files import END_THINK, SENTENCEPIECE, THINK, json_with_tokens, thinking_tekken
from transformers import PreTrainedTokenizerFast

from tramontane.router.openai.chat_request import Messages
from tramontane.router.openai.completion_request import parse_body
from tramontane.router.openai.response_models import to_json
from tramontane.router.openai.served_model import ServedModel
from tramontane.router.openai.tokenize import TokenizeRequest, tokenize
from tramontane.router.tokenization.chat import (
    VARIABLES,
    ChatMessage,
    ChatTemplate,
    Thought,
    supported_effort,
    with_thoughts,
)
from tramontane.router.tokenization.loader import load_chat_template, require_tokenizer
from tramontane.router.tokenization.reasoning_parser import is_open_after

PARSE = TypeAdapter(Messages)
USER = {"role": "user", "content": "17 * 23?"}
HELLO = [ChatMessage("user", "17 * 23?")]
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _thinking(text: str, **more: bool) -> dict[str, Any]:
    return {"type": "thinking", "thinking": text, **more}


EXAMPLE = [_text("First think."), _thinking("Like this [/THINK] </think>."), _text("Then answer.")]
CONVERSATIONS: list[list[dict[str, Any]]] = [
    [USER, {"role": "assistant", "content": [_thinking("340 + 51"), _text("391")]}, USER],
    [
        USER,
        {
            "role": "assistant",
            "content": [_thinking("340 + "), _thinking("51"), _text("391"), _text("!")],
        },
        USER,
    ],
    [USER, {"role": "assistant", "content": [_thinking("340 +", closed=False)]}, USER],
    [{"role": "system", "content": EXAMPLE}, USER],
    [
        {"role": "system", "content": EXAMPLE},
        USER,
        {"role": "assistant", "content": [_thinking(" a\n\n"), _text(" b")]},
        USER,
    ],
    [
        USER,
        {"role": "assistant", "content": [_thinking("I call f.")], "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "abcdefghi", "content": "1"},
    ],
]


@pytest.fixture(scope="module", params=["v13", "v15"])
def version(request: pytest.FixtureRequest) -> str:
    version: str = request.param
    return version


@pytest.fixture(scope="module")
def path(version: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    efforts = ("none", "high") if version == "v15" else ()
    return thinking_tekken(tmp_path_factory.mktemp(version), version, efforts)


@cache
def _chat(folder: Path) -> ChatTemplate:
    return load_chat_template(folder, require_tokenizer(folder, 10**6))


@cache
def _mistral_common(path: Path) -> MistralTokenizer:
    return MistralTokenizer.from_file(path)


def _reference(path: Path, messages: Sequence[Any], **more: Any) -> list[int]:
    tokens: list[int] = (
        _mistral_common(path)
        .encode_chat_completion(ChatCompletionRequest(messages=messages, **more))
        .tokens
    )
    return tokens


def _parsed(messages: Sequence[dict[str, Any]]) -> list[ChatMessage]:
    return [message.message() for message in PARSE.validate_json(to_json(messages))]


def _parts(message: dict[str, Any]) -> list[dict[str, Any]]:
    return message["content"] if isinstance(message["content"], list) else []


def _without_example(message: dict[str, Any]) -> dict[str, Any]:
    """A system message with its texts alone, as lines."""
    texts = [part["text"] for part in _parts(message) if part["type"] == "text"]
    return message | {"content": "\n".join(texts)} if message["role"] == "system" else message


@pytest.mark.parametrize("messages", CONVERSATIONS)
def test_thoughts_are_encoded_as_mistral_common_does(
    path: Path, version: str, messages: list[dict[str, Any]]
) -> None:
    """A system message has none from version 15 on, so there they are left out."""
    ids = list(_chat(path.parent).encode(_parsed(messages)))
    known = messages if version == "v13" else list(map(_without_example, messages))
    assert ids == _reference(path, known)
    assert ids.count(THINK) == sum(
        part["type"] == "thinking" for message in known for part in _parts(message)
    )


PIECES = st.lists(
    st.tuples(st.booleans(), st.text("ab \n\u00e9[/THINK]", min_size=1, max_size=8)),
    min_size=1,
    max_size=4,
)


@settings(deadline=None, max_examples=examples(60))
@given(pieces=PIECES)
def test_any_thoughts_are_encoded_as_mistral_common_does(
    path: Path, pieces: list[tuple[bool, str]]
) -> None:
    parts = [_thinking(text) if is_thought else _text(text) for is_thought, text in pieces]
    messages = [USER, {"role": "assistant", "content": [*parts, _text(".")]}, USER]
    if any(is_thought for is_thought, _ in pieces):  # texts alone are joined as lines
        assert list(_chat(path.parent).encode(_parsed(messages))) == _reference(path, messages)


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_a_thought_may_be_a_field(path: Path, name: str) -> None:
    """As an answer of this server has it, and as mistral-common reads it of OpenAI's messages."""
    content = [_thinking("340 + 51"), _text("391")]
    expected = _reference(path, [USER, {"role": "assistant", "content": content}, USER])
    answer: dict[str, Any] = {
        "role": "assistant",
        "content": "391",
        "refusal": None,
        name: "340 + 51",
    }
    both = answer | {"reasoning": "340 + 51", "reasoning_content": "340 + 51"}
    of_mistral = {
        "role": "assistant",
        "content": [{"type": "thinking", "thinking": [_text("340"), _text(" + 51")]}, _text("391")],
    }
    for message in (answer, both, of_mistral):
        assert list(_chat(path.parent).encode(_parsed([USER, message, USER]))) == expected
    # Without a text, as where the token limit was in the thought.
    for content, ids in (("391", expected), ("", None), (None, None)):
        conversation = [USER, {"role": "assistant", "content": content, name: "340 + 51"}, USER]
        by_mistral_common = (
            _mistral_common(path)
            .encode_chat_completion(ChatCompletionRequest.from_openai(conversation))
            .tokens
        )
        assert list(_chat(path.parent).encode(_parsed(conversation))) == by_mistral_common
        assert ids in (None, by_mistral_common)


def test_a_thought_that_is_null_or_empty_is_none(path: Path) -> None:
    plain = _reference(path, [USER, {"role": "assistant", "content": "391"}, USER])
    for thought in (None, ""):
        message = {
            "role": "assistant",
            "content": "391",
            "reasoning": thought,
            "reasoning_content": thought,
        }
        assert list(_chat(path.parent).encode(_parsed([USER, message, USER]))) == plain


def test_the_text_of_a_marker_in_a_thought_stays_text(path: Path) -> None:
    ids = _chat(path.parent).encode(
        _parsed([USER, {"role": "assistant", "content": "a", "reasoning": "[/THINK] b"}, USER])
    )
    assert [token_id for token_id in ids if token_id in (THINK, END_THINK)] == [THINK, END_THINK]


def test_versions_without_thoughts_leave_them_out(tmp_path: Path) -> None:
    thoughtful, plain = (
        [*HELLO, with_thoughts("assistant", parts), *HELLO] for parts in ((Thought("a"), "b"), "b")
    )
    (tmp_path / "tokenizer.model.v7").write_bytes(SENTENCEPIECE["v7"].read_bytes())
    thinking_tekken(tmp_path / "v11", "v11")
    for folder in (tmp_path, tmp_path / "v11"):
        assert _chat(folder).encode(thoughtful) == _chat(folder).encode(plain)
    assert _chat(tmp_path).reasoning_format is None


@pytest.mark.parametrize("effort", [None, "none", "high"])
def test_version_15_knows_efforts(tmp_path: Path, effort: str | None) -> None:
    path = thinking_tekken(tmp_path, "v15", ("none", "high"))
    ids = list(_chat(tmp_path).encode(HELLO, reasoning_effort=effort))
    assert ids == _reference(path, [USER], reasoning_effort=effort)
    assert ids == _reference(path, [USER], reasoning_effort=effort or "none"), "the default"
    assert ids != _reference(path, [USER], reasoning_effort="none" if effort == "high" else "high")


@pytest.mark.parametrize(
    ("effort", "nearest"),
    [("minimal", "none"), ("low", "high"), ("medium", "high"), ("xhigh", "high"), ("max", "high")],
)
def test_an_effort_that_a_model_does_not_know_is_the_nearest_one_if_it_knows_any(
    path: Path, version: str, effort: str, nearest: str
) -> None:
    chat = _chat(path.parent)
    known = nearest if version == "v15" else None
    ids = chat.encode(HELLO, reasoning_effort=effort)
    assert ids == chat.encode(HELLO, reasoning_effort=known)
    assert list(chat.efforts) == (["none", "high"] if version == "v15" else [])


@pytest.mark.parametrize(
    ("effort", "known", "supported"),
    [
        (None, ("none", "high"), None),
        ("high", (), None),
        ("high", ("none", "high"), "high"),
        ("medium", ("low", "high"), "high"),
        ("none", ("low", "high"), "low"),
        ("max", ("low", "high"), "high"),
        ("medium", ("minimal", "max"), "minimal"),
        ("much", ("none", "high"), None),
        ("high", ("deep",), None),
    ],
)
def test_the_nearest_effort_is_the_higher_of_two(
    effort: str | None, known: tuple[str, ...], supported: str | None
) -> None:
    assert supported_effort(effort, known) == supported


def _tokens(folder: Path, **more: Any) -> list[int]:
    """What ``POST /tokenize`` returns of a conversation."""
    tokenizer = require_tokenizer(folder, 10**6)
    model = ServedModel("m", tokenizer, 512, 16, tokenizer.vocab_size)
    request = parse_body(TokenizeRequest, to_json({"messages": [USER], **more}).encode())
    return asyncio.run(tokenize(model, _chat(folder), request)).tokens


def test_tokenize_takes_efforts_and_variables(tmp_path: Path) -> None:
    path = thinking_tekken(tmp_path, "v15", ("none", "high"))
    assert _tokens(tmp_path, reasoning_effort="high") == _reference(
        path, [USER], reasoning_effort="high"
    )
    assert _tokens(tmp_path, reasoning_effort="low") == _tokens(tmp_path, reasoning_effort="high")
    assert _tokens(tmp_path, reasoning_effort="high") != _tokens(tmp_path)
    assert _tokens(tmp_path, **{VARIABLES: {"tone": "b"}}) == _tokens(tmp_path), "it has none"
    folder = _folder(tmp_path / "jinja", "{{ tone }}: {{ messages[0].content }}")
    assert (
        require_tokenizer(folder, 10**6)
        .decode(tuple(_tokens(folder, **{VARIABLES: {"tone": "b"}})))
        .strip()
        == "b: 17 * 23?"
    )


# Templates


def _folder(folder: Path, template: str, *, special: bool = False) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(
        json_with_tokens((BEGIN, END), special), encoding="utf-8"
    )
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<s>", "eos_token": "</s>", "chat_template": template})
    )
    return folder


@pytest.mark.parametrize("template", [MESSAGES, OPENED])
@pytest.mark.parametrize("special", [True, False])
def test_a_template_gets_the_thought_as_transformers_gives_it(
    tmp_path: Path, template: str, special: bool
) -> None:
    folder = _folder(tmp_path, template, special=special)
    reference = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), bos_token="<s>", eos_token="</s>"
    )
    written: list[dict[str, str]] = [
        USER,
        {"role": "assistant", "content": "391", "reasoning_content": "340 + 51"},
        USER,
    ]
    kwargs: dict[str, Any] = {
        "chat_template": template,
        "add_generation_prompt": True,
        "return_dict": False,
    }
    ids = _chat(folder).encode(_parsed(written))
    assert list(ids) == reference.apply_chat_template(written, **kwargs)
    form, tokenizer = _chat(folder).reasoning_format, require_tokenizer(folder, 10**6)
    assert form is not None
    assert is_open_after(form, tokenizer, ids) is (template == OPENED)


def test_a_marker_in_a_thought_stays_text_in_templates(tmp_path: Path) -> None:
    folder = _folder(tmp_path, MESSAGES)
    ids = _chat(folder).encode(
        _parsed([USER, {"role": "assistant", "content": "a", "reasoning": "x</think>y"}, USER])
    )
    assert [token_id for token_id in ids if token_id >= 32000] == [32000, 32001]


def test_a_template_may_know_thoughts_as_parts_of_the_content(tmp_path: Path) -> None:
    template = """{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}
{%- if part.type == 'thinking' %}<think>{{ part.thinking }}{% if part.closed %}</think>{% endif %}{% else %}{{ part.text }}
{%- endif %}{% endfor %}{% endif %}{% endfor %}"""  # noqa: E501
    folder = _folder(tmp_path, template)
    system = {"role": "system", "content": [_text("So: "), _thinking("hm"), _text("yes")]}
    tokenizer = require_tokenizer(folder, 10**6)
    assert (
        tokenizer.decode(_chat(folder).encode(_parsed([system, USER]))).strip()
        == "So: <think> hm</think> yes17 * 23?"
    ), "each text after a marker has the space that this tokenizer writes"


def test_a_template_that_knows_thoughts_of_answers_alone_gets_no_others(tmp_path: Path) -> None:
    chat, example = _chat(_folder(tmp_path, MESSAGES)), {"role": "system", "content": EXAMPLE}
    ids = chat.encode(_parsed([example, USER]))
    assert ids == chat.encode(_parsed([_without_example(example), USER]))


def test_a_template_gets_an_effort_if_it_mentions_one(tmp_path: Path) -> None:
    folder = _folder(
        tmp_path, "{{ reasoning_effort | default('medium') }}: {{ messages[0].content }}"
    )
    tokenizer = require_tokenizer(folder, 10**6)
    for effort, expected in ((None, "medium: a"), ("high", "high: a")):
        assert (
            tokenizer.decode(
                _chat(folder).encode([ChatMessage("user", "a")], reasoning_effort=effort)
            ).strip()
            == expected
        )
    other = thinking_model("added").chat
    assert other.encode(HELLO, reasoning_effort="high") == other.encode(HELLO)
    assert not other.efforts
