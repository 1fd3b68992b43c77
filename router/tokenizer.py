"""Text to token ids and back, a piece at a time."""

import codecs
from pathlib import Path

import sentencepiece

from tramontane.proto.errors import CheckpointError

FILE_NAME = "tokenizer.model"


class IncrementalDecoder:
    """Turns one sequence's tokens into text as they come; never emits half a character.

    Bytes that can no longer become a character decode to U+FFFD.
    """

    def __init__(self, piece_bytes: tuple[bytes, ...]) -> None:
        self._piece_bytes = piece_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """The text that this token completes; empty while a character is incomplete or the id has no piece."""
        known = token_id < len(self._piece_bytes)
        return self._utf8.decode(self._piece_bytes[token_id]) if known else ""

    def finish(self) -> str:
        """What an unfinished character leaves behind at the end of the sequence."""
        return self._utf8.decode(b"", final=True)


class Tokenizer:
    """A checkpoint's SentencePiece model."""

    def __init__(self, folder: Path) -> None:
        path = folder / FILE_NAME
        if not path.is_file():
            raise CheckpointError(f"{folder} has no {FILE_NAME}, so text cannot be turned into tokens")
        try:
            self._model = sentencepiece.SentencePieceProcessor(model_file=str(path))
        except (OSError, RuntimeError) as error:
            raise CheckpointError(f"{path} is not a SentencePiece model") from error
        self.vocab_size: int = self._model.vocab_size()
        self._piece_bytes = tuple(self._bytes_of(i) for i in range(self.vocab_size))
        self.longest_piece: int = max(len(self._model.id_to_piece(i)) for i in range(self._model.vocab_size()))  # characters

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids with the beginning-of-sequence token first, as Mistral's models were trained."""
        ids: list[int] = self._model.encode(text)
        bos: int = self._model.bos_id()
        return (bos, *ids) if bos >= 0 else tuple(ids)

    def decoder(self) -> IncrementalDecoder:
        return IncrementalDecoder(self._piece_bytes)

    def decode(self, token_ids: tuple[int, ...]) -> str:
        """All at once; equal to what a decoder gives piece by piece."""
        decoder = self.decoder()
        return "".join(map(decoder.push, token_ids)) + decoder.finish()

    def _bytes_of(self, token_id: int) -> bytes:
        if self._model.is_control(token_id):
            return b""
        if self._model.is_unknown(token_id):
            return " \u2047 ".encode()  # what SentencePiece decodes it to
        piece: str = self._model.id_to_piece(token_id)
        if self._model.is_byte(token_id):
            return bytes([int(piece[3:5], 16)])  # "<0x0A>"
        return piece.replace("\u2581", " ").encode()
