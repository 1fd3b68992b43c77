"""Stage actors as they are on GPUs, on CPUs: several threads for steps, recorded decodes, tables of
pages; over either link.
"""

import asyncio
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from harness import PROMPTS, run_in_process, run_prompts, scheduler_for
from ray.actor import ActorHandle
from small_cluster import small_cluster
from tiny_models import random_model, split_model, tiny_args, tiny_plan, write_checkpoint

from tramontane.cluster.actors.pipeline_spec import WorkerSettings
from tramontane.cluster.actors.stage_actor import GPU_PIPELINE_DEPTH, StageActor, remote_stage_class
from tramontane.cluster.actors.stage_control import fence_stages
from tramontane.cluster.pipeline.stage_chain import DirectStageChain, ObjectStoreStageChain
from tramontane.proto.plan import Link

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore::DeprecationWarning:ray")]

ARGS = tiny_args(n_layers=4, windows=(24, None, 24, None), moe=False)
CHAINS: dict[Link, type[ObjectStoreStageChain]] = {
    "object-store": ObjectStoreStageChain,
    "direct": DirectStageChain,
}


class _Computes:
    """Records by computing again."""

    def __call__(self, compute: Callable[[], object]) -> Callable[[], object]:
        return compute


class _Reached:
    """An event of a device that has completed its work."""

    def wait(self) -> None: ...

    def seconds_since(self, _earlier: object) -> float:
        return 0.001


class _OverlappedStage(StageActor):
    """Has what a GPU would have, but for the GPU: its marks are reached when they are made."""

    def _load(self) -> Any:  # an actor that is sent imports where it runs
        from tramontane.workers.attention.backend import AttentionKernels
        from tramontane.workers.attention.sdpa_backend import PagedDecode, SdpaPrefill
        from tramontane.workers.stage.device_backend import DeviceBackend
        from tramontane.workers.stage.stage_worker import StageWorker

        loaded = super()._load()
        backend = DeviceBackend(
            AttentionKernels(SdpaPrefill(), PagedDecode()),
            graph_capture=_Computes(),
            make_event=_Reached,
        )
        return StageWorker(loaded.plan, loaded.model, backend=backend)

    def _make_executor(self) -> Any:
        from tramontane.workers.stage.step_executor import OverlappedExecutor

        return OverlappedExecutor(self._wait_until_loaded(), 2)


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list["ActorHandle[Any]"]]:
    folder: Path = write_checkpoint(tmp_path_factory.mktemp("model"), ARGS, random_model(ARGS))
    with small_cluster(num_cpus=4):
        this_module = sys.modules[__name__]
        ray.cloudpickle.register_pickle_by_value(this_module)  # actors cannot import tests
        settings = WorkerSettings(folder, "cpu", threads=1)
        kind = remote_stage_class(_OverlappedStage, GPU_PIPELINE_DEPTH + 1)
        yield [
            kind.options(num_cpus=1).remote(stage, settings) for stage in tiny_plan(ARGS, 3).stages
        ]
        ray.cloudpickle.unregister_pickle_by_value(this_module)


@pytest.mark.parametrize("link", CHAINS)
def test_same_tokens_as_step_by_step(stages: list["ActorHandle[Any]"], link: Link) -> None:
    plan = tiny_plan(ARGS, 3)
    expected = run_in_process(plan, split_model(random_model(ARGS), plan), PROMPTS[:16], budget=64)
    # fenced again, the same stages begin anew
    for epoch in (10, 11) if link == "object-store" else (20, 21):
        fence_stages(stages, epoch, "tests", link)
        chain = CHAINS[link](stages, stages[0], "tests")
        chain.fence = _fenced(epoch)  # type: ignore[method-assign]
        assert asyncio.run(run_prompts(chain, scheduler_for(plan, 64), PROMPTS[:16])) == expected


def _fenced(epoch: int) -> Any:
    async def fence() -> int:
        return epoch

    return fence
