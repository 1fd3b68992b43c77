"""Speculation on real stages: the answers that sequences get without it, bit for bit."""

import asyncio
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from exact_values import Values, exact_values
from guessing_drafter import WRONG, count_ahead, guess
from harness import merge_outputs, random_ids
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import ATTENTION_KINDS, random_model, tiny_plan, write_checkpoint

from tramontane.cluster.pipeline.local_chain import LocalStageChain
from tramontane.proto.plan import PipelinePlan, SpeculativeConfig
from tramontane.proto.request import ExpertChoices, FinishReason, SamplingParams, SequenceRequest
from tramontane.router.engine.router import Router
from tramontane.router.scheduling.admission import SchedulerLimits
from tramontane.router.scheduling.policy import FixedInFlightPolicy
from tramontane.router.scheduling.scheduler import Scheduler
from tramontane.router.structured.grammar import ResponseFormat, build_grammar
from tramontane.workers.stage.stage_worker import StageWorker

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="without kernels in C other rows have other roundings")
PIECES = tuple(chr(32 + i).encode() for i in range(95))  # of the tiny model, whose vocabulary is larger by one
RHYMES = {"type": "object", "properties": {"rhymes": {"type": "array", "items": {"enum": ["moon", "june"]}}}}
GRAMMAR = build_grammar(ResponseFormat.model_validate({"type": "json_schema", "json_schema": {"name": "r", "schema": RHYMES}}))
GREEDY = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
WISHES = (
    GREEDY,
    SamplingParams(max_tokens=30, temperature=0.8, seed=5, top_p=0.9),
    SamplingParams(max_tokens=24, temperature=0.9, seed=5, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2),
    SamplingParams(max_tokens=20, temperature=0.7, seed=6, logprobs=2, prompt_logprobs=1, stop_token_ids=(7, 8, 9)),
    SamplingParams(max_tokens=40, temperature=1.0, seed=7, min_tokens=9, stop_token_ids=tuple(range(20)), logprobs=1),
    SamplingParams(max_tokens=40, temperature=1.0, seed=8, grammar=GRAMMAR),
    SamplingParams(max_tokens=40, temperature=1.0, seed=9, grammar=GRAMMAR, presence_penalty=1.0, logprobs=0),
    SamplingParams(max_tokens=12, temperature=0.8, seed=5, return_experts=(1,)),
    SamplingParams(max_tokens=30, temperature=0.8, seed=5, choice=1),
)
PROMPTS = [tuple(random_ids(length, seed)) for seed, length in enumerate((5, 17, 40, 70, 16, 9, 30, 23, 17))]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        kind: write_checkpoint(tmp_path_factory.mktemp("models") / "m", args, random_model(args))
        for kind, args in ATTENTION_KINDS.items()
    }


def _scheduler(plan: PipelinePlan, budget: int, config: SpeculativeConfig | None) -> Scheduler:
    limits = SchedulerLimits(
        plan.max_num_seqs, budget, plan.max_model_len, plan.args.vocab_size, reuses_prefixes=True, speculative=config
    )
    return Scheduler(plan.cache, limits, FixedInFlightPolicy(4, budget))


Answer = tuple[Values, FinishReason | None, tuple[tuple[int, ...], ...]]  # with the experts of all tokens in the order of layers


async def _ask(chain: LocalStageChain, scheduler: Scheduler, chosen: Sequence[int]) -> list[Answer]:
    router = Router(scheduler, chain)
    running = asyncio.create_task(router.run())

    async def one(number: int) -> Answer:
        spec = SequenceRequest(PROMPTS[number], WISHES[number])
        answer = merge_outputs([batch async for batch in router.generate([spec])])
        return exact_values(answer), answer.events[-1].finish, _experts(answer.experts)

    try:
        return list(await asyncio.gather(*map(one, chosen)))
    finally:
        scheduler.check_integrity()
        assert router.health.num_recoveries == 0, "a stage that fails would be recovered, and the answers be the same"
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running


def _experts(choices: Sequence[ExpertChoices]) -> tuple[tuple[int, ...], ...]:
    return tuple(ids for each in sorted(choices, key=lambda each: (each.layer, each.start)) for ids in each.expert_ids)


def _answers(folder: Path, plan: PipelinePlan, scheduler: Scheduler, chosen: Sequence[int] = range(len(WISHES))) -> list[Answer]:
    chain = LocalStageChain([StageWorker.load(stage, folder, read_pieces=lambda: PIECES) for stage in plan.stages])
    try:
        return asyncio.run(_ask(chain, scheduler, chosen))
    finally:
        chain.close()


def _guess_from(patch: pytest.MonkeyPatch, answers: Sequence[Answer], share: float) -> None:
    """Draft from these answers, each token rightly with this probability."""
    texts = [(*prompt, *token_ids) for prompt, ((token_ids, _), *_) in zip(PROMPTS, answers, strict=True)]

    def next_token(text: Sequence[int]) -> int:
        known = tuple(text)
        return next((each[len(known)] for each in texts if each[: len(known)] == known and len(each) > len(known)), WRONG)

    guess(patch, next_token, share)


@settings(max_examples=4, deadline=None, derandomize=True)
@given(
    share=st.sampled_from([0.0, 0.6, 0.9, 1.0]),
    num_drafts=st.integers(1, 6),
    stages=st.sampled_from([1, 2, 4]),
    page_size=st.sampled_from([1, 4, 16]),
    budget=st.integers(5, 300),
    is_scarce=st.booleans(),
)
@pytest.mark.parametrize("kind", ATTENTION_KINDS)
def test_the_same_answers_with_and_without(
    folders: dict[str, Path], kind: str, share: float, num_drafts: int, stages: int, page_size: int, budget: int, is_scarce: bool
) -> None:
    """Greedy, seeded, penalized, with grammars and log-probabilities, packed together; with scarce pages some are preempted."""
    args, config = ATTENTION_KINDS[kind], SpeculativeConfig(num_drafts, 1, 2)
    plan = tiny_plan(args, min(stages, 3) if args.sparse else stages, page_size, 16, num_drafts=config.max_drafts())
    if is_scarce:
        longest = -(-plan.max_model_len // page_size)
        classes = tuple(replace(c, num_pages=min(c.num_pages, longest + longest // 2)) for c in plan.cache.classes)
        plan = replace(plan, stages=tuple(replace(s, cache=replace(s.cache, classes=classes)) for s in plan.stages))
    expected = _answers(folders[kind], plan, _scheduler(plan, budget, None))
    scheduler = _scheduler(plan, budget, config)
    with pytest.MonkeyPatch.context() as patch:
        _guess_from(patch, expected, share)
        assert _answers(folders[kind], plan, scheduler) == expected
    counts = scheduler.draft_counts
    assert counts.num_draft_tokens > 0
    if share == 1.0:
        assert counts.num_accepted_tokens > counts.num_draft_tokens / 2, "the last ones may follow the end of an answer"
    if share == 0.0:
        assert counts.num_accepted_tokens < counts.num_draft_tokens / 10, "a wrong one may be sampled all the same"


@pytest.mark.parametrize("share", [0.0, 0.6, 1.0])
def test_the_same_answer_of_a_stream_whose_drafts_go_ahead(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    config = SpeculativeConfig(3, 1, 2)
    plan = tiny_plan(ATTENTION_KINDS["window"], 2, 4, 16, num_drafts=config.max_drafts())
    expected = _answers(folders["window"], plan, _scheduler(plan, 64, None))
    _guess_from(monkeypatch, expected, share)
    ahead = count_ahead(monkeypatch)
    for number in (0, 1):  # greedy and seeded
        assert _answers(folders["window"], plan, _scheduler(plan, 64, config), (number,)) == [expected[number]]
    assert ahead
