"""A pipeline with a real scheduler and no stages; it checks the invariants on which stages rely."""

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from tramontane.proto.plan import CachePlan, SpeculativeConfig, WindowClass, ring_pages
from tramontane.proto.request import NOT_FINITE_TOKEN, FinishReason, SamplingParams, TokenEvent
from tramontane.proto.step import (
    NO_TOKEN,
    PLACEHOLDER_TOKEN,
    Chunk,
    MicroBatch,
    StageTiming,
    StepResult,
)
from tramontane.router.scheduling.policy import FixedInFlightPolicy, Policy
from tramontane.router.scheduling.scheduler import Scheduler
from tramontane.router.scheduling.sequence import Sequence
from tramontane.router.scheduling.waiting_queue import SchedulerLimits

EOS = 2


def new_cache(
    page_size: int, num_seqs: float, *windows: int | None, max_len: int = 256, num_drafts: int = 0
) -> CachePlan:
    rings = [ring_pages(window, page_size, max_len, num_drafts) for window in windows]
    classes = [
        WindowClass(w, r, max(r, int(r * num_seqs))) for w, r in zip(windows, rings, strict=True)
    ]
    return CachePlan(page_size, tuple(classes), num_drafts)


def new_sequence(
    seq_id: int, prompt: int, new: int, priority: int = 0, max_len: int = 256
) -> Sequence:
    """Return a sequence that begins with other tokens than others."""
    sampling = SamplingParams(max_tokens=new, temperature=0.0)
    prompt_ids = tuple(10 + (97 * seq_id + i) % 980 for i in range(prompt))
    return Sequence(seq_id, prompt_ids, sampling, min(prompt + new, max_len), priority)


def decode_runs(batch: MicroBatch) -> list[Chunk]:
    """Return the decodes as chunks: of one token, or of a token and its drafts."""
    runs: list[Chunk] = []
    pages = dict(batch.decodes.new_pages)
    for row, (seq_id, start, token_id) in enumerate(zip(*batch.decodes[:3], strict=True)):
        before = (
            runs.pop()
            if runs and runs[-1].seq_id == seq_id
            else Chunk(seq_id, start, (), (), None, True)
        )
        assert before.start + before.num_tokens == start
        assert not before.new_pages, "pages come with a sequence's last row"
        runs.append(
            before._replace(token_ids=(*before.token_ids, token_id), new_pages=pages.get(row, ()))
        )
    return runs


@dataclass
class FakePipeline:
    """Completes micro-batches in order, and checks the invariants on which stages rely."""

    scheduler: Scheduler
    in_flight: deque[MicroBatch] = field(default_factory=deque)
    # of each sequence, those whose keys are cached
    tokens: dict[int, tuple[int, ...]] = field(default_factory=dict)
    # per sequence and class, pages by index
    entries: dict[int, list[dict[int, int]]] = field(default_factory=dict)
    # Texts from their beginnings on, with their salts, by number: each is a shorter one, or a salt,
    # and one more token.
    texts: dict[tuple[int | str, int], int] = field(default_factory=dict)
    # of each sequence, the text up to each of its tokens
    contents: dict[int, list[int]] = field(default_factory=dict)
    # what is in a row of a page of a class
    rows: dict[tuple[int, int, int], int] = field(default_factory=dict)
    # the sequences that have written them
    writers: dict[tuple[int, int, int], int] = field(default_factory=dict)
    failed: set[int] = field(default_factory=set)  # sequences that have ended with an error
    num_reused: int = 0
    events: list[TokenEvent] = field(default_factory=list)
    token_at: Callable[[int, int], int] = lambda _seq_id, _position: 50
    num_stages: int = 0  # with timings in the results
    now: float = 0.0
    gap_s: float = 0.0  # between two micro-batches
    num_drafts: int = 0
    num_accepted: int = 0
    num_lookahead: int = 0  # micro-batches of nothing but drafts
    # position and id of the last token of each sequence
    latest: dict[int, tuple[int, int]] = field(default_factory=dict)
    num_placeholders: int = 0

    def submit(self) -> MicroBatch | None:
        batch = self.scheduler.schedule()
        if batch is not None:
            filled = self._filled(batch)
            self._check(filled)
            self.in_flight.append(filled)
        return batch

    def _filled(self, batch: MicroBatch) -> MicroBatch:
        """Put the tokens in the places of placeholders that micro-batches in flight sample, as the
        stage does.
        """
        if not self.scheduler.limits.async_scheduling:
            assert PLACEHOLDER_TOKEN not in batch.decodes.token_ids
            return batch
        columns = list(zip(*batch.decodes[:3], strict=True))
        self.num_placeholders += batch.decodes.token_ids.count(PLACEHOLDER_TOKEN)
        for seq_id, start, token_id in columns:
            sampled = [
                (c.seq_id, c.start + c.num_tokens)
                for b in self.in_flight
                for c in b.chunks
                if c.needs_sample
            ]
            sampled += [
                (seq, at + 1)
                for b in self.in_flight
                for seq, at in zip(*b.decodes[:2], strict=True)
            ]
            assert ((seq_id, start) in sampled) == (token_id == PLACEHOLDER_TOKEN), (
                "a placeholder is what is not known yet"
            )
        tokens = [
            max(self.token_at(seq, start), 0) if token == PLACEHOLDER_TOKEN else token
            for seq, start, token in columns
        ]
        return replace(batch, decodes=batch.decodes._replace(token_ids=tuple(tokens)))

    def answer(self, token_id: int | None = None) -> None:
        batch = self.in_flight.popleft()
        token_at = self.token_at if token_id is None else lambda _seq_id, _position: token_id
        ends = [(c.seq_id, c.start + c.num_tokens) for c in batch.chunks if c.needs_sample]
        token_ids = [token_at(*end) for end in ends]
        for run in decode_runs(batch):
            token_ids += self._verify(run, token_at, is_lookahead=batch.decodes.is_lookahead)
        self.num_lookahead += batch.decodes.is_lookahead
        assert len(token_ids) == len(batch.sampled_seq_ids)
        bad = {
            s
            for s, token in zip(batch.sampled_seq_ids, token_ids, strict=True)
            if token == NOT_FINITE_TOKEN
        }
        finished = tuple((seq_id, FinishReason.ERROR) for seq_id in bad)
        result = StepResult(
            batch.epoch, batch.step_id, tuple(token_ids), self._timings(batch), finished=finished
        )
        new = self.scheduler.complete(batch, result)
        self.failed |= {event.seq_id for event in new if event.finish is FinishReason.ERROR}
        self.events += new
        self.scheduler.check_integrity()

    def _verify(
        self, run: Chunk, token_at: Callable[[int, int], int], *, is_lookahead: bool
    ) -> list[int]:
        """Return the answers for a token and its drafts, or for nothing but drafts."""
        answers = []
        for row, token_id in enumerate(run.token_ids):
            is_known = not (row or is_lookahead)
            position = run.start + row
            if is_known or self.latest.get(run.seq_id) == (position, token_id):
                answers.append(token_at(run.seq_id, position + 1))
                self.latest[run.seq_id] = position + 1, answers[-1]
                self.num_accepted += not is_known
            else:
                answers.append(NO_TOKEN)
            self.num_drafts += not is_known
        return answers

    def _timings(self, batch: MicroBatch) -> tuple[StageTiming, ...]:
        """Return timings as if each stage computed right after the one before it."""
        timings, self.now = [], self.now + self.gap_s
        for stage in range(self.num_stages):
            timings.append(
                StageTiming(stage, self.now, 1e-3 + 1e-5 * batch.num_tokens, batch.num_tokens)
            )
            self.now = timings[-1].ended_at
        return tuple(timings)

    def drain(self) -> None:
        while self.in_flight or self.submit():
            while self.submit():
                pass
            self.answer()

    def fence(self) -> None:
        """Forget what stages forget when they are fenced."""
        self.in_flight.clear()
        self.latest.clear()
        self.tokens.clear()
        self.entries.clear()
        self.contents.clear()
        self.rows.clear()
        self.writers.clear()

    def tokens_of(self, seq_id: int) -> list[TokenEvent]:
        return [event for event in self.events if event.seq_id == seq_id]

    def _check(self, batch: MicroBatch) -> None:
        assert 0 < batch.num_tokens <= self.scheduler.limits.max_num_batched_tokens
        decodes = decode_runs(batch)
        chunks = [*batch.chunks, *decodes]
        assert len({c.seq_id for c in chunks}) == len(chunks)
        sizes = [c.num_tokens > 1 for c in batch.chunks]
        assert sizes == sorted(sizes, reverse=True)
        assert len(batch.decodes.seq_ids) <= self.scheduler.limits.max_num_seqs
        for seq_id in batch.freed_seq_ids:
            del self.tokens[seq_id], self.entries[seq_id], self.contents[seq_id]
        for chunk in chunks:
            self._begin(chunk)
        runs, ones = chunks[: sum(sizes)], chunks[sum(sizes) :]
        for chunk in runs:  # as stages do it: all chunks read, then all write
            self._read(chunk.seq_id, chunk.start, 0)
        for chunk in runs:
            self._write(chunk)
        for chunk in ones:
            self._write(chunk)
        for chunk in ones:
            for row in range(chunk.num_tokens):
                self._read(chunk.seq_id, chunk.start + row + 1, 1)

    def _begin(self, chunk: Chunk) -> None:
        """Check that a stage sees positions in order, each once, and put the pages of a cached
        prefix in their entries.
        """
        cache = self.scheduler.allocator.cache
        assert (chunk.sampling is not None) == (chunk.seq_id not in self.tokens)
        if chunk.sampling is None:
            tokens = self.tokens[chunk.seq_id]
            known = self._sequence(chunk.seq_id).known_ids(0, chunk.start)
            assert tokens[: len(known)] == known, "what stays is what was accepted"
            assert len(known) == chunk.start or len(tokens) == chunk.start, (
                "drafts follow those in flight"
            )
            self.tokens[chunk.seq_id] = tokens[: chunk.start]
            del self.contents[chunk.seq_id][chunk.start :]
            return
        self.num_reused += chunk.start
        self.tokens[chunk.seq_id], self.contents[chunk.seq_id] = (), []
        self._extend(chunk.seq_id, self._sequence(chunk.seq_id).known_ids(0, chunk.start))
        assert chunk.skipped_ids == (
            self.tokens[chunk.seq_id] if chunk.sampling.needs_tokens else ()
        )
        entries = self.entries[chunk.seq_id] = [{} for _ in cache.classes]
        first = chunk.start // cache.page_size
        for of_class, pages, num_own in zip(
            entries, chunk.new_pages, self._num_own(chunk), strict=True
        ):
            given = pages[: len(pages) - num_own]
            of_class.update(zip(range(first - len(given), first), given, strict=True))

    def _extend(self, seq_id: int, token_ids: tuple[int, ...]) -> None:
        self.tokens[seq_id] += token_ids
        contents = self.contents[seq_id]
        for token_id in token_ids:
            before = contents[-1] if contents else self._sequence(seq_id).cache_salt
            contents.append(self.texts.setdefault((before, token_id), len(self.texts)))

    def _num_own(self, chunk: Chunk) -> list[int]:
        cache = self.scheduler.allocator.cache
        return [
            len(c.new_pages(chunk.start, chunk.start + chunk.num_tokens, cache.page_size))
            for c in cache.classes
        ]

    def _read(self, seq_id: int, end: int, is_written: int) -> None:
        """Check that what a token at ``end`` - ``is_written`` sees of the cache is of its own
        sequence.
        """
        cache, contents, rows = self.scheduler.allocator.cache, self.contents[seq_id], self.rows
        for index, window_class in enumerate(cache.classes):
            first = (
                0
                if window_class.window is None
                else max(end - is_written - window_class.window + 1, 0)
            )
            pages = self.entries[seq_id][index]
            for position in range(first, end):
                page, row = divmod(position, cache.page_size)
                assert rows[index, pages[page], row] == contents[position]

    def _write(self, chunk: Chunk) -> None:
        cache, end = self.scheduler.allocator.cache, chunk.start + chunk.num_tokens
        self._extend(chunk.seq_id, chunk.token_ids)
        contents, last = self.contents[chunk.seq_id], -(-end // cache.page_size)
        news = chunk.new_pages or ((),) * len(cache.classes)
        # drafts that were wrong have left pages
        owned = self._num_own(chunk) if chunk.sampling else map(len, news)
        for index, (window_class, pages, num_own) in enumerate(
            zip(cache.classes, news, owned, strict=True)
        ):
            assert len(pages) >= num_own
            of_class = self.entries[chunk.seq_id][index]
            of_class.update(
                zip(range(last - num_own, last), pages[len(pages) - num_own :], strict=True)
            )
            for gone in [n for n in of_class if n < last - window_class.ring_pages]:
                del of_class[gone]
            for position in range(
                window_class.first_written(chunk.start, end, cache.page_size), end
            ):
                row = index, of_class[position // cache.page_size], position % cache.page_size
                self.rows[row], self.writers[row] = contents[position], chunk.seq_id

    def _sequence(self, seq_id: int) -> Sequence:
        return self.scheduler._running.by_id[seq_id]


def new_pipeline(
    cache: CachePlan,
    *,
    seqs: int = 8,
    budget: int = 64,
    in_flight: int = 3,
    policy: Policy | None = None,
    speculative: SpeculativeConfig | None = None,
    async_scheduling: bool = False,
) -> FakePipeline:
    policy = policy or FixedInFlightPolicy(in_flight, budget)
    limits = SchedulerLimits(
        seqs,
        budget,
        256,
        1000,
        (EOS,),
        enable_prefix_caching=True,
        speculative=speculative,
        async_scheduling=async_scheduling,
    )
    return FakePipeline(Scheduler(cache, limits, policy))


def some_token(seq_id: int, position: int) -> int:
    """Return another token for every sequence and position; sometimes the last."""
    return EOS if (31 * seq_id + position) % 41 == 0 else 3 + (256 * seq_id + position) % 997


def _answer(seq_id: int, prompt: int, new: int) -> list[int]:
    tokens = [some_token(seq_id, prompt + number) for number in range(new)]
    return tokens[: tokens.index(EOS) + 1] if EOS in tokens else tokens


def submit_traffic(
    pipe: FakePipeline,
    rng: random.Random,
    priorities: tuple[int, ...],
    *,
    with_fences: bool = False,
) -> dict[int, list[int]]:
    """Let 12 sequences arrive while micro-batches are made and answered by ``some_token``; abort
    some of them, and fence.

    Returns the tokens that each sequence is to get which was not aborted.
    """
    wanted: dict[int, list[int]] = {}
    for seq_id in range(12):
        prompt, new = rng.randint(1, 120), rng.randint(1, 20)
        pipe.scheduler.add(new_sequence(seq_id, prompt, new, rng.choice(priorities)))
        wanted[seq_id] = _answer(seq_id, prompt, new)
        for _ in range(rng.randint(0, 6)):
            pipe.submit()
            if pipe.in_flight and rng.random() < 0.6:
                pipe.answer()
        if rng.random() < 0.2:
            aborted = rng.choice(list(wanted))
            pipe.scheduler.abort(aborted)
            del wanted[aborted]
        if with_fences and rng.random() < 0.1:
            pipe.scheduler.restart(pipe.scheduler.epoch + 1)
            pipe.fence()
    return wanted
