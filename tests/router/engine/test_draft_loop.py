"""The calls to a draft model: one after the other, and again after an error."""

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress

import pytest

from tramontane.proto.errors import PipelineError
from tramontane.proto.request import SamplingParams
from tramontane.proto.step import DraftRequest
from tramontane.router.engine import router
from tramontane.router.engine.router import run_draft_model
from tramontane.router.scheduling.model_drafter import DraftQueue, ModelDrafter


class Port:
    """Drafts 1 1 1 once the gate is open; the first calls fail."""

    def __init__(self, num_failures: int = 0) -> None:
        self.gate = asyncio.Event()
        # sequences that asked, and those that had ended
        self.calls: list[tuple[list[int], list[int]]] = []
        self._num_failures = num_failures

    async def draft(
        self, requests: Sequence[DraftRequest], ended: Sequence[int]
    ) -> list[tuple[int, ...] | None]:
        self.calls.append(([request.seq_id for request in requests], list(ended)))
        await self.gate.wait()
        if len(self.calls) <= self._num_failures:
            raise (
                PipelineError("the draft model does not answer")
                if len(self.calls) > 1
                else KeyError("a defect")
            )
        return [(1,) * request.num_tokens for request in requests]


def _drafters(queue: DraftQueue, count: int) -> list[ModelDrafter]:
    return [ModelDrafter([5], seq_id, SamplingParams(), 3, 99, queue) for seq_id in range(count)]


def test_what_waits_while_the_model_drafts_goes_together_in_the_next_call() -> None:
    async def scenario() -> None:
        port, queue, woken = Port(), DraftQueue(), asyncio.Event()
        running = asyncio.create_task(run_draft_model(port, queue, woken.set))
        await asyncio.sleep(0)
        first, second, third, ended = _drafters(queue, 4)
        first.draft(3)
        while not port.calls:
            await asyncio.sleep(0)
        second.draft(3)
        third.draft(3)
        ended.close()
        port.gate.set()
        await woken.wait()
        assert first.draft(3) == (1, 1, 1)
        while len(second.draft(3)) < 3:
            await asyncio.sleep(0)
        first.close()
        third.draft(4)
        while len(third.draft(4)) < 4:
            await asyncio.sleep(0)
        assert port.calls == [([0], []), ([1, 2], []), ([2], [0])], (
            "it never knew the one that ended before its first call"
        )
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_after_an_error_the_model_is_called_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(router, "RETRY_S", 0.0)

    async def scenario() -> None:
        port, queue = Port(num_failures=2), DraftQueue()
        port.gate.set()
        drafter = ModelDrafter(tokens := [5], 0, SamplingParams(), 3, 99, queue)
        running = asyncio.create_task(run_draft_model(port, queue, lambda: None))
        await asyncio.sleep(0)
        while len(drafter.draft(3)) < 3:
            if len(port.calls) == len(tokens) < 3:
                tokens.append(5)  # without another token it is not asked for again
            await asyncio.sleep(0)
        assert len(port.calls) == 3
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running

    with caplog.at_level(logging.WARNING):
        asyncio.run(asyncio.wait_for(scenario(), 60))
    assert [record.getMessage() for record in caplog.records] == [
        "The draft model failed, and is called again in 0 s: 'a defect'",
        "The draft model failed, and is called again in 0 s: the draft model does not answer",
    ]
    assert [bool(record.exc_info) for record in caplog.records] == [True, False]


def test_an_answer_of_another_length_does_not_end_the_drafts(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(router, "RETRY_S", 0.0)

    class Short(Port):
        async def draft(
            self, requests: Sequence[DraftRequest], ended: Sequence[int]
        ) -> list[tuple[int, ...] | None]:
            answers = await super().draft(requests, ended)
            return answers if len(self.calls) > 1 else []

    async def scenario() -> None:
        port, queue, woken = Short(), DraftQueue(), asyncio.Event()
        port.gate.set()
        running = asyncio.create_task(run_draft_model(port, queue, woken.set))
        await asyncio.sleep(0)
        tokens = [5]
        drafter = ModelDrafter(tokens, 0, SamplingParams(), 3, 99, queue)
        drafter.draft(3)
        await woken.wait()
        tokens.append(6)
        while len(drafter.draft(3)) < 3:
            await asyncio.sleep(0)
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running

    asyncio.run(asyncio.wait_for(scenario(), 60))
    assert "has answered 0 of 1 requests" in caplog.text
