"""A cluster whose nodes are separate hosts (network namespaces), and faults between them."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import ray
from chaos_faults import TITLES, Faults, title_of
from hosts import Host, namespaces_unavailable_reason, network

from tramontane.cluster.config.ray_settings import RAY_SETTINGS, SERVE_SETTINGS
from tramontane.cluster.pipeline.ray_cluster import OBJECT_STORE_BYTES

HEAD_PORT = 6379
POLL_S = 0.05
SHORT_DROP_S = (1.0, 2.0)  # shorter than the health checks take
# The log lines of a router, an ingress and a proxy when they notice a failure.
FAILURES = "the pipeline failed|given to another router|another one continues it"
FAILURE_LOGGED = re.compile(rf"^\w+ (\S+ \S+) .*({FAILURES})", re.MULTILINE)


@dataclass
class HostCluster:
    """Ray's head node without cores on the first host, and a raylet with one core on each other
    host. See ``host_cluster``.
    """

    folder: Path
    head: Host
    workers: list[Host]
    # by the host's address
    raylets: dict[str, "subprocess.Popen[bytes]"] = field(default_factory=dict)
    # kind, and wall-clock time as in the logs
    injected_at: list[tuple[str, float]] = field(default_factory=list)
    # kind, and seconds until Ray declared the node dead
    declared_s: list[tuple[str, float]] = field(default_factory=list)

    @property
    def address(self) -> str:
        return f"{self.head.address}:{HEAD_PORT}"

    def faults(self, rng: random.Random) -> "HostFaults":
        return HostFaults(rng, self)

    def report(self) -> dict[str, dict[str, list[float]]]:
        """Seconds by kind: until Ray declared the node dead, and until a log of the application
        first mentions the loss.
        """
        columns = {"ray_saw_s": self.declared_s, "we_noted_s": self._logged_s()}
        return {
            kind: {
                name: [round(s, 2) for of, s in column if of == kind]
                for name, column in columns.items()
            }
            for kind in {kind for kind, _ in self.injected_at}
        }

    def _logged_s(self) -> list[tuple[str, float]]:
        """Return seconds until a router, ingress or proxy first logged a failure, by kind of
        fault.
        """
        logs = [
            log.read_text(errors="replace")
            for log in self.folder.glob("*/session_2*/logs/serve/*.log")
        ]
        times = [when for log in logs for when, _ in FAILURE_LOGGED.findall(log)]
        logged = sorted(
            datetime.fromisoformat(when.replace(",", ".")).timestamp() for when in times
        )
        ends = [when for _, when in self.injected_at[1:]] + [time.time()]
        found = []
        for (kind, begin), end in zip(self.injected_at, ends, strict=True):
            found += [(kind, when - begin) for when in logged if begin <= when < end][:1]
        return found

    def start_head(self) -> None:
        settings = [
            "--num-cpus=0",
            f"--port={HEAD_PORT}",
            "--include-dashboard=false",
            f"--temp-dir={self.folder / 'ray'}",
        ]
        self._start(
            self.head, "--head", *settings, f"--system-config={json.dumps(dict(RAY_SETTINGS))}"
        )

    def start_raylet(self, host: Host) -> None:
        self._start(host, f"--address={self.address}", "--num-cpus=1")

    def wait_until_alive(self) -> None:
        """Wait until all hosts are nodes.

        Raylets that have ended are restarted: a raylet that Ray declared dead exits, and one may
        also fail to start.
        """
        while lost := [host for host in self.workers if host.address not in alive()]:
            for host in lost:
                if self.raylets[host.address].poll() is not None:
                    self.start_raylet(host)
            time.sleep(POLL_S)

    def _start(self, host: Host, *arguments: str) -> None:
        ray_command = Path(sys.executable).with_name("ray")
        common = [
            f"--node-ip-address={host.address}",
            f"--object-store-memory={OBJECT_STORE_BYTES}",
            "--disable-usage-stats",
        ]
        environment = os.environ | SERVE_SETTINGS | {"RAY_AUTH_MODE": "disabled"}
        with (self.folder / f"{host.name}.log").open("ab") as log:
            self.raylets[host.address] = host.start(
                str(ray_command),
                "start",
                *arguments,
                *common,
                "--block",
                env=environment,
                stdout=log,
                stderr=log,
            )


class HostFaults(Faults):
    """Faults of one machine and faults between hosts. A lost host stays lost until the next fault
    is prepared.
    """

    def __init__(self, rng: random.Random, cluster: HostCluster) -> None:
        super().__init__(rng, OBJECT_STORE_BYTES)
        self._hosts = cluster
        self.kinds |= {
            "kill a raylet": lambda: self._lose_host("kill a raylet", _kill_raylet),
            "drop a link": lambda: self._lose_host("drop a link", Host.drop_link),
            "drop a link for a moment": self._drop_briefly,
        }

    def prepare(self) -> None:
        for host in self._hosts.workers:
            host.restore_link()
        self._hosts.wait_until_alive()

    def _lose_host(self, kind: str, lose: Callable[[Host], None]) -> None:
        """Lose a host; returns when Ray has declared it dead."""
        host = self._choose_busy_host(kind)
        began = time.monotonic()
        lose(host)
        while host.address in alive():
            time.sleep(POLL_S)
        self._hosts.declared_s.append((kind, time.monotonic() - began))

    def _drop_briefly(self) -> None:
        host = self._choose_busy_host("drop a link for a moment")
        host.drop_link()
        time.sleep(self._rng.uniform(*SHORT_DROP_S))
        host.restore_link()

    def _choose_busy_host(self, kind: str) -> Host:
        """Choose a host with a stage, a router or an ingress, and note the fault's time."""
        while True:  # they may be restarting
            if busy := [
                host for host in self._hosts.workers if any(map(_is_ours, host.processes()))
            ]:
                self._hosts.injected_at.append((kind, time.time()))
                return self._rng.choice(busy)
            time.sleep(POLL_S)


@contextmanager
def host_cluster(num_workers: int) -> Iterator[HostCluster]:
    """Start the cluster. In the block this process is on the head's host and connected to Ray."""
    if reason := namespaces_unavailable_reason():
        sys.exit(f"--hosts is not available: {reason}")
    with TemporaryDirectory(prefix="tramontane-hosts-", ignore_cleanup_errors=True) as name:
        yield from _cluster_in(Path(name), num_workers)


def _cluster_in(folder: Path, num_workers: int) -> Iterator[HostCluster]:
    own = {number: folder / f"{number}" for number in range(num_workers)}
    for path in (folder / "ray", *own.values()):
        path.mkdir()
    with network() as switch:
        head = switch.add_host()
        workers = [
            switch.add_host(apart=True, own_folders={str(folder / "ray"): path})
            for path in own.values()
        ]
        cluster = HostCluster(folder, head, workers)
        with head.entered():
            cluster.start_head()
            _join(cluster)
            for worker in workers:
                cluster.start_raylet(worker)
            cluster.wait_until_alive()
            try:
                yield cluster
            finally:
                ray.shutdown()


def _join(cluster: HostCluster) -> None:
    while True:
        try:
            ray.init(
                address=cluster.address, _node_ip_address=cluster.head.address, log_to_driver=False
            )
        except ConnectionError:
            time.sleep(1)
        else:
            return


def _is_ours(process: psutil.Process) -> bool:
    return title_of(process).startswith((TITLES["stage"], TITLES["router"], TITLES["ingress"]))


def alive() -> set[str]:
    return {node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}


def _kill_raylet(host: Host) -> None:
    for process in host.processes():
        if process.name() == "raylet":
            os.kill(process.pid, signal.SIGKILL)
