"""A cluster that is too small, to which Ray's autoscaler adds a node: commands wait for it, and say
so.

Ray's provider of fake nodes starts raylets on this machine.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import ray
from blocking_head import blocking_head
from free_ports import free_port
from ray.util import get_node_ip_address

from tramontane.cluster.ray_internals.accessors import has_autoscaler

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore::DeprecationWarning:ray")]

HEAD, PROVIDER = (
    "ray.head.default",
    "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider",
)
HEAD_ID = "f" * 51 + "00000"  # what the provider takes for the head's
STORE_BYTES = 2**27
COMMANDS = (
    "initialization",
    "setup",
    "head_setup",
    "worker_setup",
    "head_start_ray",
    "worker_start_ray",
)


def _configuration(address: str, version: int) -> dict[str, Any]:
    """Return what ``ray up`` would leave on the head: a type of nodes with two CPUs, of which there
    may be one.
    """
    provider = {"type": "fake_multinode", "gcs_address": address, "head_node_id": HEAD_ID}
    provider |= {
        "disable_node_updaters": True,
        "disable_launch_config_check": True,
        "launch_multiple": True,
    }
    if version == 2:  # for its own types it looks for files that the package lacks
        provider |= {"type": "external", "module": PROVIDER}
    worker = {
        "resources": {"CPU": 2, "object_store_memory": STORE_BYTES},
        "node_config": {},
        "min_workers": 0,
        "max_workers": 1,
    }
    types = {HEAD: {"resources": {"CPU": 1}, "node_config": {}, "max_workers": 0}, "worker": worker}
    more: dict[str, Any] = {
        "auth": {"ssh_user": "user"},
        "file_mounts": {},
        "cluster_synced_files": [],
        "rsync_exclude": [],
    }
    more |= {
        "file_mounts_sync_continuously": False,
        "rsync_filter": [],
        "upscaling_speed": 1.0,
        "idle_timeout_minutes": 60,
    }
    scale = {
        "cluster_name": "fake",
        "max_workers": 1,
        "head_node_type": HEAD,
        "available_node_types": types,
    }
    return {**scale, "provider": provider, **more} | {f"{name}_commands": [] for name in COMMANDS}


@contextmanager
def _growing(version: int, tmp_path: Path) -> Iterator[str]:
    """Start a head node with one CPU and the autoscaler, and wait until it is found. Yields the
    head's address.
    """
    # pytest's own names are too long for Ray's sockets
    folder = Path(tempfile.mkdtemp(prefix="grow-"))
    address = f"{get_node_ip_address()}:{(port := free_port())}"
    (file := tmp_path / "cluster.json").write_text(json.dumps(_configuration(address, version)))
    environment = os.environ | {"RAY_FAKE_CLUSTER": "1", "AUTOSCALER_UPDATE_INTERVAL_S": "1"}
    if version == 2:
        ids = dict.fromkeys(("RAY_CLOUD_INSTANCE_ID", "RAY_OVERRIDE_NODE_ID_FOR_TESTING"), HEAD_ID)
        environment |= ids | {"RAY_enable_autoscaler_v2": "1", "RAY_NODE_TYPE_NAME": HEAD}
    options: dict[str, object] = {
        "port": port,
        "num-cpus": 1,
        "object-store-memory": STORE_BYTES,
        "include-dashboard": False,
    }
    options |= {
        "temp-dir": folder,
        "autoscaling-config": file,
        "min-worker-port": 0,
        "max-worker-port": 0,
    }
    log = tmp_path / "ray.log"
    with blocking_head(
        options, environment, log, lambda: "will now block forever" in log.read_text()
    ):
        try:
            ray.init(address, log_to_driver=False)
            while not has_autoscaler():
                time.sleep(0.2)
            ray.shutdown()
            yield address
        finally:
            ray.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


def _generate(
    address: str, folder: Path, stages: int, placement_timeout: int
) -> tuple[int, list[str]]:
    (config := folder / "config.yaml").write_text(f"placement_timeout: {placement_timeout}\n")
    words = [
        "The",
        "--address",
        address,
        "--config",
        config,
        "--stages",
        stages,
        "--threads-per-stage",
        1,
        "--max-tokens",
        2,
    ]
    command = [
        sys.executable,
        "-c",
        "from tramontane.cluster.cli.main import main; main()",
        "generate",
        *map(str, words),
    ]
    done = subprocess.run(command, env=os.environ, capture_output=True, text=True, check=False)
    return done.returncode, done.stderr.splitlines()


@pytest.fixture
def growing(tmp_path: Path) -> Iterator[str]:
    with _growing(1, tmp_path) as address:
        yield address


@pytest.mark.nightly
def test_version_2_of_the_autoscaler_is_found_too(tmp_path: Path) -> None:
    with _growing(2, tmp_path):
        pass


def test_a_command_waits_for_nodes_that_the_autoscaler_adds(growing: str, tmp_path: Path) -> None:
    code, lines = _generate(growing, tmp_path, stages=3, placement_timeout=600)
    assert code == 0, lines
    waiting = [line for line in lines if line.startswith("waiting")]
    assert (
        waiting[0]
        == "waiting up to 605 s for 3 stages (3 x {CPU: 1}): free are 1 of 1 CPU; Ray's autoscaler"
        " may add nodes ..."
    )
    code, lines = _generate(growing, tmp_path, stages=4, placement_timeout=1)
    assert code == 2, lines
    assert lines[-1].startswith("error: the cluster has no room for 4 stages (4 x {CPU: 1}) after ")
    assert lines[-1].endswith(
        " of 3 CPU; Ray's autoscaler may add nodes; use fewer --stages or --threads-per-stage, or"
        " wait longer (placement_timeout in a --config file); ray status shows which nodes are"
        " added"
    )
