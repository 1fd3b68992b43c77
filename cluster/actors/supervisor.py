"""The supervisor of a pipeline: it creates the actors, grants the lease, and removes a pipeline
that no router drives.

Steps do not pass through it.
"""

import contextlib
import logging
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import ray
from ray.actor import ActorHandle
from ray.exceptions import ActorUnavailableError, RayError
from ray.util.placement_group import (
    PlacementGroup,
    get_placement_group,
    placement_group,
    remove_placement_group,
)

from tramontane.cluster.actors.draft_actor import create_draft_actor
from tramontane.cluster.actors.expert_actor import create_expert_actor, rebalance_experts
from tramontane.cluster.actors.hang_detector import (
    LoadWatch,
    PendingActorTracker,
    replace_hung_workers,
)
from tramontane.cluster.actors.lease import Lease, LeaseManager, deployment_of, must_yield
from tramontane.cluster.actors.pipeline_spec import (
    DRAFTS_SUFFIX,
    EXPERTS_SUFFIX,
    STAGE_SUFFIX,
    OwnerApplication,
    PipelineSpec,
    delete_expert_plan,
)
from tramontane.cluster.actors.stage_actor import create_stage
from tramontane.cluster.actors.stage_control import (
    fence_stages,
    find_stage_actors,
    find_worker_actors,
    newest_epoch,
    recover_lease,
)
from tramontane.cluster.actors.worker_actor import NAMESPACE, actor_names
from tramontane.cluster.common.ray_api import DeploymentWatch, avoid_head_node
from tramontane.cluster.config.logging import LogSettings
from tramontane.proto.errors import PipelineError
from tramontane.proto.plan import ExpertPlan
from tramontane.proto.timing import (
    ABANDONED_AFTER_S,
    LEASE_TTL_S,
    SUPERVISOR_WATCH_INTERVAL_S,
    UNCLAIMED_AFTER_S,
)

LOADING_CHECK_INTERVAL_S = 2.0
RESTART_POLL_S = 0.1  # of a worker whose process died while it loaded
REMOVAL_POLL_S, REMOVAL_TIMEOUT_S = 0.02, 10.0  # of the names of killed actors
HEAD_ANSWER_TIMEOUT_S = 5.0
REPLACEMENT_TIMEOUT_S = 10.0  # for resources that were reserved until then

logger = logging.getLogger(__name__)


class Supervisor:
    """Owner of one pipeline's placement group and actors, all detached and named.

    Its state can be found again by name, or read back from the stages, so Ray may restart it at any
    time while steps continue.
    """

    def __init__(self, spec: PipelineSpec, logs: LogSettings | None = None) -> None:
        if logs is not None:
            logs.to_stderr("supervisor", pipeline=spec.name)
        self.spec = spec
        self._lock = threading.Lock()  # of the lease and of the launcher's time
        self._creation_lock = threading.Lock()  # nothing is created after removal has begun
        self._is_removing = False
        self._leases = LeaseManager(LEASE_TTL_S, time.monotonic(), recover_lease(spec))
        self._pending = PendingActorTracker()
        self._launcher_seen_at = time.monotonic()
        self._deployments = DeploymentWatch(spec.application.name) if spec.application else None
        threading.Thread(target=self._reap_if_abandoned, daemon=True).start()

    def __repr__(self) -> str:
        return f"Supervisor {self.spec.name}"

    def start(self, timeout_s: float) -> list[ActorHandle[Any]] | None:
        """Place and load every stage, or find them; return None if resources are missing for
        ``timeout_s``.

        A new pipeline also waits for its draft model, so that a load error is noticed. An adopted
        pipeline does not need it. Workers that Ray never starts (see ``hang_detector``) are made
        anew, with all others.
        """
        plan = self.spec.plan
        while True:
            with self._if_not_removing():
                group = _group(self.spec)
            if not group.wait(timeout_s):
                return None
            with self._if_not_removing():
                workers = self._create_workers(group)
            if not (stuck := wait_until_ready(workers, self._find_stuck)):
                return [workers[self.spec.stage_name(s.stage_id)] for s in plan.stages]
            self._remove_workers(stuck)

    def _create_workers(self, group: PlacementGroup) -> dict[str, ActorHandle[Any]]:
        """Create all workers, or find them, by the names of their actors; without the draft model
        in a pipeline that has been driven before.
        """
        spec, plan = self.spec, self.spec.plan
        experts = spec.expert_actors.names if spec.expert_actors else ()
        ids = [actor.actor_id for actor in plan.experts.actors] if plan.experts else ()
        workers = {
            name: create_expert_actor(spec, actor_id, group)
            for name, actor_id in zip(experts, ids, strict=True)
        }
        if spec.draft_model:
            drafts = create_draft_actor(spec, group)
            workers |= {} if self._leases.last_epoch else {spec.draft_name: drafts}
        return workers | {
            spec.stage_name(stage.stage_id): create_stage(spec, stage, group)
            for stage in plan.stages
        }

    def _find_stuck(self, workers: Mapping[str, ActorHandle[Any]]) -> list[str]:
        return self._pending.find_stuck(self.spec.name, workers)

    def _remove_workers(self, stuck: list[str]) -> None:
        """Remove all workers and their placement group, whose resources the stuck ones lack."""
        logger.warning(
            "the workers of pipeline %s are created again with new resources: Ray has reserved"
            " resources for %s and not started it (Ray issue 66199)",
            self.spec.name,
            " and ".join(stuck),
        )
        with self._if_not_removing():
            remove_pipeline(self.spec.name)

    def fence(self, holder: str) -> tuple[int, list[ActorHandle[Any]]]:
        """Make every stage drop its sequences and accept a new epoch; return the epoch and the
        stages, which may have been created again since the last fence.

        Raises LeaseError if another router holds the lease, PipelineError if a stage is lost
        permanently, and Ray's GetTimeoutError if one does not answer in time.
        """
        yielding = self._yielding_to(holder)
        with self._lock:
            self._leases.claim(holder, time.monotonic(), yielding)
        stages = find_stage_actors(self.spec)
        if len(stages) < len(self.spec.plan.stages):
            raise PipelineError(
                f"only {len(stages)} of {len(self.spec.plan.stages)} stages are left"
            )
        # This process may have begun without an answer of the stages, on a machine whose clock is
        # behind. If the last epoch is lost everywhere, also in the stages, any number is valid: the
        # clock gives one.
        floor = max(newest_epoch(stages), time.time_ns() // 1_000_000)
        with self._lock:
            # again: another router may have claimed it in the meantime
            self._leases.claim(holder, time.monotonic(), yielding)
            epoch = self._leases.next_epoch(floor)
        fence_stages(stages, epoch, holder, self.spec.link)
        return epoch, stages

    @ray.method(concurrency_group="rescue")
    def replace_hung_workers(self, limit_s: float) -> str:
        """Replace hung workers (see ``hang_detector``) and workers that Ray never starts, also
        while a fence waits for one. Return the reason to fence again, "" if there is none.
        """
        workers = find_worker_actors(self.spec)
        if not (stuck := self._find_stuck(workers)):
            return replace_hung_workers(workers, limit_s)
        self._remove_workers(stuck)
        with self._if_not_removing():
            group = _group(self.spec)
        if group.wait(REPLACEMENT_TIMEOUT_S):  # else the next router waits for resources
            with self._if_not_removing():
                self._create_workers(group)
        return f"Ray has not started {' and '.join(stuck)}"

    @ray.method(concurrency_group="moving")
    def move_experts(self, plan: ExpertPlan) -> int:
        """Make the pipeline use another plan while it runs; see ``rebalance_experts``."""
        return rebalance_experts(self.spec, plan)

    @ray.method(concurrency_group="lease")
    def specification(self) -> PipelineSpec:
        """Return the specification of the pipeline; a router that adopts it uses it unchanged."""
        return self.spec

    @ray.method(concurrency_group="claim")
    def claim(self, holder: str) -> None:
        """Take the lease, if it is free or an older deployment's. Raises LeaseError while another
        router holds it.
        """
        yielding = self._yielding_to(holder)
        with self._lock:
            self._leases.claim(holder, time.monotonic(), yielding)

    @ray.method(concurrency_group="lease")
    def renew(self, holder: str) -> bool:
        """Receive the heartbeat of the router that drives the pipeline; return False if the lease
        is not its own.
        """
        with self._lock:
            return self._leases.renew(holder, time.monotonic())

    @ray.method(concurrency_group="lease")
    def heartbeat(self) -> None:
        """Receive the heartbeat of the process that launched the application."""
        with self._lock:
            self._launcher_seen_at = time.monotonic()

    @contextlib.contextmanager
    def _if_not_removing(self) -> Iterator[None]:
        with self._creation_lock:
            if self._is_removing:
                raise PipelineError(f"the pipeline {self.spec.name} is being removed")
            yield

    def _remove(self) -> None:
        with self._creation_lock:
            self._is_removing = True
        remove_pipeline(self.spec.name)
        ray.kill(ray.get_runtime_context().current_actor)

    def _yielding_to(self, claimant: str) -> str:
        """Return the current holder if it has to yield, else "".

        Call it without the lock, which renewals need: it queries the head node, and Ray may wait a
        minute for that.
        """
        current = self._leases.lease
        return (
            current.holder
            if current and current.holder != claimant and must_yield(current.holder, claimant)
            else ""
        )

    def _reap_if_abandoned(self) -> None:
        """Remove the pipeline if its router has not renewed for a long time, or for a shorter one
        if no application can claim it.

        The application is deleted if its launcher has been silent for a long time. Silence while
        the head node is unreachable does not count, as no process could reach this one.
        """
        counted_from = time.monotonic()
        while True:
            time.sleep(SUPERVISOR_WATCH_INTERVAL_S)
            with self._lock:
                now, last = time.monotonic(), self._leases.lease
                silent_s = min(self._leases.silent_for_s(now), now - counted_from)
                launcher_silent_s = min(now - self._launcher_seen_at, now - counted_from)
            application = self.spec.application
            is_orphaned = (
                application is not None
                and application.launched
                and launcher_silent_s > ABANDONED_AFTER_S
            )
            if not is_orphaned and silent_s <= ABANDONED_AFTER_S:
                continue
            try:
                if not is_head_alive():
                    counted_from = time.monotonic()
                    continue
                if is_orphaned:
                    assert application is not None
                    delete_application(application)
                if silent_s > ABANDONED_AFTER_S and (
                    silent_s > UNCLAIMED_AFTER_S or not may_be_claimed(self._deployments, last)
                ):
                    self._remove()
            except Exception:  # of Ray or Ray Serve, which may be shutting down
                retry_s = SUPERVISOR_WATCH_INTERVAL_S
                logger.warning(
                    "pipeline %s could not be removed; the next attempt is in %g s",
                    self.spec.name,
                    retry_s,
                    exc_info=True,
                )


def create_supervisor(spec: PipelineSpec) -> ActorHandle[Any]:
    """Create the pipeline's supervisor, or return the existing one."""
    options = {
        "name": spec.supervisor_name,
        "namespace": NAMESPACE,
        "lifetime": "detached",
        "get_if_exists": True,
        "num_cpus": 0,
        "max_restarts": -1,
        **avoid_head_node(),
    }
    # The lease is renewed also while workers load, and while claims wait for the head node.
    groups = {"lease": 2, "claim": 1, "moving": 1, "rescue": 1}
    actor: Any = ray.remote(concurrency_groups=groups)(Supervisor)  # type: ignore[call-overload]
    return cast("ActorHandle[Any]", actor.options(**options).remote(spec, spec.logs))


def remove_pipeline(pipeline: str) -> None:
    """Remove a pipeline's workers, then their placement group: a stage whose bundle is removed
    first stays "restarting" forever.

    Their names can be used again afterwards.
    """
    pattern = rf"{re.escape(pipeline)}({STAGE_SUFFIX}|{EXPERTS_SUFFIX}|{DRAFTS_SUFFIX})\d+"
    deadline = time.monotonic() + REMOVAL_TIMEOUT_S
    while (workers := actor_names(pattern)) and time.monotonic() < deadline:
        for worker in workers:
            with contextlib.suppress(ValueError):  # it has just been removed
                ray.kill(ray.get_actor(worker, NAMESPACE))
        time.sleep(REMOVAL_POLL_S)
    delete_expert_plan(pipeline)
    with contextlib.suppress(ValueError):  # it was never created, or has been removed
        remove_placement_group(get_placement_group(pipeline))


def wait_until_ready(
    workers: Mapping[str, ActorHandle[Any]],
    find_stuck: Callable[[Mapping[str, ActorHandle[Any]]], list[str]] = lambda _: [],
) -> list[str]:
    """Wait until all workers have loaded, and raise the first error that prevents it; return the
    names of the workers that ``find_stuck`` finds, if there are any before that.

    If a process dies, its successor is asked, which knows more than Ray does. Stopped or silent
    processes are replaced, as they would keep a new router waiting forever.
    """
    watch = LoadWatch()
    waiting: dict[ray.ObjectRef[str], str] = {
        worker.ready.remote(): name for name, worker in workers.items()
    }
    while waiting:
        ready, _ = ray.wait(list(waiting), timeout=LOADING_CHECK_INTERVAL_S)
        if not ready:
            late = {name: workers[name] for name in waiting.values()}
            watch.kill_hung(late.values())
            if stuck := find_stuck(late):
                return stuck
            continue
        name = waiting.pop(ready[0])
        try:
            ray.get(ready[0])
        # also if it is stopped, and this process has not called it before
        except ActorUnavailableError:
            watch.kill_hung([workers[name]])
            time.sleep(RESTART_POLL_S)
            waiting[workers[name].ready.remote()] = name
    return []


def _group(spec: PipelineSpec) -> PlacementGroup:
    try:
        group: PlacementGroup = get_placement_group(spec.name)
    except ValueError:
        selectors = spec.node_selectors
        group = placement_group(
            spec.bundles, "PACK", spec.name, lifetime="detached", bundle_label_selector=selectors
        )
    return group


def is_head_alive() -> bool:
    """Return True if the head node answers in HEAD_ANSWER_TIMEOUT_S; while it is unreachable, Ray
    makes callers wait.
    """
    called_at = time.monotonic()
    try:
        ray.util.list_named_actors()
    except RayError:
        return False
    return time.monotonic() - called_at < HEAD_ANSWER_TIMEOUT_S


def may_be_claimed(deployments: DeploymentWatch | None, last: Lease | None) -> bool:
    """Return True if a router of a living application may still claim its pipeline; a newer
    deployment's would have claimed it.
    """
    from ray import serve  # rarely needed, and slow to import

    if deployments is None or deployments.application not in serve.status().applications:
        return False
    return last is None or not deployments.is_superseded(deployment_of(last.holder))


def delete_application(application: OwnerApplication) -> None:
    """Delete the application, or shut Ray Serve down if it owns that; Ray Serve completes it even
    if this actor ends.
    """
    from ray import serve

    applications = serve.status().applications
    if application.owns_serve and applications.keys() <= {application.name}:
        serve.shutdown()  # type: ignore[no-untyped-call]
    elif application.name in applications:
        serve.delete(application.name)
