"""The queue of sequences that decode, and their rows in a micro-batch."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Several
from dataclasses import dataclass, field
from functools import partial
from itertools import islice, repeat, takewhile

from tramontane.proto.plan import SpeculativeConfig
from tramontane.proto.step import NO_TOKEN, PLACEHOLDER_TOKEN, DecodeColumns
from tramontane.router.scheduling.model_drafter import DraftQueue, ModelDrafter, NgramDrafter
from tramontane.router.scheduling.page_allocator import PageAllocator
from tramontane.router.scheduling.policy import WorkEstimator
from tramontane.router.scheduling.sequence import Sequence, SequenceStatus
from tramontane.router.scheduling.speculation_state import Drafter, SpeculationState

# Indexing budget of drafts per micro-batch, in tokens (about 1 ms). Longer prompts are indexed in
# several micro-batches.
TOKENS_INDEXED = 1024
Tokens = tuple[int, ...]
NO_DRAFTS: Tokens = ()


@dataclass(frozen=True, slots=True)
class DraftLimits:
    """Limits of the drafts in a micro-batch.

    ``break_even``: the probability of being right that a draft must have. ``max_rows``: rows of
    decodes, with drafts. ``num_spare``: pages of each class without a window that drafts must leave
    for other sequences.
    """

    break_even: float
    max_rows: int
    num_spare: int


@dataclass(slots=True)
class DecodeRows:
    """The rows of decoding sequences in a micro-batch, while it is made and until its result comes.

    A sequence has consecutive rows: one for its last known token, or for a placeholder, and one for
    each draft of the tokens after it. ``drafts`` is empty where no sequence may have any.
    ``is_lookahead``: all rows are drafts, which follow the drafts that are in flight. ``new_pages``
    has, for sequences that got pages, their last row and the pages.
    """

    is_lookahead: bool = False
    sequences: list[Sequence] = field(default_factory=list)
    drafts: list[Tokens] = field(default_factory=list)
    new_pages: list[tuple[int, tuple[Tokens, ...]]] = field(default_factory=list)
    num_drafts: int = 0

    @property
    def num_rows(self) -> int:
        """The rows of all sequences: 5 for 3 sequences with 2 drafts in total, and 2 as
        lookahead.
        """
        return self.num_drafts + (0 if self.is_lookahead else len(self.sequences))

    def add_drafts(self, drafts: Tokens) -> None:
        """Add the drafts of the sequence that is added next; there may be none."""
        self.drafts.append(drafts)
        self.num_drafts += len(drafts)

    def columns(self) -> DecodeColumns:
        """Return the rows as columns.

        Sequence 7 has 10 known tokens, the last of which is 50, and the drafts 60 and 61: positions
        9, 10 and 11, tokens 50, 60 and 61. As lookahead, with the draft 62 after these two:
        position 12, token 62.
        """
        sequences, new_pages = self.sequences, tuple(self.new_pages)
        if not self.num_drafts:  # hundreds of rows: a function call for each would be slow
            return DecodeColumns(
                seq_ids=tuple([s.seq_id for s in sequences]),
                starts=tuple([s.num_dispatched - 1 for s in sequences]),
                token_ids=tuple(
                    [
                        PLACEHOLDER_TOKEN if s.num_placeholders else s.output_ids[-1]
                        for s in sequences
                    ]
                ),
                new_pages=new_pages,
            )
        runs = [self._run(*each) for each in zip(sequences, self.drafts, strict=True)]
        return DecodeColumns(
            seq_ids=tuple([seq_id for seq_id, _, tokens in runs for _ in tokens]),
            starts=tuple([start + i for _, start, tokens in runs for i in range(len(tokens))]),
            token_ids=tuple([token_id for _, _, tokens in runs for token_id in tokens]),
            new_pages=new_pages,
            is_lookahead=self.is_lookahead,
        )

    def _run(self, sequence: Sequence, drafts: Tokens) -> tuple[int, int, Tokens]:
        """Return a sequence's id, the position of its first row, and the tokens of its rows."""
        if not self.is_lookahead:
            return sequence.seq_id, sequence.num_known - 1, (sequence.output_ids[-1], *drafts)
        assert sequence.speculation is not None
        num_before = sequence.speculation.num_lookahead - len(drafts)
        return sequence.seq_id, sequence.num_known + num_before, drafts

    def split(self, token_ids: Iterator[int]) -> Iterator[tuple[Sequence, int, Tokens]]:
        """Yield each sequence, its number of drafts, and its accepted tokens; a result has one
        token per row.

        With rows of token 50 and the drafts 60 and 61, and the result 60, 70 and none, the accepted
        tokens are 60 and 70.
        """
        num_known = 0 if self.is_lookahead else 1
        for sequence, drafts in zip(self.sequences, self.drafts or repeat(()), strict=False):
            of_rows = list(islice(token_ids, num_known + len(drafts)))
            tokens = tuple(takewhile(lambda token_id: token_id != NO_TOKEN, of_rows))
            assert tokens or self.is_lookahead, "the last known token is no draft"
            yield sequence, len(drafts), tokens


class DecodeQueue:
    """Decoding sequences; one is ready once its last token is known."""

    def __init__(
        self,
        allocator: PageAllocator,
        work_estimator: WorkEstimator,
        speculative: SpeculativeConfig | None = None,
    ) -> None:
        self._allocator, self._work_estimator, self._speculative = (
            allocator,
            work_estimator,
            speculative,
        )
        self.ready: deque[Sequence] = deque()
        self.draft_queue = DraftQueue()  # of a draft model, if drafts come from one
        self._num_to_index = 0  # tokens, with the micro-batch that is being made
        # of all decoding sequences, including those in flight; keys that they see
        self.num_sequences = self.num_keys = 0

    def add(self, sequence: Sequence) -> None:
        """Make a sequence ready, perhaps for the first time."""
        self.ready.append(sequence)
        if not sequence.is_decoding:
            sequence.is_decoding = True
            self.num_sequences += 1
            self.num_keys += self._work_estimator.visible_keys(sequence.num_known)

    def discard(self, sequence: Sequence) -> None:
        """Remove a sequence if it is here."""
        if sequence in self.ready:
            self.ready.remove(sequence)
        if sequence.is_decoding:
            sequence.is_decoding = False
            self.num_sequences -= 1
            self.num_keys -= self._work_estimator.visible_keys(sequence.num_known)

    def add_placeholders(self, sequences: Iterable[Sequence]) -> None:
        """Make sequences ready again before their next token is known: the micro-batch just made
        samples it.

        With a prompt of 3 tokens and at most 5 tokens, a placeholder stands for the fourth token
        once the prompt is submitted. No placeholder is made for the fifth: the last token is never
        submitted.
        """
        for sequence in sequences:
            num_tokens = sequence.num_known + sequence.num_placeholders + 1
            if num_tokens < sequence.max_len and sequence.status is SequenceStatus.RUNNING:
                sequence.num_placeholders += 1
                self.add(sequence)

    def record_growth(self, lengths: Several[int]) -> None:
        """Count one token more for sequences that now have these lengths: each sees one key more,
        up to the window.
        """
        self.num_keys += self._work_estimator.visible_keys_gained(lengths)

    def take_batch(
        self,
        max_decodes: int,
        preempt: Callable[[], bool],
        limits: DraftLimits | None = None,
        *,
        with_lookahead: bool = False,
    ) -> DecodeRows:
        """Return one token of each of the first ready sequences; fewer if a page is needed that is
        not free yet.

        ``preempt`` makes another sequence release its pages, and returns whether any are free now.
        Within ``limits`` drafts follow. ``with_lookahead``: placeholders may be submitted.
        """
        rows, ready, drafts = DecodeRows(), self.ready, NO_DRAFTS
        sequences = rows.sequences
        self._num_to_index = TOKENS_INDEXED
        max_drafts = 0 if limits is None else limits.max_rows - min(max_decodes, len(ready))
        while ready and len(sequences) < max_decodes:
            sequence = ready[0]
            if sequence.num_placeholders and not with_lookahead:
                break
            end = num_tokens = sequence.num_known + sequence.num_placeholders
            if limits is not None:
                drafts = self._draft(sequence, limits, max_drafts - rows.num_drafts)
                end += len(drafts)
            if end > sequence.num_paged_positions:
                last_row = rows.num_rows + len(drafts)
                if not self._add_pages(rows, sequence, (num_tokens - 1, end), last_row):
                    if preempt():
                        continue
                    break
            if limits is not None:
                rows.add_drafts(drafts)
            sequences.append(ready.popleft())
            sequence.num_dispatched = num_tokens
            sequence.num_in_flight += 1
        return rows

    def take_lookahead(self, sequences: Iterable[Sequence], limits: DraftLimits) -> DecodeRows:
        """Return the next drafts of decoding sequences whose last drafts are in flight.

        Sequences whose tokens depend on the ones before (penalties, grammars) get none: the tokens
        before a draft have to be known first.
        """
        rows = DecodeRows(is_lookahead=True)
        self._num_to_index = TOKENS_INDEXED
        for sequence in sequences:
            state = sequence.speculation
            if state is None or not sequence.num_in_flight or sequence.sampling.needs_tokens:
                continue
            drafts = self._draft_lookahead(sequence, state, limits, limits.max_rows - rows.num_rows)
            span = sequence.num_dispatched, sequence.num_known + state.num_lookahead + len(drafts)
            last_row = rows.num_rows + len(drafts) - 1
            if not drafts or not self._add_pages(rows, sequence, span, last_row, limits.num_spare):
                continue
            state.num_lookahead += len(drafts)
            rows.add_drafts(drafts)
            rows.sequences.append(sequence)
            sequence.num_in_flight += 1
        return rows

    def _add_pages(
        self,
        rows: DecodeRows,
        sequence: Sequence,
        span: tuple[int, int],
        last_row: int,
        num_spare: int = 0,
    ) -> bool:
        """Give a sequence the missing pages for positions from the first number to before the
        second; return False if a page is not free.
        """
        start, end = span
        if not self._allocator.reserve(sequence, end, num_spare):
            return False
        if end > sequence.num_paged_positions:
            pages = self._allocator.allocate(sequence, start, end)
            rows.new_pages.append((last_row, pages))
        return True

    def _draft(self, sequence: Sequence, limits: DraftLimits, num_left: int) -> Tokens:
        """Return drafts of the tokens after the next one; their pages are reserved.

        A sequence that returns its expert choices gets none: the choices of rejected drafts would
        be included.
        """
        assert self._speculative is not None
        if sequence.sampling.return_experts:
            return ()
        if sequence.speculation is None:
            sequence.speculation = SpeculationState(
                self._speculative, sequence.prompt_ids, partial(self._drafter, sequence)
            )
        sequence.speculation.update(sequence.output_ids)
        self._num_to_index -= sequence.speculation.index(self._num_to_index)
        drafts = sequence.speculation.draft(
            limits.break_even, min(num_left, self._max_drafts(sequence))
        )
        if drafts and not self._allocator.reserve(
            sequence, sequence.num_known + len(drafts), limits.num_spare
        ):
            return ()
        sequence.speculation.num_lookahead = len(drafts)
        return drafts

    def _draft_lookahead(
        self, sequence: Sequence, state: SpeculationState, limits: DraftLimits, num_left: int
    ) -> Tokens:
        """Return drafts of the tokens after the drafts in flight."""
        assert not sequence.num_pending, "drafts follow the last known token"
        self._num_to_index -= state.index(self._num_to_index)
        num_free = self._max_drafts(sequence) - state.num_lookahead
        return state.draft_lookahead(limits.break_even, min(num_left, num_free))

    def _drafter(self, sequence: Sequence, tokens: Several[int]) -> Drafter:
        config, sampling = self._speculative, sequence.sampling
        assert config is not None
        if config.method == "ngram":
            return NgramDrafter(tokens, config.prompt_lookup_min, config.prompt_lookup_max)
        num_tokens = 1 + config.num_speculative_tokens
        return ModelDrafter(
            tokens, sequence.seq_id, sampling, num_tokens, sequence.max_len, self.draft_queue
        )

    def _max_drafts(self, sequence: Sequence) -> int:
        """Return the maximum number of drafts after a sequence's last known token: its very last
        token is never submitted.
        """
        return min(sequence.max_len - sequence.num_known - 1, self._allocator.cache.num_drafts)

    def check_integrity(self, running: Iterable[Sequence]) -> None:
        """Assert that the counts are right."""
        decoding = [s for s in running if s.is_decoding]
        assert all(s.status is SequenceStatus.RUNNING for s in decoding)
        assert self.num_sequences == len(decoding)
        ready = set(map(id, self.ready))
        assert all(s.num_pending == (id(s) in ready) for s in decoding), (
            "what is ready has one token that is not submitted"
        )
        assert self.num_keys == sum(
            self._work_estimator.visible_keys(s.num_known) for s in decoding
        )
