"""The daemons of a Ray cluster that this process starts on its own machine. Importing this module
does not import Ray.
"""

import logging
import os
import random
import socket
import time
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from typing import Any

from tramontane.cluster.ray_internals import table
from tramontane.cluster.ray_internals.symbol import is_installed
from tramontane.proto.errors import PipelineError

OF_RAY_DEFAULT = (
    "aiohttp_cors",
    "opencensus",
    "opentelemetry.exporter.prometheus",
    "prometheus_client",
)
NO_DASHBOARD = "127.0.0.1:0"  # an address to which nothing can connect
VITAL_DAEMONS = ("raylet", "gcs_server")  # without them a cluster answers nothing
# below those that Linux gives to connections (from 32768 on) and above those of Ray's workers
AGENT_PORTS = range(20_000, 32_000)
START_TIMEOUT_S, SLOW_START_S = 180.0, 15.0
CHECK_TIMEOUT_S, CHECK_PAUSE_S = 5.0, 0.05

logger = logging.getLogger(__name__)


def keep_daemons_from_signals() -> AbstractContextManager[None]:
    """Start Ray's daemons in process groups of their own while the block runs: a signal to our
    group is for us.
    """
    return table.START_DAEMON.replaced(partial(table.START_DAEMON.value, process_group=0))


def find_dead_daemon() -> str:
    """Describe a daemon that has died and without which the cluster that this process started
    answers nothing; "" if all run.
    """
    node: Any = table.LOCAL_NODE.value
    return _dead_daemon(node) if node is not None else ""


def _dead_daemon(node: Any) -> str:  # a Node of Ray
    for kind, process in node.dead_processes():
        if kind in VITAL_DAEMONS:
            status = process.returncode
            how = f"signal {-status}" if status < 0 else f"status {status}"
            return f"{kind} (process {process.pid}, {how})"
    return ""


def patient_start(dashboard: bool) -> AbstractContextManager[None]:
    """Give a node that ``ray.init`` starts while the block runs ``START_TIMEOUT_S``, and start none
    of the dashboard's daemons without ``dashboard``.

    Ray gives a node 30 s in all, and its raylet waits 15 s for each port of its agents, which
    import half of Ray, and dies. On a machine with other work both are too short. An agent whose
    port is known is not waited for. A start in which a daemon dies, or none answers, leaves no
    daemon.
    """
    node: Any = table.NODE.value

    class LocalNode(node):  # type: ignore[misc]
        def __init__(self, ray_params: Any, *args: Any, **kwargs: Any) -> None:
            _choose_agent_ports(ray_params)
            try:
                super().__init__(ray_params, *args, **kwargs)
            except BaseException as error:
                daemon = _dead_daemon(self)
                self.kill_all_processes(check_alive=False)
                if daemon:
                    raise PipelineError(f"its {daemon} died while it started") from error
                raise

        def start_ray_processes(self) -> None:
            # of all ports the only one that Ray passes to the agent, but not to the raylet
            port = self._ray_params.dashboard_agent_listen_port
            name = table.LISTEN_PORT.value
            table.PERSIST_PORT.value(self._session_dir, self._node_id, name, port)
            super().start_ray_processes()
            _wait_until_registered(self)

    return table.NODE.replaced(LocalNode if dashboard else _without_dashboard(LocalNode))


def _without_dashboard(node: Any) -> type:
    """Return a node that starts no daemons of the dashboard.

    ``ray.init(include_dashboard=False)`` still starts the dashboard's server, which then only
    reports usage, and waits until it answers; the log monitor, which only copies logs to a driver
    that reads them; and the autoscaler's monitor, although nothing can be scaled. Each imports half
    of Ray: on two cores they take a third of the time in which a cluster starts.
    """

    class NodeWithoutDashboard(node):  # type: ignore[misc]
        def start_api_server(self, **_: object) -> None:
            # The node's agent would look for an address once a second, and log each failure.
            key = table.DASHBOARD_KEY.value.encode()
            self.get_gcs_client().internal_kv_put(
                key, NO_DASHBOARD.encode(), True, table.DASHBOARD_KEYS.value
            )

        def start_monitor(self) -> None: ...

        def start_log_monitor(self) -> None: ...

    return NodeWithoutDashboard


def _choose_agent_ports(ray_params: Any) -> None:
    """Give a node's agents four ports at which nothing listens, at any address of this machine.

    They do not follow from the seed of a program, which would give two clusters the same ones.
    """
    free: list[int] = []
    for port in random.SystemRandom().sample(AGENT_PORTS, len(AGENT_PORTS)):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", port))
            free.append(port)
        if len(free) == 4:
            break
    (
        ray_params.metrics_agent_port,
        ray_params.dashboard_agent_listen_port,
        ray_params.metrics_export_port,
        ray_params.runtime_env_agent_port,
    ) = free


def _wait_until_registered(node: Any) -> None:
    """Wait until the head node knows a node. Raises PipelineError if a daemon dies, or after
    ``START_TIMEOUT_S``.
    """
    from ray import NodeID
    from ray.exceptions import RayError

    head, node_id = node.get_gcs_client(), NodeID.from_hex(node._node_id)
    begun_at, is_reported = time.monotonic(), False
    while (waited_s := time.monotonic() - begun_at) < START_TIMEOUT_S:
        with suppress(RayError):  # it did not answer in time
            if head.check_alive([node_id], CHECK_TIMEOUT_S)[0]:
                return
        if daemon := _dead_daemon(node):
            raise PipelineError(f"its {daemon} died")
        if waited_s > SLOW_START_S and not is_reported:
            is_reported = True
            logger.warning(
                "Ray's daemons start slowly: they have not answered for %.0f s, and have %.0f s;"
                " the load of this machine is %.1f on %d cores",
                *(waited_s, START_TIMEOUT_S, os.getloadavg()[0], os.cpu_count() or 1),
            )
        time.sleep(CHECK_PAUSE_S)
    raise PipelineError(
        f"its daemons did not answer within {START_TIMEOUT_S:.0f} s. The machine may be too busy:"
        " try again"
    )


def assume_dashboard_packages() -> AbstractContextManager[None]:
    """Keep Ray from importing the packages of ``ray[default]`` into this process while the block
    runs, if they are installed.

    If one is missing, Ray has to know: its agents would not start, and end the node.
    """
    return (
        table.DASHBOARD_PACKAGES.replaced(lambda: None)
        if all(map(is_installed, OF_RAY_DEFAULT))
        else nullcontext()
    )


def keep_loopback_address() -> AbstractContextManager[None]:
    """Keep Ray from replacing 127.0.0.1 by the machine's external address while the block runs.

    With the external address every process of Ray would listen on all interfaces; with 127.0.0.1
    none does.
    """
    return table.RAY_CLUSTERS_POSSIBLE.replaced(False)
