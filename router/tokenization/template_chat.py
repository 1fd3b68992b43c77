"""A checkpoint's own chat template in Jinja; control tokens come only from the template, never from
a user's text.
"""

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Annotated, Any, NoReturn, get_args

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from pydantic import AfterValidator, Field
from tokenizers import Tokenizer

from tramontane.proto.errors import CheckpointError, ParameterError, RequestError
from tramontane.router.tokenization.backends import encode_by_backend
from tramontane.router.tokenization.chat import (
    VARIABLES,
    ChatMessage,
    ReasoningEffort,
    Thought,
    ToolFormat,
    ToolSpec,
    message_texts,
    supported_effort,
)
from tramontane.router.tokenization.history import (
    HistoryFormat,
    all_as_text,
    alternate_roles,
    parsed_arguments,
    repair_history,
    system_in_user_text,
)
from tramontane.router.tokenization.reasoning_parser import ReasoningFormat
from tramontane.router.tokenization.tokenizer import validate_text

EFFORT, OPENS_ANSWER = "reasoning_effort", "add_generation_prompt"
# variables that every template gets
RESERVED = frozenset({"messages", "tools", "documents", OPENS_ANSWER})


class TemplateTokens:
    """Encodes rendered templates as Hugging Face's tokenizers do, except for control tokens that
    users spelled out.

    In a copy of the tokenizer all added tokens have secret names. The template's own tokens are
    renamed; in users' texts an alias protects them from the renaming:

        a user writes    "use </s>"
        protected        "use ALIAS2"
        rendered         "[INST] use ALIAS2 [/INST]"
        encoded          "NAME3 use </s> NAME4"         only NAME3 and NAME4 are control tokens
    """

    def __init__(self, tokenizer_json: str) -> None:
        data = json.loads(tokenizer_json)
        added, model = data.setdefault("added_tokens", []), data["model"]
        self._secret = secrets.token_hex(8)
        self._names = {token["content"]: f"<{self._secret}-{token['id']}>" for token in added}
        self._aliases = {token["content"]: f"{self._secret}={token['id']}=" for token in added}
        # Answers may hold added tokens that are not special, which templates look for (</think>).
        self._aliases_in_answers = {
            token["content"]: self._aliases[token["content"]] for token in added if token["special"]
        }
        self._contents = {alias: content for content, alias in self._aliases.items()}
        for token in added:
            token["special"], token["content"] = True, self._names[token["content"]]
        model["vocab"] = {
            self._names.get(piece, piece): token_id for piece, token_id in model["vocab"].items()
        }
        unknown = model.get("unk_token")
        model |= {"unk_token": self._names.get(unknown, unknown), "dropout": None}
        self._tokenizer = Tokenizer.from_str(json.dumps(data))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    def protect(self, written: Any, *, in_answer: bool = False) -> Any:  # any JSON
        """Return the value with aliases for everything in its texts that looks like a control
        token.
        """
        if isinstance(written, str):
            return _replace_all(written, self._aliases_in_answers if in_answer else self._aliases)
        if isinstance(written, Mapping):
            return {self.protect(key): self.protect(value) for key, value in written.items()}
        return list(map(self.protect, written)) if isinstance(written, list | tuple) else written

    def encode(self, rendered: str) -> tuple[int, ...]:
        """Return the token ids of a rendered template. Raises RequestError if the template cut or
        changed an alias.
        """
        text = _replace_all(_replace_all(rendered, self._names), self._contents)
        if self._secret in _replace_all(text, dict.fromkeys(self._names.values(), "")).lower():
            raise RequestError(
                "a message spells out control tokens, and the model's chat template alters them;"
                " leave them out"
            )
        return tuple(encode_by_backend(self._tokenizer, text, add_special_tokens=False))


class JinjaChatTemplate:
    """Chat template in Jinja. ``names``: variables of the template, such as ``bos_token``.

    The reasoning of an answer is its ``reasoning_content`` and ``reasoning``; a template that uses
    neither may use parts of the type "thinking" in the content, as Mistral's own do.
    """

    def __init__(
        self,
        template: str,
        names: Mapping[str, str],
        tokens: TemplateTokens,
        tool_format: ToolFormat | None = None,
        reasoning_format: ReasoningFormat | None = None,
    ) -> None:
        self._template, self._names, self._tokens = compile_template(template), names, tokens
        self._words = frozenset(re.findall(r"\w+", template))
        # stands where a message ends that is to be continued
        self._end_mark = secrets.token_hex(16)
        self.tool_format, self.reasoning_format = tool_format, reasoning_format
        self.efforts: Sequence[str] = get_args(ReasoningEffort) if EFFORT in template else ()
        self._knows_parts = (
            "reasoning_content" not in template
            and re.search(r"""['"]thinking['"]""", template) is not None
        )
        self._history = HistoryFormat(
            frozenset(("assistant", "system") if self._knows_parts else ("assistant",)),
            has_tools="tool_calls" in template,
            has_mistral_ids=False,
        )

    def encode(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[ToolSpec] = (),
        variables: Mapping[str, Any] | None = None,
        *,
        reasoning_effort: str | None = None,
    ) -> tuple[int, ...]:
        """Return token ids up to where the assistant answers. Raises RequestError if the template
        refuses the conversation.

        Raises ParameterError for ``variables`` that the server sets itself.
        """
        effort = supported_effort(reasoning_effort, self.efforts)
        own = self._names if effort is None else {**self._names, EFFORT: effort}
        given = _own_variables(variables or {}, own)
        with validate_text(
            *message_texts(messages), json.dumps([*tools, given], ensure_ascii=False)
        ):
            names = {**self._tokens.protect(given), **own}
            written = self._tokens.protect(list(tools)) or None
            history = repair_history(messages, self._history)
            try:
                return self._encode(history, names, written)
            except TemplateRefusalError as refusal:
                # The template does not say why: roles, their order and ids of calls are usual.
                for repair in (alternate_roles, system_in_user_text, all_as_text):
                    with suppress(TemplateRefusalError):
                        return self._encode(repair(history), names, written)
                raise refusal

    def unused_variables(self, variables: Mapping[str, Any]) -> Sequence[str]:
        """Return the variables that the template does not mention."""
        return [name for name in variables if name not in self._words and name not in RESERVED]

    def _encode(
        self, messages: Sequence[ChatMessage], names: Mapping[str, Any], tools: list[Any] | None
    ) -> tuple[int, ...]:
        """Return the token ids of messages. Raises TemplateRefusalError."""
        protected = list(map(self._protect, messages))
        is_prefix = messages[-1].is_prefix
        if is_prefix:
            self._mark_end(protected[-1])
        rendered = render(self._template, protected, names, tools, opens_answer=not is_prefix)
        return self._tokens.encode(self._up_to_mark(rendered) if is_prefix else rendered)

    def _mark_end(self, written: dict[str, Any]) -> None:
        """Add the mark to the end of a message, whose content is a text, or parts if the template
        supports these.
        """
        if isinstance(written["content"], list):
            written["content"] = [*written["content"], {"type": "text", "text": self._end_mark}]
        else:
            written["content"] += self._end_mark

    def _up_to_mark(self, rendered: str) -> str:
        """Return the text up to the end of the last message. Raises RequestError if the template
        does not write it once.
        """
        before, *after = rendered.split(self._end_mark)
        if len(after) != 1:
            raise RequestError(
                "the model's chat template has no way to continue a message of the assistant"
            )
        return before

    def _protect(self, message: ChatMessage) -> dict[str, Any]:
        """Return a message as templates expect it, with protected texts and parsed arguments."""
        content = self._tokens.protect(message.content, in_answer=message.role == "assistant")
        written: dict[str, Any] = {"role": message.role, "content": content}
        if message.parts and self._knows_parts:
            written["content"] = list(map(self._part, message.parts))
        elif message.parts:
            written |= dict.fromkeys(
                ("reasoning_content", "reasoning"), self._tokens.protect(message.thoughts)
            )
        if message.tool_calls:
            calls = [
                (call.id, {"name": call.name, "arguments": parsed_arguments(call.arguments)})
                for call in message.tool_calls
            ]
            written["tool_calls"] = [
                {
                    "id": self._tokens.protect(call_id),
                    "type": "function",
                    "function": self._tokens.protect(function),
                }
                for call_id, function in calls
            ]
        if message.role == "tool":
            written["tool_call_id"] = self._tokens.protect(message.tool_call_id)
        if message.name:
            written["name"] = self._tokens.protect(message.name)
        return written

    def _part(self, part: str | Thought) -> dict[str, Any]:
        if isinstance(part, str):
            return {"type": "text", "text": self._tokens.protect(part)}
        return {
            "type": "thinking",
            "thinking": self._tokens.protect(part.text),
            "closed": part.closed,
        }


class TemplatesByTools:
    """Two chat templates of a checkpoint: one for conversations with tools, and the default one.

    The model's thoughts and efforts are those of the default.
    """

    def __init__(self, default: JinjaChatTemplate, with_tools: JinjaChatTemplate) -> None:
        self._default, self._with_tools = default, with_tools
        self.tool_format = with_tools.tool_format
        self.reasoning_format, self.efforts = default.reasoning_format, default.efforts

    def unused_variables(self, variables: Mapping[str, Any]) -> Sequence[str]:
        """Return the variables that neither template mentions."""
        unused = self._with_tools.unused_variables(variables)
        return [name for name in self._default.unused_variables(variables) if name in unused]

    def encode(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[ToolSpec] = (),
        variables: Mapping[str, Any] | None = None,
        *,
        reasoning_effort: str | None = None,
    ) -> tuple[int, ...]:
        """Return the token ids by the template for these tools. Raises RequestError."""
        template = self._with_tools if tools else self._default
        return template.encode(messages, tools, variables, reasoning_effort=reasoning_effort)


def _own_variables(given: Mapping[str, Any], own: Mapping[str, str]) -> dict[str, Any]:
    """Return the variables that a template gets from a client. Raises ParameterError for one that
    the server sets itself, to another value.
    """
    kept = {name: value for name, value in given.items() if name not in RESERVED}
    kept = {name: value for name, value in kept.items() if own.get(name) != value}
    reserved = [name for name, value in given.items() if name in RESERVED and value]
    if taken := [*reserved, *(name for name in kept if name in own)]:
        raise ParameterError(
            f"chat_template_kwargs has {taken[0]}, which the server sets itself; leave it out",
            VARIABLES,
        )
    return kept


class TemplateRefusalError(RequestError):
    """A chat template does not write a conversation."""


def compile_template(template: str) -> Template:
    """Compile a template with the functions that transformers offers. Raises CheckpointError."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _raise, "strftime_now": _now}
    try:
        return environment.from_string(template)
    except (TemplateError, ValueError, RecursionError) as error:
        raise CheckpointError(f"the chat template cannot be compiled: {error}") from error


def render(
    template: Template,
    messages: Sequence[Mapping[str, Any]],
    names: Mapping[str, Any],
    tools: Sequence[Any] | None = None,
    *,
    opens_answer: bool = True,
) -> str:
    """Render a conversation, with ``opens_answer`` up to where the assistant answers. Raises
    TemplateRefusalError.
    """
    try:
        return template.render(
            messages=messages,
            add_generation_prompt=opens_answer,
            tools=tools,
            documents=None,
            **names,
        )
    except (
        TemplateError,
        TypeError,
        ValueError,
        LookupError,
        ArithmeticError,
        AttributeError,
        RecursionError,
    ) as error:
        raise TemplateRefusalError(
            f"the model's chat template does not take this conversation: {error}"
        ) from error


class Generation(Extension):
    """The tag ``{% generation %}``, which marks text for training; it has no effect here."""

    tags = {"generation"}  # noqa: RUF012 - as Extension declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Return the tag's contents."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _replace_all(text: str, replacements: Mapping[str, str]) -> str:
    """Replace the longest match at every position, from left to right, in one pass.

    It looks up slices by first character and length: one regular expression would try a thousand
    tokens that begin alike one after the other at every position.
    """
    if not replacements:
        return text
    lengths = sorted({len(key) for key in replacements}, reverse=True)
    first = re.compile("[" + "".join(map(re.escape, {key[0] for key in replacements})) + "]")
    done, at, parts = 0, 0, []
    while found := first.search(text, at):
        start = found.start()
        key = next(
            (text[start : start + n] for n in lengths if text[start : start + n] in replacements),
            None,
        )
        at = start + (len(key) if key else 1)
        if key:
            parts += [text[done:start], replacements[key]]
            done = at
    return "".join(parts) + text[done:]


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, **settings: Any
) -> str:
    """Return JSON as transformers' filter does: readable, not escaped for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **settings)


# Variables of chat templates that clients give as ``chat_template_kwargs``, within bounds.

MAX_VARIABLES = 32
MAX_NAME_CHARS = 64
MAX_JSON_CHARS = 4096  # of all variables
MAX_NUMBER = 10**6  # a template may count up to it, or repeat a text this number of times
MAX_DEPTH = 4


def _check(variables: dict[str, Any]) -> dict[str, Any]:
    """Return the variables without those that are null and ``add_generation_prompt: true``, which
    is the default. Raises ValueError for names and values beyond the limits.
    """
    if len(variables) > MAX_VARIABLES:
        raise ValueError(f"it has {len(variables)} variables; it may have at most {MAX_VARIABLES}")
    if wrong := [
        name for name in variables if len(name) > MAX_NAME_CHARS or not name.isidentifier()
    ]:
        raise ValueError(f"{wrong[0]!r:.80} is not the name of a variable")
    _check_values(list(variables.values()), MAX_DEPTH)
    if (num_chars := len(json.dumps(variables))) > MAX_JSON_CHARS:
        raise ValueError(
            f"its JSON has {num_chars} characters; it may have at most {MAX_JSON_CHARS}"
        )
    return {
        name: value
        for name, value in variables.items()
        if value is not None and not (name == OPENS_ANSWER and value is True)
    }


def _check_values(values: list[Any], depth: int) -> None:
    if not depth and values:
        raise ValueError(f"its values are nested more than {MAX_DEPTH} deep")
    for value in values:
        if isinstance(value, int | float) and not -MAX_NUMBER <= value <= MAX_NUMBER:
            raise ValueError(f"a number in it is not between {-MAX_NUMBER} and {MAX_NUMBER}")
        if isinstance(value, dict | list):
            _check_values(list(value.values()) if isinstance(value, dict) else value, depth - 1)


TemplateVariables = Annotated[
    dict[str, Any], Field(max_length=MAX_VARIABLES), AfterValidator(_check)
]
