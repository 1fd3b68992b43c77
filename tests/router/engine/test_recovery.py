"""The pipeline fails, and requests only wait: every token once and the right one, and who makes it
fail is found.
"""

import asyncio
import itertools
import math
import random
from contextlib import AbstractAsyncContextManager

import pytest
from event_loops import in_event_loop
from running_router import new_scheduler, running
from scripted_chain import ScriptedChain, StatefulChain, all_chunks, answer

from tramontane.proto.errors import LeaseError, PipelineError, PoisonRequestError
from tramontane.proto.request import Request, SamplingParams
from tramontane.proto.step import MicroBatch
from tramontane.router.engine import in_flight
from tramontane.router.engine.health import PipelineHealth
from tramontane.router.engine.in_flight import StepDeadline
from tramontane.router.engine.router import MAX_CONSECUTIVE_POISON, Router

MOST_FAILURES_OF_ONE = 3  # in company, in company again, alone


def _running(
    chain: ScriptedChain, num_places: int = 8, in_flight: int = 3
) -> AbstractAsyncContextManager[Router]:
    return running(Router(new_scheduler(num_seqs=num_places, in_flight=in_flight), chain))


async def _tokens(router: Router, prompt: tuple[int, ...], num_tokens: int) -> list[int]:
    request = Request.of(prompt, SamplingParams(max_tokens=num_tokens))
    return [event.token_id async for batch in router.generate(request) for event in batch.events]


def _prompts(rng: random.Random, num_prompts: int) -> list[tuple[int, ...]]:
    return [
        tuple(rng.randrange(900) for _ in range(rng.randint(1, 100))) for _ in range(num_prompts)
    ]


@pytest.mark.parametrize("seed", range(20))
@in_event_loop
async def test_every_token_comes_once_however_often_the_pipeline_fails(seed: int) -> None:
    """More requests than places, so that some wait while others are computed again."""
    rng = random.Random(seed)
    prompts = _prompts(rng, 20)

    async def often(_batch: MicroBatch) -> None:
        for _ in range(rng.randrange(3)):
            await asyncio.sleep(0)
        # who is alone when it fails again and again is to blame
        if rng.random() < 0.03 and router.scheduler.num_running > 1:
            raise PipelineError("stage 1 died")

    chain = StatefulChain(often)
    async with _running(chain) as router:
        results = await asyncio.gather(*(_tokens(router, prompt, 60) for prompt in prompts))
        assert results == [answer(prompt, 60) for prompt in prompts]
        assert len(chain.epochs) == 1 + router.health.num_recoveries
        assert router.health.num_recoveries > 3
        router.scheduler.check_integrity()
        assert router.scheduler.is_idle


@pytest.mark.parametrize("poisonous", [0, 17])
@in_event_loop
async def test_a_request_that_makes_the_pipeline_fail_is_refused_and_the_others_continue(
    poisonous: int,
) -> None:
    """A prompt that no stage survives, or an answer of which none survives its 18th token."""
    prompts = _prompts(random.Random(poisonous), 8)
    poison = (*prompts[0], *answer(prompts[0], poisonous))
    position = len(poison) - 1

    def is_poison(batch: MicroBatch) -> bool:
        return any(
            chain.known[c.seq_id][: len(poison)] == list(poison)
            and c.start <= position < c.start + c.num_tokens
            for c in all_chunks(batch)
        )

    async def dies_of_it(batch: MicroBatch) -> None:
        await asyncio.sleep(0)
        if batch.epoch == chain.epochs[-1] and is_poison(batch):
            raise PipelineError("stage 1 died")

    chain = StatefulChain(dies_of_it)
    async with _running(chain) as router:
        requested = [_tokens(router, prompt, 60) for prompt in prompts]
        refused, *results = await asyncio.gather(*requested, return_exceptions=True)
        assert isinstance(refused, PoisonRequestError)
        assert "stage 1 died" in str(refused)
        assert results == [answer(prompt, 60) for prompt in prompts[1:]]
        # what was in flight at the same time has failed as well
        assert chain.num_failed <= MOST_FAILURES_OF_ONE * 3
        assert router.health.num_recoveries <= MOST_FAILURES_OF_ONE
        router.scheduler.check_integrity()
        assert router.scheduler.is_idle


@pytest.mark.parametrize("faults", [1, 2])
@in_event_loop
async def test_two_independent_faults_within_one_token_convict_no_request(faults: int) -> None:
    """The only request of its pipeline: nothing distinguishes the faults from its own until it runs
    once more.
    """

    async def dies(batch: MicroBatch) -> None:
        await asyncio.sleep(0)
        if batch.epoch < faults:
            raise PipelineError("stage 1 died")

    async with _running(StatefulChain(dies)) as router:
        assert await _tokens(router, (1, 2, 3), 9) == answer((1, 2, 3), 9)
        assert router.health.num_recoveries == faults


@in_event_loop
async def test_deaths_of_nodes_do_not_count_against_a_request() -> None:
    """Five nodes die one after the other under one request, whose first token comes from the sixth;
    then it fails twice.
    """

    async def dies(batch: MicroBatch) -> None:
        await asyncio.sleep(0)
        if batch.epoch < 7:
            raise PipelineError("stage 1 died")

    async with _running(StatefulChain(dies, lost_node_before=range(1, 6))) as router:
        assert await _tokens(router, (1, 2, 3), 9) == answer((1, 2, 3), 9)
        assert router.health.num_recoveries == 7


@in_event_loop
async def test_two_poisons_in_company_are_both_found() -> None:
    prompts = [(666, 1, 2), (5,) * 40, (666, 3), (7,) * 9]

    async def dies_of_it(batch: MicroBatch) -> None:
        await asyncio.sleep(0)
        if any(666 in c.token_ids for c in batch.chunks):
            raise PipelineError("stage 0 died")

    async with _running(StatefulChain(dies_of_it)) as router:
        requested = [_tokens(router, prompt, 9) for prompt in prompts]
        results = await asyncio.gather(*requested, return_exceptions=True)
        assert [isinstance(result, PoisonRequestError) for result in results] == [
            True,
            False,
            True,
            False,
        ]
        assert results[1::2] == [answer(prompt, 9) for prompt in prompts[1::2]]


@in_event_loop
async def test_a_suspect_that_is_aborted_does_not_block_others() -> None:
    """It is being tried alone when its client goes."""
    is_stuck = asyncio.Event()

    async def dies_twice(batch: MicroBatch) -> None:
        await asyncio.sleep(0)
        if len(chain.epochs) <= 2:
            raise PipelineError("stage 0 died")
        if 666 in batch.chunks[0].token_ids if batch.chunks else False:
            is_stuck.set()
            await leaves.wait()

    leaves = asyncio.Event()
    chain = StatefulChain(dies_twice)
    async with _running(chain) as router:
        suspect = asyncio.create_task(_tokens(router, (666,), 9))
        other = asyncio.create_task(_tokens(router, (3, 4), 9))
        await is_stuck.wait()
        assert router.scheduler.num_running == 1
        suspect.cancel()
        await asyncio.sleep(0)
        leaves.set()
        assert await other == answer((3, 4), 9)


@in_event_loop
async def test_a_pipeline_that_always_fails_blames_few_requests() -> None:
    async def broken(_batch: MicroBatch) -> None:
        raise PipelineError("the disk is full")

    async with _running(ScriptedChain(broken)) as router:
        results = await asyncio.gather(
            *(_tokens(router, (n,), 9) for n in range(8)), return_exceptions=True
        )
        assert (
            sum(isinstance(result, PoisonRequestError) for result in results)
            == MAX_CONSECUTIVE_POISON - 1
        )
        others = [str(result) for result in results if not isinstance(result, PoisonRequestError)]
        assert others == ["the pipeline failed with 3 requests in a row: the disk is full"] * (
            8 - MAX_CONSECUTIVE_POISON + 1
        )
        with pytest.raises(PipelineError, match="disk is full"):
            await _tokens(router, (1,), 1)


@pytest.mark.parametrize(
    "error", [PipelineError("stage 1 is gone for good"), LeaseError("driven by another")]
)
@in_event_loop
async def test_a_pipeline_that_is_lost_for_good_ends_every_request_with_the_reason(
    error: PipelineError,
) -> None:
    async def dies(batch: MicroBatch) -> None:
        await asyncio.sleep(0)
        if batch.step_id == 2:
            raise PipelineError("stage 1 died")

    chain = ScriptedChain(dies)
    chain.fence_error = error
    async with _running(chain) as router:
        results = await asyncio.gather(
            *(_tokens(router, (n,), 9) for n in range(3)), return_exceptions=True
        )
        assert [str(result) for result in results] == [str(error)] * 3
        assert not router.is_ready


@in_event_loop
async def test_who_comes_while_the_pipeline_is_being_fenced_anew_only_waits() -> None:
    async def dies_once(batch: MicroBatch) -> None:
        await asyncio.sleep(0)
        if batch.epoch == 0 and batch.step_id == 3:
            chain.may_fence.clear()
            raise PipelineError("stage 1 died")

    chain = StatefulChain(dies_once)
    async with _running(chain) as router:
        early = asyncio.create_task(_tokens(router, (1, 2), 9))
        while not router.health.num_recoveries:
            await asyncio.sleep(0)
        late = asyncio.create_task(_tokens(router, (3,), 9))
        await asyncio.sleep(0)
        assert not router.is_ready
        chain.may_fence.set()
        assert (await early, await late) == (answer((1, 2), 9), answer((3,), 9))


@pytest.mark.parametrize(
    ("reasons", "num_recoveries"), [(["stage 1 did nothing"], 1), (["", "", ""], 0)]
)
@in_event_loop
async def test_what_is_stuck_is_replaced_and_what_has_a_reason_is_waited_for(
    reasons: list[str], num_recoveries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(in_flight, "HANG_WATCH_INTERVAL_S", 0.0)
    monkeypatch.setattr(in_flight, "RECHECK_S", 0.0)

    limits, freed, now = list[float](), asyncio.Event(), itertools.count(0.0, 0.01)

    async def stuck_at_first(batch: MicroBatch) -> None:
        if batch.epoch == 0 and batch.step_id < 2:
            await freed.wait()

    def find_hung(limit_s: float) -> str:
        limits.append(limit_s)
        if len(limits) >= len(reasons):
            freed.set()
        return reasons[len(limits) - 1] if len(limits) <= len(reasons) else ""

    router = Router(
        new_scheduler(),
        StatefulChain(stuck_at_first, find_hung=find_hung),
        clock=now.__next__,
        step_timeout_s=1.0,
    )
    async with running(router):
        assert await _tokens(router, (1, 2), 9) == answer((1, 2), 9)
        assert router.health.num_recoveries == num_recoveries
        assert limits[: len(reasons)] == [4.0] * len(reasons), (
            "the first micro-batch has four times as long"
        )


@in_event_loop
async def test_a_defect_of_the_hang_watch_does_not_leave_clients_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(in_flight, "HANG_WATCH_INTERVAL_S", 0.0)
    monkeypatch.setattr(in_flight, "RECHECK_S", 0.0)

    def defect(_limit_s: float) -> str:
        raise ZeroDivisionError

    async def stuck(_batch: MicroBatch) -> None:
        await asyncio.Event().wait()

    times, chain = itertools.count(), ScriptedChain(stuck, find_hung=defect)
    router = Router(new_scheduler(), chain, clock=lambda: float(next(times)), step_timeout_s=1.0)
    driving = asyncio.create_task(router.run())
    with pytest.raises(PipelineError, match="ZeroDivisionError"):
        await _tokens(router, (1, 2), 9)
    await driving


@in_event_loop
async def test_a_pipeline_that_waits_for_a_stage_says_since_when() -> None:
    """It is degraded at first; after twice the time of a micro-batch nothing is promised."""
    now, fences, gate = [10.0], list[float](), asyncio.Event()

    async def compute(_batch: MicroBatch) -> None:
        if len(fences) == 1:
            raise PipelineError("a stage died")

    class WaitsForAStage(StatefulChain):
        async def fence(self) -> int:
            fences.append(now[0])
            if len(fences) == 2:
                await gate.wait()
            return await super().fence()

    router = Router(
        new_scheduler(), WaitsForAStage(compute), clock=lambda: now[0], step_timeout_s=30.0
    )
    async with running(router):
        requested = asyncio.create_task(_tokens(router, (1, 2), 2))
        while len(fences) < 2:
            await asyncio.sleep(0)
        seen = []
        for now[0] in (10.0, 69.0, 10.0 + 2 * router.step_limit_s, 1000.0):
            health = router.pipeline_health()
            seen.append((health.status, health.since_s))
        assert seen == [
            ("degraded", 0.0),
            ("degraded", 59.0),
            ("unavailable", 2 * router.step_limit_s),
            ("unavailable", 990.0),
        ]
        gate.set()
        assert await requested == answer((1, 2), 2)
        assert router.pipeline_health() == PipelineHealth("ready")


@in_event_loop
async def test_progress_is_what_comes_back_and_not_how_long_it_takes() -> None:
    """A long prompt in many pieces, each of which takes most of its time; then one piece that never
    comes back.
    """
    now, gate = [0.0], asyncio.Event()

    async def slowly(_batch: MicroBatch) -> None:
        now[0] += 3.0
        await asyncio.sleep(0)
        if now[0] > 30.0:
            await gate.wait()

    router = Router(
        new_scheduler(budget=8, in_flight=1),
        StatefulChain(slowly),
        clock=lambda: now[0],
        step_timeout_s=4.0,
    )
    assert router.pipeline_health().status == "unavailable"
    assert not router.is_healthy, "nothing has begun"
    async with running(router):
        requested = asyncio.create_task(_tokens(router, (1,) * 200, 2))
        while now[0] <= 30.0:
            await asyncio.sleep(0)
            assert router.is_healthy or not router.is_attached
        now[0] += 2 * router.step_limit_s
        assert not router.is_healthy
        gate.set()
        assert await requested == answer((1,) * 200, 2)
        now[0] += 1e6
        assert router.is_healthy, "there is nothing to do"
    assert not router.is_healthy


@pytest.mark.parametrize("hangs", [False, True])
@in_event_loop
async def test_endless_recoveries_are_no_progress(
    hangs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step fails, or hangs until its stage is replaced: router follows router, as in a
    replica, until the stage is well.
    """
    monkeypatch.setattr(in_flight, "HANG_WATCH_INTERVAL_S", 0.0)
    now, is_ill = [0.0], True

    async def ill(_batch: MicroBatch) -> None:
        now[0] += 1.0
        await asyncio.sleep(0)
        if is_ill:
            await (asyncio.Event().wait() if hangs else asyncio.sleep(0))
            raise PipelineError("a stage failed: no kernel runs any more")

    def clock() -> float:
        now[0] += 0.01
        return now[0]

    chain = StatefulChain(ill, find_hung=lambda _: "stage 1 did nothing for too long")
    before, num_looks, was_ill = None, 0, False
    while not was_ill:
        router = Router(new_scheduler(), chain, clock=clock, step_timeout_s=1.0, previous=before)
        driving = asyncio.create_task(router.run())
        requested = [asyncio.create_task(_tokens(router, (n,), 5)) for n in range(8)]
        while router.failure is None and not was_ill:
            await asyncio.sleep(0)
            num_looks += 1
            was_ill = router.is_attached and not router.is_healthy
            assert num_looks < 100_000
        before = router.health
    assert before is not None
    assert before.is_failing
    is_ill = False
    await asyncio.gather(*requested, return_exceptions=True)
    assert await _tokens(router, (7,), 5) == answer((7,), 5)
    assert router.is_healthy, "a micro-batch came back"
    assert not before.is_failing
    driving.cancel()
    await asyncio.gather(driving, return_exceptions=True)


def test_a_limit_follows_what_micro_batches_take() -> None:
    watch = StepDeadline(30.0)
    watch.on_submit(100.0)
    assert watch.overdue_s(219.0) == -1.0
    watch.on_submit(105.0)
    watch.on_complete(110.0, num_in_flight=1)  # after 10 s
    assert watch.limit_s == 40.0
    assert watch.overdue_s(151.0) == 1.0, "since the first one came back"
    watch.on_complete(118.0, num_in_flight=0)
    assert watch.overdue_s(1e9) == -math.inf, "nothing is waited for"
    for _ in range(100):
        watch.on_submit(0.0)
        watch.on_complete(1.0, num_in_flight=0)
    assert watch.limit_s == 30.0, "slow ones are forgotten in time"


@in_event_loop
async def test_the_most_advanced_are_computed_again_first() -> None:
    """One is through its prompt, the next in the middle of its own, the third has waited for a
    place, and still does.
    """
    order: list[int] = []

    async def dies_once(batch: MicroBatch) -> None:
        await asyncio.sleep(0)
        if batch.epoch == 0 and batch.step_id == 2:
            assert [c.start for c in batch.chunks] == [126]
            raise PipelineError("stage 1 died")
        if batch.epoch == 1:
            order.extend(c.seq_id for c in batch.chunks if c.start == 0)

    async with _running(StatefulChain(dies_once), num_places=2, in_flight=1) as router:
        prompts = [(1,), (9,) * 250, (3,)]
        results = await asyncio.gather(*(_tokens(router, prompt, 5) for prompt in prompts))
        assert results == [answer(prompt, 5) for prompt in prompts]
        assert order == [0, 1, 2]
