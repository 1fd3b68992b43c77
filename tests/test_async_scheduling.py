"""Asynchronous scheduling on a real stage: the answers that sequences get without it, bit for
bit.
"""

import asyncio
import logging
import shutil
from collections.abc import Awaitable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from examples import examples
from harness import fixed_scheduler
from hypothesis import given, settings
from hypothesis import strategies as st
from request_kinds import PROMPTS, WISHES, answers_of, with_scarce_pages
from tiny_models import (
    ATTENTION_KINDS,
    random_model,
    split_model,
    tiny_plan,
    write_each_kind,
)

from tramontane.cluster.pipeline.local_chain import LocalStageChain
from tramontane.proto.errors import StaleEpochError
from tramontane.proto.plan import PipelinePlan
from tramontane.proto.request import NOT_FINITE_TOKEN, FinishReason, SamplingParams
from tramontane.proto.step import PLACEHOLDER_TOKEN, Chunk, DecodeColumns, MicroBatch, StepResult
from tramontane.router.scheduling.scheduler import Scheduler
from tramontane.workers.stage.hidden_states import HiddenStates
from tramontane.workers.stage.stage_worker import StageWorker
from tramontane.workers.stage.step_executor import OverlappedExecutor
from tramontane.workers.stage.step_record import PendingStep

pytestmark = pytest.mark.skipif(
    shutil.which("cc") is None, reason="without kernels in C other rows have other roundings"
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_each_kind(tmp_path_factory.mktemp("models"))


def _synchronous(plan: PipelinePlan, budget: int) -> Scheduler:
    return fixed_scheduler(plan, budget, 2)


def _asynchronous(plan: PipelinePlan, budget: int) -> Scheduler:
    return fixed_scheduler(plan, budget, 2, async_scheduling=True)


class Now:
    """A mark of a device that computes at once."""

    def wait(self) -> None:
        pass

    def seconds_since(self, _earlier: object) -> float:
        return 1e-3


class OverlappedChain(LocalStageChain):
    """A stage as on a GPU: the next step is launched while the last one is not read. ``launched``
    counts both.
    """

    def __init__(self, stages: Sequence[StageWorker]) -> None:
        super().__init__(stages)
        (worker,) = stages
        worker.backend = replace(worker.backend, make_event=Now)  # type: ignore[arg-type]
        self._executor = OverlappedExecutor(worker, 2)
        self._steps = ThreadPoolExecutor(max_workers=3)

    def submit(self, batch: MicroBatch) -> Awaitable[StepResult]:
        outcome = asyncio.get_running_loop().run_in_executor(
            self._steps, self._executor.step, batch, lambda: None
        )
        return outcome  # type: ignore[return-value]  # the last stage's are results

    async def fence(self) -> int:
        epoch = self.stages[0].epoch + 1
        await asyncio.get_running_loop().run_in_executor(self._thread, self._executor.fence, epoch)
        return epoch

    def close(self) -> None:
        self._executor.interrupt()
        self._steps.shutdown()
        super().close()


class RelayingChain(LocalStageChain):
    """Stages that take turns: the first one gets the result of the step before, and the others the
    same columns as without.
    """

    _last: StepResult | None = None

    async def fence(self) -> int:
        self._last = None
        return await super().fence()

    def _run(self, batch: MicroBatch) -> StepResult:
        first, *others = self.stages
        carried = first.step(batch, self._last)
        for stage in others:
            assert isinstance(carried, HiddenStates)
            carried = stage.step(batch, carried)
        assert isinstance(carried, StepResult)
        self._last = carried
        return carried


@settings(max_examples=examples(4, least=2), deadline=None, derandomize=True)
@given(
    budget=st.integers(5, 300),
    max_num_seqs=st.integers(2, 9),
    is_scarce=st.booleans(),
    num_stages=st.integers(2, 3),
)
@pytest.mark.parametrize("kind", ATTENTION_KINDS)
def test_the_same_answers_of_stages_that_take_turns(
    folders: dict[str, Path],
    kind: str,
    budget: int,
    max_num_seqs: int,
    is_scarce: bool,
    num_stages: int,
) -> None:
    """The last stage has sampled what the first one begins with."""
    plan = tiny_plan(ATTENTION_KINDS[kind], num_stages, 4, max_num_seqs)
    plan = with_scarce_pages(plan) if is_scarce else plan
    expected = answers_of(folders[kind], plan, _synchronous(plan, budget))
    found, fill_in = list[bool](), StageWorker.fill_in

    def counted(worker: StageWorker, batch: MicroBatch, last: StepResult) -> MicroBatch:
        found.append(batch.decodes.has_placeholders)
        return fill_in(worker, batch, last)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(StageWorker, "fill_in", counted)
        assert (
            answers_of(folders[kind], plan, _asynchronous(plan, budget), make_chain=RelayingChain)
            == expected
        )
    assert any(found)


@settings(max_examples=examples(6, least=2), deadline=None, derandomize=True)
@given(
    page_size=st.sampled_from([1, 4, 16]),
    budget=st.integers(5, 300),
    max_num_seqs=st.integers(2, 9),
    is_scarce=st.booleans(),
    is_overlapped=st.booleans(),
)
@pytest.mark.parametrize("kind", ATTENTION_KINDS)
def test_the_same_answers_with_and_without(
    folders: dict[str, Path],
    kind: str,
    page_size: int,
    budget: int,
    max_num_seqs: int,
    is_scarce: bool,
    is_overlapped: bool,
) -> None:
    """Greedy, seeded, penalized, with grammars, log-probabilities and experts, packed together;
    some are preempted.
    """
    plan = tiny_plan(ATTENTION_KINDS[kind], 1, page_size, max_num_seqs)
    plan = with_scarce_pages(plan) if is_scarce else plan
    expected = answers_of(folders[kind], plan, _synchronous(plan, budget))
    chain = OverlappedChain if is_overlapped else LocalStageChain
    assert (
        answers_of(folders[kind], plan, _asynchronous(plan, budget), make_chain=chain) == expected
    )


@pytest.mark.parametrize("number", range(len(WISHES)))
def test_the_same_answer_of_a_single_stream(
    folders: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    number: int,
) -> None:
    """Steps begin with tokens that the router does not know. At most one is in vain, and that
    breaks no grammar.
    """
    plan, found = tiny_plan(ATTENTION_KINDS["window"], 1, 4, 4), list[bool]()
    expected = answers_of(folders["window"], plan, _synchronous(plan, 64), [number])
    launch = StageWorker.launch

    def counted(
        worker: StageWorker, batch: MicroBatch, incoming: HiddenStates | None
    ) -> PendingStep:
        found.append(batch.decodes.has_placeholders)
        return launch(worker, batch, incoming)

    monkeypatch.setattr(StageWorker, "launch", counted)
    assert answers_of(folders["window"], plan, _asynchronous(plan, 64), [number]) == expected
    assert any(found)
    if WISHES[number].grammar:
        assert expected[0][1] is FinishReason.STOP
    num_chunks, num_tokens = -(-len(PROMPTS[number]) // 64), len(expected[0][0][0])
    assert len(found) <= num_chunks + num_tokens - 1 + 1
    assert not [
        record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING
    ]


def test_the_first_of_several_stages_takes_tokens_from_the_result_of_the_step_before() -> None:
    """Chunks' tokens come first in a result; a sequence without a token has ended, and gets any
    token of the vocabulary.
    """
    plan = tiny_plan(ATTENTION_KINDS["window"], 2, 4, 4)
    first, _ = split_model(random_model(ATTENTION_KINDS["window"]), plan)
    first.fence(0)
    wish = SamplingParams()
    pages = [tuple((number,) for _ in plan.cache.classes) for number in range(3)]
    chunks = tuple(
        Chunk(number, 0, (5,), pages[number], wish, needs_sample=number != 1) for number in range(3)
    )
    first.step(MicroBatch(0, 0, chunks), None)
    batch = MicroBatch(
        0,
        1,
        (),
        (),
        DecodeColumns((2, 1, 0), (1, 1, 1), (PLACEHOLDER_TOKEN, 40, PLACEHOLDER_TOKEN)),
    )
    filled = first.fill_in(batch, StepResult(0, 0, (50, 60), ()))
    assert filled.decodes.token_ids == (60, 40, 50)
    assert replace(filled, decodes=batch.decodes) == batch
    ended = first.fill_in(batch, StepResult(0, 0, (NOT_FINITE_TOKEN, 60), ()))
    assert ended.decodes.token_ids == (60, 40, 0)
    known = replace(batch, decodes=DecodeColumns((1,), (1,), (40,)))
    assert first.fill_in(known, StepResult(0, 0, (50, 60), ())) is known
    with pytest.raises(StaleEpochError):
        first.step(replace(batch, epoch=1), StepResult(1, 0, (50, 60), ()))
    for not_the_one_before in (StepResult(0, 1, (50, 60), ()), StepResult(1, 0, (50, 60), ())):
        with pytest.raises(AssertionError):
            first.fill_in(batch, not_the_one_before)
