"""The one place where plain classes become Ray actors."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import ray
from ray.actor import ActorClass, ActorHandle
from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_exists, _internal_kv_put
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from tramontane.proto import wire
from tramontane.proto.errors import PipelineError
from tramontane.proto.plan import StagePlan
from tramontane.proto.step import StepResult

if TYPE_CHECKING:
    from tramontane.workers.stage_worker import StageWorker

NAMESPACE = "tramontane"


class StageActor:
    """A ``StageWorker`` behind Ray: one compute thread, bytes in, bytes out.

    torch is imported when the actor is made, not with this module: whoever only
    drives stages never needs it.
    """

    def __init__(self, plan: StagePlan, folder: Path, device: str, threads: int) -> None:
        self._plan = plan
        self._threads = threads
        self._worker: StageWorker | None = None
        self._failure: Exception | None = None
        try:
            with _loading_once(plan.label):
                self._worker = self._load(folder, device)
        except Exception as error:  # an actor that dies in its constructor cannot say why
            self._failure = error

    def _load(self, folder: Path, device: str) -> "StageWorker":
        import warnings

        from tramontane.workers.stage_worker import StageWorker

        # Hidden states arrive as read-only views of the object store and are never written to.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return StageWorker.load(self._plan, folder, device)

    def __repr__(self) -> str:
        return self._plan.label

    def ready(self) -> str:
        """Answers once the weights are there; raises what kept them from being loaded."""
        self._loaded()
        return self._plan.label

    def fence(self, epoch: int) -> None:
        import torch

        torch.set_num_threads(self._threads)  # counts per thread: here, on the thread that computes
        self._loaded().fence(epoch)

    def step(self, batch: bytes, incoming: Any) -> Any:  # noqa: ANN401 - Packed, but without importing torch
        from tramontane.workers.activation import Activation

        outcome = self._loaded().step(wire.decode_batch(batch), incoming and Activation.unpack(incoming))
        return wire.encode_result(outcome) if isinstance(outcome, StepResult) else outcome.pack()

    @ray.method(concurrency_group="control")
    def health(self) -> dict[str, Any]:
        """Answered beside the compute thread, also while a step runs.

        Call it with ``.options(concurrency_group="control")``: only then does it also
        overtake steps of the same caller that still wait for their input.
        """
        node_id = ray.get_runtime_context().get_node_id()
        epoch = self._worker.epoch if self._worker else None
        return {"label": self._plan.label, "epoch": epoch, "pid": os.getpid(), "node_id": node_id}

    def _loaded(self) -> "StageWorker":
        if self._worker is None:
            assert self._failure is not None
            raise self._failure
        return self._worker


@contextmanager
def _loading_once(label: str) -> Iterator[None]:
    """A stage whose process dies while it loads (out of memory, as a rule) is not loaded again and again.

    The mark outlives the process: Ray restarts the actor, which then finds it.
    """
    mark = f"tramontane-loading-{ray.get_runtime_context().get_actor_id()}"
    if _internal_kv_exists(mark):
        raise PipelineError(f"the process of {label} died while it was loading; most likely there is too little memory")
    _internal_kv_put(mark, b"")
    try:
        yield
    finally:
        _internal_kv_del(mark)


def as_stage_actor(stage: type[StageActor]) -> ActorClass[Any]:
    """``max_task_retries=0``: a step that ran twice would write its caches twice."""
    return ray.remote(concurrency_groups={"control": 2}, max_restarts=-1, max_task_retries=0)(stage)  # type: ignore[call-overload, no-any-return]


def create_stage(
    name: str, plan: StagePlan, folder: Path, group: PlacementGroup, threads: int, use_gpu: bool
) -> ActorHandle[Any]:
    """Make the named, detached actor of one stage in its bundle, or find the one that is there."""
    options = {
        "name": name,
        "namespace": NAMESPACE,
        "lifetime": "detached",
        "get_if_exists": True,
        "num_cpus": threads,
        "num_gpus": 1 if use_gpu else 0,
        "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=plan.stage_id),
    }
    actor = as_stage_actor(StageActor).options(**options)
    return cast("ActorHandle[Any]", actor.remote(plan, folder, "cuda" if use_gpu else "cpu", threads))
