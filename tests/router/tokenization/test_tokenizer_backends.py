"""Every kind of tokenizer file against the library that its makers wrote, on texts that are easy to
get wrong.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from mistral_common.tokens.tokenizers.sentencepiece import (
    SentencePieceTokenizer as MistralSentencePiece,
)
from mistral_common.tokens.tokenizers.tekken import Tekkenizer
from sentencepiece import SentencePieceProcessor
from tokenizer_files import (
    AWKWARD,
    SENTENCEPIECE,
    TEKKEN,
    json_of_sentencepiece,
    json_of_tekken,
    small_tekken,
)

from tramontane.proto.errors import CheckpointError
from tramontane.router.tokenization.backends import (
    SHORT_CHARS,
    HfTokenizer,
    SentencePieceTokenizer,
    TekkenTokenizer,
    encode_by_backend,
)
from tramontane.router.tokenization.loader import load_tokenizer
from tramontane.router.tokenization.tokenizer import Tokenizer

Kinds = dict[str, tuple[Tokenizer, Callable[[str], Sequence[int]]]]
KINDS = (*SENTENCEPIECE, "tekken", "json of sentencepiece", "json of tekken")


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> Kinds:
    """Of each kind ours, and the oracle's ids: its makers' library; for tokenizer.json what it was
    made of.
    """
    folder = tmp_path_factory.mktemp("tokenizers")
    kinds: Kinds = {}
    for version, path in SENTENCEPIECE.items():
        kinds[version] = (
            SentencePieceTokenizer(path),
            _begun(SentencePieceProcessor(model_file=str(path)).encode),
        )
    tekken = Tekkenizer.from_file(small_tekken(folder))
    kinds["tekken"] = (
        TekkenTokenizer(folder / "tekken.json"),
        lambda text: tekken.encode(text, bos=True, eos=False),
    )
    kinds["json of sentencepiece"] = (
        _json(folder / "sentencepiece.json", json_of_sentencepiece(SENTENCEPIECE["v3"])),
        kinds["v3"][1],
    )
    kinds["json of tekken"] = (
        _json(folder / "tekken-as.json", json_of_tekken(folder / "tekken.json")),
        kinds["tekken"][1],
    )
    return kinds


def _begun(encode: Callable[[str], list[int]]) -> Callable[[str], list[int]]:
    return lambda text: [1, *encode(text)]


def _json(path: Path, data: dict[str, Any]) -> HfTokenizer:
    path.write_text(json.dumps(data), encoding="utf-8")
    return HfTokenizer(path)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", AWKWARD, ids=lambda text: repr(text[:20]))
def test_ids_are_the_oracles_and_the_round_trip_is_exact(
    tokenizers: Kinds, kind: str, text: str
) -> None:
    tokenizer, oracle = tokenizers[kind]
    ids = tokenizer.encode(text)
    assert list(ids) == list(oracle(text))
    assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("version", SENTENCEPIECE)
def test_sentencepiece_ids_are_mistral_commons_too(tokenizers: Kinds, version: str) -> None:
    reference = MistralSentencePiece(SENTENCEPIECE[version])
    for text in AWKWARD:
        assert list(tokenizers[version][0].encode(text)) == reference.encode(
            text, bos=True, eos=False
        )


def test_the_whole_tekken(tmp_path: Path) -> None:
    tokenizer, reference = TekkenTokenizer(TEKKEN), Tekkenizer.from_file(TEKKEN)
    assert tokenizer.vocab_size == 131_072
    for text in AWKWARD:
        assert list(tokenizer.encode(text)) == reference.encode(text, bos=True, eos=False)
        assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("kind", KINDS)
def test_no_text_becomes_a_control_token(tokenizers: Kinds, kind: str) -> None:
    """Only the one that begins the sequence has no text of its own."""
    tokenizer = tokenizers[kind][0]
    for text in ("</s>", "[INST] [/INST]", "<s>", "<unk>", "[TOOL_CALLS]"):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert all(tokenizer.decode((token_id,)) for token_id in ids[1:])


@pytest.mark.parametrize("kind", KINDS)
@settings(derandomize=True, deadline=None, max_examples=examples(100))
@given(text=st.text(max_size=40))
def test_any_text_survives(tokenizers: Kinds, kind: str, text: str) -> None:
    """But for one character where SentencePiece is behind it, which writes a space as U+2581."""
    tokenizer, oracle = tokenizers[kind]
    ids = tokenizer.encode(text)
    assert list(ids) == list(oracle(text))
    assert tokenizer.decode(ids) == (text if "tekken" in kind else text.replace("\u2581", " "))


@pytest.mark.parametrize("kind", KINDS)
@settings(derandomize=True, deadline=None, max_examples=examples(60))
@given(data=st.data())
def test_streaming_equals_decoding_at_once_at_every_split(
    tokenizers: Kinds, kind: str, data: st.DataObject
) -> None:
    """Also for tokens that no text has: half characters, control tokens in the middle, ids beyond
    the vocabulary.
    """
    tokenizer = tokenizers[kind][0]
    text_ids = list(tokenizer.encode(data.draw(st.sampled_from(AWKWARD)))[:60])
    any_ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 10), max_size=30))
    cut = data.draw(st.integers(0, len(text_ids)))
    ids = (*text_ids[:cut], *any_ids, *text_ids[cut:])
    whole = tokenizer.decode(ids)
    for split in range(len(ids) + 1):
        decoder = tokenizer.decoder(is_text_start=ids[:1] == (1,))
        first = "".join(map(decoder.push, ids[:split]))
        second = "".join(map(decoder.push, ids[split:])) + decoder.finish()
        assert first + second == whole
        assert whole.startswith(first), "what was shown stays"


@pytest.mark.parametrize("kind", KINDS)
def test_a_continuation_keeps_its_space_and_a_text_of_its_own_does_not(
    tokenizers: Kinds, kind: str
) -> None:
    tokenizer = tokenizers[kind][0]
    ids = tokenizer.encode("Rome is far")[1:]
    going_on, starting = tokenizer.decoder(), tokenizer.decoder(is_text_start=True)
    spelled = "".join(map(going_on.push, ids))
    assert spelled == ("Rome is far" if "tekken" in kind else " Rome is far")
    assert "".join(map(starting.push, ids)) == "Rome is far"


@pytest.mark.parametrize(
    "ids",
    [[803], [803, 1000], [996, 899], [1007, 910, 923], [1000, 996, 899, 1000], [996, 899, 3, 899]],
)
def test_decoding_of_stray_bytes_is_sentencepieces(tokenizers: Kinds, ids: list[int]) -> None:
    """803 is the byte of a space, 996 and 899 begin a character of three bytes, 1007, 910 and 923
    one of four.
    """
    assert tokenizers["v3"][0].decode((1, *ids)) == SentencePieceProcessor(
        model_file=str(SENTENCEPIECE["v3"])
    ).decode(ids)


@settings(derandomize=True, deadline=None, max_examples=examples(150))
@given(data=st.data())
def test_decoding_of_any_ids_is_sentencepieces(tokenizers: Kinds, data: st.DataObject) -> None:
    """Also of what no text has: control tokens in the middle, half characters on both sides of
    them.
    """
    # control tokens, bytes, anything
    kinds = (st.integers(1, 10), st.integers(771, 1026), st.integers(1, 32_767))
    ids = data.draw(st.lists(st.one_of(*kinds), max_size=20))
    assert tokenizers["v3"][0].decode((1, *ids)) == SentencePieceProcessor(
        model_file=str(SENTENCEPIECE["v3"])
    ).decode(ids)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_tekken(tmp_path_factory.mktemp("tekken"))


@settings(derandomize=True, deadline=None, max_examples=examples(150))
@given(data=st.data())
def test_decoding_of_any_ids_is_tekkens(
    tokenizers: Kinds, reference: Tekkenizer, data: st.DataObject
) -> None:
    kinds = (st.integers(0, 999), st.integers(1000, 1255), st.integers(0, 6999))
    ids = data.draw(st.lists(st.one_of(*kinds), max_size=20))
    assert tokenizers["tekken"][0].decode(tuple(ids)) == reference.decode(ids)


@pytest.fixture(scope="module")
def reference(small: Path) -> Tekkenizer:
    return Tekkenizer.from_file(small)


@pytest.mark.parametrize("version", SENTENCEPIECE)
def test_decoding_is_sentencepieces(tokenizers: Kinds, version: str) -> None:
    reference = SentencePieceProcessor(model_file=str(SENTENCEPIECE[version]))
    for text in AWKWARD:
        ids = reference.encode(text)
        assert tokenizers[version][0].decode((1, *ids)) == reference.decode(ids)


@pytest.mark.parametrize("kind", KINDS)
def test_no_piece_is_longer_than_it_says(tokenizers: Kinds, kind: str) -> None:
    """By this bound texts are refused without tokenizing them."""
    tokenizer = tokenizers[kind][0]
    assert (
        max(len(tokenizer.decode((token_id,))) for token_id in range(tokenizer.vocab_size))
        <= tokenizer.max_piece_bytes
    )


def test_settings_for_training_do_not_cut_or_fill_prompts(tmp_path: Path) -> None:
    data = json_of_sentencepiece(SENTENCEPIECE["v3"])
    data["truncation"] = {
        "direction": "Right",
        "max_length": 3,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    data["padding"] = {
        "strategy": {"Fixed": 50},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
    }
    data["padding"] |= {"pad_type_id": 0, "pad_token": "<unk>"}
    tokenizer = _json(tmp_path / "tokenizer.json", data)
    assert tokenizer.decode(tokenizer.encode("to be, or not to be")) == "to be, or not to be"


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (
            {"decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True}},
            "decodes by WordPiece",
        ),
        ({"decoder": None}, "decodes by nothing"),
        (
            {"decoder": {"type": "Replace", "pattern": {"String": "_"}, "content": " "}},
            "decodes by Replace",
        ),
        (
            {
                "model": {
                    "type": "Unigram",
                    "unk_id": 0,
                    "vocab": [["a", -1.0]],
                    "byte_fallback": False,
                }
            },
            "is a Unigram tokenizer",
        ),
        ({"model": {}}, "not a tokenizer of Hugging Face"),
        ({"decoder": {"type": "Strip", "content": " ", "start": 1, "stop": 0}}, "decodes by Strip"),
        (
            {
                "decoder": {
                    "type": "Metaspace",
                    "replacement": "_",
                    "prepend_scheme": "always",
                    "split": True,
                }
            },
            "decodes by Metaspace",
        ),
    ],
)
def test_what_a_tokenizer_json_may_not_be(
    tmp_path: Path, change: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(CheckpointError, match=complaint) as refusal:
        _json(tmp_path / "tokenizer.json", json_of_sentencepiece(SENTENCEPIECE["v3"]) | change)
    assert "\n" not in str(refusal.value)
    assert "tokenizer.json" in str(refusal.value)


@pytest.mark.parametrize("kind", [SentencePieceTokenizer, TekkenTokenizer, HfTokenizer])
@pytest.mark.parametrize(
    "content", [b"", b"garbage", b"{}", b"[]", b'{"config": {}}', b"\xff\xfe" * 100], ids=repr
)
def test_damaged_files_are_named(tmp_path: Path, kind: type[Any], content: bytes) -> None:
    path = tmp_path / "damaged"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="damaged is not a") as refusal:
        kind(path)
    assert "\n" not in str(refusal.value)


def test_a_vocabulary_has_text_for_what_is_text_only(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(
        json.dumps(json_of_sentencepiece(SENTENCEPIECE["v3"])), encoding="utf-8"
    )
    by_model, by_json = (
        SentencePieceTokenizer(SENTENCEPIECE["v3"]),
        HfTokenizer(tmp_path / "tokenizer.json"),
    )
    by_tekken = TekkenTokenizer(small_tekken(tmp_path))
    assert by_model.vocabulary() == by_json.vocabulary()
    for tokenizer in (by_model, by_json, by_tekken):
        pieces = tokenizer.vocabulary()
        assert {bytes([byte]) for byte in range(256)} <= set(pieces)
        controls = [
            tokenizer.control_id(name) for name in ("<s>", "</s>", "[INST]", "[TOOL_CALLS]")
        ]
        assert all(token_id is not None and pieces[token_id] == b"" for token_id in controls)
        assert pieces[0] == b"", "the unknown one has no text"
        assert (
            tokenizer.control_id("[NONE]")
            is tokenizer.control_id("the")
            is tokenizer.control_id("<0x41>")
            is None
        )
        text = "To be, \u20ac or not"
        assert (
            b"".join(pieces[token_id] for token_id in tokenizer.encode(text)).decode().strip()
            == text
        )


@pytest.mark.parametrize("adds_special_tokens", [True, False])
def test_a_long_text_has_the_same_ids_and_lets_other_threads_run(
    tokenizers: Kinds, adds_special_tokens: bool
) -> None:
    """Only ``encode_batch_fast`` of Hugging Face's library gives up the interpreter lock."""

    class Backend:
        """Of real ids; notes how long the texts of each method are."""

        def __init__(self, inner: Any) -> None:
            self.inner = inner
            self.lengths: dict[str, list[int]] = {"one": [], "batch": []}

        def encode(self, text: str, **settings: bool) -> Any:
            self.lengths["one"].append(len(text))
            return self.inner.encode(text, **settings)

        def encode_batch_fast(self, texts: list[str], **settings: bool) -> Any:
            self.lengths["batch"] += map(len, texts)
            return self.inner.encode_batch_fast(texts, **settings)

    for tokenizer in (made for made, _ in tokenizers.values() if isinstance(made, HfTokenizer)):
        text = "".join(AWKWARD) * 2
        backend: Any = Backend(tokenizer._backend)
        ids = encode_by_backend(backend, text, add_special_tokens=adds_special_tokens)
        assert ids == tokenizer._backend.encode(text, add_special_tokens=adds_special_tokens).ids
        encode_by_backend(backend, "a" * SHORT_CHARS, add_special_tokens=adds_special_tokens)
        assert backend.lengths == {"one": [SHORT_CHARS], "batch": [len(text)]}


@pytest.mark.parametrize("name", ["tekken.json", "tokenizer.model", "tokenizer.json"])
def test_a_pointer_of_git_lfs_is_named(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(
        b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 14483464\n"
    )
    with pytest.raises(CheckpointError, match=rf"{name} is a pointer of Git LFS; .* git lfs pull"):
        load_tokenizer(tmp_path, 1000)
