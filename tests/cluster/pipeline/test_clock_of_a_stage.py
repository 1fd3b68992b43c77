"""A pipeline on Ray in which the wall clock of a stage's process is set by an hour, both ways,
while sequences decode.
"""

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from harness import PROMPTS, run_in_process, run_prompts, running_chain, scheduler_for
from small_cluster import small_cluster
from tiny_models import random_model, split_model, tiny_args, tiny_plan, write_checkpoint
from wall_clocks import WallClocks, settable_clocks

from tramontane.cluster.actors.pipeline_spec import PipelineSpec
from tramontane.proto.plan import Link
from tramontane.proto.request import SamplingParams
from tramontane.proto.step import StepResult

pytestmark = [
    pytest.mark.ray,
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray"),
    pytest.mark.skipif(shutil.which("cc") is None, reason="compiles the clock"),
]

HOUR = 3600
ARGS = tiny_args(window=24)
SAMPLING = SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True)
JUMP_AT = {40: HOUR, 90: 0, 140: -HOUR, 180: 0}  # by the number of the micro-batch


@pytest.fixture(scope="module")
def clocks() -> Iterator[WallClocks]:
    with settable_clocks() as clocks, small_cluster(num_cpus=8):
        yield clocks


@ray.remote(num_cpus=0)
class _Clock:
    def read(self) -> tuple[int, float]:
        import os
        import time

        return os.getpid(), time.time()


def test_the_clock_of_one_process_can_be_set(clocks: WallClocks) -> None:
    """Without this the next tests would show nothing."""
    ours, others = _Clock.remote(), _Clock.remote()  # type: ignore[attr-defined]
    pid, before = ray.get(ours.read.remote())
    clocks.set(pid, HOUR)
    while ray.get(ours.read.remote())[1] - before < HOUR:  # bounded by pytest's timeout
        pass
    assert ray.get(others.read.remote())[1] - before < HOUR / 2


@pytest.mark.parametrize(
    "link", [pytest.param("object-store", marks=pytest.mark.nightly), "direct"]
)
def test_no_token_differs_and_no_time_of_a_stage_goes_back(
    clocks: WallClocks, link: Link, tmp_path: Path
) -> None:
    plan = tiny_plan(ARGS, 2)
    folder = write_checkpoint(tmp_path, ARGS, random_model(ARGS))
    prompts = PROMPTS[:6]
    expected = run_in_process(plan, split_model(random_model(ARGS), plan), prompts, SAMPLING)
    spec = PipelineSpec(
        f"clock-{link}", plan, folder, threads_per_stage=1, use_gpus=False, link=link
    )
    timings: list[Any] = []
    with running_chain(spec) as chain:
        pids = [health.pid for health in asyncio.run(chain.health())]

        def observe(result: StepResult) -> None:
            timings.append(result.timings)
            if (off_s := JUMP_AT.get(len(timings))) is not None:
                clocks.set(pids[1], off_s)

        assert (
            asyncio.run(run_prompts(chain, scheduler_for(plan), prompts, SAMPLING, observe=observe))
            == expected
        )
    assert len(timings) > max(JUMP_AT)
    for stage in range(2):
        starts = [each[stage].started_at for each in timings]
        assert starts == sorted(starts)
        assert starts[-1] - starts[0] < HOUR / 2, "nor does one jump forward"
