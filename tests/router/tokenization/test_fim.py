"""Prompts between a prefix and a suffix have mistral-common's token ids."""

import json
from pathlib import Path

import pytest
from mistral_common.protocol.fim.request import FIMRequest
from mistral_common.tokens.tokenizers.mistral import MistralTokenizer
from tokenizer_files import AWKWARD, SENTENCEPIECE, json_of_sentencepiece, small_tekken

from tramontane.proto.errors import RequestError
from tramontane.router.tokenization.backends import SentencePieceTokenizer, TekkenTokenizer
from tramontane.router.tokenization.fim import encode_fim
from tramontane.router.tokenization.loader import load_tokenizer

PAIRS = [*zip(AWKWARD[1:], AWKWARD[:-1], strict=True), ("def f(a):\n    return", "\n\nprint(f(1))"), ("[SUFFIX]", "[PREFIX]")]


@pytest.mark.parametrize("version", ["v2", "v3", "v7"])
def test_the_ids_of_sentencepiece_are_mistral_commons(version: str) -> None:
    theirs = MistralTokenizer.from_file(str(SENTENCEPIECE[version]))
    ours = SentencePieceTokenizer(SENTENCEPIECE[version])
    for prompt, suffix in PAIRS:
        assert list(encode_fim(ours, prompt, suffix)) == theirs.encode_fim(FIMRequest(prompt=prompt, suffix=suffix)).tokens


def test_the_ids_of_tekken_are_mistral_commons(tmp_path: Path) -> None:
    path = small_tekken(tmp_path / "model")
    theirs, ours = MistralTokenizer.from_file(str(path)), TekkenTokenizer(path)
    for prompt, suffix in PAIRS:
        assert list(encode_fim(ours, prompt, suffix)) == theirs.encode_fim(FIMRequest(prompt=prompt, suffix=suffix)).tokens


def test_other_tokenizers_are_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps(json_of_sentencepiece(SENTENCEPIECE["v3"])))
    others = [SentencePieceTokenizer(SENTENCEPIECE["v1"]), load_tokenizer(tmp_path, 2**16)]
    for tokenizer in others:
        assert tokenizer is not None
        with pytest.raises(RequestError, match="no tokens for a suffix"):
            encode_fim(tokenizer, "a", "b")


def test_text_that_is_no_unicode_is_refused() -> None:
    with pytest.raises(RequestError, match="Unicode"):
        encode_fim(SentencePieceTokenizer(SENTENCEPIECE["v3"]), "a", "\ud800")
