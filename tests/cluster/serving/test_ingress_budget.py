"""How many ingresses serve, and how often one of them writes to its streams."""

import pytest

from tramontane.cluster.config.engine_config import EngineConfig
from tramontane.cluster.serving.app import application
from tramontane.cluster.serving.ingress import write_budget


@pytest.mark.parametrize(
    ("keys", "num_ingresses"),
    [
        ({}, 1),
        ({"replicas": 2}, 2),
        ({"max_replicas": 2}, 2),
        ({"replicas": 32}, 2),
        ({"replicas": 33}, 3),
        ({"replicas": 64}, 4),
    ],
)
def test_more_than_one_ingress_where_there_is_more_than_one_pipeline(
    keys: dict[str, int], num_ingresses: int
) -> None:
    def replicas(config: EngineConfig) -> object:
        return application(config)._bound_deployment.num_replicas  # type: ignore[attr-defined]

    assert replicas(EngineConfig.build(None, keys)) == num_ingresses
    assert replicas(EngineConfig.build(None, keys | {"ingress_replicas": 1})) == 1


@pytest.mark.parametrize(
    ("cores", "ingresses", "writes_per_s"),
    [(1, 1, 50), (2, 1, 100), (2, 2, 50), (64, 1, 400), (64, 4, 400), (1, 60, 1)],
)
def test_an_ingress_writes_at_most_as_often_as_one_process_can(
    cores: int, ingresses: int, writes_per_s: int
) -> None:
    """Ingresses share the cores of a machine, and each of them runs on one core at a time."""
    assert write_budget(cores, ingresses) == writes_per_s
