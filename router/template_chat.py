"""A checkpoint's own chat template: Jinja, rendered to text, whose control tokens are its own and never a user's."""

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from tramontane.proto.errors import CheckpointError, RequestError
from tramontane.router.chat import ChatMessage
from tramontane.router.tokenizer import refusing_bad_text


class TemplateTokens:
    """Encodes what a template renders, as Hugging Face's tokenizers would, but for control tokens that people spelled out.

    In a copy of the tokenizer all added tokens have names that nobody can guess. Only what the template
    writes is renamed; in what people write they are hidden from the renaming meanwhile:

        a user writes    "use </s>"
        hidden           "use ALIAS2"
        rendered         "[INST] use ALIAS2 [/INST]"
        encoded          "NAME3 use </s> NAME4"         where only NAME3 and NAME4 are control tokens
    """

    def __init__(self, tokenizer_json: str) -> None:
        data = json.loads(tokenizer_json)
        added, model = data.setdefault("added_tokens", []), data["model"]
        self._secret = secrets.token_hex(8)
        self._names = {token["content"]: f"<{self._secret}-{token['id']}>" for token in added}
        self._aliases = {token["content"]: f"{self._secret}={token['id']}=" for token in added}
        # An answer may hold tokens that are added without being special, and templates look for them (</think>).
        self._aliases_in_answers = {token["content"]: self._aliases[token["content"]] for token in added if token["special"]}
        self._contents = {alias: content for content, alias in self._aliases.items()}
        for token in added:
            token["special"], token["content"] = True, self._names[token["content"]]
        model["vocab"] = {self._names.get(piece, piece): token_id for piece, token_id in model["vocab"].items()}
        unknown = model.get("unk_token")
        model |= {"unk_token": self._names.get(unknown, unknown), "dropout": None}
        self._tokenizer = Tokenizer.from_str(json.dumps(data))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    def hide(self, message: ChatMessage) -> str:
        """Its text, with an alias for whatever looks like a control token."""
        return _replaced(message.content, self._aliases_in_answers if message.role == "assistant" else self._aliases)

    def encode(self, rendered: str) -> tuple[int, ...]:
        """Raises RequestError if the template has cut or changed an alias."""
        text = _replaced(_replaced(rendered, self._names), self._contents)
        if self._secret in _replaced(text, dict.fromkeys(self._names.values(), "")).lower():
            raise RequestError("a message spells out control tokens, and the model's chat template alters them; leave them out")
        return tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)


class TemplateChat:
    """``names``: what the template may call by name, such as ``bos_token``."""

    def __init__(self, template: str, names: Mapping[str, str], tokens: TemplateTokens) -> None:
        self._template, self._names, self._tokens = compiled(template), names, tokens

    def encode(self, messages: Sequence[ChatMessage]) -> tuple[int, ...]:
        with refusing_bad_text(*(message.content for message in messages)):
            hidden = [(message.role, self._tokens.hide(message)) for message in messages]
            return self._tokens.encode(rendered(self._template, hidden, self._names))


def compiled(template: str) -> Template:
    """With what transformers offers to templates. Raises CheckpointError."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _refuse, "strftime_now": _now}
    try:
        return environment.from_string(template)
    except (TemplateError, ValueError, RecursionError) as error:
        raise CheckpointError(f"the chat template cannot be understood: {error}") from error


def rendered(template: Template, messages: Sequence[tuple[str, str]], names: Mapping[str, str]) -> str:
    """Up to where the assistant answers; messages as pairs of role and content. Raises RequestError."""
    said = [{"role": role, "content": content} for role, content in messages]
    try:
        return template.render(messages=said, add_generation_prompt=True, tools=None, documents=None, **names)
    except (TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RecursionError) as error:
        raise RequestError(f"the model's chat template does not take this conversation: {error}") from error


class Generation(Extension):
    """``{% generation %}`` marks what a model is to be trained on; it changes nothing here."""

    tags = {"generation"}  # noqa: RUF012 - as Extension declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _replaced(text: str, replacements: Mapping[str, str]) -> str:
    """The longest that fits, from left to right, all in one pass.

    By first character and length rather than by one regular expression: a thousand tokens that begin alike
    would be tried one after the other at every place.
    """
    if not replacements:
        return text
    lengths = sorted({len(key) for key in replacements}, reverse=True)
    first = re.compile("[" + "".join(map(re.escape, {key[0] for key in replacements})) + "]")
    done, at, parts = 0, 0, []
    while found := first.search(text, at):
        start = found.start()
        key = next((text[start : start + n] for n in lengths if text[start : start + n] in replacements), None)
        at = start + (len(key) if key else 1)
        if key:
            parts += [text[done:start], replacements[key]]
            done = at
    return "".join(parts) + text[done:]


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **settings: Any) -> str:  # noqa: ANN401
    """As transformers gives it to templates: readable, not escaped for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **settings)
