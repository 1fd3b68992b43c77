"""End-of-sequence tokens named by the tokenizer's files of a checkpoint."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SETTINGS, SPECIAL_TOKENS, ADDED_TOKENS = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
)
TOKENIZER, TEKKEN = "tokenizer.json", "tekken.json"
TEKKEN_EOS, QUOTED_EOS = "</s>", b'"</s>"'
MAX_DIGITS = 10  # of an id that is written as a key; Python refuses to read thousands
# files of the first versions do not list special tokens (mistral-common, tekken.py)
OLD_TEKKEN_EOS = 2

NOTHING_ENDS = (
    "nothing ends an answer of %s: config.json, generation_config.json and the tokenizer's files"
    " name no end-of-sequence token, so answers run to max_tokens; add eos_token_id to config.json,"
    " or give stop or stop_token_ids with each request"
)


def tokenizer_eos_ids(folder: Path, vocab_size: int) -> tuple[int, ...]:
    """Return the ids of ``eos_token`` of a folder's tokenizer, and of tekken's ``</s>``, without
    ids that the model cannot produce.

    Missing or damaged files have no ids: loading the tokenizer reports them. SentencePiece files
    are not read: the id of Mistral's is 2, the default of its models.
    """
    found = [*_named_ids(folder), *_tekken_ids(folder / TEKKEN)]
    return tuple(dict.fromkeys(token_id for token_id in found if 0 <= token_id < vocab_size))


def _named_ids(folder: Path) -> Iterator[int]:
    """Yield the id of the token that the settings name. As in transformers, older folders have it
    in a separate file.
    """
    settings = _object(_read(folder / SETTINGS))
    name = _text(settings.get("eos_token"))
    if "added_tokens_decoder" not in settings or not name:
        name = _text(_object(_read(folder / SPECIAL_TOKENS)).get("eos_token")) or name
    if name:
        token_id = next(_ids_of(name, settings, folder), None)
        if token_id is not None:
            yield token_id


def _ids_of(name: str, settings: dict[str, Any], folder: Path) -> Iterator[int]:
    """Yield the ids of a token in the files, the most specific first; the largest file is read
    last.
    """
    for token_id, token in _object(settings.get("added_tokens_decoder")).items():
        if _text(token) == name and token_id.isdecimal() and len(token_id) < MAX_DIGITS:
            yield int(token_id)
    yield from _number(_object(_read(folder / ADDED_TOKENS)).get(name))
    tokenizer = _object(_read(folder / TOKENIZER))
    for token in _list(tokenizer.get("added_tokens")):
        if _text(token) == name:
            yield from _number(_object(token).get("id"))
    yield from _number(_object(_object(tokenizer.get("model")).get("vocab")).get(name))


def _tekken_ids(path: Path) -> Iterator[int]:
    """Yield the rank of the special token ``</s>``. Only its object is parsed: the pieces of
    130,000 other tokens take 0.3 s.
    """
    try:
        data = path.read_bytes()
    except OSError:
        return
    ranks: list[int] = []
    at = data.find(QUOTED_EOS)
    while at >= 0:  # the enclosing object has no nested objects
        token = _object(_parse(data[data.rfind(b"{", 0, at) : data.find(b"}", at) + 1]))
        # pieces of text have them
        if token.get("token_str") == TEKKEN_EOS and "token_bytes" not in token:
            ranks += _number(token.get("rank"))
        at = data.find(QUOTED_EOS, at + 1)
    yield from ranks or [OLD_TEKKEN_EOS] * (b'"vocab"' in data)


def _read(path: Path) -> object:
    try:
        return _parse(path.read_bytes())
    except OSError:
        return None


def _parse(data: bytes) -> object:
    try:
        value: object = json.loads(data.decode())
    except (ValueError, RecursionError):
        return None
    return value


def _object(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _number(value: object) -> Iterator[int]:
    if type(value) is int:
        yield value


def _text(token: object) -> str:
    """Return the text of a token, which is written as a text or as an object with text and
    flags.
    """
    return str(_object(token).get("content") or "") if isinstance(token, dict) else str(token or "")
