"""Where a stage becomes a Ray actor."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import ray
from ray.actor import ActorClass, ActorHandle
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from tramontane.cluster.actors.pipeline_spec import ExpertActorRefs
from tramontane.cluster.actors.step_guard import FailureGuard, log_failures
from tramontane.cluster.actors.worker_actor import NAMESPACE, OMP_SPIN_ENV, WorkerActor, WorkerHealth
from tramontane.cluster.config.logging import LogSettings
from tramontane.proto import wire
from tramontane.proto.errors import StaleEpochError
from tramontane.proto.model_folder import WeightSource
from tramontane.proto.plan import StagePlan
from tramontane.proto.step import StepResult
from tramontane.workers.weights.fingerprint import Fingerprint

if TYPE_CHECKING:
    from tramontane.cluster.actors.pipeline_spec import PipelineSpec, TokenPieceLoader
    from tramontane.workers.experts.remote_experts import RemoteExperts
    from tramontane.workers.links.channel import Address
    from tramontane.workers.stage.stage_link import StageLink
    from tramontane.workers.stage.stage_worker import StageWorker
    from tramontane.workers.stage.step_executor import StepExecutor


GPU_PIPELINE_DEPTH = 2  # steps: one that the device computes, and the next


@dataclass(frozen=True, slots=True)
class StageHealth(WorkerHealth):
    """``epoch`` is what the stage obeys, -1 before it has been fenced, and ``holder`` whose epoch that is.

    ``expert_load``: by layer (its global number), how many tokens each expert was given since the stage was loaded.
    """

    epoch: int
    holder: str
    expert_load: dict[int, tuple[int, ...]]


class StageActor(WorkerActor["StageWorker"]):
    """A ``StageWorker`` behind Ray. Its steps are computed in their order, one at a time."""

    def __init__(
        self,
        plan: StagePlan,
        weights: WeightSource,
        device: str,
        threads: int,
        fingerprint: Fingerprint = (),
        experts: ExpertActorRefs | None = None,
        pipeline: str = "",
        pieces: "TokenPieceLoader | None" = None,
        logs: LogSettings | None = None,
    ) -> None:
        if logs is not None:
            logs.to_stderr("stage", pipeline=pipeline, stage=plan.stage_id)
        self._plan, self._threads, self._experts, self._pipeline = plan, threads, experts, pipeline
        self._pieces = pieces
        self._holder = ""
        self._fencing = threading.Lock()  # a fence that nobody waits for any more may still be about
        self._steps: StepExecutor | None = None
        self._remote: RemoteExperts | None = None  # where experts are on actors of their own
        self._link: StageLink | None = None  # where hidden states travel directly
        self._own_failures = FailureGuard(plan.label, device)
        super().__init__(plan.label, plan.weight_bytes, weights, device, fingerprint)

    def _load(self) -> "StageWorker":
        from tramontane.workers.stage.stage_worker import StageWorker

        return StageWorker.load(self._plan, self._weights, self._device, self._on_tensor, self._pieces or tuple)

    def _exporter(self) -> Callable[[], None]:
        from tramontane.cluster.observability.metrics import expert_tokens

        tokens = expert_tokens(self._pipeline, self._plan.stage_id)
        return lambda: tokens.export(self._expert_load())

    @ray.method(concurrency_group="compute")
    def fence(self, epoch: int, holder: str) -> None:
        """Forget every sequence, and obey ``epoch`` of ``holder``'s lease from now on. Waits until the weights are there."""
        self._wait_until_loaded()
        with self._fencing:
            if self._steps is None:
                self._steps = self._new_steps()
            self._steps.fence(epoch)
            if self._link is not None:
                self._link.close()
            self._holder = holder

    @ray.method(concurrency_group="control")
    def interrupt(self, epoch: int) -> None:
        """What waits for a neighbour or for experts ends with an error, so that the fence of ``epoch`` gets its turn.

        Call it as ``health``.
        """
        if self._worker is None or epoch <= self._worker.epoch:
            return
        if self._link is not None:
            self._link.close()
        if self._steps is not None:
            self._steps.interrupt()

    @ray.method(concurrency_group="compute")
    def listen(self, epoch: int) -> "Address | None":
        """For the direct link, after the fence: where the next stage, if there is one, finds this one."""
        from tramontane.workers.stage.stage_link import StageLink

        worker = self._fenced_worker(epoch)
        assert self._steps is not None
        self._link = StageLink(worker, self._steps, ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
        return self._link.listen()

    @ray.method(concurrency_group="compute")
    def connect(self, epoch: int, inlet: "Address | None") -> None:
        """Link up with the stage before, which listens at ``inlet``, and then with the next. Raises LinkError."""
        self._fenced_worker(epoch)
        assert self._link is not None
        self._link.connect(inlet)

    @ray.method(enable_task_events=False, concurrency_group="compute")
    def linked_step(self, batch: bytes) -> bytes:
        """A step whose hidden states come from the stage before and go to the next; answers this stage's own part."""
        self._refuse_while_loading()
        if self._link is None:
            raise StaleEpochError(f"{self.label} has not been linked since it was loaded")
        decoded = wire.decode_batch(batch)
        with self._own_failures.guard(decoded.epoch), log_failures(self._worker, decoded):
            return wire.encode_result(self._link.step(decoded))

    @ray.method(enable_task_events=False, concurrency_group="compute")
    def step(self, batch: bytes, incoming: Any) -> Any:  # noqa: ANN401 - Packed, but without importing torch
        from tramontane.workers.stage.activation import Activation, ActivationSender

        self._refuse_while_loading()
        decoded = wire.decode_batch(batch)
        worker = self._wait_until_loaded()
        worker.check_epoch(decoded)
        assert self._steps is not None
        outbox = ActivationSender()
        with self._own_failures.guard(decoded.epoch), log_failures(worker, decoded):
            outcome = self._steps.step(decoded, lambda: incoming and Activation.unpack(incoming, worker.device), outbox.send)
        return wire.encode_result(outcome) if isinstance(outcome, StepResult) else outbox.payload(outcome)

    @ray.method(concurrency_group="control")
    def refresh_expert_plan(self) -> None:
        """They have moved. Call it as ``health``."""
        if self._remote is not None:
            assert self._experts is not None
            self._remote.set_plan(self._experts.current_plan())

    @ray.method(concurrency_group="control")
    def health(self) -> StageHealth:
        """Answered beside the compute thread, also while a step runs or weights are loaded.

        Call it with ``.options(concurrency_group="control")``: only then does it also
        overtake steps of the same caller that still wait for their input.
        """
        worker = self._worker
        epoch = worker.epoch if worker else -1
        return StageHealth(**self._health(), epoch=epoch, holder=self._holder, expert_load=self._expert_load())

    @property
    def _computing_s(self) -> float:
        return self._steps.busy_for_s if self._steps else 0.0

    def _expert_load(self) -> dict[int, tuple[int, ...]]:
        return {layer: tuple(tokens) for layer, tokens in self._worker.model.expert_load.items()} if self._worker else {}

    def _new_steps(self) -> "StepExecutor":
        from tramontane.workers.stage.overlapped_executor import OverlappedExecutor
        from tramontane.workers.stage.step_executor import SerialExecutor

        worker = self._wait_until_loaded()
        if self._experts is None:
            return (
                OverlappedExecutor(worker, GPU_PIPELINE_DEPTH)
                if worker.device.type == "cuda"
                else SerialExecutor(worker, self._threads)
            )
        from tramontane.cluster.actors.expert_connections import expert_connector
        from tramontane.workers.experts.remote_experts import RemoteExperts
        from tramontane.workers.stage.ping_pong_executor import PingPongExecutor

        to_each = expert_connector(self._experts, worker.device)
        self._remote = RemoteExperts(self._experts.current_plan(), to_each, self._experts.current_plan)
        return PingPongExecutor(worker, self._remote, self._experts.max_open, self._threads)

    def _refuse_while_loading(self) -> None:
        if self._is_loading:  # a step would be refused after loading as well
            raise StaleEpochError(f"{self.label} is loading and obeys no epoch yet")

    def _fenced_worker(self, epoch: int) -> "StageWorker":
        worker = self._wait_until_loaded()
        if worker.epoch != epoch:
            raise StaleEpochError(f"{self.label} is at epoch {worker.epoch} and is not linked for epoch {epoch}")
        return worker


def remote_stage_class(stage: type[StageActor], steps_at_once: int = 1) -> ActorClass[Any]:
    """``max_task_retries=0``: a step that ran twice would write its caches twice.

    All that computes, or links, is in one group of threads; they begin in the order in which one caller calls.
    """
    groups = {"control": 2, "compute": steps_at_once}
    return ray.remote(concurrency_groups=groups, max_restarts=-1, max_task_retries=0)(stage)  # type: ignore[call-overload, no-any-return]


def create_stage(spec: "PipelineSpec", plan: StagePlan, group: PlacementGroup) -> ActorHandle[Any]:
    """Make the named, detached actor of one stage in its bundle, or find the one that is there."""
    experts = spec.expert_actors
    kind = remote_stage_class(StageActor, _steps_at_once(spec))
    place = bundle_options(spec, spec.bundle_of_stage(plan.stage_id), group, spec.gpu_share)
    make = kind.options(**place, name=spec.stage_name(plan.stage_id)).remote
    device = "cuda" if spec.use_gpus else "cpu"
    return cast(
        "ActorHandle[Any]",
        make(plan, spec.weights, device, spec.threads_per_stage, spec.fingerprint, experts, spec.name, spec.pieces, spec.logs),
    )


def _steps_at_once(spec: "PipelineSpec") -> int:
    """Threads for steps: one for each that can be open, and one that waits for them or fences."""
    if spec.expert_actors is not None:
        return spec.expert_actors.max_open + 1
    return GPU_PIPELINE_DEPTH + 1 if spec.use_gpus else 1


def bundle_options(spec: "PipelineSpec", bundle: int, group: PlacementGroup, gpu_share: float = 1) -> dict[str, Any]:
    """Ray's options of a detached actor in one of the pipeline's bundles, of whose GPU it has a share.

    A share is of that one GPU, also for those who come after it: the bundle has no other.
    """
    return {
        "namespace": NAMESPACE,
        "lifetime": "detached",
        "get_if_exists": True,
        "num_cpus": spec.threads_per_stage,
        "num_gpus": gpu_share if spec.use_gpus else 0,
        "runtime_env": {"env_vars": OMP_SPIN_ENV} if spec.plan.is_oversubscribed else None,
        "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle),
    }
