"""The base class of stage actors and expert actors: they load by themselves, and report their
progress.
"""

import gc
import logging
import os
import re
import socket
import sys
import threading
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import ray

from tramontane.cluster.actors.pipeline_spec import WorkerSettings
from tramontane.cluster.common.ray_api import start_periodic_thread
from tramontane.cluster.planning.hardware import num_memory_kills
from tramontane.cluster.ray_internals.accessors import (
    end_of_last_process,
    kv_delete,
    kv_get,
    kv_put,
)
from tramontane.proto.errors import (
    CheckpointError,
    LinkError,
    PipelineError,
    StaleEpochError,
    TramontaneError,
)
from tramontane.proto.model_folder import RandomWeights
from tramontane.proto.request import format_request_ids, requests_fields
from tramontane.proto.step import MicroBatch
from tramontane.workers.device.numerics import Numerics
from tramontane.workers.weights.checkpoint import check_checkpoint_digest

if TYPE_CHECKING:
    from tramontane.workers.stage.stage_worker import StageWorker

# Guards around a worker's steps: a process that can no longer compute exits, and failed steps are
# logged.

# in a row; one more than a poison request causes: two with other requests, the third alone
MAX_FAILURES = 4
# threads left in a call of NCCL; one may be due to a neighbor that died at that moment
MAX_ABANDONED = 3

logger = logging.getLogger(__name__)


class FailureGuard:
    """Counts the failures of one process, and ends the process so that Ray starts another one,
    which loads the weights again.

    Errors of Tramontane's own classes, which may be caused by another actor, do not count. A kernel
    that fails leaves an unusable CUDA context, while the process, its health checks and all
    operations on host memory continue to work. So after each failure the device is tested.
    """

    def __init__(self, label: str, device: str, end: Callable[[], None] | None = None) -> None:
        self._label, self._device, self._end = label, device, end or _end_process
        self._num_in_a_row = 0
        self._failed_epoch: int | None = None

    @contextmanager
    def guard(self, epoch: int | None = None) -> Iterator[None]:
        """Guard one step or call. In one epoch only the first failure counts: the other steps were
        already in flight.
        """
        try:
            yield
        except TramontaneError:
            raise
        except Exception as error:
            if epoch is None or epoch != self._failed_epoch:
                self._num_in_a_row += 1
            self._failed_epoch = epoch
            if not device_self_test(self._device):
                self._exit(f"{self._device} no longer computes: {error}")
            elif self._num_in_a_row >= MAX_FAILURES:
                self._exit(f"{MAX_FAILURES} steps in a row have failed: {error}")
            raise
        self._num_in_a_row = 0

    @contextmanager
    def guard_connect(self) -> Iterator[None]:
        """Guard the creation of channels, which leaves a thread running if two GPUs cannot be
        connected.
        """
        try:
            yield
        except LinkError as error:
            from tramontane.workers.links.gpu_channel import num_abandoned_operations

            if (num_abandoned := num_abandoned_operations()) >= MAX_ABANDONED:
                self._exit(
                    f"{num_abandoned} threads were left in the first operation of a channel:"
                    f" {error}"
                )
            raise

    def _exit(self, why: str) -> None:
        logger.error("%s exits, and gets a new process: %s", self._label, why)
        self._end()


def _end_process() -> None:
    # an exit that Ray does not consider intended, and that does not wait for the device
    os._exit(1)


def device_self_test(device: str) -> bool:
    """Return whether the device still computes 1 + 1."""
    import torch

    try:
        return bool(torch.ones(1, device=device).add_(1).item() == 2)
    except Exception:
        return False


@contextmanager
def log_failures(worker: "StageWorker | None", batch: MicroBatch) -> Iterator[None]:
    """Log a step that fails, with its requests; errors of Tramontane's own classes need no
    traceback.
    """
    # now, because a fence drops them, perhaps before the log
    request_ids = worker.request_ids_of(batch) if worker else []
    try:
        yield
    except StaleEpochError:  # it is refused, and no request has failed
        raise
    except Exception as error:
        what = (batch.step_id, format_request_ids(request_ids) or "-", error)
        is_ours = isinstance(error, TramontaneError)
        logger.warning(
            "step %d failed, of requests %s: %s",
            *what,
            exc_info=not is_ours,
            extra=requests_fields(request_ids),
        )
        raise


NAMESPACE = "tramontane"
READY = "ready"  # the activity of a worker that has loaded, or cannot
EXPORT_EVERY_S = 1.0  # a worker's counters, to Ray's metrics
# How long a worker's threads spin between two products before they sleep (GNU OpenMP, with which
# torch is built): one or two ms, which covers the time between two products. The default is nine
# ms, which delay the stage whose turn it is.
OMP_SPIN_ENV = {"GOMP_SPINCOUNT": "50000"}
INDUCTOR_THREADS = "TORCHINDUCTOR_COMPILE_THREADS"  # read once, when torch's compiler is imported


class Worker(Protocol):
    """A ``StageWorker``, an ``ExpertWorker`` or a ``DraftModel``."""

    @property
    def numerics(self) -> Numerics:
        """Numerics of the worker's kernels."""


W = TypeVar("W", bound=Worker)


@dataclass(frozen=True, slots=True)
class WorkerHealth:
    """The state of one actor's process."""

    label: str
    pid: int
    node_id: str
    bytes_read: int  # from the checkpoint
    # of its weights, in their in-memory format; grows up to ``weight_bytes`` while it loads
    bytes_loaded: int
    weight_bytes: int
    busy_for_s: float  # for how long it has been computing without a pause; 0 while it does not
    # its activity after its weights are loaded; then READY
    activity: str = field(default="", kw_only=True)
    numerics: Numerics | None = field(default=None, kw_only=True)  # None before it is loaded


def import_torch() -> None:
    """Import torch without collecting garbage, and freeze all objects afterwards, so that later
    collections skip them.

    Its compiler, which a stage on a GPU uses for five small kernels, will compile in this process,
    unless the user has set the number of compile processes: by default it starts one for each core,
    up to 32, with 250 MB each, while the stage loads.

    torch creates 180,000 permanent objects. Garbage collection takes a sixth of the time of the
    import, and later each full collection would stop a step, for 0.26 s on a core of Zen 4.
    """
    if "torch" in sys.modules:
        return
    os.environ.setdefault(INDUCTOR_THREADS, "1")
    gc.disable()
    try:
        import torch  # noqa: F401
    finally:
        gc.freeze()
        gc.enable()


class WorkerActor(Generic[W]):
    """A worker behind Ray: bytes in, bytes out.

    It loads as soon as it starts or restarts, in a thread, so that it can report its progress.
    torch is imported when the actor is created, not with this module: processes that only call
    workers never need it.
    """

    # in a row; then memory is most likely too small, and loading is not retried
    max_load_crashes = 3

    def __init__(self, label: str, weight_bytes: int, settings: WorkerSettings) -> None:
        self.label = label
        self._weight_bytes = weight_bytes
        self._settings = settings
        self._failure_guard = FailureGuard(label, settings.device)
        self._worker: W | None = None
        self._load_error: Exception | None = None
        self._bytes_read = self._bytes_loaded = 0
        self._activity = ""
        self._loading = threading.Thread(target=self._try_to_load, daemon=True)
        self._loading.start()

    def __repr__(self) -> str:
        return self.label

    def ready(self) -> str:
        """Return the label once the weights are loaded; raise the error that prevented loading."""
        self._wait_until_loaded()
        return self.label

    def _health(self) -> dict[str, Any]:
        """Return the fields of ``WorkerHealth``, at any time."""
        return {
            "label": self.label,
            "pid": os.getpid(),
            "node_id": ray.get_runtime_context().get_node_id(),
            "bytes_read": self._bytes_read,
            "bytes_loaded": self._bytes_loaded,
            "weight_bytes": self._weight_bytes,
            "busy_for_s": self._busy_for_s,
            "activity": self._activity if self._is_loading else READY,
            "numerics": None if self._worker is None else self._worker.numerics,
        }

    @abstractmethod
    def _load(self) -> W:
        """Read or create the weights, reporting to ``_on_tensor``."""

    @abstractmethod
    def _exporter(self) -> Callable[[], None]:
        """Return a function that exports the worker's counters to Ray's metrics; a thread calls it,
        not the steps.
        """

    def _try_to_load(self) -> None:
        import warnings

        # Rows arrive as read-only views of the object store and are never written to.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        try:
            report_new_process(self.label)
            import_torch()
            with _limit_load_attempts(self.label, self.max_load_crashes), annotate_node():
                if not isinstance(self._settings.weights, RandomWeights):
                    check_checkpoint_digest(
                        self._settings.weights, self._settings.checkpoint_digest
                    )
                self._worker = self._load()
            start_periodic_thread(EXPORT_EVERY_S, self._exporter())
        except Exception as error:  # raised to callers that wait for the weights
            is_ours = isinstance(error, TramontaneError)
            logger.error("%s cannot load: %s", self.label, error, exc_info=not is_ours)
            # the traceback's frames would keep the loaded weights in memory
            self._load_error = error.with_traceback(None)

    def _on_tensor(self, num_read: int, num_loaded: int) -> None:
        self._bytes_read += num_read
        self._bytes_loaded += num_loaded

    def _on_activity(self, activity: str) -> None:
        self._activity = activity

    @property
    def _busy_for_s(self) -> float:
        """``busy_for_s`` of ``WorkerHealth``."""
        return 0.0

    @property
    def _is_loading(self) -> bool:
        return self._loading.is_alive()

    def _wait_until_loaded(self) -> W:
        self._loading.join()
        if self._worker is None:
            assert self._load_error is not None
            raise self._load_error
        return self._worker


def report_new_process(label: str) -> None:
    """Log why an actor has another process than its first one; nothing of a first one.

    The process that ended could not say so itself if it was killed, and callers see no more than
    that the actor was not there for a moment.
    """
    try:
        actor_id = ray.get_runtime_context().get_actor_id()
        assert actor_id is not None
        if (why := end_of_last_process(actor_id)) is None:
            return
    except Exception:  # also a defect: a log line keeps no stage from loading
        logger.warning("it is not known why %s has a new process", label, exc_info=True)
        return
    why = why or "Ray does not know how."
    if num_kills := num_memory_kills():
        why += (
            " Since this container started, the kernel has killed processes of it because its"
            f" memory was full: {num_kills}."
        )
    logger.warning("%s has a new process, because the one before ended: %s", label, why)


@contextmanager
def annotate_node() -> Iterator[None]:
    """Add this node to a CheckpointError: many nodes read the checkpoint, and one copy may be
    corrupt.
    """
    try:
        yield
    except CheckpointError as error:
        node = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        raise CheckpointError(f"on node {node} ({socket.gethostname()}): {error}") from error


@contextmanager
def _limit_load_attempts(label: str, max_crashes: int) -> Iterator[None]:
    """Raise PipelineError if the actor's process has died ``max_crashes`` times while loading,
    usually out of memory.

    A byte per attempt is kept in the cluster's key-value store, which outlives the process and is
    read after a restart.
    """
    key = f"tramontane-loading-{ray.get_runtime_context().get_actor_id()}"
    attempts = kv_get(key) or b""
    if len(attempts) >= max_crashes:
        raise PipelineError(
            f"the process of {label} died while it was loading, {len(attempts)} times; most likely"
            " there is too little memory, or the checkpoint's storage does not answer"
        )
    kv_put(key, attempts + b".")
    try:
        yield
    finally:
        kv_delete(key)


def actor_names(pattern: str) -> list[str]:
    """Return the sorted names of Tramontane's living actors that match the whole of a regular
    expression.
    """
    actors = ray.util.list_named_actors(all_namespaces=True)
    return sorted(
        a["name"]
        for a in actors
        if a["namespace"] == NAMESPACE and re.fullmatch(pattern, a["name"])
    )
