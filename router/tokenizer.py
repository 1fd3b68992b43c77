"""Text to token ids and back, a piece at a time; the files that say how are in ``tokenizer_kinds``."""

import codecs
from abc import ABC, abstractmethod


class IncrementalDecoder:
    """Turns one sequence's tokens into text as they come; never emits half a character.

    Bytes that can no longer become a character decode to U+FFFD. With ``drops_space`` the text
    loses the space that it may begin with.
    """

    def __init__(self, piece_bytes: tuple[bytes, ...], *, drops_space: bool) -> None:
        self._piece_bytes = piece_bytes
        self._drops_space = drops_space
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """The text that this token completes; empty while a character is incomplete or the id has no piece."""
        piece = self._piece_bytes[token_id] if token_id < len(self._piece_bytes) else b""
        if piece and self._drops_space:
            piece, self._drops_space = piece.removeprefix(b" "), False
        return self._utf8.decode(piece)

    def finish(self) -> str:
        """What an unfinished character leaves behind at the end of the sequence."""
        return self._utf8.decode(b"", final=True)


class Tokenizer(ABC):
    """What every kind of tokenizer shares: an id is a piece of text, so many bytes of UTF-8.

    ``bos_ids`` begin a sequence. ``strips_space``: as SentencePiece has it, a text is encoded
    with a space before it, which decoding takes away.
    """

    def __init__(self, piece_bytes: tuple[bytes, ...], bos_ids: frozenset[int], strips_space: bool) -> None:
        self._piece_bytes, self._bos_ids, self._strips_space = piece_bytes, bos_ids, strips_space
        self.vocab_size = len(piece_bytes)
        self.longest_piece = max(map(len, piece_bytes))  # at least as many bytes as characters

    @abstractmethod
    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids, begun as the model's training texts were.

        Nothing in the text becomes a control token: who writes "</s>" or "[INST]" gets these characters.
        """

    def decoder(self, *, is_text_start: bool = False) -> IncrementalDecoder:
        """``is_text_start``: what comes is a text of its own (a chat's answer), not the continuation of another."""
        return IncrementalDecoder(self._piece_bytes, drops_space=self._strips_space and is_text_start)

    def decode(self, token_ids: tuple[int, ...]) -> str:
        """All at once; equal to what a decoder gives piece by piece. Ids that begin a sequence give the text that was encoded."""
        decoder = self.decoder(is_text_start=not self._bos_ids.isdisjoint(token_ids[:1]))
        return "".join(map(decoder.push, token_ids)) + decoder.finish()
