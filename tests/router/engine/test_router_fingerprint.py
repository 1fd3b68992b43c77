"""The router says with a request's first tokens which pipeline makes them, and again when that has
become another one.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from event_loops import in_event_loop
from running_router import new_scheduler, running
from scripted_chain import ScriptedChain, no_gate

from tramontane.proto import wire
from tramontane.proto.errors import PipelineError
from tramontane.proto.request import (
    Request,
    RequestOutput,
    RequestTimings,
    SamplingParams,
    TokenEvent,
    fingerprint_output,
)
from tramontane.proto.step import MicroBatch
from tramontane.router.engine.request_output import OutputQueue
from tramontane.router.engine.router import Router

TIMES = RequestTimings(0.0, 0.0, 0.0)
NEVER = 10**9


class Pipeline:
    """A chain with a fingerprint, the next one of these after each fence."""

    def __init__(self, *fingerprints: str, fails_at: int = NEVER) -> None:
        self.fingerprints, self.fails_at = fingerprints, fails_at
        self.num_steps = 0
        self.chain = ScriptedChain(self._gate)

    async def read(self) -> str:
        await asyncio.sleep(0)
        return self.fingerprints[min(len(self.chain.epochs), len(self.fingerprints)) - 1]

    async def _gate(self, batch: MicroBatch) -> None:
        await no_gate(batch)
        self.num_steps += 1
        if self.num_steps == self.fails_at:
            raise PipelineError("a stage died")

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Router]:
        router = Router(new_scheduler(num_seqs=2), self.chain, read_fingerprint=self.read)
        async with running(router):
            while not router.is_ready:
                await asyncio.sleep(0)
            yield router


async def _seen(router: Router, num_tokens: int = 20) -> list[str]:
    """Return the fingerprint of each token, as one who reads the outputs knows it."""
    seen, current = list[str](), ""
    async for batch in router.generate(
        Request.of((1, 2, 3), SamplingParams(max_tokens=num_tokens))
    ):
        current = batch.fingerprint or current
        seen += [current] * len(batch.events)
    return seen


@in_event_loop
async def test_the_first_tokens_of_a_request_name_the_pipeline() -> None:
    async with Pipeline("a").running() as router:
        outputs = [
            output
            async for output in router.generate(Request.of((1,), SamplingParams(max_tokens=5)))
        ]
        assert [output.fingerprint for output in outputs] == ["a", *[""] * (len(outputs) - 1)]
        assert len(outputs) > 1


@in_event_loop
async def test_tokens_after_a_recovery_have_the_fingerprint_of_what_makes_them() -> None:
    """Of a request that runs and one that waits for a place."""
    pipeline = Pipeline("a", "b", fails_at=8)
    async with pipeline.running() as router:
        seen = await asyncio.gather(*(_seen(router) for _ in range(4)))
        assert set(seen[0]) == {"a", "b"}
        assert seen[0] == sorted(seen[0])
        assert {len(each) for each in seen} == {20}
        assert seen[3] == ["b"] * 20
        assert await _seen(router) == ["b"] * 20


@in_event_loop
async def test_a_pipeline_that_is_not_known_has_none_until_it_is() -> None:
    pipeline = Pipeline("", fails_at=NEVER)
    async with pipeline.running() as router:
        assert await _seen(router) == [""] * 20
        reading = asyncio.create_task(_seen(router, 200))
        while pipeline.num_steps < 30:
            await asyncio.sleep(0)
        pipeline.fingerprints = ("a",)
        await router.refresh_fingerprint()
        seen = await reading
        assert set(seen) == {"", "a"}
        assert seen == sorted(seen)
        assert await _seen(router) == ["a"] * 20


@in_event_loop
async def test_it_is_read_with_the_tokens_that_follow_it_and_once() -> None:
    queue, token = OutputQueue(), RequestOutput((TokenEvent(0, 7),), TIMES)
    for item in (fingerprint_output("a"), token):
        queue.put(item)
    assert await queue.get() == token._replace(fingerprint="a")
    queue.put(token)
    assert await queue.get() == token
    for item in (fingerprint_output("b"), fingerprint_output("c"), fingerprint_output(""), token):
        queue.put(item)
    assert await queue.get() == token._replace(fingerprint="c")


def test_it_travels_and_single_tokens_stay_short() -> None:
    token = RequestOutput((TokenEvent(0, 7),), TIMES)
    for output in (
        fingerprint_output("a"),
        fingerprint_output(""),
        token._replace(fingerprint="a"),
        token,
    ):
        assert wire.decode_outputs(wire.encode_outputs([(3, output)])) == [(3, output)]
    assert len(wire.encode_outputs([(3, token)])) < 40
