"""Creates a pipeline's actors, grants its lease, and removes what nobody drives; it is on no step's path.

What a supervisor asks, and tells, of the application that its pipeline belongs to, when it seems to be abandoned.
"""

import contextlib
import logging
import re
import threading
import time
from collections.abc import Iterator
from typing import Any, cast

import ray
from ray.actor import ActorHandle
from ray.exceptions import ActorUnavailableError, RayError
from ray.util.placement_group import PlacementGroup, get_placement_group, placement_group, remove_placement_group

from tramontane.cluster.actors.expert_actor import create_expert_actor
from tramontane.cluster.actors.expert_plan_store import delete_plan
from tramontane.cluster.actors.expert_rebalancing import rebalance_experts
from tramontane.cluster.actors.hang_detector import SilenceTracker, replace_hung_workers
from tramontane.cluster.actors.lease import Lease, LeaseManager, deployed_at, must_yield
from tramontane.cluster.actors.pipeline_spec import EXPERTS_SUFFIX, STAGE_SUFFIX, OwnerApplication, PipelineSpec
from tramontane.cluster.actors.stage_actor import create_stage
from tramontane.cluster.actors.stage_control import fence_stages, find_stage_actors, find_worker_actors, recover_lease
from tramontane.cluster.actors.worker_actor import NAMESPACE, actor_names
from tramontane.cluster.common.deployments import is_superseded
from tramontane.cluster.common.node_labels import avoid_head_node
from tramontane.cluster.config.logging import LogSettings
from tramontane.proto.errors import PipelineError
from tramontane.proto.plan import ExpertPlan

logger = logging.getLogger(__name__)

HEAD_ANSWERS_WITHIN_S = 5.0


def is_head_alive() -> bool:
    """Whether it does, and has done so for some time: Ray makes whoever asks wait while it is away."""
    asked_at = time.monotonic()
    try:
        ray.util.list_named_actors()
    except RayError:
        return False
    return time.monotonic() - asked_at < HEAD_ANSWERS_WITHIN_S


def may_be_claimed(application: OwnerApplication | None, last: Lease | None) -> bool:
    """Whether a router of a living application may still come for its pipeline; those of a newer deployment would have come."""
    from ray import serve  # rarely needed, and slow to import

    if application is None or application.name not in serve.status().applications:
        return False
    return last is None or not is_superseded(application.name, deployed_at(last.holder))


def delete_application(application: OwnerApplication) -> None:
    """Ray Serve does the rest by itself, if this actor is removed meanwhile."""
    from ray import serve

    applications = serve.status().applications
    if application.owns_serve and applications.keys() <= {application.name}:
        serve.shutdown()  # type: ignore[no-untyped-call]
    elif application.name in applications:
        serve.delete(application.name)


LEASE_TTL_S = 10.0
ABANDONED_AFTER_S = 30.0  # without a sign of life, of the router or of whoever launched it
UNCLAIMED_AFTER_S = 300.0  # without a router, although the application that could claim it is there
WATCH_INTERVAL_S = 1.0
LOOK_EVERY_S = 2.0  # while workers are waited for
REBIRTH_POLL_S = 0.1  # of a stage whose process died while it was loading


class Supervisor:
    """Owner of one pipeline's placement group and stage actors, all detached and named.

    It keeps nothing that it could not find again by name, or read back from the stages,
    so Ray may restart it at any time; steps go on meanwhile.
    """

    def __init__(self, spec: PipelineSpec, logs: LogSettings | None = None) -> None:
        if logs is not None:
            logs.to_stderr("supervisor", pipeline=spec.name)
        self.spec = spec
        self._lock = threading.Lock()  # of the book and the launcher's time: several threads use them
        self._making = threading.Lock()  # of what exists: nothing is made once removing has begun
        self._is_ending = False
        self._book = LeaseManager(LEASE_TTL_S, time.monotonic(), recover_lease(spec))
        self._launcher_seen_at = time.monotonic()
        threading.Thread(target=self._reap_if_abandoned, daemon=True).start()

    def __repr__(self) -> str:
        return f"Supervisor {self.spec.name}"

    def start(self, timeout_s: float) -> list[ActorHandle[Any]] | None:
        """Place and load every stage, or find them; None if the cluster had no room within ``timeout_s``."""
        with self._if_not_removing():
            group = _group(self.spec)
        if not group.wait(timeout_s):
            return None
        with self._if_not_removing():
            experts = self.spec.plan.experts
            holders = [create_expert_actor(self.spec, actor.actor_id, group) for actor in experts.actors] if experts else []
            stages = [create_stage(self.spec, stage, group) for stage in self.spec.plan.stages]
        wait_until_ready([*holders, *stages])
        return stages

    def fence(self, holder: str) -> int:
        """Make every stage forget its sequences and obey a new epoch, which is returned.

        Raises LeaseError if another router holds the lease, PipelineError if a stage is gone for good,
        and Ray's GetTimeoutError if one does not answer in time.
        """
        with self._lock:
            self._claim(holder)
            epoch = self._book.next_epoch(floor=time.time_ns() // 1_000_000)  # a book lost with its stages cannot repeat one
        stages = find_stage_actors(self.spec)
        if len(stages) < len(self.spec.plan.stages):
            raise PipelineError(f"only {len(stages)} of {len(self.spec.plan.stages)} stages are left")
        fence_stages(stages, epoch, holder, self.spec.link)
        return epoch

    @ray.method(concurrency_group="rescue")
    def replace_hung_workers(self, limit_s: float) -> str:
        """See ``stuck``; also while a fence waits for what is stuck."""
        return replace_hung_workers(find_worker_actors(self.spec), limit_s)

    @ray.method(concurrency_group="moving")
    def move_experts(self, plan: ExpertPlan) -> int:
        """Make the pipeline follow another plan, while it runs; see ``expert_moving``."""
        return rebalance_experts(self.spec, plan)

    @ray.method(concurrency_group="lease")
    def specification(self) -> PipelineSpec:
        """What the pipeline was made as; whoever adopts it takes it as it is."""
        return self.spec

    @ray.method(concurrency_group="lease")
    def claim(self, holder: str) -> None:
        """Take the lease, if it is free or an older deployment's. Raises LeaseError while another router holds it."""
        with self._lock:
            self._claim(holder)

    @ray.method(concurrency_group="lease")
    def renew(self, holder: str) -> bool:
        """A sign of life of the router that drives the pipeline; False if the lease is not its own."""
        with self._lock:
            return self._book.renew(holder, time.monotonic())

    @ray.method(concurrency_group="lease")
    def heartbeat(self) -> None:
        """A sign of life of the process that launched the application."""
        with self._lock:
            self._launcher_seen_at = time.monotonic()

    @contextlib.contextmanager
    def _if_not_removing(self) -> Iterator[None]:
        with self._making:
            if self._is_ending:
                raise PipelineError("the pipeline is being removed")
            yield

    def _remove(self) -> None:
        """Remove the pipeline and this actor."""
        with self._making:
            self._is_ending = True
        remove_pipeline(self.spec.name)
        ray.kill(ray.get_runtime_context().current_actor)

    def _claim(self, holder: str) -> None:
        current = self._book.lease
        makes_way = current is not None and current.holder != holder and must_yield(current.holder, holder)
        self._book.claim(holder, time.monotonic(), makes_way)

    def _reap_if_abandoned(self) -> None:
        """Remove the pipeline once its router has been silent for long, or a little less long if its application is gone.

        Nothing counts that was while the head node was away, as nobody could come then.
        """
        counted_from = time.monotonic()
        while True:
            time.sleep(WATCH_INTERVAL_S)
            with self._lock:
                now, last = time.monotonic(), self._book.lease
                silent_s = min(self._book.silent_for_s(now), now - counted_from)
                launcher_silent_s = min(now - self._launcher_seen_at, now - counted_from)
            application = self.spec.application
            is_missed = application is not None and application.launched and launcher_silent_s > ABANDONED_AFTER_S
            if not is_missed and silent_s <= ABANDONED_AFTER_S:
                continue
            try:
                if not is_head_alive():
                    counted_from = time.monotonic()
                    continue
                if is_missed:
                    assert application is not None
                    delete_application(application)
                if silent_s > ABANDONED_AFTER_S and (silent_s > UNCLAIMED_AFTER_S or not may_be_claimed(application, last)):
                    self._remove()
            except Exception:  # of Ray or Ray Serve, which may be going as well; tried again in a second
                logger.warning("pipeline %s could not be removed yet", self.spec.name, exc_info=True)


def remove_pipeline(name: str) -> None:
    """Remove the actors first: a stage whose bundle goes first stays "restarting" for ever."""
    for worker in actor_names(rf"{re.escape(name)}({STAGE_SUFFIX}|{EXPERTS_SUFFIX})\d+"):
        with contextlib.suppress(ValueError):  # it has just gone
            ray.kill(ray.get_actor(worker, NAMESPACE))
    delete_plan(name)
    with contextlib.suppress(ValueError):  # it was never made, or is gone
        remove_placement_group(get_placement_group(name))


def wait_until_ready(workers: list[ActorHandle[Any]]) -> None:
    """Raises what keeps one from loading, as soon as there is one. If its process died, its next life knows more than Ray.

    One that was found, and is stopped or silent, would keep a new router waiting for ever.
    """
    silences = SilenceTracker()
    waiting: dict[ray.ObjectRef[str], ActorHandle[Any]] = {worker.ready.remote(): worker for worker in workers}
    while waiting:
        answered, _ = ray.wait(list(waiting), timeout=LOOK_EVERY_S)
        if not answered:
            silences.kill_silent(waiting.values())
            continue
        worker = waiting.pop(answered[0])
        try:
            ray.get(answered[0])
        except ActorUnavailableError:  # also where it is stopped, and this process has not talked to it before
            silences.kill_silent([worker])
            time.sleep(REBIRTH_POLL_S)
            waiting[worker.ready.remote()] = worker


def create_supervisor(spec: PipelineSpec) -> ActorHandle[Any]:
    """Make the pipeline's supervisor, or find the one that is there."""
    options = {
        "name": spec.supervisor_name,
        "namespace": NAMESPACE,
        "lifetime": "detached",
        "get_if_exists": True,
        "num_cpus": 0,
        "max_restarts": -1,
        **avoid_head_node(),
    }
    # The lease's calls are answered also while workers are loading.
    actor: Any = ray.remote(concurrency_groups={"lease": 2, "moving": 1, "rescue": 1})(Supervisor)  # type: ignore[call-overload]
    return cast("ActorHandle[Any]", actor.options(**options).remote(spec, spec.logs))


def _group(spec: PipelineSpec) -> PlacementGroup:
    try:
        group: PlacementGroup = get_placement_group(spec.name)
    except ValueError:
        selectors = spec.node_selectors
        group = placement_group(spec.bundles, "PACK", spec.name, lifetime="detached", bundle_label_selector=selectors)
    return group
