"""A chain without stages, for tests of what is around them."""

from collections.abc import Awaitable, Callable

from tramontane.proto.step import MicroBatch, SampledToken, StepResult


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
        tokens = tuple(SampledToken(c.seq_id, 7) for c in batch.chunks if c.wants_token)
        return StepResult(batch.epoch, batch.step_id, tokens, ())
