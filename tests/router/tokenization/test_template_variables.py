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
from tramontane.router.tokenization.chat import ChatMessage, ChatTemplate
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


def test_mistrals_formats_have_no_variables() -> None:
    chat = MistralChatTemplate.from_sentencepiece(SENTENCEPIECE["v3"])
    assert chat.encode([HELLO], variables={}) == chat.encode([ChatMessage("user", "Hello")])
    with pytest.raises(
        ParameterError, match="has thinking, and this model's chat format is Mistral's own"
    ):
        chat.encode([HELLO], variables={"thinking": True})


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
    assert TypeAdapter(TemplateVariables).validate_python(
        {"add_generation_prompt": True, "a": None}
    ) == {"a": None}
