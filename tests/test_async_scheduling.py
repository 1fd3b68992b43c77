"""Asynchronous scheduling on a real stage: the answers that sequences get without it, bit for bit."""

import asyncio
import logging
import shutil
from collections.abc import Awaitable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from request_kinds import PROMPTS, WISHES, answers_of, with_scarce_pages
from tiny_models import ATTENTION_KINDS, random_model, tiny_plan, write_checkpoint

from tramontane.cluster.pipeline.local_chain import LocalStageChain
from tramontane.proto.plan import PipelinePlan
from tramontane.proto.request import FinishReason
from tramontane.proto.step import MicroBatch, StepResult
from tramontane.router.scheduling.admission import SchedulerLimits
from tramontane.router.scheduling.policy import FixedInFlightPolicy, Policy
from tramontane.router.scheduling.scheduler import Scheduler
from tramontane.workers.stage.activation import Activation, PendingOutcome
from tramontane.workers.stage.stage_worker import StageWorker
from tramontane.workers.stage.step_executor import OverlappedExecutor

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="without kernels in C other rows have other roundings")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        kind: write_checkpoint(tmp_path_factory.mktemp("models") / "m", args, random_model(args))
        for kind, args in ATTENTION_KINDS.items()
    }


def _scheduler(plan: PipelinePlan, budget: int, policy: Policy, *, async_scheduling: bool) -> Scheduler:
    limits = SchedulerLimits(plan.max_num_seqs, budget, plan.max_model_len, plan.args.vocab_size, reuses_prefixes=True)
    return Scheduler(plan.cache, replace(limits, async_scheduling=async_scheduling), policy)


def _synchronous(plan: PipelinePlan, budget: int) -> Scheduler:
    return _scheduler(plan, budget, FixedInFlightPolicy(2, budget), async_scheduling=False)


def _asynchronous(plan: PipelinePlan, budget: int) -> Scheduler:
    return _scheduler(plan, budget, FixedInFlightPolicy(2, budget), async_scheduling=True)


class Now:
    """A mark of a device that computes at once."""

    def wait(self) -> None:
        pass

    def seconds_since(self, _earlier: object) -> float:
        return 1e-3


class OverlappedChain(LocalStageChain):
    """A stage as on a GPU: the next step is launched while the last one is not read. ``launched`` counts both."""

    def __init__(self, stages: Sequence[StageWorker]) -> None:
        super().__init__(stages)
        (worker,) = stages
        worker.backend = replace(worker.backend, make_event=Now)  # type: ignore[arg-type]
        self._executor = OverlappedExecutor(worker, 2)
        self._steps = ThreadPoolExecutor(max_workers=3)

    def submit(self, batch: MicroBatch) -> Awaitable[StepResult]:
        outcome = asyncio.get_running_loop().run_in_executor(self._steps, self._executor.step, batch, lambda: None)
        return outcome  # type: ignore[return-value]  # the last stage's are results

    async def fence(self) -> int:
        epoch = self.stages[0].epoch + 1
        await asyncio.get_running_loop().run_in_executor(self._thread, self._executor.fence, epoch)
        return epoch

    def close(self) -> None:
        self._executor.interrupt()
        self._steps.shutdown()
        super().close()


@settings(max_examples=6, deadline=None, derandomize=True)
@given(
    page_size=st.sampled_from([1, 4, 16]),
    budget=st.integers(5, 300),
    max_num_seqs=st.integers(2, 9),
    is_scarce=st.booleans(),
    is_overlapped=st.booleans(),
)
@pytest.mark.parametrize("kind", ATTENTION_KINDS)
def test_the_same_answers_with_and_without(
    folders: dict[str, Path], kind: str, page_size: int, budget: int, max_num_seqs: int, is_scarce: bool, is_overlapped: bool
) -> None:
    """Greedy, seeded, penalized, with grammars, log-probabilities and experts, packed together; some are preempted."""
    plan = tiny_plan(ATTENTION_KINDS[kind], 1, page_size, max_num_seqs)
    plan = with_scarce_pages(plan) if is_scarce else plan
    expected = answers_of(folders[kind], plan, _synchronous(plan, budget))
    chain = OverlappedChain if is_overlapped else LocalStageChain
    assert answers_of(folders[kind], plan, _asynchronous(plan, budget), make_chain=chain) == expected


@pytest.mark.parametrize("number", range(len(WISHES)))
def test_the_same_answer_of_a_single_stream(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    """Steps begin with tokens that the router does not know. At most one is in vain, and that breaks no grammar."""
    plan, found = tiny_plan(ATTENTION_KINDS["window"], 1, 4, 4), list[bool]()
    expected = answers_of(folders["window"], plan, _synchronous(plan, 64), [number])
    launch = StageWorker.launch

    def counted(worker: StageWorker, batch: MicroBatch, incoming: Activation | None) -> PendingOutcome:
        found.append(batch.decodes.has_placeholders)
        return launch(worker, batch, incoming)

    monkeypatch.setattr(StageWorker, "launch", counted)
    assert answers_of(folders["window"], plan, _asynchronous(plan, 64), [number]) == expected
    assert any(found)
    if WISHES[number].grammar:
        assert expected[0][1] is FinishReason.STOP
    num_chunks, num_tokens = -(-len(PROMPTS[number]) // 64), len(expected[0][0][0])
    assert len(found) <= num_chunks + num_tokens - 1 + 1
    assert not [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
