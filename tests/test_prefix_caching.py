"""Prefix caching on real stages: prompts that begin alike get the tokens that they get without
it.
"""

import asyncio
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from exact_values import Values, exact_values
from examples import examples
from harness import fixed_scheduler, merge_outputs, random_ids
from hypothesis import given, settings
from hypothesis import strategies as st
from request_kinds import with_scarce_pages
from tiny_models import ATTENTION_KINDS, tiny_plan, write_each_kind

from tramontane.cluster.pipeline.local_chain import LocalStageChain
from tramontane.proto.plan import PipelinePlan
from tramontane.proto.request import Request, SamplingParams
from tramontane.router.engine.router import Router
from tramontane.router.scheduling.scheduler import Scheduler
from tramontane.workers.stage.stage_worker import StageWorker

pytestmark = pytest.mark.skipif(
    shutil.which("cc") is None, reason="without kernels in C other chunks have other roundings"
)
WISHES = (
    SamplingParams(max_tokens=9, temperature=0.0),
    SamplingParams(
        max_tokens=14, temperature=0.8, seed=5, repetition_penalty=1.3, presence_penalty=0.4
    ),
    SamplingParams(max_tokens=6, temperature=0.7, seed=6, logprobs=2),
    SamplingParams(max_tokens=5, temperature=0.0, prompt_logprobs=1, frequency_penalty=0.2),
)
Turn = list[tuple[int, ...]]  # prompts that are sent together


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_each_kind(tmp_path_factory.mktemp("models"))


async def _converse(
    chain: LocalStageChain, scheduler: Scheduler, turns: Sequence[Turn]
) -> list[list[Values]]:
    """Send the prompts of each turn together, when those of the turn before have been answered."""
    router = Router(scheduler, chain)
    running = asyncio.create_task(router.run())

    async def one(number: int, prompt: tuple[int, ...]) -> Values:
        request = replace(
            Request.of(prompt, WISHES[number % len(WISHES)]), cache_salt=str(number % 5 == 4)
        )
        return exact_values(merge_outputs([batch async for batch in router.generate(request)]))

    try:
        return [
            list(await asyncio.gather(*(one(*pair) for pair in enumerate(turn)))) for turn in turns
        ]
    finally:
        scheduler.check_integrity()
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running


def _answers(
    folder: Path, plan: PipelinePlan, budget: int, turns: Sequence[Turn], reuses: bool
) -> tuple[list[list[Values]], int]:
    """Return the answers of each turn, and how many tokens were found in the cache."""
    chain = LocalStageChain([StageWorker.load(stage, folder) for stage in plan.stages])
    scheduler = fixed_scheduler(plan, budget, 2, enable_prefix_caching=reuses)
    try:
        return asyncio.run(_converse(chain, scheduler, turns)), scheduler.allocator.num_hit
    finally:
        chain.close()


@st.composite
def conversations(draw: st.DrawFn) -> list[Turn]:
    """Return turns whose prompts begin with a common text, or with one of the turn before, or with
    parts of these.
    """
    texts = [random_ids(draw(st.integers(1, 90)), seed) for seed in range(2)]
    turns: list[Turn] = []
    for turn in range(draw(st.integers(1, 3))):
        prompts: Turn = []
        for number in range(draw(st.integers(1, 5))):
            before = [*texts, *(list(prompt) for each in turns for prompt in each)]
            begin = draw(st.sampled_from(before))[: draw(st.integers(0, 180))]
            prompts.append((*begin, *random_ids(draw(st.integers(1, 40)), 100 * turn + number)))
        turns.append(prompts)
    return turns


@settings(max_examples=examples(8, least=2), deadline=None, derandomize=True)
@given(
    turns=conversations(),
    stages=st.sampled_from([1, 2]),
    page_size=st.sampled_from([1, 4, 16]),
    budget=st.integers(5, 300),
    max_num_seqs=st.integers(1, 4),
    is_scarce=st.booleans(),
)
@pytest.mark.parametrize("kind", ATTENTION_KINDS)
def test_the_same_answers_with_and_without(
    folders: dict[str, Path],
    kind: str,
    turns: list[Turn],
    stages: int,
    page_size: int,
    budget: int,
    max_num_seqs: int,
    is_scarce: bool,
) -> None:
    """Of several turns, windows, page sizes, chunks; scarce pages are taken from cached ones, and
    sequences are preempted.
    """
    plan = tiny_plan(ATTENTION_KINDS[kind], stages, page_size, max_num_seqs)
    plan = with_scarce_pages(plan) if is_scarce else plan
    expected, num_hit = _answers(folders[kind], plan, budget, turns, reuses=False)
    assert num_hit == 0
    assert _answers(folders[kind], plan, budget, turns, reuses=True)[0] == expected


@pytest.mark.parametrize("page_size", [4, 16])
@pytest.mark.parametrize("kind", ATTENTION_KINDS)
def test_a_conversation_finds_nearly_all_of_it(
    folders: dict[str, Path], kind: str, page_size: int
) -> None:
    """With a window, too, which the conversation is far longer than: all but the last page of each
    turn before.
    """
    plan, text = tiny_plan(ATTENTION_KINDS[kind], 2, page_size), random_ids(240, seed=1)
    turns = [[tuple(text[:length])] for length in (60, 120, 180, 240)]
    expected, _ = _answers(folders[kind], plan, 64, turns, reuses=False)
    got, num_hit = _answers(folders[kind], plan, 64, turns, reuses=True)
    assert got == expected
    assert num_hit >= 60 + 120 + 180 - 3 * (page_size - 1)


def test_fences_forget_everything(folders: dict[str, Path]) -> None:
    plan = tiny_plan(ATTENTION_KINDS["window"], 1, 4)
    scheduler = fixed_scheduler(plan, 64, 2)
    prompt = tuple(random_ids(50, seed=2))
    answers = []
    for _ in range(2):  # a new process of the stage: its caches are lost
        chain = LocalStageChain(
            [StageWorker.load(stage, folders["window"]) for stage in plan.stages]
        )
        try:
            scheduler.epoch = -1
            answers.append(asyncio.run(_converse(chain, scheduler, [[prompt], [prompt]])))
        finally:
            chain.close()
    assert answers[0] == answers[1]
    assert scheduler.allocator.num_hit == 2 * 48


def test_threads_do_not_matter(folders: dict[str, Path]) -> None:
    before, plan, text = (
        torch.get_num_threads(),
        tiny_plan(ATTENTION_KINDS["interleaved"], 1, 4),
        random_ids(150, seed=3),
    )
    torch.set_num_threads(2)
    try:
        turns = [[tuple(text[:100])], [tuple(text), tuple(text[:130])]]
        assert (
            _answers(folders["interleaved"], plan, 64, turns, True)[0]
            == _answers(folders["interleaved"], plan, 64, turns, False)[0]
        )
    finally:
        torch.set_num_threads(before)
