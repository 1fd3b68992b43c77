"""Variables that clients give to chat templates, and messages of the assistant that are
continued.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError
from tokenizer_files import SENTENCEPIECE, json_of_sentencepiece
from transformers import PreTrainedTokenizerFast

from tramontane.proto.errors import ParameterError, RequestError
from tramontane.router.openai.chat_request import opens_answer, parse_chat
from tramontane.router.tokenization.chat import ChatMessage, ChatTemplate, ignored_variables
from tramontane.router.tokenization.loader import load_chat_template, require_tokenizer
from tramontane.router.tokenization.mistral_chat import MistralChatTemplate
from tramontane.router.tokenization.template_chat import TemplateVariables

PLAIN = """{% for m in messages %}[{{ m['role'] }}{{ ' ' + m['name'] if m['name'] }}] {{ m['content'] }}</s>{% endfor %}
{%- if add_generation_prompt %}[assistant]{{ ' thinks' if thinking }}{{ style }}{% endif %}"""  # noqa: E501
LISTS = "{% for m in messages %}{{ m['content'] | length }}{% endfor %}"
HELLO = ChatMessage("user", "Hello", name="Ada")


def _chat(folder: Path, template: str) -> ChatTemplate:
    (folder / "tokenizer.json").write_text(
        json.dumps(json_of_sentencepiece(SENTENCEPIECE["v1"])), encoding="utf-8"
    )
    settings = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return load_chat_template(folder, require_tokenizer(folder, 10**6))


def test_variables_and_names_reach_a_template_as_text(tmp_path: Path) -> None:
    chat = _chat(tmp_path, PLAIN)
    tokenizer = require_tokenizer(tmp_path, 10**6)
    end = tokenizer.control_id("</s>")
    plain, more = (
        chat.encode([HELLO]),
        chat.encode([HELLO], variables={"thinking": True, "style": "</s>", "unused": [1]}),
    )
    assert "[user Ada] Hello" in tokenizer.decode(plain)
    assert tokenizer.decode(more).endswith(" thinks</s>"), "spelled out, not the control token"
    assert plain.count(end) == more.count(end) == 1
    for name in ("messages", "tools", "add_generation_prompt", "bos_token"):
        with pytest.raises(
            ParameterError, match=f"has {name}, which the server sets itself"
        ) as refused:
            chat.encode([HELLO], variables={name: "x"})
        assert refused.value.parameter == "chat_template_kwargs"


def test_values_of_the_server_may_be_repeated(tmp_path: Path) -> None:
    chat = _chat(tmp_path, PLAIN)
    same = {"bos_token": "<s>", "tools": [], "documents": [], "add_generation_prompt": False}
    assert chat.encode([HELLO], variables=same) == chat.encode([HELLO])


def test_variables_that_a_template_does_not_mention_have_no_effect(tmp_path: Path) -> None:
    chat = _chat(tmp_path, PLAIN)
    given = {"thinking": True, "style": "x", "think": True, "enable_thinking": True, "tools": []}
    assert chat.unused_variables(given) == ["think", "enable_thinking"]
    assert ignored_variables(chat, given) == [
        "chat_template_kwargs.think",
        "chat_template_kwargs.enable_thinking",
    ]
    assert ignored_variables(chat, None) == []


def test_mistrals_formats_have_no_variables() -> None:
    chat = MistralChatTemplate.from_sentencepiece(SENTENCEPIECE["v3"])
    plain = chat.encode([ChatMessage("user", "Hello")])
    for variables in ({}, {"thinking": True, "messages": [1], "a": ""}):
        assert chat.encode([HELLO], variables=variables) == plain
        assert chat.unused_variables(variables) == list(variables)


@pytest.mark.parametrize("content", ["Good mor", "a space at the end ", "1 2 3"])
def test_a_message_is_continued_as_transformers_does(tmp_path: Path, content: str) -> None:
    chat = _chat(tmp_path, PLAIN)
    reference = PreTrainedTokenizerFast(
        tokenizer_file=str(tmp_path / "tokenizer.json"), bos_token="<s>", eos_token="</s>"
    )
    written = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": content}]
    kwargs: dict[str, Any] = {
        "chat_template": PLAIN,
        "continue_final_message": True,
        "return_dict": False,
    }
    ids = chat.encode(
        [ChatMessage("user", "Hello"), ChatMessage("assistant", content, is_prefix=True)]
    )
    assert list(ids) == reference.apply_chat_template(written, **kwargs)


def test_a_template_that_does_not_write_the_message_cannot_continue_it(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="no way to continue"):
        _chat(tmp_path, LISTS).encode([HELLO, ChatMessage("assistant", "a", is_prefix=True)])


@pytest.mark.parametrize(
    "variables",
    [
        {str(i): 1 for i in range(33)},
        {"a b": 1},
        {"a" * 65: 1},
        {"a": 10**7},
        {"a": [[-(10.0**7)]]},
        {"a": "x" * 5000},
        {"a": [[[[[1]]]]]},
        {"a": float("nan")},
    ],
    ids=["many", "no name", "long name", "large", "deep and large", "long", "deep", "no number"],
)
def test_variables_are_bounded(variables: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        TypeAdapter(TemplateVariables).validate_python(variables)


def test_what_is_done_anyway_is_no_variable() -> None:
    adapter = TypeAdapter(TemplateVariables)
    given = {"add_generation_prompt": True, "a": None, "b": False}
    assert adapter.validate_python(given) == {"b": False}


@pytest.mark.parametrize(
    ("flag", "inside", "meant"),
    [(None, False, False), (None, None, None), (True, False, True), (None, "x", None)],
)
def test_a_prompt_that_opens_an_answer_may_be_asked_for_among_the_variables(
    flag: bool | None, inside: object, meant: bool | None
) -> None:
    assert opens_answer(flag, {"add_generation_prompt": inside}) is meant
    assert opens_answer(flag, None) is flag


def test_without_a_prompt_for_an_answer_the_last_message_is_continued() -> None:
    user, answer = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    wanted = {"chat_template_kwargs": {"add_generation_prompt": False}}
    assert parse_chat(json.dumps({"messages": [user, answer]} | wanted).encode())
    with pytest.raises(ParameterError, match="add_generation_prompt is false"):
        parse_chat(json.dumps({"messages": [user]} | wanted).encode())
