"""Models that think, as an API server knows them: with markers that are tokens, added tokens or
plain text.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

from tokenizer_files import SENTENCEPIECE, json_of_sentencepiece, thinking_tekken

from tramontane.router.openai.served_model import ServedModel
from tramontane.router.tokenization.chat import ChatTemplate
from tramontane.router.tokenization.loader import load_chat_template, require_tokenizer
from tramontane.router.tokenization.tokenizer import Tokenizer

Kind = Literal["tekken", "added", "special", "text", "opened"]
# "opened": the markers are text, and the prompt ends with one that begins a thought.
KINDS: tuple[Kind, ...] = ("tekken", "added", "special", "text", "opened")
BEGIN, END = "<think>", "</think>"
MESSAGES = """{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %} {% if m.reasoning_content %}<think>
{{ m.reasoning_content }}
</think>

{% endif %}{{ m.content }}{{ eos_token }}{% else %}[INST] {{ m.content }} [/INST]{% endif %}{% endfor %}"""  # noqa: E501
OPENED = MESSAGES + "<think>\n"
FLAGS = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}


@dataclass(frozen=True)
class ThinkingModel:
    """A model with its template; ``say`` makes its tokens of a text in which the markers are
    spelled as <think> and </think>.
    """

    model: ServedModel
    chat: ChatTemplate
    is_open: bool

    @property
    def tokenizer(self) -> Tokenizer:
        assert self.model.tokenizer is not None
        return self.model.tokenizer

    def text_ids(self, text: str) -> tuple[int, ...]:
        """Return the ids of a text without the token that begins a sequence."""
        return self.tokenizer.encode(text)[1:]

    def say(self, text: str) -> tuple[int, ...]:
        form = self.chat.reasoning_format
        assert form is not None
        if form.begin_id is None or form.end_id is None:
            return self.text_ids(text)
        ids: list[int] = []
        for number, part in enumerate(text.split(BEGIN)):
            ids += [form.begin_id] * (number > 0)
            for index, piece in enumerate(part.split(END)):
                ids += [form.end_id] * (index > 0) + list(self.text_ids(piece) if piece else ())
        return tuple(ids)


class SpelledTokenizer(Tokenizer):
    """A tokenizer of these pieces, one id each; it encodes nothing."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        super().__init__((*pieces, b"."), frozenset(), strips_space=False)

    def control_id(self, name: str) -> int | None:
        """Return None: no piece is a control token."""
        return None

    def _encode(self, text: str) -> tuple[int, ...]:
        raise NotImplementedError


@cache
def thinking_model(kind: Kind, context: int = 512) -> ThinkingModel:
    with TemporaryDirectory() as name:
        folder = Path(name)
        if kind == "tekken":
            thinking_tekken(folder)
        else:
            _write_template(folder, kind)
        tokenizer = require_tokenizer(folder, 10**6)
        model = ServedModel("thinker", tokenizer, context, 16, tokenizer.vocab_size)
        return ThinkingModel(model, load_chat_template(folder, tokenizer), kind == "opened")


def _write_template(folder: Path, kind: Kind) -> None:
    data = json_of_sentencepiece(SENTENCEPIECE["v1"])
    for content in (BEGIN, END) if kind in ("added", "special") else ():
        token_id = len(data["model"]["vocab"])
        data["model"]["vocab"][content] = token_id
        data["added_tokens"].append(
            {"id": token_id, "content": content, "special": kind == "special"} | FLAGS
        )
    (folder / "tokenizer.json").write_text(json.dumps(data), encoding="utf-8")
    settings = {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "chat_template": OPENED if kind == "opened" else MESSAGES,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
