"""Routers that adopt pipelines or create them: what they log of those they cannot claim, and how
many calls 64 of them make.
"""

import asyncio
import itertools
import logging
import random
from collections import Counter
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import ray
from ray.exceptions import ActorUnavailableError, RayError, RayTaskError
from tiny_models import tiny_args, tiny_plan

from tramontane.cluster.actors import supervisor_client
from tramontane.cluster.actors.lease import LeaseManager
from tramontane.cluster.actors.pipeline_spec import SUPERVISOR_SUFFIX, PipelineSpec
from tramontane.cluster.pipeline import lifecycle
from tramontane.cluster.planning.hardware import TooFewNodesError
from tramontane.proto.errors import LeaseError, PlanError
from tramontane.proto.model_folder import RandomWeights
from tramontane.proto.units import backoff_delays

SPEC = PipelineSpec(
    "app-0", tiny_plan(tiny_args(n_layers=2)), RandomWeights(), threads_per_stage=1, use_gpus=False
)
DRIVEN = RayTaskError(
    "claim", "a traceback", LeaseError("the pipeline is driven by another")
).as_instanceof_cause()
UNREACHABLE = ActorUnavailableError("the supervisor is away", None)


@pytest.mark.parametrize(
    ("error", "level"), [(DRIVEN, logging.INFO), (UNREACHABLE, logging.WARNING)]
)
def test_that_another_router_drives_a_pipeline_is_nothing_to_warn_of(
    error: RayError, level: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is so whenever one more is wanted; a supervisor that does not answer is another matter."""

    async def specification(_name: str) -> PipelineSpec:
        return SPEC

    async def claim(*_: object) -> NoReturn:
        raise error

    def new_spec() -> NoReturn:
        raise PlanError("a new one is wanted")

    async def look() -> None:
        async with lifecycle.adopt_or_create_pipeline("app", new_spec):
            raise AssertionError("there is none")

    monkeypatch.setattr(lifecycle, "actor_holder_name", lambda _: "actor@0/me")
    monkeypatch.setattr(lifecycle, "_pipelines", lambda _: [SPEC.name])
    monkeypatch.setattr(lifecycle, "_specification", specification)
    monkeypatch.setattr(lifecycle, "create_supervisor", lambda _: None)
    monkeypatch.setattr(lifecycle, "call_or_restart", claim)
    caplog.set_level(logging.INFO, lifecycle.__name__)
    with pytest.raises(PlanError, match="a new one is wanted"):
        asyncio.run(look())
    (record,) = caplog.records
    assert record.levelno == level
    assert record.getMessage().startswith("the pipeline app-0 cannot be claimed: ")


def test_a_cluster_that_stays_too_small_is_probed_until_the_timeout(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Every two seconds, for the last time when none is left; ``nodes_timeout_s`` counts from the
    first probe.
    """
    now, probes = 1000.0, list[float]()

    def new_spec() -> NoReturn:
        probes.append(now - 1000.0)
        raise TooFewNodesError("4 stages need a GPU each, and there are 2")

    async def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    async def create() -> None:
        async with lifecycle.adopt_or_create_pipeline("app", new_spec, nodes_timeout_s=4.0):
            raise AssertionError("there is none")

    monkeypatch.setattr(lifecycle, "actor_holder_name", lambda _: "actor@0/me")
    monkeypatch.setattr(lifecycle, "_pipelines", lambda _: [])
    monkeypatch.setattr(lifecycle, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(
        lifecycle,
        "asyncio",
        SimpleNamespace(sleep=sleep, to_thread=asyncio.to_thread, create_task=asyncio.create_task),
    )
    caplog.set_level(logging.INFO, lifecycle.__name__)
    with pytest.raises(TooFewNodesError, match="and there are 2"):
        asyncio.run(create())
    assert probes == [0.0, 2.0, 4.0]
    assert [message.partition(":")[0] for message in caplog.messages] == [
        f"waiting up to {left} s more for nodes" for left in (4, 2)
    ]


def test_a_router_waits_longer_after_each_round_in_which_it_claims_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As all supervisors are away: neither is an existing pipeline claimed nor a new one."""
    rounds, sleeps = list[list[str]](), list[float]()

    def create_supervisor(spec: PipelineSpec) -> None:
        rounds[-1].append(spec.name)

    async def claim(*_: object) -> NoReturn:
        raise UNREACHABLE

    def new_spec() -> PipelineSpec:
        if len(rounds) == 3:
            raise PlanError("it is given up")
        rounds.append([])
        return SPEC

    async def sleep(seconds: float) -> None:
        sleeps.append(seconds)

    async def create() -> None:
        async with lifecycle.adopt_or_create_pipeline("app", new_spec):
            raise AssertionError("there is none")

    monkeypatch.setattr(lifecycle, "actor_holder_name", lambda _: "actor@0/me")
    monkeypatch.setattr(lifecycle, "_pipelines", lambda _: [])
    monkeypatch.setattr(
        lifecycle, "backoff_delays", partial(backoff_delays, uniform=lambda _, bound_s: bound_s)
    )
    monkeypatch.setattr(
        lifecycle,
        "asyncio",
        SimpleNamespace(sleep=sleep, to_thread=asyncio.to_thread, create_task=asyncio.create_task),
    )
    monkeypatch.setattr(lifecycle, "create_supervisor", create_supervisor)
    monkeypatch.setattr(lifecycle, "call_or_restart", claim)
    with pytest.raises(PlanError, match="it is given up"):
        asyncio.run(create())
    assert rounds == [["app-0"]] * 3
    assert sleeps == [0.2, 0.4, 0.8]


NUM_ROUTERS = 64


class _Method:
    """As a method of an actor's handle; every call is counted, and takes a few turns of the event
    loop.
    """

    def __init__(self, cluster: "_Cluster", call: Callable[..., Any]) -> None:
        self._cluster, self._call = cluster, call

    def options(self, **_: object) -> "_Method":
        return self

    async def remote(self, *args: object) -> Any:
        self._cluster.calls["supervisors"] += 1
        for _ in range(self._cluster.rng.randrange(1, 10)):
            await asyncio.sleep(0)
        return self._call(*args)


class _Supervisor:
    """Grants the lease as the real one does; its pipeline has no stages."""

    def __init__(self, cluster: "_Cluster", spec: PipelineSpec) -> None:
        self._leases = LeaseManager(ttl_s=10.0, now=0.0)
        self.specification, self.claim = (
            _Method(cluster, lambda: spec),
            _Method(cluster, self._claim),
        )
        self.start, self.renew = (
            _Method(cluster, lambda _timeout_s: []),
            _Method(cluster, lambda _holder: True),
        )

    def _claim(self, holder: str) -> None:
        try:
            self._leases.claim(holder, 0.0)
        except LeaseError as error:
            raise RayTaskError("claim", "a traceback", error).as_instanceof_cause() from None


class _Cluster:
    """The named actors of a cluster, and how many calls the head node and the supervisors have
    received.
    """

    def __init__(self, rng: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rng, self.calls, self._holders = rng, Counter[str](), itertools.count()
        self.supervisors: dict[str, _Supervisor] = {}
        monkeypatch.setattr(
            lifecycle, "actor_names", lambda _: self._count("listings", sorted(self.supervisors))
        )
        monkeypatch.setattr(
            lifecycle, "actor_holder_name", lambda _: f"actor@0/{next(self._holders)}"
        )
        monkeypatch.setattr(
            ray, "get_actor", lambda name, _: self._count("lookups", self.supervisors[name])
        )
        monkeypatch.setattr(lifecycle, "create_supervisor", self.create)
        monkeypatch.setattr(lifecycle, "shut_down_pipeline", lambda _: None)
        # on a busy machine 64 routers take seconds
        monkeypatch.setattr(supervisor_client, "LEASE_CALL_TIMEOUT_S", 3600.0)
        monkeypatch.setattr(supervisor_client, "RENEW_INTERVAL_S", 3600.0)

    def _count(self, kind: str, answer: Any) -> Any:
        self.calls[kind] += 1
        return answer

    def create(self, spec: PipelineSpec) -> _Supervisor:
        new = self.supervisors.setdefault(spec.name + SUPERVISOR_SUFFIX, _Supervisor(self, spec))
        return self._count("creations", new)


async def _start_together(first_numbers: list[int]) -> list[str]:
    """Start a router for each of these numbers, and return the names of their pipelines."""
    all_started = asyncio.Event()
    names = []

    async def drive(first_number: int) -> None:
        async with AsyncExitStack() as stack:
            adopted = lifecycle.adopt_or_create_pipeline(
                "app", lambda: SPEC, first_number=first_number
            )
            spec, _ = await stack.enter_async_context(adopted)
            names.append(spec.name)
            if len(names) == len(first_numbers):
                all_started.set()
            await all_started.wait()

    await asyncio.gather(*map(drive, first_numbers))
    return names


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("num_existing", [0, NUM_ROUTERS])
def test_64_routers_start_in_a_number_of_calls_linear_in_64(
    num_existing: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """New pipelines, and those that existed and have no driver. In rounds, 64 routers made
    thousands of calls.
    """
    rng = random.Random(seed)
    cluster = _Cluster(rng, monkeypatch)
    for number in range(num_existing):
        cluster.create(replace(SPEC, name=f"app-{number}"))
    cluster.calls.clear()
    first_numbers = list(range(NUM_ROUTERS))
    rng.shuffle(first_numbers)
    names = asyncio.run(_start_together(first_numbers))
    assert sorted(names) == sorted(f"app-{number}" for number in range(NUM_ROUTERS))
    assert cluster.calls["listings"] == cluster.calls["creations"] == NUM_ROUTERS
    assert cluster.calls["lookups"] <= 2 * NUM_ROUTERS, "for the specification, and at the end"
    assert cluster.calls["supervisors"] <= 5 * NUM_ROUTERS, (
        "specification, claim, start and two renewals"
    )


@pytest.mark.parametrize("seed", range(3))
def test_routers_with_the_same_number_soon_claim_different_pipelines(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each lists the cluster once, and claims a pipeline 10 times at most on average; one by one it
    would be 32 times.
    """
    cluster = _Cluster(random.Random(seed), monkeypatch)
    names = asyncio.run(_start_together([0] * NUM_ROUTERS))
    assert len(set(names)) == NUM_ROUTERS
    assert "app-0" in names
    assert cluster.calls["listings"] == NUM_ROUTERS
    assert cluster.calls["creations"] <= 10 * NUM_ROUTERS


def test_names_of_new_pipelines_begin_with_the_own_number_and_spread() -> None:
    names = lifecycle._new_names("app", ["app-5", "app-6"], 5, randrange=lambda stop: stop - 1)
    assert list(itertools.islice(names, 4)) == ["app-7", "app-8", "app-9", "app-12"]


def test_existing_pipelines_are_tried_from_the_own_number_on() -> None:
    assert lifecycle._rotate(["a", "b", "c"], 4) == ["b", "c", "a"]
    assert lifecycle._rotate([], 4) == []


def test_pipelines_are_sorted_by_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        lifecycle, "actor_names", lambda _: [f"app-{n}{SUPERVISOR_SUFFIX}" for n in (0, 1, 10, 2)]
    )
    assert lifecycle._pipelines("app") == ["app-0", "app-1", "app-2", "app-10"]
