"""Where experts become Ray actors."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import ray
from ray.actor import ActorHandle
from ray.util.placement_group import PlacementGroup

from tramontane.cluster.actors.pipeline_spec import ExpertActorRefs
from tramontane.cluster.actors.stage_actor import bundle_options
from tramontane.cluster.actors.step_guard import FailureGuard
from tramontane.cluster.actors.worker_actor import WorkerActor, WorkerHealth
from tramontane.cluster.config.logging import LogSettings
from tramontane.proto.errors import ExpertUnavailableError
from tramontane.proto.model_folder import WeightSource
from tramontane.proto.plan import ExpertId
from tramontane.workers.weights.fingerprint import Fingerprint

if TYPE_CHECKING:
    from tramontane.cluster.actors.pipeline_spec import PipelineSpec
    from tramontane.workers.experts.expert_link import ExpertServer
    from tramontane.workers.experts.expert_worker import ExpertWorker
    from tramontane.workers.links.channel import Address

RunMessage = tuple[int, tuple[int, ...], tuple[int, ...]]  # the fields of an ExpertCall


@dataclass(frozen=True, slots=True)
class ExpertHealth(WorkerHealth):
    """What the actor has done since it was loaded: seconds in which its experts worked, and rows that they were given."""

    busy_s: float
    num_rows: int


class ExpertActor(WorkerActor["ExpertWorker"]):
    """An ``ExpertWorker`` behind Ray. It keeps nothing between calls, so that one which is repeated does no harm."""

    def __init__(
        self,
        experts: ExpertActorRefs,
        actor_id: int,
        weights: WeightSource,
        device: str,
        threads: int,
        fingerprint: Fingerprint = (),
        logs: LogSettings | None = None,
    ) -> None:
        if logs is not None:
            logs.to_stderr("experts", pipeline=experts.pipeline, actor=actor_id)
        self._plan, self._actor_id, self._threads = experts.current_plan(), actor_id, threads
        self._pipeline = experts.pipeline
        self._door: ExpertServer | None = None
        own = self._plan.actors[actor_id]
        self._own_failures = FailureGuard(own.label, device)
        super().__init__(own.label, own.weight_bytes, weights, device, fingerprint)

    def _load(self) -> "ExpertWorker":
        from tramontane.workers.experts.expert_link import ExpertServer
        from tramontane.workers.experts.expert_worker import ExpertWorker
        from tramontane.workers.links.factory import channel_factory_for

        worker = ExpertWorker.load(self._plan, self._actor_id, self._weights, self._device, self._on_tensor)
        host = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        self._door = ExpertServer(
            worker, self._plan, host, channel_factory_for(worker.device), self._threads, self._own_failures.guard
        )
        return worker

    def _exporter(self) -> Callable[[], None]:
        from tramontane.cluster.observability.metrics import expert_work

        work = expert_work(self._pipeline, self._actor_id)
        return lambda: work.export(*self._work_done())

    def _work_done(self) -> tuple[float, int]:
        return (self._worker.busy_s, self._worker.num_rows) if self._worker else (0.0, 0)

    @ray.method(enable_task_events=False)
    def run(self, call: RunMessage, rows: Any) -> tuple[float, Any]:  # noqa: ANN401 - bytes as an array, without importing torch
        """Over the object store: how long the experts worked, and the rows that they made. Raises ExpertRelocatedError."""
        import torch

        from tramontane.workers.device.pinned_memory import to_device, to_host
        from tramontane.workers.experts.expert_worker import ExpertCall

        worker, expert_call = self._wait_until_loaded(), ExpertCall(*call)
        torch.set_num_threads(self._threads)  # counts per thread
        dtype = getattr(torch, self._plan.dtype)
        rows_CD = torch.from_numpy(rows).view(dtype).view(expert_call.num_rows, -1)
        with self._own_failures.guard():
            reply = worker.run(expert_call, to_device(rows_CD, worker.device))
            return reply.busy_s, to_host(reply.rows_CD).view(torch.uint8).reshape(-1).numpy()

    @ray.method(concurrency_group="control")
    def open_link(self, calls: "Address") -> "Address":
        """For the direct link of a stage, whose calls come from there; where its replies will come from.

        Raises ExpertUnavailableError while it is loading, and whatever kept it from loading.
        """
        if self._is_loading:
            raise ExpertUnavailableError(f"{self.label} is loading")
        self._wait_until_loaded()
        assert self._door is not None
        return self._door.open(calls)

    @ray.method(concurrency_group="moving")
    def load_experts(self, experts: Collection[ExpertId]) -> None:
        """Load those of them that are not here, while the others work."""
        worker = self._wait_until_loaded()
        self._weight_bytes = len(worker.loaded_experts | set(experts)) * self._plan.expert_bytes
        worker.load_experts(experts)

    @ray.method(concurrency_group="moving")
    def unload_experts(self, kept: Collection[ExpertId]) -> None:
        """Forget all experts but these."""
        worker = self._wait_until_loaded()
        worker.unload_experts(kept)
        self._weight_bytes, self._bytes_loaded = len(kept) * self._plan.expert_bytes, worker.num_bytes

    @ray.method(concurrency_group="control")
    def health(self) -> ExpertHealth:
        """Answered also while experts work or weights are loaded. Call it with ``.options(concurrency_group="control")``."""
        busy_s, num_rows = self._work_done()
        return ExpertHealth(**self._health(), busy_s=busy_s, num_rows=num_rows)


def create_expert_actor(spec: "PipelineSpec", actor_id: int, group: PlacementGroup) -> ActorHandle[Any]:
    """Make the named, detached actor of some experts in its bundle, or find the one that is there."""
    groups = {"control": 2, "moving": 1}
    kind: Any = ray.remote(concurrency_groups=groups, max_restarts=-1, max_task_retries=0)(ExpertActor)  # type: ignore[call-overload]
    options = bundle_options(spec, spec.bundle_of_experts(actor_id), group) | {"name": spec.expert_name(actor_id)}
    device = "cuda" if spec.use_gpus else "cpu"
    arguments = (spec.expert_actors, actor_id, spec.weights, device, spec.threads_per_stage, spec.fingerprint, spec.logs)
    return cast("ActorHandle[Any]", kind.options(**options).remote(*arguments))
