"""The Ray actor that holds experts outside the stages, and the movement of experts between such
actors.
"""

import itertools
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError
from ray.util.placement_group import PlacementGroup

from tramontane.cluster.actors.pipeline_spec import ExpertActorRefs, PipelineSpec, WorkerSettings
from tramontane.cluster.actors.stage_actor import bundle_options
from tramontane.cluster.actors.worker_actor import NAMESPACE, WorkerActor, WorkerHealth
from tramontane.cluster.planning.expert_planner import plan_moves
from tramontane.proto.errors import ExpertUnavailableError, PipelineError
from tramontane.proto.plan import ExpertId, ExpertPlan

if TYPE_CHECKING:
    from tramontane.workers.experts.expert_link import ExpertServer
    from tramontane.workers.experts.expert_worker import ExpertWorker
    from tramontane.workers.links.channel import Address

RETRY_S = 0.2  # of a call to an actor that restarts
MAX_ATTEMPTS = 300

RunMessage = tuple[int, tuple[int, ...], tuple[int, ...]]  # the fields of an ExpertCall


@dataclass(frozen=True, slots=True)
class ExpertHealth(WorkerHealth):
    """Health and work since loading: seconds for which experts computed, and rows that they
    received.
    """

    busy_s: float
    num_rows: int


class ExpertActor(WorkerActor["ExpertWorker"]):
    """An ``ExpertWorker`` behind Ray. It keeps no state between calls, so that a repeated one does
    no harm.
    """

    def __init__(self, experts: ExpertActorRefs, actor_id: int, settings: WorkerSettings) -> None:
        if settings.logs is not None:
            settings.logs.to_stderr("experts", pipeline=settings.pipeline, actor=actor_id)
        self._plan, self._actor_id = experts.current_plan(), actor_id
        self._server: ExpertServer | None = None
        actor = self._plan.actors[actor_id]
        super().__init__(actor.label, actor.weight_bytes, settings)

    def _load(self) -> "ExpertWorker":
        from tramontane.workers.experts.expert_link import ExpertServer
        from tramontane.workers.experts.expert_worker import ExpertWorker
        from tramontane.workers.links.gpu_channel import channel_factory_for

        settings = self._settings
        worker = ExpertWorker.load(
            self._plan, self._actor_id, settings.weights, settings.device, self._on_tensor
        )
        host = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        channels = channel_factory_for(worker.device)
        self._server = ExpertServer(
            worker, self._plan, host, channels, settings.threads, self._failure_guard.guard
        )
        return worker

    def _exporter(self) -> Callable[[], None]:
        from tramontane.cluster.observability.metrics import ExpertWorkMetrics, MetricFactory

        work = ExpertWorkMetrics(MetricFactory(), self._settings.pipeline, self._actor_id)
        return lambda: work.export(*self._work_done())

    def _work_done(self) -> tuple[float, int]:
        return (self._worker.busy_s, self._worker.num_rows) if self._worker else (0.0, 0)

    @ray.method(enable_task_events=False)
    # bytes as an array, without importing torch
    def run(self, call: RunMessage, rows: Any) -> tuple[float, Any]:
        """Compute a call over the object store; return the seconds and the result rows. Raises
        ExpertRelocatedError.
        """
        import torch

        from tramontane.workers.device.cuda import to_device, to_host
        from tramontane.workers.experts.expert_worker import ExpertCall

        worker, expert_call = self._wait_until_loaded(), ExpertCall(*call)
        torch.set_num_threads(self._settings.threads)  # applies to this thread only
        dtype = getattr(torch, self._plan.dtype)
        rows_CD = torch.from_numpy(rows).view(dtype).view(expert_call.num_rows, -1)
        with self._failure_guard.guard():
            reply = worker.run(expert_call, to_device(rows_CD, worker.device))
            return reply.busy_s, to_host(reply.rows_CD).view(torch.uint8).reshape(-1).numpy()

    @ray.method(concurrency_group="control")
    def open_link(self, calls: "Address") -> "Address":
        """Open a direct link to a stage, which sends its calls from the address ``calls``; return
        the address of the replies.

        Raises ExpertUnavailableError while this actor loads, or the error that prevented loading.
        """
        if self._is_loading:
            raise ExpertUnavailableError(f"{self.label} is loading")
        self._wait_until_loaded()
        assert self._server is not None
        return self._server.open(calls)

    @ray.method(concurrency_group="moving")
    def load_experts(self, experts: Collection[ExpertId]) -> None:
        """Load the given experts that are not loaded, while the others compute."""
        worker = self._wait_until_loaded()
        self._weight_bytes = len(worker.loaded_experts | set(experts)) * self._plan.expert_bytes
        worker.load_experts(experts)

    @ray.method(concurrency_group="moving")
    def unload_experts(self, kept: Collection[ExpertId]) -> None:
        """Unload all experts but these."""
        worker = self._wait_until_loaded()
        worker.unload_experts(kept)
        self._weight_bytes, self._bytes_loaded = (
            len(kept) * self._plan.expert_bytes,
            worker.num_bytes,
        )

    @ray.method(concurrency_group="control")
    def health(self) -> ExpertHealth:
        """Return the actor's health, also while experts compute or load.

        Call it with ``.options(concurrency_group="control")``.
        """
        busy_s, num_rows = self._work_done()
        return ExpertHealth(**self._health(), busy_s=busy_s, num_rows=num_rows)


def create_expert_actor(
    spec: PipelineSpec, actor_id: int, group: PlacementGroup
) -> ActorHandle[Any]:
    """Create the named, detached expert actor in its bundle, or return the existing one."""
    groups = {"control": 2, "moving": 1}
    remote: Any = ray.remote  # its annotations lack concurrency groups
    actor = remote(concurrency_groups=groups, max_restarts=-1, max_task_retries=0)(ExpertActor)
    options = bundle_options(spec, spec.bundle_of_experts(actor_id), group) | {
        "name": spec.expert_name(actor_id)
    }
    return cast(
        "ActorHandle[Any]",
        actor.options(**options).remote(spec.expert_actors, actor_id, spec.worker_settings),
    )


def rebalance_experts(spec: PipelineSpec, new: ExpertPlan) -> int:
    """Make a pipeline use another expert plan, and return how many copies of experts were loaded.

    For each intermediate plan, actors load the experts that it adds; then it is stored and
    announced to the stages; then actors unload the experts that it removes. A stage that misses the
    announcement finds an expert relocated, reads the plan, and calls again. An actor that restarts
    in between loads the plan stored at that time, so all actors are called again after a plan is
    stored. Raises PlanError if actors have no memory to exchange any, PipelineError if one is lost.
    """
    experts = spec.expert_actors
    assert experts is not None
    num_loaded = 0
    previous = experts.current_plan()
    for method in ("unload_experts", "load_experts"):  # completes a move that was interrupted
        _call_all(experts.names, method, previous)
    for plan in plan_moves(previous, new):
        _call_all(experts.names, "load_experts", plan)
        num_loaded += sum(
            len(set(a.experts) - set(b.experts))
            for a, b in zip(plan.actors, previous.actors, strict=True)
        )
        experts.store_plan(plan)
        _call_all(experts.names, "load_experts", plan)
        for stage in spec.plan.stages:
            _call_with_retry(spec.stage_name(stage.stage_id), "refresh_expert_plan")
        _call_all(experts.names, "unload_experts", plan)
        previous = plan
    return num_loaded


def _call_all(names: Sequence[str], method: str, plan: ExpertPlan) -> None:
    for actor in plan.actors:
        _call_with_retry(names[actor.actor_id], method, actor.experts)


def _call_with_retry(name: str, method: str, *arguments: object) -> None:
    """Call an actor, again while it restarts. Raises PipelineError after MAX_ATTEMPTS."""
    for attempt in itertools.count(1):
        try:
            ray.get(getattr(ray.get_actor(name, NAMESPACE), method).remote(*arguments))
            return
        except RayActorError as error:
            if attempt == MAX_ATTEMPTS:
                raise PipelineError(
                    f"{name} was unavailable {MAX_ATTEMPTS} times in a row, so experts are not"
                    " moved further"
                ) from error
        time.sleep(RETRY_S)
