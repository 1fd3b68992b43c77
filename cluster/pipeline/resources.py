"""Resources of the Ray cluster compared with a pipeline's needs: whether it can be placed, which
holders use the missing resources, and what it waits for.
"""

import asyncio
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import get_placement_group, placement_group_table

from tramontane.cluster.actors.pipeline_spec import SUPERVISOR_SUFFIX, PipelineSpec
from tramontane.cluster.common.ray_api import WAIT_REPORT_INTERVAL_S
from tramontane.cluster.ray_internals.accessors import free_resources, has_autoscaler, living_actors
from tramontane.proto.errors import PlanError

HEAD_ANSWER_TIMEOUT_S = 1.0  # to a health check

logger = logging.getLogger(__name__)

MAX_NAMED = 4  # holders in a message
TASKS = "tasks"
ROUNDING = 1e-6  # of Ray's sums of shares
HOLDING = ("CREATED", "PREPARED", "RESCHEDULING")  # states of a placement group

Resources = Mapping[str, float]
Bundle = tuple[tuple[str, float], ...]  # sorted by name


@dataclass(frozen=True, slots=True)
class Node:
    """A living node: its total and its free resources."""

    node_id: str
    total: Resources
    free: Resources


@dataclass(frozen=True, slots=True)
class Holder:
    """The resources that a pipeline, another placement group or an actor outside of groups holds on
    a node.
    """

    label: str
    node_id: str
    held: Resources


@dataclass(frozen=True, slots=True)
class ClusterResources:
    """The nodes of a cluster, and the holders of their resources. Tasks hold resources too, but are
    not among the holders.

    ``may_grow``: Ray's autoscaler may add nodes.
    """

    nodes: tuple[Node, ...]
    holders: tuple[Holder, ...] = ()
    may_grow: bool = False

    def may_grow_for(self, spec: PipelineSpec) -> bool:
        """Return whether added nodes could hold the pipeline: not if it is planned for certain
        nodes.
        """
        return self.may_grow and not any(spec.nodes)


@dataclass(frozen=True, slots=True)
class _Need:
    """``count`` bundles of the same resources; ``nodes`` are Ray's ids of the allowed nodes, () for
    any.
    """

    bundle: Bundle
    nodes: tuple[str, ...]
    count: int

    def num_fitting(self, amounts: Mapping[str, Resources]) -> int:
        """Return how many of the bundles fit on the nodes. Of 3 x {CPU: 2} on nodes with 3 and 1
        CPUs it is one.
        """
        return min(
            self.count,
            sum(
                self._num_on(amounts[node])
                for node in amounts
                if not self.nodes or node in self.nodes
            ),
        )

    def _num_on(self, amounts: Resources) -> int:
        return min(
            int((amounts.get(name, 0) + ROUNDING) / amount)
            for name, amount in self.bundle
            if amount
        )


def read_resources() -> ClusterResources:
    """Query the joined cluster for its nodes' resources and their holders."""
    free = free_resources()
    alive = [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
    nodes = tuple(
        Node(node["NodeID"], node["Resources"], free.get(node["NodeID"], {})) for node in alive
    )
    actors = living_actors()
    groups: dict[str, Any] = ray.util.placement_group_table()
    pipelines = {
        actor.name.removesuffix(SUPERVISOR_SUFFIX)
        for actor in actors
        if actor.name.endswith(SUPERVISOR_SUFFIX)
    }
    return ClusterResources(
        nodes, (*_groups(groups.values(), pipelines), *map(_actor, actors)), has_autoscaler()
    )


def _groups(groups: Iterable[dict[str, Any]], pipelines: set[str]) -> Iterable[Holder]:
    for group in groups:
        if group["state"] in HOLDING:
            name = group["name"] or group["placement_group_id"][:8]
            label = f"pipeline {name}" if name in pipelines else f"placement group {name}"
            for index, node in group["bundles_to_node_id"].items():
                yield Holder(label, node, group["bundles"][index])


def _actor(actor: Any) -> Holder:  # a message of Ray's
    """Return the resources of an actor. Inside a placement group they have other names, and belong
    to the group.
    """
    label = f"actor {actor.class_name}{f' ({actor.name})' if actor.name else ''}"
    return Holder(label, actor.address.node_id.hex(), dict(actor.required_resources))


def check_placeable(spec: PipelineSpec, cluster: ClusterResources, num_pipelines: int = 1) -> None:
    """Raise PlanError if the cluster cannot grow, and could not hold the pipelines even if it were
    empty.
    """
    needs = _needs(spec, num_pipelines)
    total = {node.node_id: node.total for node in cluster.nodes}
    if cluster.may_grow_for(spec) or _have_room(needs, total):
        return
    raise PlanError(
        f"the cluster is too small for {describe_needs(spec, num_pipelines)}: it has"
        f" {_amounts(needs, total)} in all{_room(needs, total)}; use fewer"
        f" {_options(spec, num_pipelines)}, or add nodes"
    )


def describe_shortage(spec: PipelineSpec, cluster: ClusterResources, num_pipelines: int = 1) -> str:
    """Describe the resources that the pipelines lack now, and their holders; "" if there is room.

    ``free are 0 of 2 CPU; pipeline tramontane-1a2b3c4d has 1 CPU, actor Trainer has 1 CPU``. It is
    "" too where only Ray knows that bundles of unlike resources do not fit together. A hint at
    Ray's autoscaler follows.
    """
    needs = _needs(spec, num_pipelines)
    free, total = (
        {n.node_id: n.free for n in cluster.nodes},
        {n.node_id: n.total for n in cluster.nodes},
    )
    if _have_room(needs, free):
        return ""
    nodes, names = _allowed(needs, free), _used(needs)
    of = (f"{_sum(free, nodes, name):g} of {_sum(total, nodes, name):g} {name}" for name in names)
    grows = "; Ray's autoscaler may add nodes" if cluster.may_grow_for(spec) else ""
    return f"free are {' and '.join(of)}{_room(needs, free)}{_held(cluster, nodes, names)}{grows}"


def describe_missing(
    spec: PipelineSpec, cluster: ClusterResources, placed: Collection[int] = ()
) -> str:
    """Describe which bundles have no place now; "" if there is room for all. ``placed``: those that
    have one, whose resources are not free.

    ``1 of 2 stages: 1 CPU, offered by no node``, or ``free on no node`` where something else has
    it. ``GET /health`` shows it without an API key, so it names no holders.
    """
    needs = _needs(spec, 1, placed)
    free = {node.node_id: node.free for node in cluster.nodes}
    total = {node.node_id: node.total for node in cluster.nodes}
    lacking = {need: count for need in needs if (count := need.count - need.num_fitting(free))}
    if not lacking:
        return ""
    of = len(spec.bundles)
    kind = "stages" if of == len(spec.plan.stages) else "bundles"
    amounts = " or ".join(
        " and ".join(f"{amount:g} {name}" for name, amount in need.bundle) for need in lacking
    )
    is_offered = all(need.num_fitting(total) == need.count for need in lacking)
    where = "free on no node" if is_offered else "offered by no node"
    return f"{sum(lacking.values())} of {of} {kind}: {amounts}, {where}"


def describe_wait(spec: PipelineSpec, seconds: float, shortage: str, num_pipelines: int = 1) -> str:
    """Describe the resources that pipelines wait for, and the time limit."""
    return f"waiting up to {seconds:.0f} s for {describe_needs(spec, num_pipelines)}: {shortage}"


def describe_wait_of(spec: PipelineSpec) -> str:
    """Return ``waiting for 1 of 2 stages: 1 CPU, offered by no node``; "" if the resources are
    reserved or are about to be. It blocks.
    """
    try:
        group = placement_group_table(get_placement_group(spec.name))
    except ValueError:  # it does not exist yet
        return ""
    if group["state"] == "CREATED":
        return ""
    cluster = read_resources()
    alive = {node.node_id for node in cluster.nodes}
    placed = [index for index, node in group["bundles_to_node_id"].items() if node in alive]
    missing = describe_missing(spec, cluster, placed)
    return f"waiting for {missing}" if missing else ""


async def report_waits(spec: PipelineSpec, report: Callable[[str], None]) -> None:
    """Report what a starting pipeline waits for, again and again, until cancelled. ``report`` may
    block.
    """
    while True:
        try:
            text = await asyncio.to_thread(describe_wait_of, spec)
            await asyncio.to_thread(report, text or f"loading {spec.describe_workers()}")
        except RayError as error:  # the head node does not answer
            logger.debug("it is not known what %s waits for: %s", spec.name, error)
        await asyncio.sleep(WAIT_REPORT_INTERVAL_S)


class WaitDescriber:
    """What a pipeline that was ready waits for, as last known: the head node may not answer."""

    def __init__(self, spec: PipelineSpec) -> None:
        self._spec = spec
        self._asking: asyncio.Task[str] | None = None
        self._asked_at = 0.0
        self._known = ""

    async def describe(self) -> str:
        """Return the text of ``describe_wait_of``, "" if it is not known."""
        is_due = time.monotonic() > self._asked_at + WAIT_REPORT_INTERVAL_S
        if self._asking is None or (self._asking.done() and is_due):
            self._asked_at = time.monotonic()
            self._asking = asyncio.create_task(asyncio.to_thread(describe_wait_of, self._spec))
        done, _ = await asyncio.wait({self._asking}, timeout=HEAD_ANSWER_TIMEOUT_S)
        if done:
            self._known = "" if self._asking.exception() else self._asking.result()
        return self._known


def no_room_error(
    spec: PipelineSpec,
    cluster: ClusterResources,
    num_pipelines: int = 1,
    waited_s: float | None = None,
) -> PlanError:
    """Return the error of pipelines for which resources are missing."""
    waited = "" if waited_s is None else f" after {waited_s:.0f} s"
    shortage = describe_shortage(spec, cluster, num_pipelines) or "Ray cannot place them"
    end = "end what holds them"
    if cluster.may_grow_for(spec):
        end = (
            "wait longer (placement_timeout in a --config file); ray status shows which nodes are"
            " added"
        )
    return PlanError(
        f"the cluster has no room for {describe_needs(spec, num_pipelines)}{waited}: {shortage}; "
        f"use fewer {_options(spec, num_pipelines)}, or {end}"
    )


def describe_needs(spec: PipelineSpec, num_pipelines: int = 1) -> str:
    """Return ``2 stages (2 x {CPU: 1})``."""
    each = Counter(map(_bundle, spec.bundles))
    bundles = (
        f"{num_pipelines * count} x {{{_listed(bundle, ': ')}}}" for bundle, count in each.items()
    )
    where = " on the nodes that they are planned for" if any(spec.nodes) else ""
    return f"{spec.describe_workers(num_pipelines)} ({' and '.join(bundles)}){where}"


def _listed(bundle: Bundle, between: str) -> str:
    return ", ".join(f"{name}{between}{amount:g}" for name, amount in bundle)


def _needs(spec: PipelineSpec, num_pipelines: int, placed: Collection[int] = ()) -> list[_Need]:
    """Return the bundles that pipelines need, without those that have a place already."""
    nodes = (*spec.nodes, *((),) * (len(spec.bundles) - len(spec.nodes)))
    each = Counter(
        (_bundle(bundle), allowed)
        for index, (bundle, allowed) in enumerate(zip(spec.bundles, nodes, strict=True))
        if index not in placed
    )
    return [
        _Need(bundle, allowed, num_pipelines * count) for (bundle, allowed), count in each.items()
    ]


def _bundle(bundle: Resources) -> Bundle:
    return tuple(sorted(bundle.items()))


def _have_room(needs: list[_Need], amounts: Mapping[str, Resources]) -> bool:
    """Return False if bundles do not fit: one kind of bundles alone, or all together by their
    sums.
    """
    if any(need.num_fitting(amounts) < need.count for need in needs):
        return False
    nodes = _allowed(needs, amounts)
    return all(
        needed <= _sum(amounts, nodes, name) + ROUNDING for name, needed in _used(needs).items()
    )


def _used(needs: list[_Need]) -> dict[str, float]:
    """Return the sum of each needed resource."""
    sums = defaultdict[str, float](float)
    for need in needs:
        for name, amount in need.bundle:
            sums[name] += amount * need.count
    return dict(sorted(sums.items()))


def _allowed(needs: list[_Need], amounts: Mapping[str, Resources]) -> set[str]:
    """Return the nodes that at least one bundle may be on."""
    return (
        set(amounts)
        if any(not need.nodes for need in needs)
        else {node for need in needs for node in need.nodes}
    )


def _sum(amounts: Mapping[str, Resources], nodes: set[str], name: str) -> float:
    return sum(each.get(name, 0) for node, each in amounts.items() if node in nodes)


def _amounts(needs: list[_Need], amounts: Mapping[str, Resources]) -> str:
    nodes = _allowed(needs, amounts)
    return " and ".join(f"{_sum(amounts, nodes, name):g} {name}" for name in _used(needs))


def _room(needs: list[_Need], amounts: Mapping[str, Resources]) -> str:
    """Return the number of bundles that fit, where sums alone do not show that it is too low."""
    nodes = _allowed(needs, amounts)
    if any(needed > _sum(amounts, nodes, name) + ROUNDING for name, needed in _used(needs).items()):
        return ""
    return (
        f", with room for {sum(n.num_fitting(amounts) for n in needs)} of"
        f" {sum(n.count for n in needs)} on single nodes"
    )


def _held(cluster: ClusterResources, nodes: set[str], names: Iterable[str]) -> str:
    """Describe the holders of these resources, the largest first. Resources without a holder are
    held by tasks.
    """
    held = defaultdict[str, defaultdict[str, float]](lambda: defaultdict(float))
    for name in names:
        used = sum(
            node.total.get(name, 0) - node.free.get(name, 0)
            for node in cluster.nodes
            if node.node_id in nodes
        )
        for holder in cluster.holders:
            if holder.node_id in nodes and name in holder.held:
                held[holder.label][name] += holder.held[name]
                used -= holder.held[name]
        if used > ROUNDING:
            held[TASKS][name] = used
    ranked = sorted(held.items(), key=lambda each: -sum(each[1].values()))
    named = [
        f"{label} {'have' if label == TASKS else 'has'}"
        f" {' and '.join(f'{n:g} {name}' for name, n in has.items())}"
        for label, has in ranked[:MAX_NAMED]
    ]
    if len(ranked) > MAX_NAMED:
        named.append(f"{len(ranked) - MAX_NAMED} more have the rest")
    return f"; {', '.join(named)}" if named else ""


def _options(spec: PipelineSpec, num_pipelines: int) -> str:
    experts = ", --expert-actors" if spec.plan.experts else ""
    return f"{'--replicas, ' if num_pipelines > 1 else ''}--stages{experts} or --threads-per-stage"
