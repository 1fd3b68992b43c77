"""Chats in turns through a router: the prompt of a turn is that of the turn before, its answer, and
some more.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from exact_values import Values, exact_values
from harness import merge_outputs, random_ids, scheduler_for

from tramontane.proto.plan import PipelinePlan
from tramontane.proto.ports import StageChain, TokenSource
from tramontane.proto.request import Request, SamplingParams
from tramontane.proto.step import StepResult
from tramontane.router.engine.router import Router
from tramontane.router.scheduling.scheduler import Scheduler

NUM_ADDED = 13  # tokens of a turn that are not from the one before
WISHES = (
    SamplingParams(max_tokens=9, temperature=0.0, logprobs=2),
    SamplingParams(
        max_tokens=14, temperature=0.8, seed=5, repetition_penalty=1.3, frequency_penalty=0.4
    ),
    SamplingParams(max_tokens=6, temperature=0.7, seed=6),
)


@dataclass(frozen=True)
class Turn:
    """What one chat got in one turn. ``num_known``: tokens of its prompt that were computed or
    sampled in the turn before.
    """

    answer: Values
    num_known: int
    num_cached: int


def new_chats(num_chats: int, num_common: int = 70, vocab_size: int = 96) -> list[list[int]]:
    """Return prompts that begin with the same tokens, far more than a window of 24."""
    common = random_ids(num_common, 1000, vocab_size)
    return [common + random_ids(5 + 3 * number, number, vocab_size) for number in range(num_chats)]


async def _keep_going(_turn: int) -> None:
    pass


async def take_turns(
    source: TokenSource,
    chats: Sequence[list[int]],
    num_turns: int,
    before_turn: Callable[[int], Awaitable[None]] = _keep_going,
    vocab_size: int = 96,
) -> list[list[Turn]]:
    """Return what each chat got in each turn. All chats take a turn together."""

    async def one(number: int) -> Turn:
        request = Request.of(tuple(texts[number]), WISHES[number % len(WISHES)])
        batches = [batch async for batch in source.generate(request)]
        answer = exact_values(merge_outputs(batches))
        turn = Turn(answer, known[number], sum(batch.num_cached for batch in batches))
        known[number] = len(texts[number]) + len(answer[0])
        texts[number] += [
            *answer[0],
            *random_ids(NUM_ADDED, 100 * number + len(texts[number]), vocab_size),
        ]
        return turn

    texts, known, turns = [list(chat) for chat in chats], [0] * len(chats), []
    for turn in range(num_turns):
        await before_turn(turn)
        turns.append(list(await asyncio.gather(*map(one, range(len(chats))))))
    return turns


def caching_scheduler(
    plan: PipelinePlan, budget: int = 64, *, enable_prefix_caching: bool = True
) -> Scheduler:
    return scheduler_for(plan, budget, enable_prefix_caching=enable_prefix_caching)


async def run_turns(
    chain: StageChain,
    scheduler: Scheduler,
    chats: Sequence[list[int]],
    num_turns: int,
    before_turn: Callable[[Router, int], Awaitable[None]] | None = None,
    observe: Callable[[StepResult], None] | None = None,
) -> list[list[Turn]]:
    """Drive the chain by a router of its own, and return what each chat got in each turn."""
    router = Router(scheduler, chain, observe)
    running = asyncio.create_task(router.run())

    async def begin(turn: int) -> None:
        if before_turn is not None:
            await before_turn(router, turn)

    try:
        return await take_turns(router, chats, num_turns, begin, scheduler.limits.vocab_size)
    finally:
        scheduler.check_integrity()
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running


def check_turns(chain: StageChain, plan: PipelinePlan, num_chats: int = 4) -> None:
    """Assert that caching changes no token or log-probability, and that all but a page of each turn
    before is found.
    """
    chats = new_chats(num_chats)
    without = asyncio.run(
        run_turns(chain, caching_scheduler(plan, enable_prefix_caching=False), chats, 3)
    )
    turns = asyncio.run(run_turns(chain, caching_scheduler(plan), chats, 3))
    assert all(each.num_cached == 0 for turn in without for each in turn)
    assert [[replace(each, num_cached=0) for each in turn] for turn in turns] == without
    page_size = plan.cache.page_size
    assert sum(each.num_cached for each in turns[0]) > 0, (
        "of those that arrive together the later ones find the common text"
    )
    assert all(each.num_cached >= each.num_known - page_size for turn in turns[1:] for each in turn)
