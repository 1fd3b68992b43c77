"""A pipeline without a model: what it does between a micro-batch and its result is up to the test."""

import asyncio
from collections.abc import Awaitable, Callable

from tramontane.proto.step import Chunk, MicroBatch, StepResult


def all_chunks(batch: MicroBatch) -> tuple[Chunk, ...]:
    """With the decodes as chunks of one token each; those that gain no page have () for their pages."""
    pages = dict(batch.decodes.new_pages)
    columns = enumerate(zip(*batch.decodes[:3], strict=True))
    decodes = (Chunk(seq_id, start, (token_id,), pages.get(i, ()), None, True) for i, (seq_id, start, token_id) in columns)
    return *batch.chunks, *decodes


class ScriptedChain:
    """Samples token 7; every micro-batch passes through ``gate`` first."""

    num_stages = 2

    def __init__(self, gate: Callable[[MicroBatch], Awaitable[None]]) -> None:
        self.gate = gate
        self.most_in_flight = 0
        self.epochs: list[int] = []
        self._in_flight = 0

    async def fence(self) -> int:
        self.epochs.append(len(self.epochs))
        return self.epochs[-1]

    def submit(self, batch: MicroBatch) -> Awaitable[StepResult]:
        self._in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self._in_flight)
        return self._run(batch)

    async def _run(self, batch: MicroBatch) -> StepResult:
        await self.gate(batch)
        self._in_flight -= 1
        return StepResult(batch.epoch, batch.step_id, (7,) * len(batch.sampled_ids), ())


async def no_gate(_batch: MicroBatch) -> None:
    await asyncio.sleep(0)
