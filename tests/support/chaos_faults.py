"""Injection of faults: processes that are killed or stopped, full object stores, lost nodes; and
what routers say of them.
"""

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import psutil
import ray
from ray.cluster_utils import Cluster
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from serve_cluster import ingress_stats, leftovers, router_stats

from tramontane.cluster.config.ray_settings import RAY_SETTINGS, SERVE_SETTINGS
from tramontane.cluster.pipeline.ray_cluster import OBJECT_STORE_BYTES

POLL_S = 0.05
VICTIM_TIMEOUT_S = 180.0  # until a victim has been restarted
FILLED_S = 3.0
# of a node that does not start: Ray forks it from this process, where gRPC's threads may end it
NODE_TRIES = 3
FILL_FACTOR = 1.5  # times the size of the object store; the excess is spilled
TITLES = {
    "stage": "ray::StageActor",
    "expert": "ray::ExpertActor",
    "router": "ray::ServeReplica:tramontane:Router",
    "supervisor": "ray::Supervisor",
    "ingress": "ray::ServeReplica:tramontane:Ingress",
}


@ray.remote(num_cpus=0, max_retries=0)
def _fill_store(num_blocks: int) -> None:
    refs = [ray.put(np.zeros(2**24, np.uint8)) for _ in range(num_blocks)]
    time.sleep(FILLED_S)
    del refs


class Faults:
    """Faults by kind, on a cluster of one machine with one or more nodes. Each function returns
    when the fault is injected.
    """

    def __init__(
        self, rng: random.Random, store_bytes: int, cluster: Cluster | None = None
    ) -> None:
        self._rng, self._store_bytes, self._cluster = rng, store_bytes, cluster
        self.num_filled = 0  # object stores in all
        # not in the default set: Ray Serve's health checks need half a minute
        self.rare: dict[str, Callable[[], None]] = {
            "stop an expert": lambda: self._signal("expert", signal.SIGSTOP),
            "stop the router": lambda: self._signal("router", signal.SIGSTOP),
            "stop the ingress": lambda: self._signal("ingress", signal.SIGSTOP),
        }
        self.kinds: dict[str, Callable[[], None]] = {
            "kill a stage": lambda: self._signal("stage", signal.SIGKILL),
            "stop a stage": lambda: self._signal("stage", signal.SIGSTOP),
            "kill an expert": lambda: self._signal("expert", signal.SIGKILL),
            "kill the router": lambda: self._signal("router", signal.SIGKILL),
            "kill the supervisor": lambda: self._signal("supervisor", signal.SIGKILL),
            "stop the supervisor": lambda: self._signal("supervisor", signal.SIGSTOP),
            "kill the router and the supervisor": self._kill_both,
            "kill the ingress": lambda: self._signal("ingress", signal.SIGKILL),
            "fill the object store": self._fill,
            "kill a raylet": self._kill_raylet,
        }

    def prepare(self) -> None:
        """Prepare the next fault. Called while nothing is measured."""

    def _kill_both(self) -> None:
        self._signal("router", signal.SIGKILL)
        self._signal("supervisor", signal.SIGKILL)

    def _signal(self, victim: str, number: signal.Signals) -> None:
        give_up_at = time.monotonic() + VICTIM_TIMEOUT_S
        while time.monotonic() < give_up_at:  # it may be restarting
            ours = psutil.Process().children(recursive=True)  # a machine may have other clusters
            found = [each for each in ours if title_of(each).startswith(TITLES[victim])]
            with suppress(psutil.NoSuchProcess, IndexError):
                os.kill(self._rng.choice(found).pid, number)
                return
            time.sleep(POLL_S)
        raise TimeoutError(f"no {victim} process was found within {VICTIM_TIMEOUT_S:.0f} s")

    def _fill(self) -> None:
        """Fill the object stores of all nodes, including those of the stages."""
        num_blocks = int(FILL_FACTOR * self._store_bytes) >> 24
        nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
        strategies = [NodeAffinitySchedulingStrategy(node, soft=False) for node in nodes]
        tasks = [
            _fill_store.options(scheduling_strategy=strategy).remote(num_blocks)
            for strategy in strategies
        ]
        for filled in tasks:
            with suppress(RayError):  # a node may be dying
                ray.get(filled)
                self.num_filled += 1

    def _kill_raylet(self) -> None:
        """Kill a raylet with all its workers. A new node replaces it at once."""
        assert self._cluster is not None
        node = self._rng.choice(
            [each for each in self._cluster.list_all_nodes() if each is not self._cluster.head_node]
        )
        node.kill_raylet()
        self._cluster.worker_nodes.discard(node)
        for tries_left in reversed(range(NODE_TRIES)):
            try:
                self._cluster.add_node(num_cpus=1, object_store_memory=self._store_bytes)
                return
            except Exception:  # what Ray raises if the raylet does not start; it has no own class
                if not tries_left:
                    raise


def title_of(process: psutil.Process) -> str:
    """Return the process's title. A busy actor's title ends with its method
    (``ray::StageActor.step``).
    """
    with suppress(psutil.Error):
        return " ".join(process.cmdline()).strip()
    return ""


@contextmanager
def raylet_cluster(num_nodes: int) -> Iterator[Cluster]:
    """Run a cluster with a raylet for each node of one core, connected while the block runs."""
    os.environ.update(SERVE_SETTINGS)
    head = {"num_cpus": 0, "include_dashboard": False, "_system_config": dict(RAY_SETTINGS)}
    # an exit hook needs the main thread
    cluster = Cluster(initialize_head=True, head_node_args=head, shutdown_at_exit=False)
    for _ in range(num_nodes):
        cluster.add_node(num_cpus=1, object_store_memory=OBJECT_STORE_BYTES)
    ray.init(address=cluster.address, log_to_driver=False)
    try:
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


def _routers() -> list[dict[str, Any]]:
    """Return the statistics of all routers; empty while they are being replaced."""
    try:
        return router_stats(stages=False)
    except (RayError, RayServeException):
        return []


def step_limit_s() -> float:
    """Return the time after which a stopped stage is detected."""
    return max((stats["step_limit_s"] for stats in _routers()), default=0.0)


def detected_after(injected_at: float, limit_s: float) -> list[float]:
    """Return the seconds until routers detected the fault. All processes of a machine share one
    monotonic clock.
    """
    detected = [stats["last_recovery"]["seen_at"] for stats in _routers() if stats["last_recovery"]]
    return [round(at - injected_at - limit_s, 3) for at in detected if at > injected_at]


def held_resources() -> dict[str, Any]:
    """Return the resources that must be the same at the beginning and at the end."""
    return {
        "actors and groups": sorted(leftovers()),
        "pages held": [stats["pages_held"] for stats in router_stats()],
        "sequences": [stats["sequences"] + stats["waiting"] for stats in router_stats()],
        "ingress requests": ingress_stats()["requests"],
    }
