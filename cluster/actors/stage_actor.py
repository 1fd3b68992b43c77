"""The Ray actor of one stage."""

import os
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, cast

import ray
from ray.actor import ActorClass, ActorHandle
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from tramontane.cluster.actors.pipeline_spec import (
    ExpertActorRefs,
    TokenPieceLoader,
    WorkerSettings,
)
from tramontane.cluster.actors.worker_actor import (
    NAMESPACE,
    OMP_SPIN_ENV,
    WorkerActor,
    WorkerHealth,
    log_failures,
)
from tramontane.cluster.config.ray_settings import INLINE_LIMIT
from tramontane.cluster.ray_internals.accessors import cluster_settings
from tramontane.proto import wire
from tramontane.proto.errors import StaleEpochError
from tramontane.proto.plan import StagePlan
from tramontane.proto.step import StepResult

if TYPE_CHECKING:
    from tramontane.cluster.actors.pipeline_spec import PipelineSpec
    from tramontane.workers.experts.remote_experts import RemoteExperts
    from tramontane.workers.links.channel import Address
    from tramontane.workers.stage.hidden_states import Packed, StageInput
    from tramontane.workers.stage.stage_link import StageLink
    from tramontane.workers.stage.stage_worker import StageWorker
    from tramontane.workers.stage.step_executor import StepExecutor

# Counts of the hidden states that a stage sends to the next one, by transport.

RAYS_LIMIT = 100 * 2**10  # without the setting
SERIALIZED_OVERHEAD = 254  # bytes that Ray's serialization adds to a header and an array


class Transport(StrEnum):
    """The transport of hidden states to the next stage: in the reply to the router and the router's
    next call, through the object store, or over a channel.
    """

    INLINE = "inline"
    PLASMA = "plasma"
    DIRECT = "direct"


class HiddenStateTransfers:
    """Counts of one stage's transfers of hidden states. Threads that compute steps add to the
    counts, and another thread reads them.
    """

    def __init__(self, inline_hidden_states_below: int) -> None:
        self._inline_hidden_states_below = inline_hidden_states_below
        self._lock = threading.Lock()
        self._transfers: Counter[Transport] = Counter()
        self._num_bytes: Counter[Transport] = Counter()

    def add_result(self, packed: "Packed") -> None:
        """Count a result of the actor by Ray's own rule: with a limit of 1,048,576, 1,048,575 bytes
        are inline.
        """
        header, array_B = packed
        size = len(header) + array_B.nbytes + SERIALIZED_OVERHEAD
        is_inline = size < self._inline_hidden_states_below
        self._add(Transport.INLINE if is_inline else Transport.PLASMA, array_B.nbytes)

    def add_direct(self, num_bytes: int) -> None:
        """Count hidden states sent through a direct channel."""
        self._add(Transport.DIRECT, num_bytes)

    def _add(self, transport: Transport, num_bytes: int) -> None:
        with self._lock:
            self._transfers[transport] += 1
            self._num_bytes[transport] += num_bytes

    def totals(self) -> dict[str, tuple[int, int]]:
        """Return the number of transfers and their bytes, by transport."""
        with self._lock:
            return {
                str(transport): (number, self._num_bytes[transport])
                for transport, number in self._transfers.items()
            }


def inline_hidden_states_below() -> int:
    """Return the size below which this cluster's results are inline: a setting of the head node, or
    else of the environment.
    """
    return int(
        cluster_settings().get(INLINE_LIMIT) or os.environ.get(f"RAY_{INLINE_LIMIT}") or RAYS_LIMIT
    )


GPU_PIPELINE_DEPTH = 2  # open steps: one that the device computes, and the next


@dataclass(frozen=True, slots=True)
class StageHealth(WorkerHealth):
    """Health of a stage. ``epoch``: the epoch that it accepts, granted to ``holder``; -1 before the
    first fence.

    ``expert_load``: by layer (its global number), how many tokens each expert was given since the
    stage was loaded. ``sent``: see ``HiddenStateTransfers.totals``. ``device``: its name; "" before
    the stage is loaded.
    ``sampled_epoch``: of the last step in which it has sampled a token; -1 before the first one.
    """

    epoch: int
    holder: str
    expert_load: dict[int, tuple[int, ...]]
    sent: dict[str, tuple[int, int]]
    device: str = ""
    sampled_epoch: int = -1


class StageActor(WorkerActor["StageWorker"]):
    """A ``StageWorker`` behind Ray. Its steps are computed in the order of submission, one at a
    time.
    """

    def __init__(
        self,
        plan: StagePlan,
        settings: WorkerSettings,
        experts: ExpertActorRefs | None = None,
        pieces: TokenPieceLoader | None = None,
    ) -> None:
        if settings.logs is not None:
            settings.logs.to_stderr("stage", pipeline=settings.pipeline, stage=plan.stage_id)
        self._plan, self._experts, self._pieces = plan, experts, pieces
        self._holder = ""
        self._fence_lock = threading.Lock()  # a fence whose caller has timed out may still run
        self._executor: StepExecutor | None = None
        self._remote_experts: RemoteExperts | None = None  # if experts are on actors of their own
        self._link: StageLink | None = None  # if hidden states travel through direct channels
        self._sent = HiddenStateTransfers(inline_hidden_states_below())
        self._sampled_epoch = -1  # of the last step with a token
        super().__init__(plan.label, plan.weight_bytes, settings)

    def _load(self) -> "StageWorker":
        import torch

        from tramontane.workers.stage.stage_worker import StageWorker

        settings = self._settings
        # Applies to this thread only. torch.compile would recompile in threads of steps that have
        # another number.
        torch.set_num_threads(settings.threads)
        return StageWorker.load(
            self._plan,
            settings.weights,
            settings.device,
            self._on_tensor,
            self._pieces or tuple,
            self._on_activity,
        )

    def _exporter(self) -> Callable[[], None]:
        from tramontane.cluster.observability.metrics import MetricFactory, StageActorMetrics

        metrics = StageActorMetrics(MetricFactory(), self._settings.pipeline, self._plan.stage_id)
        return lambda: metrics.export(self._expert_load(), self._sent.totals())

    @ray.method(concurrency_group="compute")
    def fence(self, epoch: int, holder: str) -> None:
        """Drop every sequence, and accept only ``epoch`` of ``holder``'s lease. Waits until the
        weights are loaded.
        """
        self._wait_until_loaded()
        with self._fence_lock:
            if self._executor is None:
                self._executor = self._make_executor()
            self._executor.fence(epoch)
            if self._link is not None:
                self._link.close()
            self._holder = holder

    @ray.method(concurrency_group="control")
    def interrupt(self, epoch: int) -> None:
        """End calls that wait for another stage or for experts with an error, so that the fence of
        ``epoch`` gets its turn.

        Call it as ``health``.
        """
        if self._worker is None or epoch <= self._worker.epoch:
            return
        if self._link is not None:
            self._link.close()
        if self._executor is not None:
            self._executor.interrupt()

    @ray.method(concurrency_group="compute")
    def listen(self, epoch: int) -> "Address | None":
        """Open a direct link after the fence; return the address for the next stage, if there is
        one.
        """
        from tramontane.workers.stage.stage_link import StageLink

        worker = self._fenced_worker(epoch)
        assert self._executor is not None
        self._link = StageLink(worker, self._executor, ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
        return self._link.listen()

    @ray.method(concurrency_group="compute")
    def connect(self, epoch: int, inlet: "Address | None") -> None:
        """Connect to the previous stage, which listens at ``inlet``, and then to the next. Raises
        LinkError.
        """
        self._fenced_worker(epoch)
        assert self._link is not None
        with self._failure_guard.guard_connect():
            self._link.connect(inlet)

    @ray.method(enable_task_events=False, concurrency_group="compute")
    def linked_step(self, batch: bytes, last_result: bytes | None = None) -> bytes:
        """Compute a step whose hidden states travel through direct channels; return this stage's
        part of the result.

        ``last_result``: see ``step``.
        """
        self._refuse_while_loading()
        if self._link is None:
            raise StaleEpochError(f"{self.label} has no direct link since it was loaded")
        decoded = wire.decode_batch(batch)
        last = None if last_result is None else wire.decode_result(last_result)
        with self._failure_guard.guard(decoded.epoch), log_failures(self._worker, decoded):
            outcome = self._link.step(decoded, last)
        self._note_tokens(outcome)
        if not self._plan.is_last:
            assert self._worker is not None
            self._sent.add_direct(
                decoded.num_tokens * self._plan.args.dim * self._worker.dtype.itemsize
            )
        return wire.encode_result(outcome)

    @ray.method(enable_task_events=False, concurrency_group="compute")
    def step(self, batch: bytes, incoming: Any) -> Any:  # Packed, but without importing torch
        """Compute a step from the previous stage's output; return hidden states, or the last
        stage's encoded result.

        For the first stage ``incoming`` is the last stage's encoded result of the previous step, if
        that was in flight when this one was submitted: it has the tokens for the placeholders.
        """
        from tramontane.workers.stage.hidden_states import HiddenStatesCopy

        self._refuse_while_loading()
        worker = self._wait_until_loaded()
        if self._executor is None:
            raise StaleEpochError(
                f"{self.label} is at epoch {worker.epoch}: not fenced since it was loaded"
            )
        decoded, outbox = wire.decode_batch(batch), HiddenStatesCopy()
        with self._failure_guard.guard(decoded.epoch), log_failures(worker, decoded):
            outcome = self._executor.step(decoded, lambda: self._unpack(incoming), outbox.start)
        if isinstance(outcome, StepResult):
            self._note_tokens(outcome)
            return wire.encode_result(outcome)
        packed = outbox.payload(outcome)
        self._sent.add_result(packed)
        return packed

    @ray.method(concurrency_group="control")
    def refresh_expert_plan(self) -> None:
        """Read the expert plan again, after experts have moved. Call it as ``health``."""
        if self._remote_experts is not None:
            assert self._experts is not None
            self._remote_experts.set_plan(self._experts.current_plan())

    @ray.method(concurrency_group="control")
    def health(self) -> StageHealth:
        """Return the stage's health, also while a step runs or weights load.

        Call it with ``.options(concurrency_group="control")``: only then does it also
        overtake steps of the same caller that still wait for their input.
        """
        worker = self._worker
        return StageHealth(
            **self._health(),
            epoch=worker.epoch if worker else -1,
            holder=self._holder,
            expert_load=self._expert_load(),
            sent=self._sent.totals(),
            device=worker.device_name if worker else "",
            sampled_epoch=self._sampled_epoch,
        )

    @property
    def _busy_for_s(self) -> float:
        return self._executor.busy_for_s if self._executor else 0.0

    def _unpack(self, incoming: Any) -> "StageInput":
        from tramontane.workers.stage.hidden_states import HiddenStates

        if incoming is None:
            return None
        return (
            wire.decode_result(incoming) if self._plan.is_first else HiddenStates.unpack(incoming)
        )

    def _note_tokens(self, outcome: StepResult) -> None:
        if outcome.num_sampled:
            self._sampled_epoch = outcome.epoch

    def _expert_load(self) -> dict[int, tuple[int, ...]]:
        return (
            {layer: tuple(tokens) for layer, tokens in self._worker.model.expert_load.items()}
            if self._worker
            else {}
        )

    def _make_executor(self) -> "StepExecutor":
        from tramontane.workers.stage.step_executor import OverlappedExecutor, SerialExecutor

        worker = self._wait_until_loaded()
        if self._experts is None:
            return (
                OverlappedExecutor(worker, GPU_PIPELINE_DEPTH)
                if worker.device.type == "cuda"
                else SerialExecutor(worker, self._settings.threads)
            )
        from tramontane.cluster.actors.expert_connections import expert_connector
        from tramontane.workers.experts.remote_experts import RemoteExperts
        from tramontane.workers.stage.ping_pong_executor import PingPongExecutor

        connect = expert_connector(self._experts, worker.device)
        self._remote_experts = RemoteExperts(
            self._experts.current_plan(), connect, self._experts.current_plan
        )
        return PingPongExecutor(
            worker, self._remote_experts, self._experts.max_open, self._settings.threads
        )

    def _refuse_while_loading(self) -> None:
        if self._is_loading:  # a step would be refused after loading, too
            raise StaleEpochError(f"{self.label} is loading and accepts no epoch yet")

    def _fenced_worker(self, epoch: int) -> "StageWorker":
        worker = self._wait_until_loaded()
        if worker.epoch != epoch:
            raise StaleEpochError(
                f"{self.label} is at epoch {worker.epoch} and is not linked for epoch {epoch}"
            )
        return worker


def remote_stage_class(stage: type[StageActor], steps_at_once: int = 1) -> ActorClass[Any]:
    """Return the class of a stage's actor. Calls are never retried: a repeated step would write its
    cache entries twice.

    Computing and linking share one group of threads, which start calls in the caller's order.
    """
    groups = {"control": 2, "compute": steps_at_once}
    return ray.remote(concurrency_groups=groups, max_restarts=-1, max_task_retries=0)(stage)  # type: ignore[call-overload, no-any-return]


def create_stage(spec: "PipelineSpec", plan: StagePlan, group: PlacementGroup) -> ActorHandle[Any]:
    """Create the named, detached actor of one stage in its bundle, or return the existing one."""
    actor = remote_stage_class(StageActor, _steps_at_once(spec))
    options = bundle_options(spec, spec.bundle_of_stage(plan.stage_id), group, spec.gpu_share)
    create = actor.options(**options, name=spec.stage_name(plan.stage_id)).remote
    return cast(
        "ActorHandle[Any]", create(plan, spec.worker_settings, spec.expert_actors, spec.pieces)
    )


def _steps_at_once(spec: "PipelineSpec") -> int:
    """Return the number of threads for steps: one for each step that can be open, and one that
    waits for these or fences.
    """
    if spec.expert_actors is not None:
        return spec.expert_actors.max_open + 1
    return GPU_PIPELINE_DEPTH + 1 if spec.use_gpus else 1


def bundle_options(
    spec: "PipelineSpec", bundle: int, group: PlacementGroup, gpu_share: float = 1
) -> dict[str, Any]:
    """Return Ray's options for a detached actor in one of the pipeline's bundles, with a share of
    its GPU.

    All actors of a bundle share one GPU, also after a restart: the bundle has no other GPU.
    """
    return {
        "namespace": NAMESPACE,
        "lifetime": "detached",
        "get_if_exists": True,
        "num_cpus": spec.threads_per_stage,
        "num_gpus": gpu_share if spec.use_gpus else 0,
        "runtime_env": {"env_vars": OMP_SPIN_ENV} if spec.plan.is_oversubscribed else None,
        "scheduling_strategy": PlacementGroupSchedulingStrategy(
            group, placement_group_bundle_index=bundle
        ),
    }
