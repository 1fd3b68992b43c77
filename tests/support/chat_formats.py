"""All kinds of chat formats, with their tokenizers: Mistral's versions, and templates in Jinja that
are strict each in its own way.
"""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType

from mistral_common.protocol.instruct.validator import ValidationMode
from mistral_common.tokens.tokenizers.mistral import MistralTokenizer
from tokenizer_files import SENTENCEPIECE, json_with_tokens, small_tekken, thinking_tekken

from tramontane.router.tokenization.chat import ChatTemplate
from tramontane.router.tokenization.loader import load_chat_template, require_tokenizer
from tramontane.router.tokenization.tokenizer import Tokenizer

EFFORTS = ("none", "high")
CHATML = """{% for message in messages -%}
<|im_start|>{{ message['role'] }}
{{ message['content'] }}<|im_end|>
{% endfor %}
{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
# Mistral 7B Instruct v0.3's
STRICT = """{%- if messages[0]["role"] == "system" %}{%- set system_message = messages[0]["content"] %}
{%- set loop_messages = messages[1:] %}{%- else %}{%- set loop_messages = messages %}{%- endif %}
{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list %}
{%- set ns = namespace() %}{%- set ns.index = 0 %}
{%- for message in loop_messages %}
    {%- if not (message.role == "tool" or message.role == "tool_results" or (message.tool_calls is defined and message.tool_calls is not none)) %}
        {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
            {{- raise_exception("conversation roles must alternate user/assistant/user/assistant/...") }}
        {%- endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and (message == user_messages[-1]) %}
            {{- "[AVAILABLE_TOOLS] " + tools|tojson + "[/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- "[TOOL_CALLS] [" }}
        {%- for tool_call in message.tool_calls %}
            {%- set out = tool_call.function|tojson %}
            {{- out[:-1] }}
            {%- if not tool_call.id is defined or tool_call.id|length != 9 %}
                {{- raise_exception("Tool call IDs should be alphanumeric strings with length 9!") }}
            {%- endif %}
            {{- ', "id": "' + tool_call.id + '"}' }}
            {{- ", " if not loop.last else "]" + eos_token }}
        {%- endfor %}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"]|trim + eos_token}}
    {%- elif message["role"] == "tool_results" or message["role"] == "tool" %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content|string + ", " }}
        {%- if not message.tool_call_id is defined or message.tool_call_id|length != 9 %}
            {{- raise_exception("Tool call IDs should be alphanumeric strings with length 9!") }}
        {%- endif %}
        {{- '"call_id": "' + message.tool_call_id + '"}[/TOOL_RESULTS]' }}
    {%- else %}
        {{- raise_exception("Only user and assistant roles are supported") }}
    {%- endif %}
{%- endfor %}"""  # noqa: E501
# Gemma's: no system messages, no tools, roles in turns
NO_SYSTEM = """{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}
{%- if message['role'] == 'assistant' %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %}
{{- '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""  # noqa: E501
# Hermes': calls as objects with their ids, thoughts as a field, and names
HERMES = """{% for m in messages %}{{ '<|im_start|>' + (m.role if m.role != 'tool' else 'user') + ' ' + (m.name or '') + '\\n' }}
{%- if m.role == 'tool' %}<tool_response>{{ m.tool_call_id }}: {{ m.content }}</tool_response>{% else %}
{%- if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}
{{- m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ c | tojson }}</tool_call>{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant \\n' }}
{%- endif %}"""  # noqa: E501
# GLM's: the arguments are written one after the other
BY_ARGUMENT = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}
{%- for key, value in c.function.arguments | items %}<arg>{{ key }}={{ value | tojson }}</arg>{% endfor %}</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""  # noqa: E501
# It has calls, and no results of them.
NO_RESULTS = """{% for m in messages %}{% if m.role not in ('user', 'assistant', 'system') %}
{{- raise_exception('no such role: ' + m.role) }}{% endif %}<|im_start|>{{ m.role }}
{{ m.content }}{{ m.tool_calls | tojson if m.tool_calls else '' }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
# Magistral's: thoughts as parts, which are only in messages of the system and the assistant
PARTS = """{{ bos_token }}{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}{% for m in messages %}{% if m.role == 'system' %}[SYSTEM_PROMPT]
{%- elif m.role == 'user' %}[INST]{% elif m.role == 'tool' %}[TOOL_RESULTS]{% endif %}
{%- if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}
{%- if part['type'] == 'text' %}{{ part['text'] }}
{%- elif part['type'] == 'thinking' and m.role in ('system', 'assistant') %}[THINK]{{ part['thinking'] }}
{%- if part['closed'] %}[/THINK]{% endif %}{% else %}{{ raise_exception('no such part') }}{% endif %}{% endfor %}{% endif %}
{%- if m.role == 'assistant' and not m.content and not m.tool_calls %}{{ raise_exception('an empty answer') }}{% endif %}
{%- for c in m.tool_calls or [] %}[TOOL_CALLS]{{ c.function.name }}[ARGS]{{ c.function.arguments | tojson }}{% endfor %}
{%- if m.role == 'system' %}[/SYSTEM_PROMPT]{% elif m.role == 'user' %}[/INST]{% elif m.role == 'tool' %}[/TOOL_RESULTS]
{%- else %}{{ eos_token }}{% endif %}{% endfor %}"""  # noqa: E501

TEMPLATES: Mapping[str, str] = MappingProxyType(
    {
        "chatml": CHATML,
        "strict": STRICT,
        "no system": NO_SYSTEM,
        "hermes": HERMES,
        "by argument": BY_ARGUMENT,
        "no results": NO_RESULTS,
        "parts": PARTS,
    }
)
ADDED = (
    "<|im_start|>",
    "<|im_end|>",
    "<start_of_turn>",
    "<end_of_turn>",
    *("[INST]", "[/INST]", "[TOOL_CALLS]", "[ARGS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
    *("[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[THINK]", "[/THINK]"),
    *("[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
)
# SentencePiece's and tekken's
MISTRALS = (*SENTENCEPIECE, "tekken v3", "tekken v7", "v11", "v13", "v15")
FORMATS = (*MISTRALS, *TEMPLATES)


@dataclass(frozen=True)
class Format:
    """A chat format. ``reference``: mistral-common's, for Mistral's own."""

    name: str
    chat: ChatTemplate
    tokenizer: Tokenizer
    controls: frozenset[int]
    reference: MistralTokenizer | None = None


@cache
def chat_format(name: str) -> Format:
    with TemporaryDirectory() as made:
        folder = Path(made)
        path = _write(folder, name)
        tokenizer = require_tokenizer(folder, 10**6)
        controls = {i for i in range(tokenizer.vocab_size) if not tokenizer.bytes_of(i)}
        if name in TEMPLATES:
            added = json.loads(path.read_text(encoding="utf-8"))["added_tokens"]
            controls = {token["id"] for token in added}
        return Format(
            name,
            load_chat_template(folder, tokenizer),
            tokenizer,
            frozenset(controls),
            MistralTokenizer.from_file(path, ValidationMode.serving) if name in MISTRALS else None,
        )


def _write(folder: Path, name: str) -> Path:
    if name in SENTENCEPIECE:
        return Path(shutil.copy(SENTENCEPIECE[name], folder / f"tokenizer.model.{name}"))
    if name == "tekken v3":
        return small_tekken(folder)
    if name in MISTRALS:
        version = name.removeprefix("tekken ")
        return thinking_tekken(folder, version, EFFORTS if version == "v15" else ())
    path = folder / "tokenizer.json"
    path.write_text(json_with_tokens(ADDED, True), encoding="utf-8")
    settings = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATES[name]}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return path
