"""The head node dies while a pipeline starts, and comes back: the pipeline starts nonetheless."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from killable_head import KillableHead, killable_head
from serve_cluster import leftovers

from tramontane.cluster.actors.pipeline_spec import PipelineSpec
from tramontane.cluster.config.engine_config import EngineConfig
from tramontane.cluster.pipeline.engine import pipeline_spec, validate_model
from tramontane.cluster.pipeline.lifecycle import running_pipeline
from tramontane.cluster.planning.hardware import probe_cluster
from tramontane.cluster.ray_internals import table

pytestmark = [
    pytest.mark.ray,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning"),
]

SETTINGS = {"dtype": "float32", "stages": 2, "max_num_seqs": 4, "threads_per_stage": 1}
States = dict[str, str]  # of the living actors, by name


@pytest.fixture(scope="module")
def cluster() -> Iterator[KillableHead]:
    with killable_head("one", "two") as cluster, cluster.connected("one"):
        yield cluster


def _states() -> States:
    actors = table.GLOBAL_STATE.value.actor_table(None, None, None).values()
    return {each["Name"]: each["State"] for each in actors if each["State"] != "DEAD"}


def _kill_head_when(
    has_begun: Callable[[States], bool], cluster: KillableHead, killed: list[States]
) -> None:
    while not has_begun(states := _states()):
        time.sleep(0.01)
    cluster.kill("head")
    killed.append(states)
    cluster.start("head")


def _supervised(states: States) -> bool:
    return bool(states)


def _created(states: States) -> bool:
    """Their leases are requested: the phase in which Ray leaves actors pending (issue 66199)."""
    return len(states) == 3


def _loading(states: States) -> bool:
    return list(states.values()) == ["ALIVE"] * 3


@pytest.mark.nightly
@pytest.mark.parametrize(
    "has_begun",
    [
        _created,
        pytest.param(_supervised, marks=pytest.mark.nightly),
        pytest.param(_loading, marks=pytest.mark.nightly),
    ],
)
def test_a_pipeline_starts(
    has_begun: Callable[[States], bool], cluster: KillableHead, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = EngineConfig.build(None, SETTINGS)
    name = f"pipeline{has_begun.__name__}"
    spec = replace(pipeline_spec(config, validate_model(config), probe_cluster(True)), name=name)
    killed: list[States] = []
    killer = threading.Thread(
        target=_kill_head_when, args=(has_begun, cluster, killed), daemon=True
    )
    killer.start()
    assert asyncio.run(_epoch_after_start(spec)) > 0
    killer.join()
    assert killed
    assert not leftovers()


async def _epoch_after_start(spec: PipelineSpec) -> int:
    async with running_pipeline(spec) as chain:
        return await chain.fence()
