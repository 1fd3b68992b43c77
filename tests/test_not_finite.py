"""A sequence whose logits are not finite ends with an error of its own, and changes no bit of any
other.
"""

import asyncio
import logging
import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from exact_values import exact_values
from guessing_drafter import guess
from harness import fixed_scheduler, random_ids, run_answers
from overflowing import (
    ALWAYS,
    NEVER,
    NUM_NEIGHBORS,
    TRIGGER,
    leave_behind,
    neighbor_wishes,
    plant_overflow,
    with_trigger,
    without_trigger,
)
from request_kinds import GRAMMAR, PIECES
from test_async_scheduling import OverlappedChain
from tiny_models import ATTENTION_KINDS, random_model, tiny_plan, write_checkpoint

from tramontane.cluster.config.engine_keys import SpeculativeConfig
from tramontane.cluster.pipeline.local_chain import LocalStageChain
from tramontane.proto.plan import PipelinePlan
from tramontane.proto.request import (
    NOT_FINITE_TOKEN,
    FinishReason,
    Request,
    RequestOutput,
    SamplingParams,
    TokenEvent,
)
from tramontane.router.engine.router import Router
from tramontane.router.scheduling.scheduler import Scheduler
from tramontane.workers.attention.backend import AttentionKernels
from tramontane.workers.attention.sdpa_backend import PagedDecode, SdpaPrefill, cpu_kernels
from tramontane.workers.stage.device_backend import DeviceBackend
from tramontane.workers.stage.stage_worker import StageWorker

KERNELS: dict[str, AttentionKernels | None] = {
    "as chosen": None,
    "PyTorch": cpu_kernels(),
    "PyTorch, by page": AttentionKernels(SdpaPrefill(), PagedDecode()),
}
LENGTHS = (5, 17, 40, 70, 16, 9, 30, 23, 17, 33, 8, 2, 51, 1, 64, 12)
PROMPTS = [without_trigger(random_ids(length, seed)) for seed, length in enumerate(LENGTHS)]
FAILED = TokenEvent(0, NOT_FINITE_TOKEN, FinishReason.ERROR)
ZEROS = 0.0, 0.0  # keys and values that other sequences have left
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)

pytestmark = pytest.mark.skipif(
    shutil.which("cc") is None, reason="without kernels in C other rows have other roundings"
)


class Pipelines:
    """Stages of planted models, each loaded once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._loaded: dict[tuple[str, PipelinePlan], list[tuple[StageWorker, DeviceBackend]]] = {}

    def plan(self, kind: str, stages: int = 1, num_drafts: int = 0) -> PipelinePlan:
        more = {"dtype": "float16", "batch_invariant": True, "num_drafts": num_drafts}
        return tiny_plan(ATTENTION_KINDS[kind], stages, 4, 32, **more)

    def stages(
        self,
        kind: str,
        plan: PipelinePlan,
        kernels: AttentionKernels | None = None,
        left: tuple[float, float] = ZEROS,
    ) -> list[StageWorker]:
        """Return the stages, with these kernels or those that they have chosen, and ``left`` in
        their caches.
        """
        folder = self._folder / kind
        if not folder.exists():
            write_checkpoint(folder, plan.args, plant_overflow(random_model(plan.args)))
        if (kind, plan) not in self._loaded:
            workers = [
                StageWorker.load(stage, folder, read_pieces=lambda: PIECES) for stage in plan.stages
            ]
            self._loaded[kind, plan] = [(worker, worker.backend) for worker in workers]
        for worker, backend in self._loaded[kind, plan]:
            worker.backend = replace(backend, kernels=kernels or backend.kernels)
            leave_behind(worker, *left)
        return [worker for worker, _ in self._loaded[kind, plan]]

    def alone(
        self, kind: str, plan: PipelinePlan, prompt: list[int], sampling: SamplingParams
    ) -> RequestOutput:
        return _answers(self.stages(kind, plan), _scheduler(plan), [prompt], [sampling])[0]


@pytest.fixture(scope="module")
def pipelines(tmp_path_factory: pytest.TempPathFactory) -> Pipelines:
    return Pipelines(tmp_path_factory.mktemp("models"))


def _scheduler(
    plan: PipelinePlan,
    *,
    speculative: SpeculativeConfig | None = None,
    budget: int = 64,
    num_in_flight: int = 2,
    async_scheduling: bool = False,
) -> Scheduler:
    limits = {"speculative": speculative, "async_scheduling": async_scheduling}
    return fixed_scheduler(plan, budget, 4 if speculative else num_in_flight, **limits)


def _answers(
    workers: Sequence[StageWorker],
    scheduler: Scheduler,
    prompts: Sequence[list[int]],
    sampling: Sequence[SamplingParams],
    make_chain: Callable[[Sequence[StageWorker]], LocalStageChain] = LocalStageChain,
) -> list[RequestOutput]:
    chain = make_chain(workers)
    try:
        return asyncio.run(run_answers(chain, scheduler, prompts, sampling))
    finally:
        chain.close()


def _warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("kind", ATTENTION_KINDS)
def test_neighbors_keep_their_bits(pipelines: Pipelines, kind: str, kernels: str) -> None:
    """Of 17 requests one overflows. In its place there was one before that ends with its first
    token, and nothing was NaN.
    """
    plan = pipelines.plan(kind)
    wishes = [neighbor_wishes(number) for number in range(NUM_NEIGHBORS)]
    place = NUM_NEIGHBORS // 2

    def answers(prompt: list[int], left: tuple[float, float]) -> list[RequestOutput]:
        prompts = [*PROMPTS[:place], prompt, *PROMPTS[place:]]
        sampling = [*wishes[:place], replace(GREEDY, max_tokens=1), *wishes[place:]]
        # so that steps are alike: PyTorch's bits depend on the company
        scheduler = _scheduler(plan, num_in_flight=1)
        return _answers(
            pipelines.stages(kind, plan, KERNELS[kernels], left), scheduler, prompts, sampling
        )

    harmless = random_ids(30, 77)
    expected = answers(without_trigger(with_trigger(harmless)), ZEROS)
    found = answers(with_trigger(harmless), (math.nan, math.inf))
    assert found.pop(place).events == (FAILED,)
    del expected[place]
    assert list(map(exact_values, found)) == list(map(exact_values, expected))
    assert all(
        len(answer.events) == wish.max_tokens for answer, wish in zip(found, wishes, strict=True)
    )


@pytest.mark.parametrize(
    ("how", "stages"),
    [
        ("one after the other", 1),
        ("one after the other", 2),
        ("asynchronous", 1),
        ("overlapped", 1),
    ],
)
def test_an_answer_ends_where_it_overflows(
    pipelines: Pipelines, caplog: pytest.LogCaptureFixture, how: str, stages: int
) -> None:
    """Its first token is the one that overflows, in the next step; with asynchronous scheduling
    further steps are in vain.
    """
    plan = pipelines.plan("window", stages=stages)
    scheduler = _scheduler(plan, async_scheduling=how != "one after the other")
    chain = OverlappedChain if how == "overlapped" else LocalStageChain
    wishes = [
        GREEDY,
        replace(GREEDY, logit_bias=ALWAYS),
        SamplingParams(max_tokens=12, temperature=0.8, seed=1, logit_bias=NEVER),
        replace(GREEDY, logit_bias=ALWAYS, logprobs=2, temperature=0.7, seed=3),
    ]
    answers = _answers(pipelines.stages("window", plan), scheduler, PROMPTS[:4], wishes, chain)
    for number in (1, 3):
        assert answers[number].events == (TokenEvent(0, TRIGGER), FAILED)
    assert [each.start for each in answers[3].logprobs] == [len(PROMPTS[3])]
    for number in (0, 2):
        assert exact_values(answers[number]) == exact_values(
            pipelines.alone("window", plan, PROMPTS[number], wishes[number])
        )
    assert sorted(_warnings(caplog)) == [
        "a sequence of request - ends with an error: the logits of its token at position "
        f"{len(PROMPTS[number]) + 1} are not finite"
        for number in (1, 3)
    ]


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("drafted", [5, TRIGGER])
def test_drafts_after_it_are_void_and_drafts_of_it_too(
    pipelines: Pipelines, monkeypatch: pytest.MonkeyPatch, drafted: int, stages: int
) -> None:
    """Its drafts are in the same step, or in steps ahead. A wrong draft that overflows is as any
    wrong draft.
    """
    config = SpeculativeConfig(4, 1, 2)
    plan = pipelines.plan("window", stages=stages, num_drafts=config.max_drafts())
    wishes = [
        GREEDY,
        replace(GREEDY, logit_bias=ALWAYS),
        neighbor_wishes(3),
        replace(GREEDY, grammar=GRAMMAR, max_tokens=40),
    ]
    expected = [
        pipelines.alone("window", plan, prompt, wish)
        for prompt, wish in zip(PROMPTS, wishes, strict=False)
    ]
    guess(monkeypatch, lambda _: drafted, share=1.0)
    scheduler = _scheduler(plan, speculative=config)
    answers = _answers(pipelines.stages("window", plan), scheduler, PROMPTS[:4], wishes)
    assert answers[1].events == (TokenEvent(0, TRIGGER), FAILED)
    assert list(map(exact_values, answers)) == list(map(exact_values, expected))
    assert scheduler.draft_counts.num_draft_tokens > 20


@pytest.mark.parametrize("kind", ["dense", "window"])
def test_log_probabilities_of_a_prompt_end_it(pipelines: Pipelines, kind: str) -> None:
    """Also where the prompt's last token, after a whole window, would not show it, and before its
    last chunk is computed.
    """
    plan = pipelines.plan(kind)
    prompt = [TRIGGER, *random_ids(150, 5, TRIGGER)]
    wish = replace(GREEDY, max_tokens=1, prompt_logprobs=1)
    longer = replace(wish, max_tokens=40)  # than what of the prompt is in flight when it ends
    answers = _answers(
        pipelines.stages(kind, plan),
        _scheduler(plan, budget=32),
        [prompt, PROMPTS[0]],
        [wish, longer],
    )
    assert answers[0].events == (FAILED,)
    assert answers[0].logprobs == ()
    assert answers[1].events[-1].finish is FinishReason.LENGTH


def test_a_grammar_is_not_advanced(pipelines: Pipelines, caplog: pytest.LogCaptureFixture) -> None:
    plan = pipelines.plan("window")
    wish = SamplingParams(max_tokens=100, temperature=1.0, seed=8, grammar=GRAMMAR)
    answers = _answers(
        pipelines.stages("window", plan),
        _scheduler(plan),
        [with_trigger(PROMPTS[3]), PROMPTS[3]],
        [wish, wish],
    )
    assert answers[0].events == (FAILED,)
    assert exact_values(answers[1]) == exact_values(
        pipelines.alone("window", plan, PROMPTS[3], wish)
    )
    assert len(_warnings(caplog)) == 1


@pytest.mark.parametrize("kind", ["window", "dense", "interleaved"])
def test_its_pages_are_offered_to_no_other_sequence(pipelines: Pipelines, kind: str) -> None:
    """Neither those of the overflow nor the prefix before it, which another one has computed."""
    plan = pipelines.plan(kind)
    scheduler, prefix = _scheduler(plan), random_ids(24, 3, TRIGGER)
    bad = [*prefix, *with_trigger(random_ids(60, 4, TRIGGER))]

    async def ask_all() -> list[tuple[int, list[TokenEvent]]]:
        chain = LocalStageChain(pipelines.stages(kind, plan))
        router = Router(scheduler, chain)
        running = asyncio.create_task(router.run())
        found = []
        for prompt in ([*prefix, 1], [*prefix, 2], bad, bad, [*prefix, 3], [*prefix, 3]):
            outputs = [batch async for batch in router.generate(Request.of(tuple(prompt), GREEDY))]
            found.append(
                (
                    sum(each.num_cached for each in outputs),
                    [event for each in outputs for event in each.events],
                )
            )
            scheduler.check_integrity()
        running.cancel()
        chain.close()
        return found

    first, second, failed, again, after, last = asyncio.run(ask_all())
    assert (first[0], second[0], failed[0]) == (0, 24, 24), (
        "the prefix is cached until a sequence that begins with it overflows"
    )
    assert failed[1] == again[1] == [FAILED]
    assert again[0] == 0, "nothing of what has overflowed is used"
    assert (after[0], last[0]) == (0, 24)
    assert after[1] == last[1]
    assert len(after[1]) == GREEDY.max_tokens


def test_minus_infinity_is_no_error(pipelines: Pipelines) -> None:
    """Tokens that may not be chosen have it, and so may all but one."""
    plan = pipelines.plan("dense")
    workers = pipelines.stages("dense", plan)
    assert workers[0].last_stage is not None
    head = workers[0].last_stage._head
    only = torch.full((plan.args.vocab_size,), -torch.inf)
    only[7] = 3.0
    workers[0].last_stage._head = lambda hidden_TD: head(hidden_TD) * 0 + only
    answer = _answers(
        workers,
        _scheduler(plan),
        [PROMPTS[1]],
        [replace(GREEDY, temperature=0.9, seed=1, logprobs=2)],
    )[0]
    assert [event.token_id for event in answer.events] == [7] * 12
    assert answer.logprobs[0].logprobs == (0.0,)
