"""Tokenizers by file format: SentencePiece (tokenizer.model), Mistral's tekken.json, Hugging Face's
tokenizer.json.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tramontane.proto.errors import CheckpointError
from tramontane.router.tokenization.tokenizer import REPLACE_EACH, THINK_MARKERS, Tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

SPACE = "\u2581"  # represents a space in SentencePiece
# decoder steps of Hugging Face that decode as SentencePiece, by settings
SENTENCEPIECE_STEPS: dict[str, dict[str, Any]] = {
    "Replace": {"pattern": {"String": SPACE}, "content": " "},
    "ByteFallback": {},
    "Fuse": {},
    "Strip": {"content": " ", "start": 1, "stop": 0},
    "Metaspace": {"replacement": SPACE},
}
BPE = "BPE"
NUM_BYTES = 256  # tekken's first pieces
MAX_UNUSED_IDS = 2**16  # ids without a piece
SHORT_CHARS = 4096  # Hugging Face's library takes 3 ms for a text of this length


class SentencePieceTokenizer(Tokenizer):
    """Tokenizer of a ``tokenizer.model``, by SentencePiece itself."""

    def __init__(self, path: Path) -> None:
        import sentencepiece

        try:
            self.model = sentencepiece.SentencePieceProcessor(model_file=str(path))
        except (OSError, RuntimeError) as error:
            raise CheckpointError(f"{path} is not a SentencePiece model") from error
        self.path = path
        self._bos: tuple[int, ...] = (self.model.bos_id(),) if self.model.bos_id() >= 0 else ()
        adds_space = self.model.id_to_piece(self.model.encode("a")[0]).startswith(SPACE)
        pieces = tuple(self._bytes_of(i) for i in range(self.model.vocab_size()))
        bytes_of_text = frozenset(filter(self.model.is_byte, range(self.model.vocab_size())))
        super().__init__(pieces, frozenset(self._bos), adds_space, REPLACE_EACH, bytes_of_text)

    def vocabulary(self) -> tuple[bytes, ...]:
        """Return the pieces, without the text that the unknown token decodes to."""
        pieces = list(self._piece_bytes)
        pieces[self.model.unk_id()] = b""
        return tuple(pieces)

    def control_id(self, name: str) -> int | None:
        """Return the id of a control token, None if it does not exist."""
        token_id = self.model.piece_to_id(name)  # the unknown token's id if the piece is missing
        return token_id if self.model.is_control(token_id) else None

    def _encode(self, text: str) -> tuple[int, ...]:
        return (*self._bos, *self.model.encode(text))

    def _bytes_of(self, token_id: int) -> bytes:
        if self.model.is_control(token_id):
            return b""
        if self.model.is_unknown(token_id):
            return " \u2047 ".encode()  # as SentencePiece decodes it
        return _bytes_of_piece(
            self.model.id_to_piece(token_id), is_byte=self.model.is_byte(token_id)
        )


class TekkenTokenizer(Tokenizer):
    """Tokenizer of a ``tekken.json``, by mistral-common. The first ids are control tokens, byte
    sequences follow.
    """

    def __init__(self, path: Path) -> None:
        from mistral_common.tokens.tokenizers.tekken import Tekkenizer

        try:
            self.tekkenizer: Tekkenizer = Tekkenizer.from_file(path)
            if self.tekkenizer.n_words < self.tekkenizer.num_special_tokens + NUM_BYTES:
                raise ValueError("it does not have a piece for every byte")
        except (
            OSError,
            ValueError,
            AssertionError,
            KeyError,
            TypeError,
            AttributeError,
            RecursionError,
        ) as error:
            raise CheckpointError(
                f"{path} is not a tekken tokenizer: {_first_line(error)}"
            ) from error
        pieces = tuple(map(self.tekkenizer.id_to_byte_piece, range(self.tekkenizer.n_words)))
        super().__init__(pieces, frozenset({self.tekkenizer.bos_id}), strips_space=False)

    def control_id(self, name: str) -> int | None:
        """Return the id of a control token, None if it does not exist."""
        return self.tekkenizer.get_special_token(name) if self.tekkenizer.is_special(name) else None

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self.tekkenizer.encode(text, bos=True, eos=False))


class HfTokenizer(Tokenizer):
    """Tokenizer of a ``tokenizer.json``, by Hugging Face's tokenizers. Its decoder must map every
    id to bytes.
    """

    def __init__(self, path: Path) -> None:
        from tokenizers import Tokenizer as Backend

        try:
            self.text = path.read_text(encoding="utf-8")
            data = json.loads(self.text)
            if (kind := data["model"].get("type", BPE)) != BPE:
                raise CheckpointError(
                    f"{path} is a {kind!s:.40} tokenizer; Mistral's family has {BPE}, and nothing"
                    " else is supported"
                )
            backend = Backend.from_str(self.text)
            steps = _decoder_steps(data.get("decoder"))
            pieces = _pieces(backend, _to_bytes(steps, path))
            backend.encode_special_tokens = True
            backend.no_truncation()
            backend.no_padding()
            backend.model.dropout = None
            bos_ids = frozenset(backend.encode("").ids)
        except CheckpointError:
            raise
        except Exception as error:  # the library raises plain Exception
            raise CheckpointError(
                f"{path} is not a tokenizer of Hugging Face's tokenizers: {_first_line(error)}"
            ) from error
        self._backend = backend
        super().__init__(pieces, bos_ids, strips_space=any(map(_strips_space, steps)))

    def control_id(self, name: str) -> int | None:
        """Return the id of a control token, None if it does not exist."""
        token_id = self._backend.token_to_id(name)
        added = self._backend.get_added_tokens_decoder()
        return self._known(token_id) if token_id in added and added[token_id].special else None

    @property
    def added_ids(self) -> frozenset[int]:
        """The ids of added tokens, control tokens or not."""
        return frozenset(self._backend.get_added_tokens_decoder())

    def added_id(self, name: str) -> int | None:
        """Return the id of an added token, special or not; None if it does not exist."""
        token_id = self._backend.token_to_id(name)
        return self._known(token_id) if token_id in self.added_ids else None

    def vocabulary(self) -> tuple[bytes, ...]:
        """Return the pieces, without the text of markers of thoughts: a grammar names these by
        their ids.
        """
        pieces = list(self._piece_bytes)
        for name in (each for markers in THINK_MARKERS for each in markers):
            if (token_id := self.added_id(name)) is not None:
                pieces[token_id] = b""
        return tuple(pieces)

    def _known(self, token_id: int | None) -> int | None:
        return None if token_id is None or token_id >= self._left_out_from else token_id

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(encode_by_backend(self._backend, text))


def encode_by_backend(
    backend: "Backend", text: str, *, add_special_tokens: bool = True
) -> list[int]:
    """Return the ids of a text by Hugging Face's library, which lets other threads run only while
    it encodes a batch.

    A text of 8 MiB would stop the event loop for seconds. A short one takes less time than the
    change of threads.
    """
    if len(text) <= SHORT_CHARS:
        return list(backend.encode(text, add_special_tokens=add_special_tokens).ids)
    return list(backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)


def _decoder_steps(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if decoder is None:
        return []
    return list(decoder["decoders"]) if decoder["type"] == "Sequence" else [decoder]


def _pieces(backend: "Backend", to_bytes: Callable[[str], bytes]) -> tuple[bytes, ...]:
    """Return the bytes of every id, b"" for control tokens and for ids without a piece."""
    added, vocab = backend.get_added_tokens_decoder(), backend.get_vocab()
    size = max(vocab.values()) + 1
    if size > 2 * len(vocab) + MAX_UNUSED_IDS:
        raise ValueError(f"{len(vocab)} pieces have ids up to {size - 1}")
    pieces = [b""] * size
    for piece, token_id in vocab.items():
        if token_id not in added:
            pieces[token_id] = to_bytes(piece)
        elif not added[token_id].special:
            pieces[token_id] = piece.encode()
    return tuple(pieces)


def _to_bytes(steps: list[dict[str, Any]], path: Path) -> Callable[[str], bytes]:
    """Return the function from a piece to its bytes, given the steps of the file's decoder."""
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        byte_of = _gpt2_bytes()
        return lambda piece: bytes(byte_of[character] for character in piece)
    if {"Replace", "Metaspace"} & set(kinds) and all(map(_is_sentencepiece_step, steps)):
        has_bytes = "ByteFallback" in kinds
        return lambda piece: _bytes_of_piece(piece, is_byte=has_bytes and _is_byte(piece))
    raise CheckpointError(
        f"{path} decodes by {', '.join(kinds) or 'nothing'} in a way that is not supported; "
        "supported are ByteLevel and SentencePiece's steps (Replace or Metaspace, ByteFallback)"
    )


def _strips_space(step: dict[str, Any]) -> bool:
    return step["type"] == "Strip" or (
        step["type"] == "Metaspace" and step.get("prepend_scheme") != "never"
    )


def _is_sentencepiece_step(step: dict[str, Any]) -> bool:
    expected = SENTENCEPIECE_STEPS.get(step["type"])
    return expected is not None and all(step.get(key) == value for key, value in expected.items())


def _bytes_of_piece(piece: str, *, is_byte: bool) -> bytes:
    """Return a piece's bytes: b" King" for "\u2581King", a newline for "<0x0A>"."""
    return bytes([int(piece[3:5], 16)]) if is_byte else piece.replace(SPACE, " ").encode()


def _is_byte(piece: str) -> bool:
    return len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">")


def _gpt2_bytes() -> dict[str, int]:
    """Return GPT-2's alphabet for bytes: printable bytes map to themselves, the others to U+0100
    and following, so U+0120 is a space.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + i): byte for i, byte in enumerate(others)
    }


def _first_line(error: Exception) -> str:
    return f"{str(error)[:200]} ".splitlines()[0].strip() or type(error).__name__
