"""Which of a checkpoint's files say how its texts become tokens, and its conversations prompts."""

import json
import re
from pathlib import Path

from tramontane.proto.errors import CheckpointError
from tramontane.router.chat import ChatPrompt
from tramontane.router.tokenizer import Tokenizer
from tramontane.router.tokenizer_kinds import JsonTokenizer, SentencePieceTokenizer, TekkenTokenizer

TEKKEN, HUGGING_FACE, SENTENCEPIECE = "tekken.json", "tokenizer.json", "tokenizer.model"
VERSIONED = re.compile(r"tokenizer\.model\.v\d+(m\d+)?")  # as Mistral names its own: tokenizer.model.v3
TEMPLATE, SETTINGS = "chat_template.jinja", "tokenizer_config.json"
MISTRAL_MARK = "[INST]"  # a template that spells it is a rendering of Mistral's own format


def tokenizer_file(folder: Path) -> Path | None:
    """The one that is read. Where there are several they agree, but for tokens that a fine-tune with
    a chat template of its own has added: those are in ``tokenizer.json`` only.
    """
    if (folder / HUGGING_FACE).is_file() and MISTRAL_MARK not in (_template(folder) or MISTRAL_MARK):
        return folder / HUGGING_FACE
    versioned = sorted(path for path in folder.glob(f"{SENTENCEPIECE}.*") if VERSIONED.fullmatch(path.name))
    candidates = [folder / TEKKEN, *versioned[-1:], folder / SENTENCEPIECE, folder / HUGGING_FACE]
    return next((path for path in candidates if path.is_file()), None)


def open_tokenizer(folder: Path, vocab_size: int) -> Tokenizer | None:
    """None if the folder has none. Raises CheckpointError if it is damaged, or larger than the model's vocabulary."""
    path = tokenizer_file(folder)
    if path is None:
        return None
    kinds = {TEKKEN: TekkenTokenizer, HUGGING_FACE: JsonTokenizer}
    tokenizer = kinds.get(path.name, SentencePieceTokenizer)(path)
    if tokenizer.vocab_size > vocab_size:
        raise CheckpointError(f"{path} has {tokenizer.vocab_size} pieces, more than the model's vocabulary of {vocab_size}")
    return tokenizer


def need_tokenizer(folder: Path, vocab_size: int) -> Tokenizer:
    """As ``open_tokenizer``, for those who cannot do without."""
    tokenizer = open_tokenizer(folder, vocab_size)
    if tokenizer is None:
        raise CheckpointError(
            f"{folder} has none of {SENTENCEPIECE}, {TEKKEN} and {HUGGING_FACE}, so text cannot be turned into tokens"
        )
    return tokenizer


def open_chat(folder: Path, tokenizer: Tokenizer) -> ChatPrompt:
    """How a conversation becomes a prompt: by mistral-common for Mistral's tokenizers, else by the checkpoint's template."""
    from tramontane.router.mistral_chat import MistralChat  # both bring what completions never need
    from tramontane.router.template_chat import TemplateChat, TemplateTokens

    if isinstance(tokenizer, TekkenTokenizer):
        return MistralChat(tokenizer.tekkenizer)
    if isinstance(tokenizer, SentencePieceTokenizer):
        return MistralChat.of_sentencepiece(tokenizer.path)
    assert isinstance(tokenizer, JsonTokenizer)
    template = _template(folder)
    if template is None:
        raise CheckpointError(f"{folder} has no chat template (neither {TEMPLATE} nor one in {SETTINGS}): it is no chat model")
    settings = _settings(folder)
    names = {name: _content(settings.get(name)) for name in ("bos_token", "eos_token", "unk_token", "pad_token")}
    return TemplateChat(template, names, TemplateTokens(tokenizer.text, template))


def _template(folder: Path) -> str | None:
    path = folder / TEMPLATE
    try:
        if path.is_file():
            return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    template = _settings(folder).get("chat_template")
    if isinstance(template, list):  # several, by name
        template = next((each["template"] for each in template if each.get("name") == "default"), None)
    return template if isinstance(template, str) else None


def _settings(folder: Path) -> dict[str, object]:
    path = folder / SETTINGS
    if not path.is_file():
        return {}
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    return settings if isinstance(settings, dict) else {}


def _content(token: object) -> str:
    """A token is written as its text, or as an object with its text and flags."""
    return str(token.get("content", "")) if isinstance(token, dict) else str(token or "")
