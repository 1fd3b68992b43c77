"""Base of tokenizers, and incremental decoding of tokens. ``backends`` has the file formats."""

import codecs
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from tramontane.proto.errors import ContextLengthError, RequestError
from tramontane.proto.request import validate_prompt


@contextmanager
def validate_text(*texts: str) -> Iterator[None]:
    """Raise RequestError for lone surrogates, and for texts on which the tokenizer's library fails
    inside the context.
    """
    try:
        for text in texts:
            text.encode()
        yield
    except UnicodeEncodeError:
        raise RequestError("the text is not valid Unicode") from None
    except ValueError as error:  # tiktoken's regular expressions, on a million spaces
        raise RequestError(f"the text cannot be tokenized: {str(error)[:200]}") from error


# of a text; its ids, four for each character at most, are a list within 30 ms
UNCHECKED_CHARS = PIECE_CHARS = 2**18
# Of the end of a long text: characters per token at first, and tokens that a cut may change.
CHARS_PER_TOKEN, NUM_AT_CUT = 8, 64
REPLACE, REPLACE_EACH = "replace", "tramontane-replace-each"
THINK_TEXTS = ("<think>", "</think>")
# before and after a thought: Mistral's markers, and the most common others
THINK_MARKERS = (("[THINK]", "[/THINK]"), THINK_TEXTS)


def _replace_each(error: UnicodeError) -> tuple[str, int]:
    """Replace each byte by U+FFFD: E1 80, which begins a character of three bytes, by two. Python's
    "replace" gives one.
    """
    assert isinstance(error, UnicodeDecodeError)
    return "\ufffd" * (error.end - error.start), error.end


codecs.register_error(REPLACE_EACH, _replace_each)


class IncrementalDecoder:
    """Turns the tokens of one sequence into text; never emits half a character.

    Bytes that can no longer become a character decode to U+FFFD, according to ``errors``. With
    ``drops_space`` a leading space of the text is removed, unless its id is one of the
    ``bytes_of_text`` (ids of single bytes).
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
        """Return the text that this token completes; empty while a character is incomplete.

        Control tokens and ids without a piece have no text; a character that was begun before them
        stays unfinished.
        """
        piece = self._piece_bytes[token_id] if token_id < len(self._piece_bytes) else b""
        if not piece:
            return self.finish()
        if self._drops_space:
            piece = self._without_space(token_id, piece)
        return self._utf8.decode(piece)

    def push_with_offset(self, token_id: int) -> tuple[str, int]:
        """Push, and also return the index in the text at which the token itself begins, after
        unfinished bytes before it.

        After E2 82, which may become a character, the token "a" gives ("\ufffda", 1) and the token
        AC ("\u20ac", 0).
        """
        piece = self._piece_bytes[token_id] if token_id < len(self._piece_bytes) else b""
        if not piece:
            return (text := self.finish()), len(text)
        if self._drops_space:
            piece = self._without_space(token_id, piece)
            if not piece:
                return "", 0
        text = self._utf8.decode(piece[:1])
        is_in_last = not self._utf8.getstate()[0]  # the first byte waits for no further bytes
        return text + self._utf8.decode(piece[1:]), len(text) - is_in_last

    def _without_space(self, token_id: int, piece: bytes) -> bytes:
        """Remove the space of the first token that has text."""
        self._drops_space = False
        return piece if token_id in self._bytes_of_text else piece.removeprefix(b" ")

    def finish(self) -> str:
        """Return the text of an unfinished character at the end of the sequence."""
        return self._utf8.decode(b"", final=True)


class Tokenizer(ABC):
    """Base of tokenizers: every id represents some bytes of UTF-8.

    ``bos_ids`` begin a sequence; without any, every sequence begins a text. ``strips_space``: as in
    SentencePiece, a text is encoded with a space before it, which decoding removes.
    """

    def __init__(
        self,
        piece_bytes: tuple[bytes, ...],
        bos_ids: frozenset[int],
        strips_space: bool,
        errors: str = REPLACE,
        bytes_of_text: frozenset[int] = frozenset(),
    ) -> None:
        self._left_out_from: float = math.inf  # ids that a model does not know
        self._errors, self._bytes_of_text = errors, bytes_of_text
        self._piece_bytes, self._bos_ids, self.strips_space = piece_bytes, bos_ids, strips_space
        # ids above have no text
        self.vocab_size = 1 + max(token_id for token_id, piece in enumerate(piece_bytes) if piece)
        self.max_piece_bytes = max(map(len, piece_bytes))  # an upper bound of its characters, too

    def encode(self, text: str) -> tuple[int, ...]:
        """Return token ids, with the model's beginning-of-text tokens. Raises RequestError for
        invalid text.

        No part of the text becomes a control token: "</s>" and "[INST]" are encoded as characters.
        """
        with validate_text(text):
            return self._encode(text)

    def encode_end(self, text: str, num_tokens: int) -> tuple[int, ...]:
        """Return the last token ids of a text, at most ``num_tokens``. Raises RequestError for
        invalid text; call it in a thread.

        Of a long text only the end is tokenized, with more tokens than asked for, so that the cut
        does not change the ones that are returned.
        """
        beginning = len(self.encode(""))
        num_chars = CHARS_PER_TOKEN * (num_tokens + NUM_AT_CUT)
        while num_chars < len(text):
            ids = self.encode(text[-num_chars:])[beginning:]
            if len(ids) >= num_tokens + NUM_AT_CUT:
                return ids[-num_tokens:]
            num_chars *= 2
        return self.encode(text)[-num_tokens:]

    def vocabulary(self) -> tuple[bytes, ...]:
        """Return the bytes of every id in a text, b"" for control tokens and the unknown token."""
        return self._piece_bytes

    @abstractmethod
    def control_id(self, name: str) -> int | None:
        """Return the id of a control token such as "[TOOL_CALLS]"; None if it does not exist or its
        name is text.
        """

    @property
    def added_ids(self) -> frozenset[int]:
        """The ids of tokens that were added to the vocabulary, as far as the file tells."""
        return frozenset()

    def leave_out_added(self, vocab_size: int) -> bool:
        """Leave out added tokens that are not in a model's vocabulary: they have no text, and no
        names. Returns whether all other tokens are in it.
        """
        beyond = range(vocab_size, len(self._piece_bytes))
        if any(self._piece_bytes[i] and i not in self.added_ids for i in beyond):
            return False
        self._left_out_from = vocab_size
        self._piece_bytes = self._piece_bytes[:vocab_size]
        self.vocab_size = min(self.vocab_size, vocab_size)
        return True

    def added_id(self, name: str) -> int | None:
        """Return the id of an added token, a control token or not; None if it does not exist."""
        return self.control_id(name)

    @abstractmethod
    def _encode(self, text: str) -> tuple[int, ...]:
        """Return the ids of a text that is valid Unicode."""

    def check_length(self, text: str, max_model_len: int, name: str = "the prompt") -> None:
        """Raise ContextLengthError if a text certainly has more tokens than the context has
        positions, without tokenizing it: 900 characters in tokens of at most 8 are 113 or more.
        """
        if len(text) > max_model_len * self.max_piece_bytes:
            num_tokens = -(-len(text) // self.max_piece_bytes)
            raise ContextLengthError.of_prompt(num_tokens, max_model_len, name, at_least=True)

    def check_num_tokens(self, text: str, max_model_len: int, name: str = "the prompt") -> None:
        """Raise ContextLengthError if a long text has more than twice as many tokens as the context
        has positions; call it in a thread.

        The libraries hold Python's interpreter lock while they build a list of all ids: 75 ms for
        2.8 million. So a long text is tokenized in pieces first. The cuts change a few tokens,
        hence the factor of two. A text of 600,000 characters has three pieces.
        """
        if len(text) <= UNCHECKED_CHARS:
            return
        num_tokens = 0
        for start in range(0, len(text), PIECE_CHARS):
            num_tokens += len(self.encode(text[start : start + PIECE_CHARS]))
            if num_tokens > 2 * max_model_len:
                raise ContextLengthError.of_prompt(
                    num_tokens // 2, max_model_len, name, at_least=True
                )

    def decoder(self, *, is_text_start: bool = False) -> IncrementalDecoder:
        """Return a decoder. ``is_text_start``: its tokens are a text of their own (a chat's
        answer), not a continuation.
        """
        drops_space = self.strips_space and is_text_start
        return IncrementalDecoder(
            self._piece_bytes,
            drops_space=drops_space,
            errors=self._errors,
            bytes_of_text=self._bytes_of_text,
        )

    def decode(self, token_ids: tuple[int, ...]) -> str:
        """Decode all tokens at once, as a decoder does piece by piece. Ids from ``encode`` give the
        text that was encoded.
        """
        return "".join(self.pieces(token_ids))

    def pieces(self, token_ids: tuple[int, ...]) -> list[str]:
        """Decode token by token. A character of several tokens belongs to the last of them."""
        decoder = self._decoder_of(token_ids)
        pieces = [decoder.push(token_id) for token_id in token_ids]
        return [*pieces[:-1], *(piece + decoder.finish() for piece in pieces[-1:])]

    def offsets(self, token_ids: Sequence[int]) -> list[int]:
        """Return at which index of the decoded text each token begins; if it continues a character,
        that character's index.
        """
        decoder = self._decoder_of(token_ids)
        offsets, num_chars = [], 0
        for token_id in token_ids:
            text, offset = decoder.push_with_offset(token_id)
            offsets.append(num_chars + offset)
            num_chars += len(text)
        return offsets

    def bytes_of(self, token_id: int) -> bytes:
        """Return the bytes of one token in the middle of a text, b"" for control tokens and ids
        without a piece.
        """
        return self._piece_bytes[token_id] if token_id < len(self._piece_bytes) else b""

    def _decoder_of(self, token_ids: Sequence[int]) -> IncrementalDecoder:
        return self.decoder(
            is_text_start=not self._bos_ids or not self._bos_ids.isdisjoint(token_ids[:1])
        )


def encode_prompt(
    tokenizer: Tokenizer | None,
    prompt: str | Sequence[int],
    max_model_len: int,
    vocab_size: int,
    name: str = "the prompt",
) -> tuple[int, ...]:
    """Return the ids of a prompt, a text or ids, from which something can be generated; ``name`` is
    how errors name it.

    An empty text is a prompt where the tokenizer begins every text with a token. Raises
    RequestError.
    """
    if isinstance(prompt, str):
        if tokenizer is None:
            raise RequestError(f"{name} is a text, and this model has no tokenizer; give token ids")
        try:
            tokenizer.check_length(prompt, max_model_len, name)
            tokenizer.check_num_tokens(prompt, max_model_len, name)
            prompt = tokenizer.encode(prompt)
        except ContextLengthError:
            raise
        except RequestError as error:
            raise RequestError(f"{name}: {error}") from error
    validate_prompt(prompt, max_model_len, vocab_size, name)
    return tuple(prompt)


# Prompts that ask for the text between a prompt and a suffix (FIM, fill in the middle), with
# mistral-common's token ids.

NO_FIM = (
    "this model's tokenizer has no tokens for a suffix, as Codestral's has ([SUFFIX] and [PREFIX])"
)
# Encoded before a suffix and dropped, so that SentencePiece puts no space there. mistral-common
# does so with every tokenizer.
AHEAD, NUM_AHEAD = "\u263a", 2  # the character, and how many tokens are dropped


def has_fim(tokenizer: Tokenizer) -> bool:
    """Return whether the tokenizer has the control tokens of fill-in-the-middle prompts."""
    return None not in (tokenizer.control_id("[SUFFIX]"), tokenizer.control_id("[PREFIX]"))


def encode_fim(tokenizer: Tokenizer, prompt: str, suffix: str) -> tuple[int, ...]:
    """Return the token ids of a fill-in-the-middle prompt: the model continues with the text
    between prompt and suffix.

    Raises RequestError if the tokenizer lacks a control token for this, and for invalid Unicode.
    """
    suffix_id, prefix_id = tokenizer.control_id("[SUFFIX]"), tokenizer.control_id("[PREFIX]")
    if suffix_id is None or prefix_id is None:
        raise RequestError(NO_FIM)
    beginning = tokenizer.encode("")
    num_lookahead = len(beginning) + NUM_AHEAD
    suffix_ids = tokenizer.encode(AHEAD + suffix)[num_lookahead:] if suffix else ()
    return (
        *beginning,
        suffix_id,
        *suffix_ids,
        prefix_id,
        *tokenizer.encode(prompt)[len(beginning) :],
    )
