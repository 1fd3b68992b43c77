"""Text comes out piece by piece as it would all at once, and never as half a character."""

from collections.abc import Callable
from pathlib import Path

import pytest
import sentencepiece as spm
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import write_tokenizer

from tramontane.proto.errors import ContextLengthError
from tramontane.router.tokenization import tokenizer as tokenizer_module
from tramontane.router.tokenization.backends import SentencePieceTokenizer
from tramontane.router.tokenization.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer with few pieces, so that most characters fall back to bytes."""
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"), 320)


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return SentencePieceTokenizer(folder / "tokenizer.model")


@pytest.fixture(scope="module")
def decode_like_sentencepiece(folder: Path) -> Callable[[tuple[int, ...]], str]:
    model = spm.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    return lambda ids: str(model.decode(list(ids)))


@settings(derandomize=True, deadline=None, max_examples=examples(200))
@given(text=st.text(max_size=60))
def test_pieces_add_up_to_the_text(
    tokenizer: Tokenizer, decode_like_sentencepiece: Callable[[tuple[int, ...]], str], text: str
) -> None:
    ids = tokenizer.encode(text)
    decoder = tokenizer.decoder(is_text_start=True)
    pieces = [decoder.push(token) for token in ids]
    assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in text
    # SentencePiece puts a space before the text and drops one when it decodes.
    assert "".join(pieces) + decoder.finish() == decode_like_sentencepiece(ids)
    # the latter is how SentencePiece writes a space
    readable = "\x00" not in text and "\u2581" not in text
    assert tokenizer.decode(ids) == text or not readable


def test_a_character_appears_with_its_last_byte(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a😀b")
    decoder = tokenizer.decoder()
    pieces = [decoder.push(token) for token in ids]
    assert "😀" in pieces
    before = pieces[: pieces.index("😀")]
    assert before[-3:] == ["", "", ""], "three of its four bytes say nothing"
    assert "".join(pieces).strip() == "a😀b"


def test_broken_bytes_become_replacement_characters(tokenizer: Tokenizer) -> None:
    smiley, letter = tokenizer.encode("😀")[-4:], tokenizer.encode("x")[-1]
    decoder = tokenizer.decoder()
    text = "".join(map(decoder.push, (smiley[0], smiley[1], letter, smiley[0])))
    assert text.startswith("\ufffd")
    assert text.endswith("x")
    assert decoder.finish() == "\ufffd"


def test_ids_without_a_piece_decode_to_nothing(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode((1, 2, 10**6)) == ""


def test_the_unknown_piece_is_what_sentencepiece_says(
    tokenizer: Tokenizer, decode_like_sentencepiece: Callable[[tuple[int, ...]], str]
) -> None:
    ids = (*tokenizer.encode("fox"), 0)
    assert tokenizer.decode(ids) == decode_like_sentencepiece(ids)


def test_newlines_and_spaces_survive(tokenizer: Tokenizer) -> None:
    text = "one\n\n  two   three\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_text_is_too_long_if_even_its_longest_pieces_are_too_many(tokenizer: Tokenizer) -> None:
    """Characters are not tokens: a text may have more of them than there is room for tokens."""
    longest = tokenizer.max_piece_bytes
    assert longest > 1
    tokenizer.check_length("a" * (7 * longest), 7)
    with pytest.raises(ContextLengthError, match="too long: at least 8 tokens > 6 maximum"):
        tokenizer.check_length("a" * (7 * longest + 1), 7)


def test_a_long_text_of_far_too_many_tokens_is_found_out_piece_by_piece(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer_module, "UNCHECKED_CHARS", 40)
    monkeypatch.setattr(tokenizer_module, "PIECE_CHARS", 16)
    encode, lengths = tokenizer.encode, list[int]()
    monkeypatch.setattr(
        tokenizer, "encode", lambda text: (lengths.append(len(text)), encode(text))[1]
    )
    text = "one two three " * 20
    num_tokens = sum(len(encode(text[start : start + 16])) for start in range(0, len(text), 16))
    tokenizer.check_num_tokens(text, (num_tokens + 1) // 2)
    assert lengths == [16] * 17 + [8], "to its end"
    lengths.clear()
    with pytest.raises(ContextLengthError, match=r"too long: at least \d+ tokens > 11 maximum"):
        tokenizer.check_num_tokens(text, 12)
    assert 1 < len(lengths) < 17, "only until it is known"
    lengths.clear()
    tokenizer.check_num_tokens(text[:40], 1)
    assert not lengths, "a short text is not tokenized twice"
