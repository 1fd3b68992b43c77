"""Loads the tokenizer and the chat template of a checkpoint folder."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

from tramontane.proto.errors import CheckpointError, RequestError
from tramontane.proto.model_folder import refuse_lfs_pointer
from tramontane.router.tokenization.backends import (
    HfTokenizer,
    SentencePieceTokenizer,
    TekkenTokenizer,
)
from tramontane.router.tokenization.chat import ChatTemplate, ToolFormat
from tramontane.router.tokenization.reasoning_parser import find_reasoning_format
from tramontane.router.tokenization.tokenizer import Tokenizer

if TYPE_CHECKING:
    from tramontane.router.tokenization.template_chat import JinjaChatTemplate

TEKKEN, HUGGING_FACE, SENTENCEPIECE = "tekken.json", "tokenizer.json", "tokenizer.model"
# names of Mistral's own files
VERSIONED_NAMES = [f"{SENTENCEPIECE}.v{version}" for version in ("7m1", "7", "3m1", "3", "2", "1")]
TEMPLATE, SETTINGS = "chat_template.jinja", "tokenizer_config.json"
TEMPLATE_JSON, NAMED_TEMPLATES = "chat_template.json", "additional_chat_templates"
DEFAULT, TOOL_USE = "default", "tool_use"  # names of templates; the second is used with tools
NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")
PROBE = (("user", "ONE"), ("assistant", "TWO"), ("user", "THREE"))
# without spaces and without an optional prefix
MISTRAL_PROBE = "[INST]ONE[/INST]TWO</s>[INST]THREE[/INST]"


def find_tokenizer_file(folder: Path) -> Path | None:
    """Return the tokenizer file to read, None if no file exists.

    If there are several files, they agree, except for tokens that a fine-tune with its own chat
    template added: only ``tokenizer.json`` has these.
    """
    if (folder / HUGGING_FACE).is_file() and _has_own_format(folder):
        return folder / HUGGING_FACE
    candidates = (folder / name for name in (TEKKEN, *VERSIONED_NAMES, SENTENCEPIECE, HUGGING_FACE))
    return next((path for path in candidates if path.is_file()), None)


def load_tokenizer(folder: Path, vocab_size: int) -> Tokenizer | None:
    """Load a folder's tokenizer, None if it has none. Raises CheckpointError if it is damaged or
    exceeds ``vocab_size``; tokens that were added to it may, which the model does not know.
    """
    path = find_tokenizer_file(folder)
    if path is None:
        return None
    refuse_lfs_pointer(path)
    kinds = {TEKKEN: TekkenTokenizer, HUGGING_FACE: HfTokenizer}
    tokenizer = kinds.get(path.name, SentencePieceTokenizer)(path)
    if not tokenizer.leave_out_added(vocab_size):
        raise CheckpointError(
            f"{path} has {tokenizer.vocab_size} pieces, more than the model's vocabulary of"
            f" {vocab_size}"
        )
    return tokenizer


def require_tokenizer(folder: Path, vocab_size: int) -> Tokenizer:
    """Load a folder's tokenizer. Raises CheckpointError also if it has none."""
    tokenizer = load_tokenizer(folder, vocab_size)
    if tokenizer is None:
        raise CheckpointError(
            f"{folder} has no tokenizer: there is none of {TEKKEN}, {HUGGING_FACE}, {SENTENCEPIECE}"
            f" and {VERSIONED_NAMES[-1]} to .v7m1, so text cannot be turned into tokens; copy one"
            " of them from where the checkpoint was published, or give token ids to the API of"
            " tramontane serve or to LLM.generate"
        )
    return tokenizer


def load_chat_template(folder: Path, tokenizer: Tokenizer) -> ChatTemplate:
    """Load a folder's chat template: mistral-common's for Mistral's tokenizers, otherwise the
    checkpoint's own.
    """
    # imports libraries that completions do not need
    from tramontane.router.tokenization.mistral_chat import MistralChatTemplate

    if isinstance(tokenizer, HfTokenizer):
        templates = _templates(folder)
        if DEFAULT not in templates:
            raise CheckpointError(
                f"{folder} has no chat template (neither {TEMPLATE} nor one in {SETTINGS} or"
                f" {TEMPLATE_JSON}): it is not a chat model"
            )
        default = _load_jinja(folder, templates[DEFAULT], tokenizer)
        if TOOL_USE not in templates:
            return default
        from tramontane.router.tokenization.template_chat import TemplatesByTools

        return TemplatesByTools(default, _load_jinja(folder, templates[TOOL_USE], tokenizer))
    if _has_own_format(folder):
        raise CheckpointError(
            f"{folder} has a chat template of its own, which needs the tokenizer as {HUGGING_FACE};"
            " convert it"
        )
    try:
        if isinstance(tokenizer, TekkenTokenizer):
            return MistralChatTemplate(tokenizer.tekkenizer)
        assert isinstance(tokenizer, SentencePieceTokenizer)
        return MistralChatTemplate.from_sentencepiece(tokenizer.path)
    except ValueError as error:
        raise CheckpointError(
            f"the tokenizer of {folder} lacks what Mistral's instruct format needs: {error}"
        ) from error


def _load_jinja(folder: Path, template: str, tokenizer: HfTokenizer) -> "JinjaChatTemplate":
    from tramontane.router.tokenization.template_chat import JinjaChatTemplate, TemplateTokens

    try:
        return JinjaChatTemplate(
            template,
            _token_names(folder),
            TemplateTokens(tokenizer.text),
            _tool_format(template, tokenizer),
            find_reasoning_format(tokenizer, template),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{folder / HUGGING_FACE} is not as its chat template needs it: {error!r}"
        ) from error


def _tool_format(template: str, tokenizer: Tokenizer) -> ToolFormat | None:
    """Return Mistral's format for tools if the template uses it."""
    calls, args = (
        tokenizer.control_id(name) if name in template else None
        for name in ("[TOOL_CALLS]", "[ARGS]")
    )
    return None if calls is None or "tools" not in template else ToolFormat(calls, args)


def _has_own_format(folder: Path) -> bool:
    """Return True if the folder has a chat template that does not write Mistral's instruct
    format.
    """
    template = _templates(folder).get(DEFAULT)
    if template is None:
        return False
    # imported only if there is a template
    from tramontane.router.tokenization.template_chat import compile_template, render

    try:
        messages = [{"role": role, "content": content} for role, content in PROBE]
        prompt = render(
            compile_template(template), messages, _token_names(folder) | {"eos_token": "</s>"}
        )
    except (RequestError, CheckpointError):
        return True
    return not "".join(prompt.split()).endswith(MISTRAL_PROBE)


def _token_names(folder: Path) -> dict[str, str]:
    settings = _settings(folder)
    return {name: _token_text(settings.get(name)) for name in NAMED_TOKENS}


def _templates(folder: Path) -> dict[str, str]:
    """Return the chat templates of a folder by their names; most have only a default."""
    found: dict[str, str] = {}
    for name in (TEMPLATE_JSON, SETTINGS):  # the later ones count
        template = _settings(folder, name).get("chat_template")
        for each in template if isinstance(template, list) else ():
            if isinstance(each, dict) and isinstance(each.get("template"), str):
                found[str(each.get("name"))] = each["template"]
        if isinstance(template, str):
            found[DEFAULT] = template
    named = sorted((folder / NAMED_TEMPLATES).glob("*.jinja"))
    for name, path in ((DEFAULT, folder / TEMPLATE), *((path.stem, path) for path in named)):
        try:
            if path.is_file():
                found[name] = path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
    return found


def _settings(folder: Path, name: str = SETTINGS) -> dict[str, object]:
    path = folder / name
    if not path.is_file():
        return {}
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    return settings if isinstance(settings, dict) else {}


def _token_text(token: object) -> str:
    """Return the text of a token, which is written as a text or as an object with text and
    flags.
    """
    return str(token.get("content", "")) if isinstance(token, dict) else str(token or "")
