"""A draft model on an actor of its own: the answers that requests get without it, also while its
process is killed.
"""

import asyncio
import os
import shutil
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import ray
from exact_values import Values, exact_values
from harness import merge_outputs, random_ids, run_answers, running_chain, scheduler_for
from small_cluster import small_cluster
from tiny_models import random_model, tiny_args, tiny_plan, write_checkpoint

from tramontane.cluster.actors import draft_actor
from tramontane.cluster.actors.draft_actor import draft_port
from tramontane.cluster.actors.pipeline_spec import DraftModelSpec, PipelineSpec
from tramontane.cluster.actors.worker_actor import NAMESPACE, WorkerHealth
from tramontane.cluster.pipeline.local_chain import LocalStageChain
from tramontane.cluster.pipeline.stage_chain import ObjectStoreStageChain
from tramontane.proto.errors import CheckpointError, PipelineError
from tramontane.proto.plan import SpeculativeConfig
from tramontane.proto.request import Request, RequestOutput, SamplingParams
from tramontane.router.engine.router import Router, run_with_drafts
from tramontane.router.scheduling.policy import FixedInFlightPolicy
from tramontane.router.scheduling.scheduler import Scheduler
from tramontane.router.scheduling.waiting_queue import SchedulerLimits
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
WISHES = (
    SamplingParams(max_tokens=60, temperature=0.0, logprobs=1),
    SamplingParams(max_tokens=60, temperature=0.8, seed=5, top_p=0.9),
    SamplingParams(
        max_tokens=60, temperature=0.9, seed=6, presence_penalty=0.4, frequency_penalty=0.2
    ),
)
PROMPTS = [random_ids(6 + 9 * number, number, ARGS.vocab_size) for number in range(len(WISHES))]


@pytest.fixture(scope="module", autouse=True)
def _ray() -> Iterator[None]:
    with small_cluster(num_cpus=6):
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model"), ARGS, random_model(ARGS))


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[Values]:
    """The answers without speculation, by a stage in this process."""
    plan = tiny_plan(ARGS, batch_invariant=True)
    chain = LocalStageChain([StageWorker.load(plan.stages[0], folder)])
    try:
        return list(
            map(
                exact_values,
                asyncio.run(
                    run_answers(chain, scheduler_for(plan), PROMPTS, WISHES, together=False)
                ),
            )
        )
    finally:
        chain.close()


@pytest.fixture(scope="module")
def pipeline(folder: Path) -> Iterator[tuple[ObjectStoreStageChain, PipelineSpec]]:
    """Two stages, and the same model as its own draft model, so that its drafts are right."""
    config = SpeculativeConfig(4, 0, 0, "draft_model", str(folder))
    plan = tiny_plan(ARGS, 2, num_drafts=config.max_drafts(), batch_invariant=True)
    draft_model = DraftModelSpec(
        tiny_plan(ARGS, num_drafts=5, batch_invariant=True).stages[0], folder
    )
    spec = PipelineSpec(
        "drafting", plan, folder, threads_per_stage=1, use_gpus=False, draft_model=draft_model
    )
    with running_chain(spec) as chain:
        yield chain, spec


def _scheduler(spec: PipelineSpec) -> Scheduler:
    config = SpeculativeConfig(4, 0, 0, "draft_model")
    limits = SchedulerLimits(
        16,
        BUDGET,
        spec.plan.max_model_len,
        ARGS.vocab_size,
        enable_prefix_caching=True,
        speculative=config,
    )
    return Scheduler(spec.plan.cache, limits, FixedInFlightPolicy(2, BUDGET))


async def _ask(
    chain: ObjectStoreStageChain, spec: PipelineSpec, scheduler: Scheduler, kill: bool
) -> list[Values]:
    """Run all requests at once. ``kill``: the draft model's process, once ten drafts were right."""
    router, was_killed = Router(scheduler, chain), not kill
    running = asyncio.create_task(run_with_drafts(router, draft_port(spec)))

    async def one(prompt: Sequence[int], wish: SamplingParams) -> RequestOutput:
        nonlocal was_killed
        outputs = []
        async for output in router.generate(Request.of(tuple(prompt), wish)):
            outputs.append(output)
            if not was_killed and scheduler.draft_counts.num_accepted_tokens >= 10:
                was_killed = True
                os.kill(_pid(spec), signal.SIGKILL)
        return merge_outputs(outputs)

    try:
        return list(map(exact_values, await asyncio.gather(*map(one, PROMPTS, WISHES))))
    finally:
        scheduler.check_integrity()
        assert was_killed
        assert router.health.num_recoveries == 0, "requests do not need drafts"
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running


def _pid(spec: PipelineSpec) -> int:
    health: WorkerHealth = ray.get(ray.get_actor(spec.draft_name, NAMESPACE).health.remote())
    return health.pid


def _wait_until_loaded(spec: PipelineSpec) -> None:
    actor = ray.get_actor(spec.draft_name, NAMESPACE)
    while True:
        with suppress(ray.exceptions.RayActorError):  # it is being restarted
            assert ray.get(actor.ready.remote()) == "the draft model"
            return
        time.sleep(0.1)


@pytest.mark.parametrize("run", ["undisturbed", "killed", "after it"])
def test_the_same_answers_with_a_draft_model(
    pipeline: tuple[ObjectStoreStageChain, PipelineSpec], expected: list[Values], run: str
) -> None:
    """The third run has the process that has come after the one that was killed."""
    scheduler = _scheduler(pipeline[1])
    _wait_until_loaded(pipeline[1])
    assert asyncio.run(_ask(*pipeline, scheduler, run == "killed")) == expected
    counts = scheduler.draft_counts
    assert counts.num_accepted_tokens >= 10
    assert counts.num_accepted_tokens > counts.num_draft_tokens / 2, (
        "the last ones may follow the end of an answer"
    )


def test_one_that_hangs_gets_a_new_process(
    pipeline: tuple[ObjectStoreStageChain, PipelineSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft_actor, "CALL_TIMEOUT_S", 0.5)
    _wait_until_loaded(pipeline[1])
    hung = _pid(pipeline[1])
    os.kill(hung, signal.SIGSTOP)
    port = draft_port(pipeline[1])
    assert port is not None
    with pytest.raises(PipelineError, match="does not answer"):
        asyncio.run(port.draft([], ()))
    _wait_until_loaded(pipeline[1])
    assert _pid(pipeline[1]) != hung


def _small(name: str, folder: Path, draft_folder: Path) -> PipelineSpec:
    draft_model = DraftModelSpec(tiny_plan(ARGS, num_drafts=5).stages[0], draft_folder)
    plan = tiny_plan(ARGS, 1, num_drafts=4)
    return PipelineSpec(
        name, plan, folder, threads_per_stage=1, use_gpus=False, draft_model=draft_model
    )


def test_a_new_pipeline_needs_its_draft_model(folder: Path, tmp_path: Path) -> None:
    with (
        pytest.raises((CheckpointError, PipelineError), match="could not be started"),
        running_chain(_small("without", folder, tmp_path)),
    ):
        pass


def test_one_that_is_adopted_does_not(folder: Path, tmp_path: Path) -> None:
    """Its draft model's folder has gone, and its process too."""
    copy = shutil.copytree(folder, tmp_path / "copy")
    spec = _small("adopted", folder, copy)
    with running_chain(spec) as chain:
        asyncio.run(chain.fence())
        supervisor = ray.get_actor(spec.supervisor_name, NAMESPACE)
        pid = _pid(spec)
        shutil.rmtree(copy)
        os.kill(pid, signal.SIGKILL)
        assert len(ray.get(supervisor.start.remote(5.0))) == 1


def test_it_is_removed_with_its_pipeline(folder: Path) -> None:
    spec = _small("removed", folder, folder)
    with running_chain(spec):
        ray.get_actor(spec.draft_name, NAMESPACE)
    with pytest.raises(ValueError, match="removed-drafts-0"):
        ray.get_actor(spec.draft_name, NAMESPACE)
