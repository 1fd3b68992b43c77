"""Stage chains without a model: the test decides what happens between a micro-batch and its
result.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

from tramontane.proto.errors import PipelineError
from tramontane.proto.request import ExpertChoices, Logprobs
from tramontane.proto.step import NO_TOKEN, Chunk, MicroBatch, StepResult

PAGE_SIZE = 16
Gate = Callable[[MicroBatch], Awaitable[None]]


def all_chunks(batch: MicroBatch) -> tuple[Chunk, ...]:
    """Return the batch's chunks and its decodes as chunks of one token; decodes without new pages
    have ``()`` as pages.
    """
    pages = dict(batch.decodes.new_pages)
    columns = enumerate(zip(*batch.decodes[:3], strict=True))
    decodes = (
        Chunk(seq_id, start, (token_id,), pages.get(i, ()), None, True)
        for i, (seq_id, start, token_id) in columns
    )
    return *batch.chunks, *decodes


class ScriptedChain:
    """A chain that samples token 7; every micro-batch awaits ``gate`` first."""

    num_stages = 2
    has_lost_node = False

    def __init__(self, gate: Gate) -> None:
        self.gate = gate
        self.max_in_flight = 0
        self.epochs: list[int] = []
        self._in_flight = 0

    async def fence(self) -> int:
        self.epochs.append(len(self.epochs))
        return self.epochs[-1]

    async def replace_hung_workers(self, limit_s: float) -> str:
        return ""

    def submit(self, batch: MicroBatch) -> Awaitable[StepResult]:
        self._in_flight += 1
        self.max_in_flight = max(self.max_in_flight, self._in_flight)
        return self._run(batch)

    async def _run(self, batch: MicroBatch) -> StepResult:
        await self.gate(batch)
        self._in_flight -= 1
        return StepResult(batch.epoch, batch.step_id, (7,) * len(batch.sampled_seq_ids), ())


class VerifyingChain(ScriptedChain):
    """A chain that samples token 7, but none from the rows of drafts after a wrong one."""

    def __init__(self, gate: Gate) -> None:
        super().__init__(gate)
        # of each sequence's next token, once it has decoded
        self.next_position: dict[int, int] = {}

    async def _run(self, batch: MicroBatch) -> StepResult:
        result = await super()._run(batch)
        num_first = len(result.token_ids) - len(batch.decodes.seq_ids)
        token_ids, before = list(result.token_ids[:num_first]), -1
        for seq_id, start, draft in zip(*batch.decodes[:3], strict=True):
            is_known = seq_id != before and not batch.decodes.is_lookahead
            is_right = is_known or (self.next_position.get(seq_id) == start and draft == 7)
            token_ids.append(7 if is_right else NO_TOKEN)
            if is_right:
                self.next_position[seq_id] = start + 1
            before = seq_id
        return replace(result, token_ids=tuple(token_ids))


async def no_gate(_batch: MicroBatch) -> None:
    await asyncio.sleep(0)


def next_token_id(known: list[int]) -> int:
    """Return the token after these; it depends on each of them."""
    return sum(position * token for position, token in enumerate(known, 1)) % 997


def answer(prompt: tuple[int, ...], num_tokens: int) -> list[int]:
    known = list(prompt)
    for _ in range(num_tokens):
        known.append(next_token_id(known))
    return known[len(prompt) :]


class StatefulChain(ScriptedChain):
    """A chain that keeps the tokens of every sequence since the last fence, as stages do, and
    samples by them.
    """

    def __init__(self, gate: Gate) -> None:
        super().__init__(gate)
        self.known: dict[int, list[int]] = {}
        # of each sequence, of the first window class, by index
        self.pages: dict[int, dict[int, int]] = {}
        # of the first window class: all tokens up to its end
        self.in_page: dict[int, list[int]] = {}
        self.num_failed = 0

    async def fence(self) -> int:
        self.known.clear()
        self.pages.clear()
        self.in_page.clear()
        return await super().fence()

    def submit(self, batch: MicroBatch) -> Awaitable[StepResult]:
        for seq_id in batch.freed_seq_ids:
            del self.known[seq_id], self.pages[seq_id]
        sampled = []
        for chunk in all_chunks(batch):
            if chunk.sampling is not None:
                assert chunk.seq_id not in self.known
                self._begin(chunk)
            known = self.known[chunk.seq_id]
            assert chunk.start == len(known), "positions are missing, or come twice"
            known += chunk.token_ids
            self._fill_pages(chunk)
            if chunk.needs_sample:
                sampled.append(next_token_id(known))
        return self._through(batch, tuple(sampled))

    def _begin(self, chunk: Chunk) -> None:
        """Begin a sequence with what is in the last page of its cached prefix. Chunks are no longer
        than a ring.
        """
        num_given, num_pages = (
            chunk.start // PAGE_SIZE,
            -(-(chunk.start + chunk.num_tokens) // PAGE_SIZE),
        )
        self.pages[chunk.seq_id] = {}
        self.known[chunk.seq_id] = []
        if num_given:
            self.known[chunk.seq_id] += self.in_page[chunk.new_pages[0][num_given - 1 - num_pages]]

    def _fill_pages(self, chunk: Chunk) -> None:
        known, pages, new = (
            self.known[chunk.seq_id],
            self.pages[chunk.seq_id],
            chunk.new_pages[0] if chunk.new_pages else (),
        )
        num_pages = -(-len(known) // PAGE_SIZE)
        pages.update(zip(range(num_pages - len(new), num_pages), new, strict=True))
        for index in range(chunk.start // PAGE_SIZE, len(known) // PAGE_SIZE):
            self.in_page[pages[index]] = known[: (index + 1) * PAGE_SIZE]

    async def _through(self, batch: MicroBatch, sampled: tuple[int, ...]) -> StepResult:
        try:
            await self.gate(batch)
        except PipelineError:
            self.num_failed += 1
            raise
        return StepResult(batch.epoch, batch.step_id, sampled, ())


class ReportingChain(StatefulChain):
    """A chain that reports log-probabilities (minus the position) and expert choices of layer 3
    (the position).
    """

    async def _through(self, batch: MicroBatch, sampled: tuple[int, ...]) -> StepResult:
        chunks = all_chunks(batch)
        experts = [
            ExpertChoices(c.seq_id, 3, c.start, tuple((c.start + n,) for n in range(c.num_tokens)))
            for c in chunks
        ]
        logprobs = [
            Logprobs(c.seq_id, c.start + 1, *_minus(range(c.start + 1, c.start + 1 + c.num_tokens)))
            for c in chunks
        ]
        result = await super()._through(batch, sampled)
        return replace(result, expert_choices=tuple(experts), logprobs=tuple(logprobs))


def _minus(positions: range) -> tuple[tuple[float, ...], tuple[tuple[()], ...]]:
    return tuple(-float(position) for position in positions), ((),) * len(positions)
