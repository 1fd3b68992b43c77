"""Answers that follow a grammar: which tokens may come next, as llguidance says.

What an answer may say next follows from its grammar and from what it has said, so nothing of it has to be kept anywhere
else: a sequence that is computed again comes with its own words as part of its prompt, and is told them.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence

import llguidance
import numpy
import torch
from torch import Tensor

from tramontane.proto.errors import RequestError, UserError
from tramontane.proto.log_fields import request_fields
from tramontane.proto.request import FinishReason
from tramontane.proto.step import Chunk, MicroBatch
from tramontane.workers.device.pinned_memory import tensor_on, to_device

logger = logging.getLogger(__name__)

LoadVocabulary = Callable[[], Sequence[bytes]]  # of every token id, the text that it stands for; none for control tokens
MAX_COMPILED_GRAMMARS = 64  # compiled grammars
# What one grammar may take: tenths of a second to compile at the worst, some ms for a mask, and 1 to 2 KB for each state.
LIMITS = llguidance.LLParserLimits(
    max_lexer_states=20_000, max_grammar_size=200_000, precompute_large_lexemes=False, verbose_errors=False
)
# Forced tokens would have to be those into which the model's texts are cut, and only the model knows that.
NO_FORCING = '%llguidance {"no_forcing": true}\n'


class GrammarError(RequestError):
    """A grammar cannot be followed: it cannot be compiled, or the vocabulary cannot say what it asks for."""


class Vocabulary:
    """The tokens as llguidance takes them. To it, an answer ends with a token of its own, the one after the last piece."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self.num_pieces = len(pieces)
        self.tokenizer = llguidance.LLTokenizer(_TokenizerAdapter(pieces))


class _TokenizerAdapter(llguidance.TokenizerWrapper):
    """What ``LLTokenizer`` asks for; without a piece, a token is nothing that text could mean."""

    eos_token_id = None  # type: ignore[assignment]  # which makes it add one
    bos_token_id = None
    is_tokenizer_wrapper = True

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self.tokens = [piece or b"<%d>" % token_id for token_id, piece in enumerate(pieces)]
        self.special_token_ids = [token_id for token_id, piece in enumerate(pieces) if not piece]

    def __call__(self, text: bytes | str) -> list[int]:
        """Into which tokens a text is cut; never asked (see ``NO_FORCING``)."""
        raise NotImplementedError


class GrammarState:
    """One sequence's place in its grammar."""

    def __init__(self, matcher: llguidance.LLMatcher, num_pieces: int, num_prompt: int) -> None:
        self.num_prompt = num_prompt
        self._matcher, self._num_pieces = matcher, num_pieces
        self.can_stop = False
        self.mask = b""  # a bit per token id, from the lowest bit of the first byte on; the one of no piece is never set
        self._refresh_mask()

    def advance(self, token_ids: Sequence[int]) -> None:
        """Raises GrammarError where the grammar does not allow it."""
        if token_ids:
            self._matcher.consume_tokens(list(token_ids))
            self._refresh_mask()

    @property
    def is_complete(self) -> bool:
        """Nothing can follow."""
        return self.can_stop and _is_empty(self.mask)

    def _refresh_mask(self) -> None:
        if not self._matcher.is_error():
            mask = bytearray(self._matcher.compute_bitmask())
            byte, bit = divmod(self._num_pieces, 8)  # 300 pieces: the end is bit 4 of byte 37
            self.can_stop = bool(mask[byte] >> bit & 1)
            mask[byte] &= ~(1 << bit)
            self.mask = bytes(mask)
        if self._matcher.is_error():
            raise GrammarError(f"the grammar cannot be followed: {self._matcher.get_error():.200}")
        if _is_empty(self.mask) and not self.can_stop:
            raise GrammarError("the grammar cannot be followed: the vocabulary has no piece for what comes next")


class StructuredOutputManager:
    """Of one last stage: the sequences whose answers follow a grammar. The vocabulary is read when the first one comes."""

    def __init__(self, read_pieces: LoadVocabulary, vocab_size: int, eos_token_ids: Collection[int]) -> None:
        self._read_pieces, self._vocab_size, self._eos = read_pieces, vocab_size, sorted(eos_token_ids)
        self._vocabulary: Vocabulary | GrammarError | None = None
        self._compiled: OrderedDict[str, llguidance.LLMatcher] = OrderedDict()  # the one used last comes last
        self._answers: dict[int, GrammarState | GrammarError] = {}
        self._request_ids: dict[int, str] = {}  # for logs
        self._never_ends: set[int] = set()  # sequences for which the model's end of sequence is a token like others

    @property
    def num_sequences(self) -> int:
        """That follow one and live."""
        return len(self._answers)

    def clear(self) -> None:
        """Forget every sequence."""
        self._answers.clear()
        self._request_ids.clear()
        self._never_ends.clear()

    def update(self, batch: MicroBatch) -> None:
        """Forget released sequences, meet new ones, and tell those that are computed again what they have said."""
        for seq_id in batch.freed_seq_ids if self._answers else ():
            self._answers.pop(seq_id, None)
            self._request_ids.pop(seq_id, None)
            self._never_ends.discard(seq_id)
        for chunk in batch.chunks:
            if chunk.sampling is not None and chunk.sampling.grammar:
                self._request_ids[chunk.seq_id] = chunk.request_id
                self._answers[chunk.seq_id] = self._begun(chunk)
                if chunk.sampling.ignore_eos:
                    self._never_ends.add(chunk.seq_id)
            if isinstance(answer := self._answers.get(chunk.seq_id), GrammarState):
                self._said(chunk.seq_id, output_tokens(chunk, answer.num_prompt))

    def apply_masks(self, logits_SV: Tensor, seq_ids: Sequence[int]) -> Tensor:
        """The logits, of which those that a sequence's grammar does not allow next are minus infinity; a row per sequence."""
        if not self._answers:
            return logits_SV
        rows = [(row, self._answers.get(seq_id)) for row, seq_id in enumerate(seq_ids)]
        bound = [(row, answer) for row, answer in rows if isinstance(answer, GrammarState)]
        if not bound:
            return logits_SV
        banned_RV = unpack_bitmasks([answer.mask for _, answer in bound], self._vocab_size).logical_not_()
        ending = [i for i, (row, answer) in enumerate(bound) if answer.can_stop and seq_ids[row] not in self._never_ends]
        if ending and self._eos:
            banned_RV[torch.tensor(ending)[:, None], torch.tensor(self._eos)] = False
        rows_R = tensor_on([row for row, _ in bound], torch.int64, logits_SV.device)
        allowed_RV = logits_SV[rows_R].masked_fill_(to_device(banned_RV, logits_SV.device), -torch.inf)
        return logits_SV.index_copy(0, rows_R, allowed_RV)

    def finished(self, seq_ids: Sequence[int], token_ids: Sequence[int]) -> tuple[tuple[int, FinishReason], ...]:
        """Having sampled these, which sequences end with them: because nothing can follow, or because of an error."""
        if not self._answers:
            return ()
        return tuple(
            (seq_id, reason)
            for seq_id, token_id in zip(seq_ids, token_ids, strict=True)
            if seq_id in self._answers and (reason := self._finish(seq_id, token_id))
        )

    def _finish(self, seq_id: int, token_id: int) -> FinishReason | None:
        unfollowed = isinstance(self._answers[seq_id], GrammarError)  # then an end means nothing
        if token_id in self._eos and seq_id not in self._never_ends and not unfollowed:
            return None  # the router sees it by itself
        answer = self._said(seq_id, (token_id,))
        if isinstance(answer, GrammarError):
            return FinishReason.ERROR
        return FinishReason.STOP if answer.is_complete else None

    def _said(self, seq_id: int, token_ids: Sequence[int]) -> GrammarState | GrammarError:
        answer = self._answers[seq_id]
        try:
            if isinstance(answer, GrammarState):
                answer.advance(token_ids)
        except GrammarError as error:
            request_id = self._request_ids.get(seq_id, "")
            logger.warning("a sequence of request %s ends: %s", request_id or "-", error, extra=request_fields(request_id))
            answer = self._answers[seq_id] = error
        return answer

    def _begun(self, chunk: Chunk) -> GrammarState | GrammarError:
        assert chunk.sampling is not None
        try:
            vocabulary = self._known_vocabulary()
            matcher = self._matcher(vocabulary, chunk.sampling.grammar).deep_copy()
            return GrammarState(matcher, vocabulary.num_pieces, chunk.num_prompt)
        except GrammarError as error:
            extra = request_fields(chunk.request_id)
            logger.warning("a sequence of request %s will end: %s", chunk.request_id or "-", error, extra=extra)
            return error

    def _known_vocabulary(self) -> Vocabulary:
        if self._vocabulary is None:
            try:
                self._vocabulary = Vocabulary(self._read_pieces()[: self._vocab_size])
            except (UserError, OSError, ValueError) as error:  # the stage is well, and serves all others
                self._vocabulary = GrammarError(f"the vocabulary cannot be read: {error}")
        if isinstance(self._vocabulary, GrammarError):
            raise GrammarError(str(self._vocabulary))
        return self._vocabulary

    def _matcher(self, vocabulary: Vocabulary, grammar: str) -> llguidance.LLMatcher:
        """At the beginning of its grammar; to be copied."""
        if grammar in self._compiled:
            self._compiled.move_to_end(grammar)
            return self._compiled[grammar]
        matcher = llguidance.LLMatcher(vocabulary.tokenizer, NO_FORCING + grammar, log_level=0, limits=LIMITS)
        if matcher.is_error():
            raise GrammarError(f"the grammar cannot be compiled: {matcher.get_error():.200}")
        self._compiled[grammar] = matcher
        if len(self._compiled) > MAX_COMPILED_GRAMMARS:
            self._compiled.popitem(last=False)
        return matcher


def output_tokens(chunk: Chunk, num_prompt: int) -> tuple[int, ...]:
    """What a chunk repeats of the sequence's answer: of positions 4..6, where the prompt has 5 tokens, those at 5 and 6."""
    return chunk.token_ids[max(num_prompt - chunk.start, 0) :]


def unpack_bitmasks(masks: Sequence[bytes], vocab_size: int) -> Tensor:
    """[R, V] from R rows of bits; ids beyond them, which have no piece, are false. 0b101 is ids 0 and 2."""
    packed_RB = numpy.frombuffer(b"".join(masks), dtype=numpy.uint8).reshape(len(masks), -1)
    known_RV = torch.from_numpy(
        numpy.unpackbits(packed_RB, axis=1, count=vocab_size, bitorder="little")
    )  # several times torch's pace
    return known_RV.view(torch.bool)


def _is_empty(mask: bytes) -> bool:
    return mask.count(0) == len(mask)
