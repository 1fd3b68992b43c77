"""How many ingress replicas the planner starts."""

from dataclasses import replace

import pytest
from tiny_models import tiny_args

from tramontane.cluster.config.engine_config import EngineConfig
from tramontane.cluster.planning.hardware import Gpu, Hardware
from tramontane.cluster.planning.ingresses import choose_num_ingresses, describe_ingresses
from tramontane.cluster.planning.plan_search import plan_pipeline
from tramontane.cluster.serving.app import application
from tramontane.cluster.serving.server import _with_choices
from tramontane.proto.plan import PipelinePlan
from tramontane.proto.units import GIB

GPU = Gpu("NVIDIA H100 80GB HBM3", 79 * GIB)


def _plan(num_seqs: int) -> PipelinePlan:
    plan = plan_pipeline(EngineConfig(stages=1), tiny_args(), Hardware((8,), (8 * GIB,)))
    return replace(
        plan, stages=tuple(replace(stage, max_num_seqs=num_seqs) for stage in plan.stages)
    )


def _chosen(cores: tuple[int, ...], num_seqs: int, gpus: int = 1, **keys: int) -> int:
    hardware = Hardware(cores, (64 * GIB,) * len(cores), (GPU,) * gpus)
    return choose_num_ingresses(EngineConfig(**keys), _plan(num_seqs), hardware)


@pytest.mark.parametrize(
    ("cores", "num_seqs", "num_ingresses"),
    [
        *(((16,), 1, 1), ((16,), 32, 1), ((16,), 62, 1)),
        # more than two, and the proxy would be the limit
        *(((16,), 63, 2), ((16,), 128, 2), ((16,), 256, 2)),
        *(((2,), 256, 1), ((4,), 256, 1), ((7,), 256, 1), ((8,), 256, 2), ((128,), 256, 2)),
        *(((16, 16), 256, 3), ((4, 4), 256, 2), ((2, 2), 256, 1)),  # each node has a proxy
        ((7, 7), 256, 2),  # three cores of each are not four
    ],
)
def test_where_there_are_gpus_and_cores_tokens_are_written_when_they_come(
    cores: tuple[int, ...], num_seqs: int, num_ingresses: int
) -> None:
    assert _chosen(cores, num_seqs) == num_ingresses


@pytest.mark.parametrize("cores", [1, 2, 16, 128])
def test_without_gpus_stages_need_all_cores(cores: int) -> None:
    assert _chosen((cores,), 256, gpus=0) == 1
    assert _chosen((cores,), 256, gpus=0, replicas=2) == 2


def test_what_is_configured_counts() -> None:
    assert [_chosen((16,), 256, ingress_replicas=number) for number in (1, 2, 5)] == [1, 2, 5]


def test_there_are_never_fewer_than_the_pipelines_need() -> None:
    """Two serve on while one of them is replaced."""
    assert [_chosen((2,), 1, gpus=2, replicas=number) for number in (1, 2, 64)] == [1, 2, 4]


def test_the_events_of_all_pipelines_count() -> None:
    assert (_chosen((16,), 40), _chosen((16,), 40, gpus=2, replicas=2)) == (1, 2)
    assert (
        describe_ingresses(EngineConfig(replicas=2), _plan(40), 2)
        == "the planner has chosen 2 ingress replicas (key ingress_replicas): 4000 tokens per"
        " second are to be expected, one replica writes 3125 of them when they come, and the"
        " proxy of a machine passes on 4667"
    )


@pytest.mark.parametrize(
    ("cores", "said"), [(2, []), (16, ["the planner has chosen 2 ingress replicas"])]
)
def test_a_server_starts_what_is_chosen_and_says_so(cores: int, said: list[str]) -> None:
    reports: list[str] = []
    hardware = Hardware((cores,), (64 * GIB,), (GPU,))
    config = _with_choices(EngineConfig(), _plan(64), hardware, reports.append)
    assert [report.partition(" (")[0] for report in reports] == said
    assert config.num_ingresses == 1 + len(said)
    assert application(config)._bound_deployment.num_replicas == config.num_ingresses  # type: ignore[attr-defined]
