"""A cluster whose nodes are hosts of their own, and what can go wrong between them."""

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
from hosts import Host, network, why_impossible

from tramontane.cluster.config.ray_settings import RAY_SETTINGS, SERVE_SETTINGS
from tramontane.cluster.pipeline.ray_cluster import OBJECT_STORE_BYTES

HEAD_PORT = 6379
POLL_S = 0.05
A_MOMENT_S = (1.0, 2.0)  # shorter than the health checks take
NOTED = re.compile(r"^\w+ (\S+ \S+) .*(the pipeline failed|given to another router|another one continues it)", re.MULTILINE)


@dataclass
class HostCluster:
    """Ray's head, without cores, on the first host; a raylet with one core on each of the others. Made by ``host_cluster``."""

    folder: Path
    head: Host
    workers: list[Host]
    raylets: dict[str, "subprocess.Popen[bytes]"] = field(default_factory=dict)  # by the host's address
    struck_at: list[tuple[str, float]] = field(default_factory=list)  # which kind, and when by the clock of the logs
    seen_s: list[tuple[str, float]] = field(default_factory=list)  # how long Ray took to declare a node dead

    @property
    def address(self) -> str:
        return f"{self.head.address}:{HEAD_PORT}"

    def faults(self, rng: random.Random) -> "HostFaults":
        return HostFaults(rng, self)

    def ledger(self) -> dict[str, dict[str, list[float]]]:
        """Seconds, by kind: until Ray declared the node dead, and until one of us wrote that something was missing."""
        columns = {"ray_saw_s": self.seen_s, "we_noted_s": self._noted_s()}
        return {
            kind: {name: [round(s, 2) for of, s in column if of == kind] for name, column in columns.items()}
            for kind in {kind for kind, _ in self.struck_at}
        }

    def _noted_s(self) -> list[tuple[str, float]]:
        """After how long a router, door or proxy first wrote that it had missed something, by kind of fault."""
        logs = [log.read_text(errors="replace") for log in self.folder.glob("*/session_2*/logs/serve/*.log")]
        times = [when for log in logs for when, _ in NOTED.findall(log)]
        noted = sorted(datetime.fromisoformat(when.replace(",", ".")).timestamp() for when in times)
        ends = [when for _, when in self.struck_at[1:]] + [time.time()]
        found = []
        for (kind, struck_at), end in zip(self.struck_at, ends, strict=True):
            found += [(kind, when - struck_at) for when in noted if struck_at <= when < end][:1]
        return found

    def start_head(self) -> None:
        settings = ["--num-cpus=0", f"--port={HEAD_PORT}", "--include-dashboard=false", f"--temp-dir={self.folder / 'ray'}"]
        self._start(self.head, "--head", *settings, f"--system-config={json.dumps(dict(RAY_SETTINGS))}")

    def start_raylet(self, host: Host) -> None:
        self._start(host, f"--address={self.address}", "--num-cpus=1")

    def wait_until_alive(self) -> None:
        """All hosts are nodes. A raylet that was declared dead ends itself once it hears so; one may also fail to start."""
        while lost := [host for host in self.workers if host.address not in alive()]:
            for host in lost:
                if self.raylets[host.address].poll() is not None:
                    self.start_raylet(host)
            time.sleep(POLL_S)

    def _start(self, host: Host, *arguments: str) -> None:
        ray_command = Path(sys.executable).with_name("ray")
        common = [f"--node-ip-address={host.address}", f"--object-store-memory={OBJECT_STORE_BYTES}", "--disable-usage-stats"]
        environment = os.environ | SERVE_SETTINGS | {"RAY_AUTH_MODE": "disabled"}
        with (self.folder / f"{host.name}.log").open("ab") as log:
            self.raylets[host.address] = host.start(
                str(ray_command), "start", *arguments, *common, "--block", env=environment, stdout=log, stderr=log
            )


class HostFaults(Faults):
    """Those of one machine and those between hosts. A lost host stays lost until the next fault is prepared."""

    def __init__(self, rng: random.Random, cluster: HostCluster) -> None:
        super().__init__(rng, OBJECT_STORE_BYTES)
        self._hosts = cluster
        self.kinds |= {
            "kill a raylet": lambda: self._lose_host("kill a raylet", _kill_raylet),
            "drop a link": lambda: self._lose_host("drop a link", Host.drop_link),
            "drop a link for a moment": self._drop_for_a_moment,
        }

    def prepare(self) -> None:
        for host in self._hosts.workers:
            host.restore_link()
        self._hosts.wait_until_alive()

    def _lose_host(self, kind: str, lose: Callable[[Host], None]) -> None:
        """Returns once Ray knows of it."""
        host = self._at_work(kind)
        began = time.monotonic()
        lose(host)
        while host.address in alive():
            time.sleep(POLL_S)
        self._hosts.seen_s.append((kind, time.monotonic() - began))

    def _drop_for_a_moment(self) -> None:
        host = self._at_work("drop a link for a moment")
        host.drop_link()
        time.sleep(self._rng.uniform(*A_MOMENT_S))
        host.restore_link()

    def _at_work(self, kind: str) -> Host:
        """One with a stage, a router or a door."""
        while True:  # they may be starting again just now
            if having := [host for host in self._hosts.workers if any(map(_is_ours, host.processes()))]:
                self._hosts.struck_at.append((kind, time.time()))
                return self._rng.choice(having)
            time.sleep(POLL_S)


@contextmanager
def host_cluster(num_workers: int) -> Iterator[HostCluster]:
    """This process is on the head's host, and connected."""
    if reason := why_impossible():
        sys.exit(f"--hosts cannot be had: {reason}")
    with TemporaryDirectory(prefix="tramontane-hosts-", ignore_cleanup_errors=True) as name:
        yield from _cluster_in(Path(name), num_workers)


def _cluster_in(folder: Path, num_workers: int) -> Iterator[HostCluster]:
    own = {number: folder / f"{number}" for number in range(num_workers)}
    for path in (folder / "ray", *own.values()):
        path.mkdir()
    with network() as switch:
        head = switch.add_host()
        workers = [switch.add_host(apart=True, own_folders={str(folder / "ray"): path}) for path in own.values()]
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
            ray.init(address=cluster.address, _node_ip_address=cluster.head.address, log_to_driver=False)
        except ConnectionError:
            time.sleep(1)
        else:
            return


def _is_ours(process: psutil.Process) -> bool:
    return title_of(process).startswith((TITLES["stage"], TITLES["router"], TITLES["door"]))


def alive() -> set[str]:
    return {node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}


def _kill_raylet(host: Host) -> None:
    for process in host.processes():
        if process.name() == "raylet":
            os.kill(process.pid, signal.SIGKILL)
