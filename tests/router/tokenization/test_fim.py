"""Prompts between a prefix and a suffix have mistral-common's token ids."""

import json
from pathlib import Path

import pytest
from mistral_common.protocol.fim.request import FIMRequest
from mistral_common.tokens.tokenizers.mistral import MistralTokenizer
from mistral_common.tokens.tokenizers.tekken import Tekkenizer
from tokenizer_files import (
    AWKWARD,
    SENTENCEPIECE,
    json_of_sentencepiece,
    json_of_tekken,
    small_tekken,
)

from tramontane.proto.errors import RequestError
from tramontane.router.tokenization.backends import (
    HfTokenizer,
    SentencePieceTokenizer,
    TekkenTokenizer,
)
from tramontane.router.tokenization.tokenizer import Tokenizer, encode_fim

PAIRS = [
    *zip(AWKWARD[1:], AWKWARD[:-1], strict=True),
    ("def f(a):\n    return", "\n\nprint(f(1))"),
    *(("[SUFFIX]", "[PREFIX]"), ("a", ""), ("", " b"), ("", "")),
]


def _check(ours: Tokenizer, path: Path) -> None:
    theirs = MistralTokenizer.from_file(str(path))
    for prompt, suffix in PAIRS:
        assert (
            list(encode_fim(ours, prompt, suffix))
            == theirs.encode_fim(FIMRequest(prompt=prompt, suffix=suffix)).tokens
        )


@pytest.mark.parametrize("version", ["v3", "v7"])
def test_the_ids_of_sentencepiece_are_mistral_commons(version: str) -> None:
    _check(SentencePieceTokenizer(SENTENCEPIECE[version]), SENTENCEPIECE[version])


def test_the_ids_of_tekken_are_mistral_commons(tmp_path: Path) -> None:
    path = small_tekken(tmp_path / "model")
    _check(TekkenTokenizer(path), path)


@pytest.mark.parametrize("kind", ["sentencepiece", "tekken"])
def test_the_ids_of_hugging_faces_files_are_mistral_commons(tmp_path: Path, kind: str) -> None:
    path = SENTENCEPIECE["v3"] if kind == "sentencepiece" else small_tekken(tmp_path / "model")
    data = json_of_sentencepiece(path) if kind == "sentencepiece" else json_of_tekken(path)
    _check(_hf_tokenizer(tmp_path, data), path)


def _hf_tokenizer(folder: Path, data: object) -> HfTokenizer:
    (folder / "tokenizer.json").write_text(json.dumps(data), encoding="utf-8")
    return HfTokenizer(folder / "tokenizer.json")


def test_tokenizers_without_the_control_tokens_are_refused(tmp_path: Path) -> None:
    """Version 2 has neither; mistral-common writes the unknown token for them."""
    path = small_tekken(tmp_path / "tekken")
    named = json.loads(
        json.dumps(Tekkenizer.DEPRECATED_SPECIAL_TOKENS).replace("[SUFFIX]", "[OTHER]")
    )
    data = json.loads(path.read_text(encoding="utf-8")) | {"special_tokens": named}
    path.write_text(json.dumps(data), encoding="utf-8")
    others: list[Tokenizer] = [
        SentencePieceTokenizer(SENTENCEPIECE[version]) for version in ("v1", "v2")
    ]
    others += [
        _hf_tokenizer(tmp_path, json_of_sentencepiece(SENTENCEPIECE["v2"])),
        TekkenTokenizer(path),
    ]
    for tokenizer in others:
        with pytest.raises(RequestError, match="no tokens for a suffix"):
            encode_fim(tokenizer, "a", "b")


def test_text_that_is_no_unicode_is_refused() -> None:
    for prompt, suffix in (("a", "\ud800"), ("\ud800", "b")):
        with pytest.raises(RequestError, match="Unicode"):
            encode_fim(SentencePieceTokenizer(SENTENCEPIECE["v3"]), prompt, suffix)
