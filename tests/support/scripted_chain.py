"""Stage chains without a model: the test decides what happens between a micro-batch and its
result.
"""

import asyncio
from collections.abc import Awaitable, Callable, Container, Mapping
from types import MappingProxyType
from typing import Any

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


async def no_gate(_batch: MicroBatch) -> None:
    await asyncio.sleep(0)


class ScriptedChain:
    """The one ``StageChain`` without a model. It samples token 7, but none from the rows of drafts
    after a wrong one.

    ``gate`` is awaited by each micro-batch before its result comes back, and may raise.
    ``find_hung`` is called by ``replace_hung_workers``. A node has died before the epochs in
    ``lost_node_before``. ``experts`` has the layers whose choices are reported: position p chooses
    p plus the layer's value. ``logprobs``: whether log-probabilities are, minus the position each.

    Fences wait until ``may_fence`` is set, as they do while a stage loads its weights; after the
    first they raise ``fence_error`` if it is set.
    """

    num_stages = 2

    def __init__(
        self,
        gate: Gate = no_gate,
        *,
        find_hung: Callable[[float], str] = lambda _limit_s: "",
        lost_node_before: Container[int] = (),
        experts: Mapping[int, int] = MappingProxyType({}),
        logprobs: bool = False,
    ) -> None:
        self.gate, self.find_hung = gate, find_hung
        self.may_fence = asyncio.Event()
        self.may_fence.set()
        self.fence_error: PipelineError | None = None
        self.epochs: list[int] = []
        self.submitted: list[MicroBatch] = []
        self.max_in_flight = self.num_failed = 0
        self._in_flight = 0
        self._lost_node_before, self._experts, self._logprobs = lost_node_before, experts, logprobs
        # of each sequence's next token, once it has decoded
        self._next_position: dict[int, int] = {}

    @property
    def has_lost_node(self) -> bool:
        return bool(self.epochs) and self.epochs[-1] in self._lost_node_before

    async def fence(self) -> int:
        await self.may_fence.wait()
        if self.epochs and self.fence_error is not None:
            raise self.fence_error
        self.epochs.append(len(self.epochs))
        return self.epochs[-1]

    async def replace_hung_workers(self, limit_s: float) -> str:
        return self.find_hung(limit_s)

    def submit(self, batch: MicroBatch) -> Awaitable[StepResult]:
        self.submitted.append(batch)
        self._in_flight += 1
        self.max_in_flight = max(self.max_in_flight, self._in_flight)
        return self._through(batch, self.sample(batch))

    def sample(self, batch: MicroBatch) -> tuple[int, ...]:
        """Return the tokens of a micro-batch, in the order of its rows."""
        token_ids = [7] * sum(chunk.needs_sample for chunk in batch.chunks)
        before = -1
        for seq_id, start, draft in zip(*batch.decodes[:3], strict=True):
            is_known = seq_id != before and not batch.decodes.is_lookahead
            is_right = is_known or (self._next_position.get(seq_id) == start and draft == 7)
            token_ids.append(7 if is_right else NO_TOKEN)
            if is_right:
                self._next_position[seq_id] = start + 1
            before = seq_id
        return tuple(token_ids)

    async def _through(self, batch: MicroBatch, token_ids: tuple[int, ...]) -> StepResult:
        try:
            await self.gate(batch)
        except PipelineError:
            self.num_failed += 1
            raise
        finally:
            self._in_flight -= 1
        chunks = all_chunks(batch)
        experts = [
            ExpertChoices(
                c.seq_id, layer, c.start, tuple((c.start + n + more,) for n in range(c.num_tokens))
            )
            for layer, more in self._experts.items()
            for c in chunks
        ]
        logprobs = [
            Logprobs(c.seq_id, c.start + 1, *_minus(range(c.start + 1, c.start + 1 + c.num_tokens)))
            for c in chunks
            if self._logprobs
        ]
        return StepResult(
            batch.epoch,
            batch.step_id,
            token_ids,
            (),
            expert_choices=tuple(experts),
            logprobs=tuple(logprobs),
        )


def _minus(positions: range) -> tuple[tuple[float, ...], tuple[tuple[()], ...]]:
    return tuple(-float(position) for position in positions), ((),) * len(positions)


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

    def __init__(self, gate: Gate = no_gate, **options: Any) -> None:
        """``options`` are those of a ``ScriptedChain``."""
        super().__init__(gate, **options)
        self.known: dict[int, list[int]] = {}
        # of each sequence, of the first window class, by index
        self.pages: dict[int, dict[int, int]] = {}
        # of the first window class: all tokens up to its end
        self.in_page: dict[int, list[int]] = {}

    async def fence(self) -> int:
        epoch = await super().fence()
        self.known.clear()
        self.pages.clear()
        self.in_page.clear()
        return epoch

    def sample(self, batch: MicroBatch) -> tuple[int, ...]:
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
        return tuple(sampled)

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
