"""Stage chains without a model: the test decides what happens between a micro-batch and its result."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

from tramontane.proto.errors import PipelineError
from tramontane.proto.request import ExpertChoices, Logprobs
from tramontane.proto.step import Chunk, MicroBatch, StepResult

Gate = Callable[[MicroBatch], Awaitable[None]]


def all_chunks(batch: MicroBatch) -> tuple[Chunk, ...]:
    """Return the batch's chunks and its decodes as chunks of one token; decodes without new pages have ``()`` as pages."""
    pages = dict(batch.decodes.new_pages)
    columns = enumerate(zip(*batch.decodes[:3], strict=True))
    decodes = (Chunk(seq_id, start, (token_id,), pages.get(i, ()), None, True) for i, (seq_id, start, token_id) in columns)
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
    """A chain that keeps the tokens of every sequence since the last fence, as stages do, and samples by them."""

    def __init__(self, gate: Gate) -> None:
        super().__init__(gate)
        self.known: dict[int, list[int]] = {}
        self.num_failed = 0

    async def fence(self) -> int:
        self.known.clear()
        return await super().fence()

    def submit(self, batch: MicroBatch) -> Awaitable[StepResult]:
        for seq_id in batch.freed_seq_ids:
            del self.known[seq_id]
        sampled = []
        for chunk in all_chunks(batch):
            known = self.known.setdefault(chunk.seq_id, [])
            assert chunk.start == len(known), "positions are missing, or come twice"
            assert (chunk.sampling is not None) == (chunk.start == 0)
            known += chunk.token_ids
            if chunk.needs_sample:
                sampled.append(next_token_id(known))
        return self._through(batch, tuple(sampled))

    async def _through(self, batch: MicroBatch, sampled: tuple[int, ...]) -> StepResult:
        try:
            await self.gate(batch)
        except PipelineError:
            self.num_failed += 1
            raise
        return StepResult(batch.epoch, batch.step_id, sampled, ())


class ReportingChain(StatefulChain):
    """A chain that reports log-probabilities (minus the position) and expert choices of layer 3 (the position)."""

    async def _through(self, batch: MicroBatch, sampled: tuple[int, ...]) -> StepResult:
        chunks = all_chunks(batch)
        experts = [ExpertChoices(c.seq_id, 3, c.start, tuple((c.start + n,) for n in range(c.num_tokens))) for c in chunks]
        logprobs = [Logprobs(c.seq_id, c.start + 1, *_minus(range(c.start + 1, c.start + 1 + c.num_tokens))) for c in chunks]
        result = await super()._through(batch, sampled)
        return replace(result, expert_choices=tuple(experts), logprobs=tuple(logprobs))


def _minus(positions: range) -> tuple[tuple[float, ...], tuple[tuple[()], ...]]:
    return tuple(-float(position) for position in positions), ((),) * len(positions)
