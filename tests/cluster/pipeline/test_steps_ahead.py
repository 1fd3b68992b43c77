"""Stages that take turns, over Ray: the next step is submitted while the last one is computed, and
has its tokens.
"""

import asyncio
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import ray
from harness import PROMPTS, run_in_process, run_prompts, running_chain, scheduler_for
from small_cluster import small_cluster
from tiny_models import random_model, split_model, tiny_args, tiny_plan, write_checkpoint

from tramontane.cluster.actors.pipeline_spec import PipelineSpec
from tramontane.cluster.pipeline.stage_chain import ObjectStoreStageChain
from tramontane.proto.plan import Link
from tramontane.proto.request import SamplingParams
from tramontane.proto.step import MicroBatch, StepResult
from tramontane.router.scheduling.balanced_policy import BalancedPolicy
from tramontane.router.scheduling.policy import FixedInFlightPolicy, Policy
from tramontane.router.scheduling.round_times import HostGap

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore::DeprecationWarning:ray")]

ARGS = tiny_args(window=24)
LENGTH = 40
KINDS = [
    SamplingParams(max_tokens=LENGTH, temperature=0.0, ignore_eos=True),
    SamplingParams(max_tokens=LENGTH, temperature=0.8, seed=5, top_p=0.9),
    SamplingParams(
        max_tokens=LENGTH, temperature=0.9, seed=6, repetition_penalty=1.3, presence_penalty=0.4
    ),
    SamplingParams(
        max_tokens=LENGTH, temperature=1.0, seed=7, stop_token_ids=tuple(range(30)), logprobs=1
    ),
]
WISHES = [KINDS[number % len(KINDS)] for number in range(len(PROMPTS))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model"), ARGS, random_model(ARGS))


@pytest.fixture(scope="module", autouse=True)
def _ray() -> Iterator[None]:
    with small_cluster(num_cpus=8):
        yield


def _spec(folder: Path, link: Link) -> PipelineSpec:
    plan = replace(tiny_plan(ARGS, 2, 8), max_concurrent_stages=1)
    return PipelineSpec(
        f"ahead-{link}", plan, folder, threads_per_stage=1, use_gpus=False, link=link
    )


def _expected(spec: PipelineSpec) -> list[list[int]]:
    workers = split_model(random_model(ARGS), spec.plan)
    return [
        run_in_process(spec.plan, workers, [prompt], wish)[0]
        for prompt, wish in zip(PROMPTS, WISHES, strict=True)
    ]


class _Counted:
    """A chain that counts the steps that were submitted with placeholders."""

    def __init__(self, chain: ObjectStoreStageChain, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_lookahead, submit = 0, chain.submit

        def counted(batch: MicroBatch) -> object:
            self.num_lookahead += batch.decodes.has_placeholders
            return submit(batch)

        monkeypatch.setattr(chain, "submit", counted)


@pytest.mark.parametrize(
    ("is_balanced", "link"),
    [
        (False, "direct"),
        pytest.param(True, "object-store", marks=pytest.mark.nightly),
        pytest.param(False, "object-store", marks=pytest.mark.nightly),
        pytest.param(True, "direct", marks=pytest.mark.nightly),
    ],
)
def test_the_same_tokens(
    folder: Path, monkeypatch: pytest.MonkeyPatch, link: Link, is_balanced: bool
) -> None:
    spec = _spec(folder, link)
    policy: Policy = FixedInFlightPolicy(2, 64)
    if is_balanced:
        policy = BalancedPolicy(2, 64, None, 1, async_scheduling=True)
        # whatever the machine's times are
        monkeypatch.setattr(HostGap, "is_long", lambda _self, _step_s: True)
    with running_chain(spec) as chain:
        counted = _Counted(chain, monkeypatch)
        scheduler = scheduler_for(spec.plan, 64, policy)
        scheduler.limits = replace(scheduler.limits, async_scheduling=True)
        found = asyncio.run(run_prompts(chain, scheduler, PROMPTS, WISHES))
    assert found == _expected(spec)
    assert counted.num_lookahead > LENGTH // 2


@pytest.mark.parametrize(
    ("stage", "link"),
    [
        pytest.param(0, "object-store", marks=pytest.mark.nightly),
        (1, "direct"),
        pytest.param(1, "object-store", marks=pytest.mark.nightly),
        pytest.param(0, "direct", marks=pytest.mark.nightly),
    ],
)
def test_a_stage_that_dies_loses_no_token(
    folder: Path, monkeypatch: pytest.MonkeyPatch, link: Link, stage: int
) -> None:
    """The step that goes ahead fails with the one before it, and no step after the fence waits for
    either.
    """
    spec, steps = _spec(folder, link), list[StepResult]()
    with running_chain(spec) as chain:
        pid = ray.get(chain.stages[stage].health.options(concurrency_group="control").remote()).pid
        counted = _Counted(chain, monkeypatch)

        def kill_once(result: StepResult) -> None:
            steps.append(result)
            if len(steps) == 20:
                os.kill(pid, signal.SIGKILL)

        scheduler = scheduler_for(spec.plan, 64, FixedInFlightPolicy(2, 64))
        scheduler.limits = replace(scheduler.limits, async_scheduling=True)
        found = asyncio.run(run_prompts(chain, scheduler, PROMPTS, WISHES, observe=kill_once))
    assert found == _expected(spec)
    assert len({step.epoch for step in steps}) == 2
    assert counted.num_lookahead > LENGTH // 2
