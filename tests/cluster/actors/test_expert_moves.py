"""How experts are moved between actors, how an actor is created, and what it does, without Ray."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NoReturn

import numpy as np
import pytest
import ray
import torch
from local_expert_actors import expert_plan, without_experts
from ray.exceptions import RayActorError, RayTaskError
from tiny_models import tiny_args, tiny_plan

from tramontane.cluster.actors import expert_actor, pipeline_spec, worker_actor
from tramontane.cluster.actors.expert_actor import (
    ExpertActor,
    create_expert_actor,
    rebalance_experts,
)
from tramontane.cluster.actors.pipeline_spec import PipelineSpec
from tramontane.proto.errors import ExpertRelocatedError, ExpertUnavailableError, PipelineError
from tramontane.proto.model_folder import RandomWeights, WeightSource
from tramontane.proto.plan import ExpertPlan
from tramontane.workers.experts.expert_link import DirectExpertClient, ExpertMessageLayout
from tramontane.workers.experts.expert_worker import ExpertCall, ExpertWorker
from tramontane.workers.links.tcp_channel import TcpChannelFactory

HOST = "127.0.0.1"
LIMIT_S = 30.0  # after which a test fails that would wait forever
ARGS = tiny_args(n_layers=2)
OLD = expert_plan(ARGS, 2)
NEW = OLD.with_assignment([actor.experts for actor in reversed(OLD.actors)])
SPEC = PipelineSpec(
    "app-0",
    without_experts(tiny_plan(ARGS, 2), OLD),
    RandomWeights(),
    threads_per_stage=1,
    use_gpus=False,
)


class Cluster:
    """Records calls to actors, and when a plan is stored; each of the first ``errors`` is raised by
    one call.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[object, ...]] = []
        self.errors: list[Exception] = []
        self.sleeps: list[float] = []
        self._stored: dict[str, bytes] = {}
        monkeypatch.setattr(ray, "get_actor", lambda name, _: _Actor(self, name))
        monkeypatch.setattr(ray, "get", lambda call: call())
        monkeypatch.setattr(pipeline_spec, "kv_get", self._stored.get)
        monkeypatch.setattr(pipeline_spec, "kv_put", self._store)
        monkeypatch.setattr(expert_actor, "time", SimpleNamespace(sleep=self.sleeps.append))

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
        return SimpleNamespace(
            remote=lambda *arguments: lambda: self._cluster.call(self._name, method, *arguments)
        )


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
        assert (
            before == after[:2] == [(f"app-0-experts-{n}", "load_experts", plan[n]) for n in (0, 1)]
        ), "also restarted ones"
        assert after[2:4] == [
            ("app-0-stage-0", "refresh_expert_plan"),
            ("app-0-stage-1", "refresh_expert_plan"),
        ]
        assert after[4:] == [(f"app-0-experts-{n}", "unload_experts", plan[n]) for n in (0, 1)]
    assert cluster.calls[-1][2] == NEW.actors[1].experts


def test_a_move_that_was_interrupted_is_completed_first(cluster: Cluster) -> None:
    assert rebalance_experts(SPEC, OLD) == 0
    assert cluster.calls == [
        (f"app-0-experts-{actor.actor_id}", method, actor.experts)
        for method in ("unload_experts", "load_experts")
        for actor in OLD.actors
    ]


def test_an_actor_that_restarts_is_called_again(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expert_actor, "MAX_ATTEMPTS", 3)
    cluster.errors = [RayActorError(), RayActorError()]
    assert rebalance_experts(SPEC, OLD) == 0
    assert cluster.sleeps == [expert_actor.RETRY_S] * 2
    assert len(cluster.calls) == 4 + 2
    cluster.errors = [RayActorError() for _ in range(3)]
    with pytest.raises(PipelineError, match="app-0-experts-0 was unavailable 3 times in a row"):
        rebalance_experts(SPEC, OLD)


def test_an_error_of_an_actor_ends_a_move(cluster: Cluster) -> None:
    cluster.errors = [RayTaskError("unload_experts", "a traceback", ValueError("no memory"))]
    with pytest.raises(RayTaskError):
        rebalance_experts(SPEC, OLD)
    assert len(cluster.calls) == 1


def test_an_expert_actor_restarts_however_often_it_dies_and_no_call_is_repeated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options: dict[str, Any] = {}
    arguments: list[object] = []

    def remote(**given: object) -> Any:
        def with_options(**more: object) -> SimpleNamespace:
            options.update(more)
            return SimpleNamespace(remote=lambda *created: arguments.extend(created))

        options.update(given)
        return lambda _: SimpleNamespace(options=with_options)

    monkeypatch.setattr(ray, "remote", remote)
    monkeypatch.setattr(
        expert_actor, "bundle_options", lambda _spec, bundle, _group: {"bundle": bundle}
    )
    group: Any = None
    create_expert_actor(SPEC, 1, group)
    assert (options["max_restarts"], options["max_task_retries"]) == (-1, 0)
    assert options["concurrency_groups"] == {"control": 2, "moving": 1}
    assert (options["name"], options["bundle"]) == ("app-0-experts-1", 3)
    assert arguments == [SPEC.expert_actors, 1, SPEC.worker_settings]


class LocalActor:
    """An expert actor in this process. Its experts begin to load after ``may_load`` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.may_load = threading.Event()
        self.logged: list[tuple[tuple[str, ...], dict[str, object]]] = []
        values: dict[str, bytes] = {}
        for name, fake in (
            ("kv_get", values.get),
            ("kv_put", values.__setitem__),
            ("kv_delete", values.pop),
        ):
            monkeypatch.setattr(worker_actor, name, fake)
        context = SimpleNamespace(get_actor_id=lambda: "actor", get_node_id=lambda: "node")
        monkeypatch.setattr(pipeline_spec, "kv_get", values.get)
        monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
        monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: HOST)
        monkeypatch.setattr(worker_actor, "start_periodic_thread", lambda *_: None)
        monkeypatch.setattr(ExpertActor, "_exporter", lambda _: None)
        monkeypatch.setattr(ExpertWorker, "load", self._load)
        logs: Any = SimpleNamespace(
            to_stderr=lambda *names, **labels: self.logged.append((names, labels))
        )
        assert SPEC.expert_actors is not None
        self.actor = ExpertActor(
            SPEC.expert_actors, 1, replace(SPEC.worker_settings, logs=logs, threads=3)
        )

    def _load(
        self, plan: ExpertPlan, actor_id: int, weights: WeightSource, *others: Any
    ) -> ExpertWorker:
        assert self.may_load.wait(LIMIT_S)
        worker = ExpertWorker(plan, weights, *others)
        worker.load_experts(plan.actors[actor_id].experts)
        return worker


@pytest.fixture
def local(monkeypatch: pytest.MonkeyPatch) -> LocalActor:
    return LocalActor(monkeypatch)


def _computed(
    actor: ExpertActor, call: ExpertCall, rows_CD: torch.Tensor
) -> tuple[float, torch.Tensor, int]:
    """Return the reply of a call over the object store, and with how many threads it was
    computed.
    """

    def run() -> tuple[float, torch.Tensor, int]:
        busy_s, reply = actor.run(tuple(call), rows_CD.view(torch.uint8).reshape(-1).numpy())
        assert (reply.dtype, reply.shape) == (np.uint8, (rows_CD.nbytes,))
        return (
            busy_s,
            torch.from_numpy(reply).view(torch.float32).view(call.num_rows, ARGS.dim),
            torch.get_num_threads(),
        )

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(run).result()


def test_an_actor_computes_over_both_links_what_its_worker_computes(local: LocalActor) -> None:
    local.may_load.set()
    assert local.actor.ready() == local.actor.label == OLD.actors[1].label
    assert local.logged == [(("experts",), {"pipeline": "app-0", "actor": 1})]
    layer, expert = OLD.actors[1].experts[0]
    call, rows_CD = (
        ExpertCall(layer, (expert,), (3,)),
        torch.arange(3.0 * ARGS.dim).view(3, -1) / 64,
    )
    expected_CD = ExpertWorker.load(OLD, 1, RandomWeights()).run(call, rows_CD).rows_CD

    busy_s, computed_CD, num_threads = _computed(local.actor, call, rows_CD)
    assert torch.equal(computed_CD, expected_CD)
    assert num_threads == 3
    health = local.actor.health()
    assert (health.busy_s, health.num_rows) == (busy_s, 3)

    changed, layout = threading.Event(), ExpertMessageLayout.of(OLD, torch.device("cpu"))
    client = DirectExpertClient(
        local.actor.open_link, changed.set, layout, HOST, TcpChannelFactory(), "experts"
    )
    assert changed.wait(LIMIT_S)
    assert torch.equal(client.call(call, rows_CD).result(LIMIT_S).rows_CD, expected_CD)
    client.close()
    assert local.actor.health().num_rows == 6


def test_an_actor_that_loads_reports_no_work_and_opens_no_link(local: LocalActor) -> None:
    health = local.actor.health()
    assert (health.busy_s, health.num_rows, health.bytes_loaded) == (0.0, 0, 0)
    assert health.weight_bytes == OLD.actors[1].weight_bytes
    with pytest.raises(ExpertUnavailableError, match="is loading"):
        local.actor.open_link((HOST, 1, "token"))
    local.may_load.set()
    local.actor.ready()
    assert local.actor.health().bytes_loaded == OLD.actors[1].weight_bytes


def test_an_actor_that_cannot_load_says_so_to_a_stage_that_connects(
    local: LocalActor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load_experts(*_: object) -> NoReturn:
        raise PipelineError("the disk is gone")

    monkeypatch.setattr(ExpertWorker, "load_experts", load_experts)
    local.may_load.set()
    with pytest.raises(PipelineError, match="the disk is gone"):
        local.actor.ready()
    with pytest.raises(PipelineError, match="the disk is gone"):
        local.actor.open_link((HOST, 1, "token"))


def test_an_actor_loads_and_unloads_experts_while_it_runs(local: LocalActor) -> None:
    """How much it will hold is known before they load."""
    own, others = (actor.experts for actor in OLD.actors[::-1])
    local.may_load.set()
    local.actor.load_experts(others)
    health = local.actor.health()
    assert health.bytes_loaded == health.weight_bytes == (len(own) + len(others)) * OLD.expert_bytes
    layer, expert = others[0]
    call, rows_CD = ExpertCall(layer, (expert,), (2,)), torch.ones(2, ARGS.dim)
    _computed(local.actor, call, rows_CD)
    local.actor.unload_experts(own)
    health = local.actor.health()
    assert health.bytes_loaded == health.weight_bytes == len(own) * OLD.expert_bytes
    with pytest.raises(ExpertRelocatedError):
        _computed(local.actor, call, rows_CD)
