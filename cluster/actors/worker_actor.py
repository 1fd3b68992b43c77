"""What stage actors and expert actors have in common: they load by themselves, and tell how far they are."""

import os
import re
import socket
import threading
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import ray

from tramontane.cluster.common.periodic import start_periodic_thread
from tramontane.cluster.ray_internals.core import kv_delete, kv_get, kv_put
from tramontane.proto.errors import CheckpointError, PipelineError
from tramontane.proto.model_folder import RandomWeights, WeightSource
from tramontane.workers.weights.fingerprint import Fingerprint, check_fingerprint

NAMESPACE = "tramontane"
EXPORT_EVERY_S = 1.0  # of a worker's counts, to Ray's metrics
# How long a worker's threads look out for the next product before they sleep (GNU OpenMP, which torch is built with): one or
# two ms, which spans what lies between two products. By default it is nine, and taken from whoever's turn it is.
OMP_SPIN_ENV = {"GOMP_SPINCOUNT": "50000"}
W = TypeVar("W")


@dataclass(frozen=True, slots=True)
class WorkerHealth:
    """Of one actor's process."""

    label: str
    pid: int
    node_id: str
    bytes_read: int  # from the checkpoint
    bytes_loaded: int  # of its weights, as they are in memory; grows up to ``weight_bytes`` while it loads
    weight_bytes: int
    busy_for_s: float  # for how long it has been computing without a pause; 0 while it does not


class WorkerActor(Generic[W]):
    """A worker behind Ray: bytes in, bytes out.

    It loads by itself, also when Ray has restarted it and nobody calls, and in a thread of its own: so it
    can be asked meanwhile how far it is. torch is imported when the actor is made, not with this module: whoever only
    calls workers never needs it.
    """

    max_load_crashes = 3  # while it loads, in a row; then there is most likely too little memory, and it is not loaded again

    def __init__(self, label: str, weight_bytes: int, weights: WeightSource, device: str, fingerprint: Fingerprint) -> None:
        self.label = label
        self._weight_bytes = weight_bytes
        self._weights, self._device, self._fingerprint = weights, device, fingerprint
        self._worker: W | None = None
        self._failure: Exception | None = None
        self._bytes_read = self._bytes_loaded = 0
        self._loading = threading.Thread(target=self._try_to_load, daemon=True)
        self._loading.start()

    def __repr__(self) -> str:
        return self.label

    def ready(self) -> str:
        """Answers once the weights are there; raises what kept them from being loaded."""
        self._wait_until_loaded()
        return self.label

    def _health(self) -> dict[str, Any]:
        """The fields of ``WorkerHealth``, at any time."""
        return {
            "label": self.label,
            "pid": os.getpid(),
            "node_id": ray.get_runtime_context().get_node_id(),
            "bytes_read": self._bytes_read,
            "bytes_loaded": self._bytes_loaded,
            "weight_bytes": self._weight_bytes,
            "busy_for_s": self._computing_s,
        }

    @abstractmethod
    def _load(self) -> W:
        """Read or make the weights, reporting to ``_on_tensor``."""

    @abstractmethod
    def _exporter(self) -> Callable[[], None]:
        """What tells Ray's metrics how far the worker's own counts have come. Beside its steps, which only count."""

    def _try_to_load(self) -> None:
        import warnings

        # Rows arrive as read-only views of the object store and are never written to.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        try:
            with _limit_load_attempts(self.label, self.max_load_crashes), annotate_node():
                if not isinstance(self._weights, RandomWeights):
                    check_fingerprint(self._weights, self._fingerprint)
                self._worker = self._load()
            start_periodic_thread(EXPORT_EVERY_S, self._exporter())
        except Exception as error:  # told to whoever waits for the weights
            self._failure = error.with_traceback(None)  # whose frames would keep what was loaded so far

    def _on_tensor(self, num_read: int, num_loaded: int) -> None:
        self._bytes_read += num_read
        self._bytes_loaded += num_loaded

    @property
    def _computing_s(self) -> float:
        """Of ``WorkerHealth``."""
        return 0.0

    @property
    def _is_loading(self) -> bool:
        return self._loading.is_alive()

    def _wait_until_loaded(self) -> W:
        self._loading.join()
        if self._worker is None:
            assert self._failure is not None
            raise self._failure
        return self._worker


@contextmanager
def annotate_node() -> Iterator[None]:
    """A checkpoint's folder is looked for on many nodes: say on which of them something is wrong with it."""
    try:
        yield
    except CheckpointError as error:
        node = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        raise CheckpointError(f"on node {node} ({socket.gethostname()}): {error}") from error


@contextmanager
def _limit_load_attempts(label: str, most_deaths: int) -> Iterator[None]:
    """Whoever's process dies while it loads (out of memory, as a rule) is not loaded again and again.

    The mark, a byte for each time that it began, outlives the process: Ray restarts the actor, which then finds it.
    """
    mark = f"tramontane-loading-{ray.get_runtime_context().get_actor_id()}"
    begun = kv_get(mark) or b""
    if len(begun) >= most_deaths:
        raise PipelineError(f"the process of {label} died while it was loading; most likely there is too little memory")
    kv_put(mark, begun + b".")
    try:
        yield
    finally:
        kv_delete(mark)


def actor_names(pattern: str) -> list[str]:
    """Names of our living actors that match the whole of a regular expression."""
    actors = ray.util.list_named_actors(all_namespaces=True)
    return sorted(a["name"] for a in actors if a["namespace"] == NAMESPACE and re.fullmatch(pattern, a["name"]))
