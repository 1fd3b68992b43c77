"""A local Ray cluster whose head node can die and return, because its state is in Redis. Run as a
program it is one node.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from free_ports import free_port
from ray._private.node import Node
from ray._private.parameter import RayParams

from tramontane.cluster.common.ray_api import HEAD_GROUP
from tramontane.cluster.config.ray_settings import RAY_SETTINGS, SERVE_SETTINGS

STORE_BYTES = 80 * 2**20
SETTINGS = {f"RAY_{name}": str(value) for name, value in RAY_SETTINGS.items()} | SERVE_SETTINGS
# how long processes wait for a lost head node
LONG_RECONNECT = {"RAY_gcs_rpc_server_reconnect_timeout_s": "600"}


class KillableHead:
    """A cluster with room for no stage on its head node, and for one on each other node."""

    def __init__(self, folder: Path, redis: str) -> None:
        self._folder, self._redis, self._port = folder, redis, free_port()
        self.address = f"{ray.util.get_node_ip_address()}:{self._port}"  # type: ignore[no-untyped-call]
        self.processes: dict[str, subprocess.Popen[str]] = {}

    def start(self, *names: str) -> None:
        """Start nodes: ``head`` or others. Returns when they are up."""
        for name in names:
            head = (
                {"RAY_REDIS_ADDRESS": self._redis, "RAY_NODE_TYPE_NAME": HEAD_GROUP}
                if name == "head"
                else {}
            )
            command = [sys.executable, __file__, self.folder(name), self.address, name]
            pipes: dict[str, Any] = {
                "stdin": subprocess.PIPE,
                "stdout": subprocess.PIPE,
                "text": True,
            }
            self.processes[name] = subprocess.Popen(
                command, env=os.environ | SETTINGS | LONG_RECONNECT | head, **pipes
            )
        for name in names:
            stdout = self.processes[name].stdout
            assert stdout is not None
            assert stdout.readline() == "up\n"

    def kill(self, name: str) -> None:
        """Kill a node with all its processes, as a power failure would."""
        process = self.processes.pop(name)
        victims = [psutil.Process(process.pid), *self.members(process)]
        for act in (psutil.Process.suspend, psutil.Process.kill):
            for each in victims:
                with suppress(psutil.NoSuchProcess):
                    act(each)
        process.communicate()

    @contextmanager
    def connected(self, name: str) -> Iterator[None]:
        """Connect this process to a node for the block. Ray would end the process if the head node
        were away for a minute.
        """
        ray.init(self.address, _temp_dir=self.folder(name), log_to_driver=False)
        yield
        ray.shutdown()

    def folder(self, name: str) -> str:
        return str(self._folder / name)

    def members(self, process: "subprocess.Popen[str]") -> list[psutil.Process]:
        return psutil.Process(process.pid).children(recursive=True)


@contextmanager
def killable_head(*others: str) -> Iterator[KillableHead]:
    """Start a cluster of the head node and these other nodes."""
    server = shutil.which("redis-server")
    if server is None:
        pytest.skip("redis-server is not installed")
    folder = Path("/tmp") / f"head-{os.getpid()}"  # the paths of Ray's sockets must be short
    folder.mkdir()
    port = free_port()
    command = [
        server,
        "--port",
        str(port),
        "--bind",
        "127.0.0.1",
        "--save",
        "",
        "--dir",
        str(folder),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as redis:
        assert redis.stdout is not None
        next(line for line in redis.stdout if "Ready to accept connections" in line)
        cluster = KillableHead(folder, f"127.0.0.1:{port}")
        try:
            cluster.start("head")
            cluster.start(*others)
            yield cluster
        finally:
            for name in ("head", *others):
                if name in cluster.processes:
                    cluster.kill(name)
            redis.kill()
            shutil.rmtree(folder)


def _node(folder: str, address: str, name: str) -> None:
    """Run a node. ``ray start`` refuses to start a head node next to another node of its cluster on
    the same machine.
    """
    is_head = name == "head"
    params = RayParams(
        temp_dir=folder,
        num_cpus=0 if is_head else 1,
        num_gpus=0,
        object_store_memory=STORE_BYTES,
        include_dashboard=False,
        include_log_monitor=False,
        min_worker_port=0,
        max_worker_port=0,
        node_manager_port=0,
    )
    if is_head:
        params.gcs_server_port = int(address.rpartition(":")[2])
    else:
        params.gcs_address = params.redis_address = address
    Node(params, head=is_head, shutdown_at_exit=True, spawn_reaper=False)
    print("up", flush=True)
    sys.stdin.read()  # until the test process ends


if __name__ == "__main__":
    _node(*sys.argv[1:])
