"""A checkpoint's own chat template: Jinja, rendered to text, whose control tokens are its own and never a user's."""

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from tramontane.proto.errors import CheckpointError, RequestError
from tramontane.router.chat import ChatMessage


class TemplateTokens:
    """Encodes what a template renders, as Hugging Face's tokenizers would, but for control tokens that people spelled out.

    In a copy of the tokenizer control tokens have names that nobody can guess. Only what the template
    writes is renamed; in what people write they are hidden from the renaming meanwhile:

        a user writes    "use </s>"
        hidden           "use ALIAS2"
        rendered         "[INST] use ALIAS2 [/INST]"
        encoded          "NAME3 use </s> NAME4"         where only NAME3 and NAME4 are control tokens
    """

    def __init__(self, tokenizer_json: str, template: str) -> None:
        data = json.loads(tokenizer_json)
        controls = [token for token in data["added_tokens"] if token["special"] or token["content"] in template]
        secret = secrets.token_hex(8)
        self._names = {token["content"]: f"<{secret}-{token['id']}>" for token in controls}
        self._aliases = {token["content"]: f"{secret}={token['id']}=" for token in controls}
        for token in controls:
            token["special"], token["content"] = True, self._names[token["content"]]
        model = data["model"]
        model["vocab"] = {self._names.get(piece, piece): token_id for piece, token_id in model["vocab"].items()}
        model["unk_token"] = self._names.get(model["unk_token"], model["unk_token"])
        self._tokenizer = Tokenizer.from_str(json.dumps(data))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    def hide(self, text: str) -> str:
        """The same text, with an alias for whatever looks like a control token."""
        return _replaced(text, self._aliases)

    def encode(self, rendered: str) -> tuple[int, ...]:
        named = _replaced(rendered, self._names)
        text = _replaced(named, {alias: content for content, alias in self._aliases.items()})
        return tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)


class TemplateChat:
    """``names``: what the template may call by name, such as ``bos_token``."""

    def __init__(self, template: str, names: Mapping[str, str], tokens: TemplateTokens) -> None:
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
        environment.filters["tojson"] = _to_json
        environment.globals |= {
            "raise_exception": _refuse,
            "strftime_now": lambda form: datetime.now().astimezone().strftime(form),
        }
        try:
            self._template = environment.from_string(template)
        except TemplateError as error:
            raise CheckpointError(f"the chat template cannot be understood: {error}") from error
        self._names, self._tokens = names, tokens

    def encode(self, messages: Sequence[ChatMessage]) -> tuple[int, ...]:
        hidden = [asdict(message) | {"content": self._tokens.hide(message.content)} for message in messages]
        try:
            rendered = self._template.render(messages=hidden, add_generation_prompt=True, **self._names)
        except (TemplateError, TypeError, ValueError, LookupError, ArithmeticError, OverflowError) as error:
            raise RequestError(f"the model's chat template does not take this conversation: {error}") from error
        return self._tokens.encode(rendered)


def _replaced(text: str, replacements: Mapping[str, str]) -> str:
    """The longest that fits, from left to right, all in one pass."""
    longest_first = sorted(replacements, key=len, reverse=True)
    any_of_them = "|".join(map(re.escape, longest_first)) or r"(?!)"
    return re.sub(any_of_them, lambda found: replacements[found[0]], text)


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def _to_json(value: Any, indent: int | None = None) -> str:  # noqa: ANN401 - whatever a template holds
    """As transformers gives it to templates: readable, not escaped for HTML."""
    return json.dumps(value, ensure_ascii=False, indent=indent)
