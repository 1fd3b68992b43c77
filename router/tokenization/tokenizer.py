"""Text to token ids and back, a piece at a time; the files that say how are in ``tokenizer_kinds``."""

import codecs
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from tramontane.proto.errors import RequestError


@contextmanager
def validate_text(*texts: str) -> Iterator[None]:
    """Raises RequestError for characters that are none (lone surrogates), and for texts that the library gives up on."""
    try:
        for text in texts:
            text.encode()
        yield
    except UnicodeEncodeError:
        raise RequestError("the text is not valid Unicode") from None
    except ValueError as error:  # tiktoken's regular expressions, on a million spaces
        raise RequestError(f"the text cannot be tokenized: {str(error)[:200]}") from error


REPLACE, REPLACE_EACH = "replace", "tramontane-replace-each"


def _replace_each(error: UnicodeError) -> tuple[str, int]:
    """U+FFFD for each byte: for E1 80, which begins a character of three, twice. Python's own way is once."""
    assert isinstance(error, UnicodeDecodeError)
    return "\ufffd" * (error.end - error.start), error.end


codecs.register_error(REPLACE_EACH, _replace_each)


class IncrementalDecoder:
    """Turns one sequence's tokens into text as they come; never emits half a character.

    Bytes that can no longer become a character decode to U+FFFD, as ``errors`` says. With ``drops_space`` the text
    loses the space that it may begin with, unless that is one of the ``bytes_of_text``: ids that stand for single bytes.
    """

    def __init__(
        self,
        piece_bytes: tuple[bytes, ...],
        *,
        drops_space: bool,
        errors: str = REPLACE,
        bytes_of_text: frozenset[int] = frozenset(),
    ) -> None:
        self._piece_bytes = piece_bytes
        self._drops_space = drops_space
        self._bytes_of_text = bytes_of_text
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors=errors)

    def push(self, token_id: int) -> str:
        """The text that this token completes; empty while a character is incomplete.

        Control tokens, and ids without a piece, are nobody's text; what was begun before them stays unfinished.
        """
        piece = self._piece_bytes[token_id] if token_id < len(self._piece_bytes) else b""
        if not piece:
            return self.finish()
        if self._drops_space:
            piece = self._without_space(token_id, piece)
        return self._utf8.decode(piece)

    def push_with_offset(self, token_id: int) -> tuple[str, int]:
        """As ``push``, and at which character of that text the token itself begins: after what was left unfinished before it.

        After E2 82, which may become a character, the token "a" gives ("\ufffda", 1) and the token AC ("\u20ac", 0).
        """
        piece = self._piece_bytes[token_id] if token_id < len(self._piece_bytes) else b""
        if not piece:
            return (text := self.finish()), len(text)
        if self._drops_space:
            piece = self._without_space(token_id, piece)
            if not piece:
                return "", 0
        text = self._utf8.decode(piece[:1])
        is_in_last = not self._utf8.getstate()[0]  # the first byte is no longer waiting for others
        return text + self._utf8.decode(piece[1:]), len(text) - is_in_last

    def _without_space(self, token_id: int, piece: bytes) -> bytes:
        """Of the first token that says anything."""
        self._drops_space = False
        return piece if token_id in self._bytes_of_text else piece.removeprefix(b" ")

    def finish(self) -> str:
        """What an unfinished character leaves behind at the end of the sequence."""
        return self._utf8.decode(b"", final=True)


class Tokenizer(ABC):
    """What every kind of tokenizer shares: an id is a piece of text, so many bytes of UTF-8.

    ``bos_ids`` begin a sequence; a tokenizer without any begins a text with every sequence. ``strips_space``: as
    SentencePiece has it, a text is encoded with a space before it, which decoding takes away.
    """

    def __init__(
        self,
        piece_bytes: tuple[bytes, ...],
        bos_ids: frozenset[int],
        strips_space: bool,
        errors: str = REPLACE,
        bytes_of_text: frozenset[int] = frozenset(),
    ) -> None:
        self._errors, self._bytes_of_text = errors, bytes_of_text
        self._piece_bytes, self._bos_ids, self._strips_space = piece_bytes, bos_ids, strips_space
        self.vocab_size = 1 + max(token_id for token_id, piece in enumerate(piece_bytes) if piece)  # as far as texts reach
        self.max_piece_bytes = max(map(len, piece_bytes))  # at least as many bytes as characters

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids, begun as the model's training texts were. Raises RequestError for what is no text.

        Nothing in the text becomes a control token: who writes "</s>" or "[INST]" gets these characters.
        """
        with validate_text(text):
            return self._encode(text)

    def vocabulary(self) -> tuple[bytes, ...]:
        """What every id stands for in a text; nothing where it stands for none, as control tokens do, and the unknown one."""
        return self._piece_bytes

    @abstractmethod
    def control_id(self, name: str) -> int | None:
        """The id of a control token such as "[TOOL_CALLS]"; None if there is no such token, or its name is text."""

    @abstractmethod
    def _encode(self, text: str) -> tuple[int, ...]:
        """Ids of valid Unicode."""

    def check_length(self, text: str, most: int) -> None:
        """Raises RequestError if a text has certainly more than ``most`` tokens: no need to tokenize it to know."""
        if len(text) > most * self.max_piece_bytes:
            raise RequestError(f"a text of {len(text)} characters is too long; there is room for {most} tokens")

    def decoder(self, *, is_text_start: bool = False) -> IncrementalDecoder:
        """``is_text_start``: what comes is a text of its own (a chat's answer), not the continuation of another."""
        drops_space = self._strips_space and is_text_start
        return IncrementalDecoder(
            self._piece_bytes, drops_space=drops_space, errors=self._errors, bytes_of_text=self._bytes_of_text
        )

    def decode(self, token_ids: tuple[int, ...]) -> str:
        """All at once; equal to what a decoder gives piece by piece. Ids that begin a sequence give the text that was encoded."""
        return "".join(self.pieces(token_ids))

    def pieces(self, token_ids: tuple[int, ...]) -> list[str]:
        """What ``decode`` gives, token by token; a character that several of them make comes with the last."""
        decoder = self._decoder_of(token_ids)
        pieces = [decoder.push(token_id) for token_id in token_ids]
        return [*pieces[:-1], *(piece + decoder.finish() for piece in pieces[-1:])]

    def offsets(self, token_ids: Sequence[int]) -> list[int]:
        """At which character of what ``decode`` gives each token begins; of one that continues a character, where that stands."""
        decoder = self._decoder_of(token_ids)
        offsets, num_chars = [], 0
        for token_id in token_ids:
            text, place = decoder.push_with_offset(token_id)
            offsets.append(num_chars + place)
            num_chars += len(text)
        return offsets

    def bytes_of(self, token_id: int) -> bytes:
        """The text of one token as it is in the middle of others; none for control tokens and ids without a piece."""
        return self._piece_bytes[token_id] if token_id < len(self._piece_bytes) else b""

    def _decoder_of(self, token_ids: Sequence[int]) -> IncrementalDecoder:
        return self.decoder(is_text_start=not self._bos_ids or not self._bos_ids.isdisjoint(token_ids[:1]))
