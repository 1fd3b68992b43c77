"""Structured output: masks of the tokens that a sequence's grammar allows next, computed by
llguidance.

The state of a grammar is determined by the grammar and the output so far, so only the last stage
keeps it: a recomputed sequence brings its output in its chunks, and the grammar is advanced by it.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence

import llguidance
import numpy
import torch
from torch import Tensor

from tramontane.proto.errors import RequestError, UserError
from tramontane.proto.request import FinishReason, request_fields
from tramontane.proto.step import Chunk, MicroBatch
from tramontane.workers.device.cuda import tensor_on, to_device

logger = logging.getLogger(__name__)

# returns the text of every token id, empty for control tokens
LoadVocabulary = Callable[[], Sequence[bytes]]

MAX_COMPILED_GRAMMARS = 64
# Limits of one grammar: at worst tenths of a second to compile, a few ms per mask, and 1 to 2 KB
# per lexer state.
LIMITS = llguidance.LLParserLimits(
    max_lexer_states=20_000,
    max_grammar_size=200_000,
    precompute_large_lexemes=False,
    verbose_errors=False,
)
# llguidance would tokenize forced text by itself, and not as the model does.
NO_FORCING = '%llguidance {"no_forcing": true}\n'


class GrammarError(RequestError):
    """A grammar cannot be compiled, or the vocabulary has no token that it allows."""


class Vocabulary:
    """Vocabulary in llguidance's form. To llguidance the end of the output is an additional token
    after the last piece.
    """

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self.num_pieces = len(pieces)
        self.tokenizer = llguidance.LLTokenizer(_TokenizerAdapter(pieces))


class _TokenizerAdapter(llguidance.TokenizerWrapper):
    """Interface that ``LLTokenizer`` expects. A token without a piece becomes a special token that
    no text contains.
    """

    eos_token_id = None  # type: ignore[assignment]  # makes llguidance add one
    bos_token_id = None
    is_tokenizer_wrapper = True

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self.tokens = [piece or b"<%d>" % token_id for token_id, piece in enumerate(pieces)]
        self.special_token_ids = [token_id for token_id, piece in enumerate(pieces) if not piece]

    def __call__(self, text: bytes | str) -> list[int]:
        """Tokenize a text; never called, because of ``NO_FORCING``."""
        raise NotImplementedError


class GrammarState:
    """State of one sequence in its grammar."""

    def __init__(self, matcher: llguidance.LLMatcher, num_pieces: int, num_prompt: int) -> None:
        self.num_prompt = num_prompt
        self._matcher, self._num_pieces = matcher, num_pieces
        self.can_stop = False
        # a bit per token id, from the lowest bit of the first byte on; never set for the end token
        self.mask = b""
        self._refresh_mask()

    def advance(self, token_ids: Sequence[int]) -> None:
        """Advance by these tokens. Raises GrammarError if the grammar does not allow them."""
        if token_ids:
            self._matcher.consume_tokens(list(token_ids))
            self._refresh_mask()

    @property
    def is_complete(self) -> bool:
        """Whether no token can follow."""
        return self.can_stop and _is_empty(self.mask)

    def _refresh_mask(self) -> None:
        if not self._matcher.is_error():
            mask = bytearray(self._matcher.compute_bitmask())
            byte, bit = divmod(self._num_pieces, 8)  # 300 pieces: the end token is bit 4 of byte 37
            self.can_stop = bool(mask[byte] >> bit & 1)
            mask[byte] &= ~(1 << bit)
            self.mask = bytes(mask)
        if self._matcher.is_error():
            raise GrammarError(f"the grammar cannot be followed: {self._matcher.get_error():.200}")
        if _is_empty(self.mask) and not self.can_stop:
            raise GrammarError(
                "the grammar cannot be followed: the vocabulary has no piece for what comes next"
            )


class StructuredOutputManager:
    """State of the last stage for sequences that follow a grammar. The vocabulary is read for the
    first of these sequences.
    """

    def __init__(
        self, read_pieces: LoadVocabulary, vocab_size: int, eos_token_ids: Collection[int]
    ) -> None:
        self._read_pieces, self._vocab_size, self._eos = (
            read_pieces,
            vocab_size,
            sorted(eos_token_ids),
        )
        self._vocabulary: Vocabulary | GrammarError | None = None
        # least recently used first
        self._compiled: OrderedDict[str, llguidance.LLMatcher] = OrderedDict()
        self._states: dict[int, GrammarState | GrammarError] = {}
        self._request_ids: dict[int, str] = {}  # for logs
        # sequences that treat end-of-sequence as an ordinary token
        self._ignore_eos: set[int] = set()

    @property
    def num_sequences(self) -> int:
        """Running sequences that follow a grammar."""
        return len(self._states)

    def clear(self) -> None:
        """Remove all sequences."""
        self._states.clear()
        self._request_ids.clear()
        self._ignore_eos.clear()

    def update(self, batch: MicroBatch) -> None:
        """Remove freed sequences, add new ones, and advance recomputed sequences by their
        output.
        """
        for seq_id in batch.freed_seq_ids if self._states else ():
            self._forget(seq_id)
        for chunk in batch.chunks:
            if chunk.sampling is not None and chunk.sampling.grammar:
                self._request_ids[chunk.seq_id] = chunk.request_id
                self._states[chunk.seq_id] = self._compile_state(chunk)
                if chunk.sampling.ignore_eos:
                    self._ignore_eos.add(chunk.seq_id)
            if isinstance(state := self._states.get(chunk.seq_id), GrammarState):
                self._advance(chunk.seq_id, output_tokens(chunk, state.num_prompt))

    def apply_masks(self, logits_SV: Tensor, seq_ids: Sequence[int]) -> Tensor:
        """Return the logits with minus infinity for tokens that a sequence's grammar does not
        allow; a row per sequence.
        """
        if not self._states:
            return logits_SV
        states = [(row, self._states.get(seq_id)) for row, seq_id in enumerate(seq_ids)]
        constrained = [(row, state) for row, state in states if isinstance(state, GrammarState)]
        if not constrained:
            return logits_SV
        banned_RV = unpack_bitmasks(
            [state.mask for _, state in constrained], self._vocab_size
        ).logical_not_()
        can_stop = [
            i
            for i, (row, state) in enumerate(constrained)
            if state.can_stop and seq_ids[row] not in self._ignore_eos
        ]
        if can_stop and self._eos:
            banned_RV[torch.tensor(can_stop)[:, None], torch.tensor(self._eos)] = False
        rows_R = tensor_on([row for row, _ in constrained], torch.int64, logits_SV.device)
        allowed_RV = logits_SV[rows_R].masked_fill_(
            to_device(banned_RV, logits_SV.device), -torch.inf
        )
        return logits_SV.index_copy(0, rows_R, allowed_RV)

    def finished(
        self, seq_ids: Sequence[int], token_ids: Sequence[int]
    ) -> tuple[tuple[int, FinishReason], ...]:
        """Advance by sampled tokens; return the sequences that end with them, because no token can
        follow or by an error.
        """
        if not self._states:
            return ()
        return tuple(
            (seq_id, reason)
            for seq_id, token_id in zip(seq_ids, token_ids, strict=True)
            if seq_id in self._states and (reason := self._finish(seq_id, token_id))
        )

    def _forget(self, seq_id: int) -> None:
        self._states.pop(seq_id, None)
        self._request_ids.pop(seq_id, None)
        self._ignore_eos.discard(seq_id)

    def _finish(self, seq_id: int, token_id: int) -> FinishReason | None:
        # an end-of-sequence token then has no effect
        has_failed = isinstance(self._states[seq_id], GrammarError)
        if token_id in self._eos and seq_id not in self._ignore_eos and not has_failed:
            self._forget(seq_id)  # as below
            return None  # the router detects it
        state = self._advance(seq_id, (token_id,))
        if isinstance(state, GrammarError):
            return FinishReason.ERROR
        if not state.is_complete:
            return None
        self._forget(seq_id)  # a row that was submitted before the end was known needs no mask
        return FinishReason.STOP

    def _advance(self, seq_id: int, token_ids: Sequence[int]) -> GrammarState | GrammarError:
        state = self._states[seq_id]
        try:
            if isinstance(state, GrammarState):
                state.advance(token_ids)
        except GrammarError as error:
            request_id = self._request_ids.get(seq_id, "")
            logger.warning(
                "a sequence of request %s ends with an error: %s",
                request_id or "-",
                error,
                extra=request_fields(request_id),
            )
            state = self._states[seq_id] = error
        return state

    def _compile_state(self, chunk: Chunk) -> GrammarState | GrammarError:
        assert chunk.sampling is not None
        try:
            vocabulary = self._load_vocabulary()
            matcher = self._compile(vocabulary, chunk.sampling.grammar).deep_copy()
            return GrammarState(matcher, vocabulary.num_pieces, chunk.num_prompt)
        except GrammarError as error:
            extra = request_fields(chunk.request_id)
            logger.warning(
                "a sequence of request %s will end with an error: %s",
                chunk.request_id or "-",
                error,
                extra=extra,
            )
            return error

    def _load_vocabulary(self) -> Vocabulary:
        if self._vocabulary is None:
            try:
                self._vocabulary = Vocabulary(self._read_pieces()[: self._vocab_size])
            # only sequences with a grammar need it
            except (UserError, OSError, ValueError) as error:
                self._vocabulary = GrammarError(f"the vocabulary cannot be read: {error}")
        if isinstance(self._vocabulary, GrammarError):
            raise GrammarError(str(self._vocabulary))
        return self._vocabulary

    def _compile(self, vocabulary: Vocabulary, grammar: str) -> llguidance.LLMatcher:
        """Return a matcher at the start of the grammar, compiled or cached. The caller copies
        it.
        """
        if grammar in self._compiled:
            self._compiled.move_to_end(grammar)
            return self._compiled[grammar]
        matcher = llguidance.LLMatcher(
            vocabulary.tokenizer, NO_FORCING + grammar, log_level=0, limits=LIMITS
        )
        if matcher.is_error():
            raise GrammarError(f"the grammar cannot be compiled: {matcher.get_error():.200}")
        self._compiled[grammar] = matcher
        if len(self._compiled) > MAX_COMPILED_GRAMMARS:
            self._compiled.popitem(last=False)
        return matcher


def output_tokens(chunk: Chunk, num_prompt: int) -> tuple[int, ...]:
    """Return the output tokens of a chunk: for positions 4..6 and a prompt of 5 tokens, the tokens
    at 5 and 6.
    """
    return chunk.skipped_ids[num_prompt:] + chunk.token_ids[max(num_prompt - chunk.start, 0) :]


def unpack_bitmasks(masks: Sequence[bytes], vocab_size: int) -> Tensor:
    """Return [R, V] booleans from R rows of bits; ids past their end are false. 0b101 is ids 0 and
    2.
    """
    packed_RB = numpy.frombuffer(b"".join(masks), dtype=numpy.uint8).reshape(len(masks), -1)
    # several times faster than in torch
    bits_RV = numpy.unpackbits(packed_RB, axis=1, count=vocab_size, bitorder="little")
    return torch.from_numpy(bits_RV).view(torch.bool)


def _is_empty(mask: bytes) -> bool:
    return mask.count(0) == len(mask)
