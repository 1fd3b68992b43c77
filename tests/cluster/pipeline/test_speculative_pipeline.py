"""Speculation and asynchronous scheduling on Ray's actors: the answers that requests get without,
also while a stage dies.
"""

import asyncio
import os
import shutil
import signal
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import pytest
import ray
from exact_values import Values, exact_values
from guessing_drafter import WRONG, count_ahead, guess
from harness import merge_outputs, random_ids, run_answers, running_chain, scheduler_for
from local_expert_actors import expert_plan, without_experts
from small_cluster import small_cluster
from tiny_models import random_model, tiny_args, tiny_plan, write_checkpoint, write_tokenizer

from tramontane.cluster.actors.pipeline_spec import PipelineSpec, TokenPieceLoader
from tramontane.cluster.pipeline.local_chain import LocalStageChain
from tramontane.cluster.pipeline.stage_chain import ObjectStoreStageChain
from tramontane.proto.plan import Link, PipelinePlan, SpeculativeConfig
from tramontane.proto.request import (
    FinishReason,
    Request,
    RequestOutput,
    SamplingParams,
)
from tramontane.proto.step import StepResult
from tramontane.router.engine.router import Router
from tramontane.router.scheduling.policy import FixedInFlightPolicy
from tramontane.router.scheduling.scheduler import Scheduler
from tramontane.router.scheduling.waiting_queue import SchedulerLimits
from tramontane.router.structured.grammar import ResponseFormat, build_grammar
from tramontane.workers.stage.stage_worker import StageWorker

pytestmark = [
    pytest.mark.ray,
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray"),
    pytest.mark.skipif(
        shutil.which("cc") is None, reason="without kernels in C other rows have other roundings"
    ),
]

ARGS = replace(tiny_args(n_layers=4, windows=(None, 24, 7, None), max_seq_len=256), vocab_size=300)
BUDGET = 64
CONFIG = SpeculativeConfig(4, prompt_lookup_min=2, prompt_lookup_max=4)
RHYMES = {
    "type": "object",
    "properties": {"rhymes": {"type": "array", "items": {"enum": ["moon", "june"]}, "maxItems": 2}},
    "required": ["rhymes"],
}
GRAMMAR = build_grammar(
    ResponseFormat.model_validate(
        {"type": "json_schema", "json_schema": {"name": "r", "schema": RHYMES}}
    )
)
FEW = ((40, 100.0), (50, 97.0))  # so that only these two tokens come, and n-grams are found
WISHES = (
    SamplingParams(max_tokens=45, temperature=0.0, logit_bias=FEW, logprobs=1),
    SamplingParams(max_tokens=45, temperature=0.8, seed=5, top_p=0.9, logit_bias=FEW),
    SamplingParams(
        max_tokens=45,
        temperature=0.9,
        seed=5,
        repetition_penalty=1.3,
        frequency_penalty=0.02,
        logit_bias=FEW,
    ),
    SamplingParams(
        max_tokens=60, temperature=0.7, seed=6, logprobs=2, prompt_logprobs=1, logit_bias=FEW
    ),
    SamplingParams(max_tokens=40, temperature=0.0),
    SamplingParams(
        max_tokens=40,
        temperature=0.9,
        seed=7,
        presence_penalty=0.4,
        frequency_penalty=0.2,
        logprobs=0,
    ),
    SamplingParams(max_tokens=40, temperature=0.7, seed=8, grammar=GRAMMAR, logprobs=0),
    SamplingParams(
        max_tokens=40, temperature=1.0, seed=9, min_tokens=20, stop_token_ids=tuple(range(100))
    ),
)
PROMPTS = [random_ids(6 + 2 * number, number, ARGS.vocab_size) * 3 for number in range(len(WISHES))]
TOGETHER = tuple(range(len(WISHES)))
ALONE = (3,)  # one stream; it is the longest, so it ends alone among others too
# How likely each draft is right; None: n-grams of the text are the drafts.
SHARES = {"n-grams": None, "right": 1.0, "mostly right": 0.7, "wrong": 0.0}


class Answer(NamedTuple):
    values: Values
    finish: FinishReason | None


class Case(NamedTuple):
    link: Link
    num_stages: int
    num_actors: int = 0  # of experts; 0: they are in the stages

    @property
    def name(self) -> str:
        return f"{self.link}-{self.num_stages}" + (
            f"-experts-{self.num_actors}" if self.num_actors else ""
        )


CASES = (
    pytest.param(Case("object-store", 2), marks=pytest.mark.nightly),
    Case("direct", 3),
    Case("direct", 2, num_actors=1),
)


@dataclass(frozen=True)
class Pipeline:
    chain: ObjectStoreStageChain
    plan: PipelinePlan


@pytest.fixture(scope="module", autouse=True)
def _ray() -> Iterator[None]:
    with small_cluster(num_cpus=6):
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(
        write_checkpoint(tmp_path_factory.mktemp("model"), ARGS, random_model(ARGS))
    )


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[Answer]:
    """The answers without speculation, by a stage in this process, one after the other."""
    plan = tiny_plan(ARGS, batch_invariant=True)
    chain = LocalStageChain(
        [
            StageWorker.load(
                plan.stages[0], folder, read_pieces=TokenPieceLoader(folder, ARGS.vocab_size)
            )
        ]
    )
    try:
        answers = list(
            map(
                _answer,
                asyncio.run(
                    run_answers(chain, scheduler_for(plan), PROMPTS, WISHES, together=False)
                ),
            )
        )
    finally:
        chain.close()
    ended = [
        wish
        for wish, answer in zip(WISHES, answers, strict=True)
        if answer.finish is FinishReason.STOP
    ]
    assert ended == [wish for wish in WISHES if wish.grammar or wish.stop_token_ids]
    return answers


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.name)
def pipeline(request: pytest.FixtureRequest, folder: Path) -> Iterator[Pipeline]:
    case: Case = request.param
    plan = tiny_plan(ARGS, case.num_stages, num_drafts=CONFIG.max_drafts(), batch_invariant=True)
    if case.num_actors:
        plan = without_experts(
            plan, replace(expert_plan(ARGS, case.num_actors), batch_invariant=True)
        )
    pieces = TokenPieceLoader(folder, ARGS.vocab_size)
    spec = PipelineSpec(
        f"drafts-{case.name}",
        plan,
        folder,
        threads_per_stage=1,
        use_gpus=False,
        link=case.link,
        pieces=pieces,
    )
    with running_chain(spec) as chain:
        yield Pipeline(chain, plan)


def _scheduler(plan: PipelinePlan) -> Scheduler:
    limits = SchedulerLimits(
        24,
        BUDGET,
        plan.max_model_len,
        plan.args.vocab_size,
        enable_prefix_caching=True,
        speculative=CONFIG,
    )
    return Scheduler(plan.cache, limits, FixedInFlightPolicy(len(plan.stages), BUDGET))


def _answer(output: RequestOutput) -> Answer:
    assert all(event.finish is None for event in output.events[:-1])
    return Answer(exact_values(output), output.events[-1].finish)


def _guess_from(patch: pytest.MonkeyPatch, answers: Sequence[Answer], share: float | None) -> None:
    """Draft from these answers, each token rightly with this probability; by n-grams without
    one.
    """
    if share is None:
        return
    texts = [(*prompt, *answer.values[0]) for prompt, answer in zip(PROMPTS, answers, strict=True)]

    def next_token(text: Sequence[int]) -> int:
        known = tuple(text)
        return next(
            (
                each[len(known)]
                for each in texts
                if each[: len(known)] == known and len(each) > len(known)
            ),
            WRONG,
        )

    guess(patch, next_token, share)


@dataclass
class Watch:
    """What happens to one run. With a ``pid``, this process is killed once so many tokens have
    come, and a draft was right.

    Without speculation, once so many tokens have come.
    """

    scheduler: Scheduler
    pid: int = 0
    kill_after: int = 0
    num_tokens: int = 0
    was_killed: bool = False
    # drafts, by epoch, when its first result came
    accepted_before: dict[int, int] = field(default_factory=dict)

    @property
    def num_accepted(self) -> int:
        return self.scheduler.draft_counts.num_accepted_tokens

    def on_result(self, result: StepResult) -> None:
        self.accepted_before.setdefault(result.epoch, self.num_accepted)

    def on_output(self, output: RequestOutput) -> None:
        self.num_tokens += len(output.events)
        is_due = self.num_accepted or self.scheduler.limits.speculative is None
        if self.pid and not self.was_killed and self.num_tokens >= self.kill_after and is_due:
            self.was_killed = True
            os.kill(self.pid, signal.SIGKILL)


async def _ask(
    chain: ObjectStoreStageChain, watch: Watch, chosen: Sequence[int]
) -> tuple[list[Answer], int]:
    """Run these requests at once; return their answers, and how often the router has recovered the
    pipeline.
    """
    router = Router(watch.scheduler, chain, watch.on_result)
    running = asyncio.create_task(router.run())

    async def one(number: int) -> Answer:
        outputs = []
        async for output in router.generate(Request.of(tuple(PROMPTS[number]), WISHES[number])):
            outputs.append(output)
            watch.on_output(output)
        return _answer(merge_outputs(outputs))

    try:
        return list(await asyncio.gather(*map(one, chosen))), router.health.num_recoveries
    finally:
        watch.scheduler.check_integrity()
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running


@pytest.mark.parametrize("drafts", SHARES)
def test_the_same_answers_with_and_without(
    pipeline: Pipeline, expected: list[Answer], monkeypatch: pytest.MonkeyPatch, drafts: str
) -> None:
    """Greedy, seeded, penalized, with log-probabilities and a grammar, packed together; no answer
    waits for a recovery.
    """
    _guess_from(monkeypatch, expected, SHARES[drafts])
    ahead = count_ahead(monkeypatch)
    watch = Watch(_scheduler(pipeline.plan))
    answers, num_recoveries = asyncio.run(_ask(pipeline.chain, watch, TOGETHER))
    assert answers == expected
    assert num_recoveries == 0
    counts = watch.scheduler.draft_counts
    assert counts.num_draft_tokens > 0
    if drafts == "wrong":
        assert counts.num_accepted_tokens < counts.num_draft_tokens / 10, (
            "a wrong one may be sampled all the same"
        )
    else:
        assert counts.num_accepted_tokens > 0
    if drafts != "n-grams":  # which are found or not
        assert ahead, "the last streams leave stages idle"
    if drafts == "right":
        assert counts.num_accepted_tokens > counts.num_draft_tokens / 2, (
            "the last ones may follow the end of an answer"
        )


@pytest.mark.parametrize(
    ("drafts", "chosen", "dying", "kill_after"),
    [("n-grams", ALONE, 0, 20), ("mostly right", TOGETHER, 1, 100)],
    ids=["first-stage-one-stream", "second-stage-many-streams"],
)
def test_the_same_answers_while_the_process_of_a_stage_is_killed(
    pipeline: Pipeline,
    expected: list[Answer],
    monkeypatch: pytest.MonkeyPatch,
    drafts: str,
    chosen: tuple[int, ...],
    dying: int,
    kill_after: int,
) -> None:
    """Some drafts are right before it, and some after."""
    _guess_from(monkeypatch, expected, SHARES[drafts])
    stage = pipeline.chain.stages[dying]
    watch = Watch(_scheduler(pipeline.plan), ray.get(stage.health.remote()).pid, kill_after)
    answers, num_recoveries = asyncio.run(_ask(pipeline.chain, watch, chosen))
    assert answers == [expected[number] for number in chosen]
    assert watch.was_killed
    assert num_recoveries > 0
    assert ray.get(stage.health.remote()).pid != watch.pid
    # when the first result after the recovery came
    num_before = list(watch.accepted_before.values())[1]
    assert 0 < num_before < watch.num_accepted


@pytest.mark.parametrize(
    "link", [pytest.param("object-store", marks=pytest.mark.nightly), "direct"]
)
def test_the_same_answers_of_steps_that_are_submitted_before_tokens_are_known(
    folder: Path, expected: list[Answer], link: Link
) -> None:
    """All at once, one alone, and while the process of the only stage is killed."""
    plan = tiny_plan(ARGS, 1, batch_invariant=True)
    pieces = TokenPieceLoader(folder, ARGS.vocab_size)
    spec = PipelineSpec(
        f"async-{link}", plan, folder, threads_per_stage=1, use_gpus=False, link=link, pieces=pieces
    )
    limits = SchedulerLimits(
        24,
        BUDGET,
        plan.max_model_len,
        ARGS.vocab_size,
        enable_prefix_caching=True,
        async_scheduling=True,
    )
    with running_chain(spec) as chain:
        for chosen, is_killed in ((TOGETHER, False), (ALONE, False), (TOGETHER, True)):
            pid = ray.get(chain.stages[0].health.remote()).pid if is_killed else 0
            watch = Watch(
                Scheduler(plan.cache, limits, FixedInFlightPolicy(2, BUDGET)), pid, kill_after=100
            )
            answers, num_recoveries = asyncio.run(_ask(chain, watch, chosen))
            assert answers == [expected[number] for number in chosen]
            assert watch.was_killed == is_killed == bool(num_recoveries)
