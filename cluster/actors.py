"""The one place where plain classes become Ray actors."""

import os
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import ray
from ray.actor import ActorClass, ActorHandle
from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_exists, _internal_kv_put
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from tramontane.proto import wire
from tramontane.proto.errors import CheckpointError, PipelineError, StaleEpochError
from tramontane.proto.model_folder import RandomWeights, Weights
from tramontane.proto.plan import StagePlan
from tramontane.proto.step import StepResult
from tramontane.workers.fingerprint import Fingerprint, check_fingerprint

if TYPE_CHECKING:
    from tramontane.cluster.supervisor import PipelineSpec
    from tramontane.workers.edge import Address
    from tramontane.workers.link import StageLink
    from tramontane.workers.stage_worker import StageWorker

NAMESPACE = "tramontane"
# How long a stage's threads look out for the next product before they sleep (GNU OpenMP, which torch is built with): one or
# two ms, which spans what lies between two products. By default it is nine, and taken from the stage whose turn it is.
THREADS_WAIT = {"GOMP_SPINCOUNT": "50000"}


@dataclass(frozen=True, slots=True)
class StageHealth:
    """``epoch`` is what the stage obeys, -1 before it has been fenced, and ``holder`` whose epoch that is."""

    label: str
    epoch: int
    holder: str
    pid: int
    node_id: str
    bytes_read: int  # from the checkpoint, by this process
    bytes_loaded: int  # of its weights, as they are in memory; grows up to ``weight_bytes`` while it loads
    weight_bytes: int


class StageActor:
    """A ``StageWorker`` behind Ray: one compute thread, bytes in, bytes out.

    It loads by itself, also when Ray has restarted it and nobody calls, and in a thread of its own: so it
    can be asked meanwhile how far it is. torch is imported when the actor is made, not with this module: whoever only
    drives stages never needs it.
    """

    def __init__(self, plan: StagePlan, weights: Weights, device: str, threads: int, fingerprint: Fingerprint = ()) -> None:
        self._plan = plan
        self._threads = threads
        self._fingerprint = fingerprint
        self._holder = ""
        self._worker: StageWorker | None = None
        self._link: StageLink | None = None  # where hidden states travel directly
        self._failure: Exception | None = None
        self._bytes_read = self._bytes_loaded = 0
        self._loading = threading.Thread(target=self._try_to_load, args=(weights, device), daemon=True)
        self._loading.start()

    def _try_to_load(self, weights: Weights, device: str) -> None:
        try:
            with _loading_once(self._plan.label):
                self._worker = self._load(weights, device)
        except Exception as error:  # told to whoever waits for the weights
            self._failure = error.with_traceback(None)  # whose frames would keep what was loaded so far

    def _load(self, weights: Weights, device: str) -> "StageWorker":
        import warnings

        from tramontane.workers.stage_worker import StageWorker

        # Hidden states arrive as read-only views of the object store and are never written to.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        with naming_the_node():
            if not isinstance(weights, RandomWeights):
                check_fingerprint(weights, self._fingerprint)
            return StageWorker.load(self._plan, weights, device, self._on_tensor)

    def _on_tensor(self, num_read: int, num_loaded: int) -> None:
        self._bytes_read += num_read
        self._bytes_loaded += num_loaded

    def __repr__(self) -> str:
        return self._plan.label

    def ready(self) -> str:
        """Answers once the weights are there; raises what kept them from being loaded."""
        self._wait_until_loaded()
        return self._plan.label

    def fence(self, epoch: int, holder: str) -> None:
        """Forget every sequence, and obey ``epoch`` of ``holder``'s lease from now on. Waits until the weights are there."""
        import torch

        torch.set_num_threads(self._threads)  # counts per thread: here, on the thread that computes
        self._wait_until_loaded().fence(epoch)
        if self._link is not None:
            self._link.close()
        self._holder = holder

    @ray.method(concurrency_group="control")
    def unlink(self, epoch: int) -> None:
        """What waits for a neighbour ends with an error, so that the fence of ``epoch`` gets its turn. Call it as ``health``."""
        if self._worker is not None and self._link is not None and epoch > self._worker.epoch:
            self._link.close()

    def listen(self, epoch: int) -> "Address | None":
        """For the direct link, after the fence: where the next stage, if there is one, finds this one."""
        from tramontane.workers.link import StageLink

        self._link = StageLink(self._fenced_worker(epoch), ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
        return self._link.listen()

    def connect(self, epoch: int, inlet: "Address | None") -> None:
        """Link up with the stage before, which listens at ``inlet``, and then with the next. Raises LinkError."""
        self._fenced_worker(epoch)
        assert self._link is not None
        self._link.connect(inlet)

    @ray.method(enable_task_events=False)
    def linked_step(self, batch: bytes) -> bytes:
        """A step whose hidden states come from the stage before and go to the next; answers this stage's own part."""
        self._refuse_while_loading()
        if self._link is None:
            raise StaleEpochError(f"{self._plan.label} has not been linked since it was loaded")
        return wire.encode_result(self._link.step(wire.decode_batch(batch)))

    @ray.method(enable_task_events=False)
    def step(self, batch: bytes, incoming: Any) -> Any:  # noqa: ANN401 - Packed, but without importing torch
        from tramontane.workers.activation import Activation

        self._refuse_while_loading()
        outcome = self._wait_until_loaded().step(wire.decode_batch(batch), incoming and Activation.unpack(incoming))
        return wire.encode_result(outcome) if isinstance(outcome, StepResult) else outcome.pack()

    @ray.method(concurrency_group="control")
    def health(self) -> StageHealth:
        """Answered beside the compute thread, also while a step runs or weights are loaded.

        Call it with ``.options(concurrency_group="control")``: only then does it also
        overtake steps of the same caller that still wait for their input.
        """
        worker = self._worker
        return StageHealth(
            label=self._plan.label,
            epoch=worker.epoch if worker else -1,
            holder=self._holder,
            pid=os.getpid(),
            node_id=ray.get_runtime_context().get_node_id(),
            bytes_read=self._bytes_read,
            bytes_loaded=self._bytes_loaded,
            weight_bytes=self._plan.weight_bytes,
        )

    def _refuse_while_loading(self) -> None:
        if self._loading.is_alive():  # a step would be refused after loading as well
            raise StaleEpochError(f"{self._plan.label} is loading and obeys no epoch yet")

    def _fenced_worker(self, epoch: int) -> "StageWorker":
        worker = self._wait_until_loaded()
        if worker.epoch != epoch:
            raise StaleEpochError(f"{self._plan.label} is at epoch {worker.epoch} and is not linked for epoch {epoch}")
        return worker

    def _wait_until_loaded(self) -> "StageWorker":
        self._loading.join()
        if self._worker is None:
            assert self._failure is not None
            raise self._failure
        return self._worker


@contextmanager
def naming_the_node() -> Iterator[None]:
    """A checkpoint's folder is looked for on many nodes: say on which of them something is wrong with it."""
    try:
        yield
    except CheckpointError as error:
        node = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        raise CheckpointError(f"on node {node} ({socket.gethostname()}): {error}") from error


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


def actor_names(pattern: str) -> list[str]:
    """Names of our living actors that match the whole of a regular expression."""
    actors = ray.util.list_named_actors(all_namespaces=True)
    return sorted(a["name"] for a in actors if a["namespace"] == NAMESPACE and re.fullmatch(pattern, a["name"]))


def as_stage_actor(stage: type[StageActor]) -> ActorClass[Any]:
    """``max_task_retries=0``: a step that ran twice would write its caches twice."""
    return ray.remote(concurrency_groups={"control": 2}, max_restarts=-1, max_task_retries=0)(stage)  # type: ignore[call-overload, no-any-return]


def create_stage(spec: "PipelineSpec", plan: StagePlan, group: PlacementGroup) -> ActorHandle[Any]:
    """Make the named, detached actor of one stage in its bundle, or find the one that is there."""
    options = {
        "name": spec.stage_name(plan.stage_id),
        "namespace": NAMESPACE,
        "lifetime": "detached",
        "get_if_exists": True,
        "num_cpus": spec.threads_per_stage,
        "num_gpus": 1 if spec.use_gpus else 0,
        "runtime_env": {"env_vars": THREADS_WAIT} if spec.plan.takes_turns else None,
        "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=plan.stage_id),
    }
    device = "cuda" if spec.use_gpus else "cpu"
    actor = as_stage_actor(StageActor).options(**options)
    return cast("ActorHandle[Any]", actor.remote(plan, spec.weights, device, spec.threads_per_stage, spec.fingerprint))
