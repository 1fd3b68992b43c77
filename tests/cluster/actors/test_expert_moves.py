"""How experts are moved between actors, and how an actor is created, with actors and a key-value store that the test plays."""

from types import SimpleNamespace
from typing import Any

import pytest
import ray
from local_expert_actors import expert_plan, without_experts
from ray.exceptions import RayActorError, RayTaskError
from tiny_models import tiny_args, tiny_plan

from tramontane.cluster.actors import expert_actor, pipeline_spec
from tramontane.cluster.actors.expert_actor import create_expert_actor, rebalance_experts
from tramontane.cluster.actors.pipeline_spec import PipelineSpec
from tramontane.proto.errors import PipelineError
from tramontane.proto.model_folder import RandomWeights

ARGS = tiny_args(n_layers=2)
OLD = expert_plan(ARGS, 2)
NEW = OLD.with_assignment([actor.experts for actor in reversed(OLD.actors)])
SPEC = PipelineSpec("app-0", without_experts(tiny_plan(ARGS, 2), OLD), RandomWeights(), threads_per_stage=1, use_gpus=False)


class Cluster:
    """Records calls to actors, and when a plan is stored; each of the first ``errors`` is raised by one call."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[object, ...]] = []
        self.errors: list[Exception] = []
        self._stored: dict[str, bytes] = {}
        monkeypatch.setattr(ray, "get_actor", lambda name, _: _Actor(self, name))
        monkeypatch.setattr(ray, "get", lambda call: call())
        monkeypatch.setattr(pipeline_spec, "kv_get", self._stored.get)
        monkeypatch.setattr(pipeline_spec, "kv_put", self._store)
        monkeypatch.setattr(expert_actor, "RETRY_S", 0.0)

    def _store(self, key: str, value: bytes) -> None:
        self.calls.append(("store",))
        self._stored[key] = value

    def call(self, *call: object) -> None:
        self.calls.append(call)
        if self.errors:
            raise self.errors.pop(0)


class _Actor:
    def __init__(self, cluster: Cluster, name: str) -> None:
        self._cluster, self._name = cluster, name

    def __getattr__(self, method: str) -> SimpleNamespace:
        return SimpleNamespace(remote=lambda *arguments: lambda: self._cluster.call(self._name, method, *arguments))


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    return Cluster(monkeypatch)


def test_experts_are_unloaded_only_after_every_stage_has_the_new_plan(cluster: Cluster) -> None:
    assert rebalance_experts(SPEC, NEW) == sum(len(actor.experts) for actor in NEW.actors)
    assert SPEC.expert_actors is not None
    assert SPEC.expert_actors.current_plan() == NEW
    for stored in (number for number, call in enumerate(cluster.calls) if call == ("store",)):
        before, after = cluster.calls[stored - 2 : stored], cluster.calls[stored + 1 : stored + 7]
        plan = [call[2] for call in before]
        assert before == after[:2] == [(f"app-0-experts-{n}", "load_experts", plan[n]) for n in (0, 1)], "also restarted ones"
        assert after[2:4] == [("app-0-stage-0", "refresh_expert_plan"), ("app-0-stage-1", "refresh_expert_plan")]
        assert after[4:] == [(f"app-0-experts-{n}", "unload_experts", plan[n]) for n in (0, 1)]
    assert cluster.calls[-1][2] == NEW.actors[1].experts


def test_a_move_that_was_interrupted_is_completed_first(cluster: Cluster) -> None:
    assert rebalance_experts(SPEC, OLD) == 0
    assert cluster.calls == [
        (f"app-0-experts-{actor.actor_id}", method, actor.experts)
        for method in ("unload_experts", "load_experts")
        for actor in OLD.actors
    ]


def test_an_actor_that_restarts_is_called_again(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_actor, "MAX_ATTEMPTS", 3)
    cluster.errors = [RayActorError(), RayActorError()]
    assert rebalance_experts(SPEC, OLD) == 0
    assert len(cluster.calls) == 4 + 2
    cluster.errors = [RayActorError() for _ in range(3)]
    with pytest.raises(PipelineError, match="app-0-experts-0 was unavailable 3 times in a row"):
        rebalance_experts(SPEC, OLD)


def test_an_error_of_an_actor_ends_a_move(cluster: Cluster) -> None:
    cluster.errors = [RayTaskError("unload_experts", "a traceback", ValueError("no memory"))]
    with pytest.raises(RayTaskError):
        rebalance_experts(SPEC, OLD)
    assert len(cluster.calls) == 1


def test_an_expert_actor_restarts_however_often_it_dies_and_no_call_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {}
    arguments: list[object] = []

    def remote(**given: object) -> Any:  # noqa: ANN401
        def with_options(**more: object) -> SimpleNamespace:
            options.update(more)
            return SimpleNamespace(remote=lambda *created: arguments.extend(created))

        options.update(given)
        return lambda _: SimpleNamespace(options=with_options)

    monkeypatch.setattr(ray, "remote", remote)
    monkeypatch.setattr(expert_actor, "bundle_options", lambda _spec, bundle, _group: {"bundle": bundle})
    group: Any = None
    create_expert_actor(SPEC, 1, group)
    assert (options["max_restarts"], options["max_task_retries"]) == (-1, 0)
    assert options["concurrency_groups"] == {"control": 2, "moving": 1}
    assert (options["name"], options["bundle"]) == ("app-0-experts-1", 3)
    assert arguments == [SPEC.expert_actors, 1, SPEC.worker_settings]
