"""A pipeline with a real scheduler and no stages; it checks the invariants on which stages rely."""

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from scripted_chain import all_chunks

from tramontane.proto.plan import CachePlan, WindowClass, ring_pages
from tramontane.proto.request import SamplingParams, TokenEvent
from tramontane.proto.step import Chunk, MicroBatch, StageTiming, StepResult
from tramontane.router.scheduling.admission import SchedulerLimits
from tramontane.router.scheduling.policy import FixedInFlightPolicy, Policy
from tramontane.router.scheduling.scheduler import Scheduler
from tramontane.router.scheduling.sequence import Sequence

EOS = 2


def new_cache(page_size: int, num_seqs: float, *windows: int | None, max_len: int = 256) -> CachePlan:
    rings = [ring_pages(window, page_size, max_len) for window in windows]
    classes = [WindowClass(w, r, max(r, int(r * num_seqs))) for w, r in zip(windows, rings, strict=True)]
    return CachePlan(page_size, tuple(classes))


def new_sequence(seq_id: int, prompt: int, new: int, priority: int = 0, max_len: int = 256) -> Sequence:
    sampling = SamplingParams(max_tokens=new, temperature=0.0)
    return Sequence(seq_id, tuple(range(10, 10 + prompt)), sampling, min(prompt + new, max_len), priority)


@dataclass
class FakePipeline:
    """Completes micro-batches in order, and checks the invariants on which stages rely."""

    scheduler: Scheduler
    in_flight: deque[MicroBatch] = field(default_factory=deque)
    pages: dict[int, list[list[int]]] = field(default_factory=dict)
    positions: Counter[int] = field(default_factory=Counter)
    events: list[TokenEvent] = field(default_factory=list)
    token_at: Callable[[int, int], int] = lambda _seq_id, _position: 50
    num_stages: int = 0  # with timings in the results
    now: float = 0.0

    def submit(self) -> MicroBatch | None:
        batch = self.scheduler.schedule()
        if batch is not None:
            self._check(batch)
            self.in_flight.append(batch)
        return batch

    def answer(self, token_id: int | None = None) -> None:
        batch = self.in_flight.popleft()
        ends = [(c.seq_id, c.start + c.num_tokens) for c in all_chunks(batch) if c.needs_sample]
        assert [seq_id for seq_id, _ in ends] == list(batch.sampled_seq_ids)
        token_ids = tuple(self.token_at(seq_id, end) if token_id is None else token_id for seq_id, end in ends)
        self.events += self.scheduler.complete(batch, StepResult(batch.epoch, batch.step_id, token_ids, self._timings(batch)))
        self.scheduler.check_integrity()

    def _timings(self, batch: MicroBatch) -> tuple[StageTiming, ...]:
        """Return timings as if each stage computed right after the one before it."""
        timings = []
        for stage in range(self.num_stages):
            timings.append(StageTiming(stage, self.now, 1e-3 + 1e-5 * batch.num_tokens, batch.num_tokens))
            self.now = timings[-1].ended_at
        return tuple(timings)

    def drain(self) -> None:
        while self.in_flight or self.submit():
            while self.submit():
                pass
            self.answer()

    def tokens_of(self, seq_id: int) -> list[TokenEvent]:
        return [event for event in self.events if event.seq_id == seq_id]

    def _check(self, batch: MicroBatch) -> None:
        assert 0 < batch.num_tokens <= self.scheduler.limits.max_num_batched_tokens
        chunks = all_chunks(batch)
        assert len({c.seq_id for c in chunks}) == len(chunks)
        sizes = [c.num_tokens > 1 for c in chunks]
        assert sizes == sorted(sizes, reverse=True)
        for seq_id in batch.freed_seq_ids:
            del self.pages[seq_id], self.positions[seq_id]
        for chunk in chunks:
            self._check_chunk(chunk)
        for of_class in zip(*self.pages.values(), strict=True):
            held = [page for ring in of_class for page in ring]
            assert len(held) == len(set(held)), "a page has two owners"

    def _check_chunk(self, chunk: Chunk) -> None:
        cache = self.scheduler.allocator.cache
        assert (chunk.sampling is not None) == (chunk.start == 0) == (chunk.seq_id not in self.pages)
        rings = self.pages.setdefault(chunk.seq_id, [[] for _ in cache.classes])
        assert chunk.start == self.positions[chunk.seq_id], "a stage sees positions in order, each once"
        self.positions[chunk.seq_id] += chunk.num_tokens
        for ring, new, window_class in zip(rings, chunk.new_pages or ((),) * len(rings), cache.classes, strict=True):
            ring += new
            assert len(ring) == window_class.pages_for(self.positions[chunk.seq_id], cache.page_size)


def new_pipeline(
    cache: CachePlan, *, seqs: int = 8, budget: int = 64, in_flight: int = 3, policy: Policy | None = None
) -> FakePipeline:
    policy = policy or FixedInFlightPolicy(in_flight, budget)
    return FakePipeline(Scheduler(cache, SchedulerLimits(seqs, budget, 256, 1000, (EOS,)), policy))
