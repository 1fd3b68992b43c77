"""The cluster itself: a start that is killed in the middle, and what is left of it when it is
removed. A cluster that runs is removed first.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import kube_builds
import kube_cgroups
import kube_network
import pytest
from kube_paths import CLUSTER, PROCESSES
from kube_processes import kubectl
from kube_report import Report

PROGRAM = [sys.executable, str(Path(__file__).with_name("kube_cluster.py"))]
NUM_NODES = 2
# A start is killed so many seconds after the line of its program that is printed when the step
# before has been done: while it links the image, and while it starts the control plane, nodes and
# pods of the system.
KILLS = (
    ("images of the control plane", 0.5),
    ("images of the control plane", 3.0),
    ("linking the environment", 0.2),
    ("linking the environment", 1.5),
    ("starting the control plane", 0.5),
    ("starting the control plane", 2.0),
    ("starting the control plane", 5.0),
    ("starting 2 of 2 nodes", 1.0),
)


def test_a_start_after_killed_ones_is_whole_and_its_removal_leaves_nothing(report: Report) -> None:
    run("down")
    before = devices()
    killed = [kill_a_start(line, after_s) for line, after_s in KILLS]
    began = time.monotonic()
    run("up", "--nodes", str(NUM_NODES))
    took_s = time.monotonic() - began
    try:
        nodes = json.loads(kubectl("get", "nodes", "--output=json"))["items"]
        assert len(nodes) == NUM_NODES
        pods = json.loads(kubectl("get", "pods", "--all-namespaces", "--output=json"))["items"]
        assert pods
        assert {pod["status"]["phase"] for pod in pods} == {"Running"}
        runs_a_pod_of_the_image()
        services = [each.name for each in PROCESSES.iterdir() if not each.name.startswith(".")]
        assert "etcd" in services
        assert num_processes("etcd") == 1  # the killed starts left none next to it
        assert num_processes("kubelet") == NUM_NODES
    finally:
        run("down")
    assert not left_over()
    assert devices() == before
    assert sum(killed) >= len(KILLS) // 2
    result = f"whole after {took_s:.0f} s, after {sum(killed)} starts that were killed by SIGKILL"
    report.add("start after killed ones", result, killed=sum(killed))


def run(*arguments: str) -> None:
    """Run the cluster's program."""
    subprocess.run([*PROGRAM, *arguments], check=True)


def kill_a_start(line: str, after_s: float) -> bool:
    """Start the cluster and kill its program some seconds after a line; False if it ended first."""
    with subprocess.Popen(
        [*PROGRAM, "up", "--nodes", str(NUM_NODES)], stderr=subprocess.PIPE, text=True
    ) as start:
        assert start.stderr is not None
        for said in start.stderr:
            if line in said or f"{NUM_NODES} nodes run" in said:
                break
        time.sleep(after_s)
        start.send_signal(signal.SIGKILL)
    return start.returncode == -signal.SIGKILL


def runs_a_pod_of_the_image() -> None:
    """Run Python from the image on each node: one that was linked in part lacks modules."""
    image = "registry.example.com/tramontane:0.2.0-cpu"
    for number in range(NUM_NODES):
        name = f"whole-{number + 1}"
        spec = {"nodeName": f"tramontane-node-{number + 1}", "automountServiceAccountToken": False}
        words = ["run", name, f"--image={image}", "--restart=Never", "--attach", "--rm", "--quiet"]
        said = kubectl(
            *words,
            f"--overrides={json.dumps({'apiVersion': 'v1', 'spec': spec})}",
            "--command",
            "--",
            "python",
            "-c",
            "import ray, torch, tramontane.cluster; print('whole')",
        )
        assert said == "whole\n"


def num_processes(program: str) -> int:
    """The processes of a program in the cluster's control groups."""
    return sum(
        Path(f"/proc/{pid}/comm").read_text().strip() == program
        for pid in kube_cgroups.processes()
        if Path(f"/proc/{pid}").exists()
    )


def devices() -> set[str]:
    """The network devices of this machine, outside of all namespaces."""
    return {each["ifname"] for each in json.loads(subprocess.check_output(["ip", "-j", "link"]))}


def left_over() -> list[str]:
    """What is left of a cluster: files, mounts, control groups, namespaces and processes."""
    mounts = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
    names = kube_network.NAMESPACES.iterdir() if kube_network.NAMESPACES.exists() else ()
    groups = [root / kube_cgroups.GROUP for root in kube_cgroups.hierarchies()]
    found = [
        *([str(CLUSTER)] if CLUSTER.exists() else []),
        *(mount for mount in mounts if mount.startswith(str(CLUSTER))),
        *(str(group) for group in groups if group.exists()),
        *(str(name) for name in names if name.name.startswith("tramontane-")),
    ]
    for command in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = command.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue  # it has ended since
        if str(CLUSTER) in words:
            found.append(words)
    return found


def test_a_build_ends_with_the_program_that_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = tmp_path / "bin" / "go"
    go.parent.mkdir()
    go.write_text(
        f"#!/bin/sh\necho $$ > {tmp_path / 'pid.part'}\n"
        f"mv {tmp_path / 'pid.part'} {tmp_path / 'pid'}\nexec sleep 600\n"
    )
    go.chmod(0o755)
    program = "import kube_builds as b, pathlib; b.build(pathlib.Path('/'), '.', 'none')"
    path = f"{go.parent}:{os.environ['PATH']}"
    with subprocess.Popen(
        [sys.executable, "-c", program],
        env=os.environ | {"PATH": path, "PYTHONPATH": str(Path(kube_builds.__file__).parent)},
    ) as start:
        deadline = time.monotonic() + 60
        while not (tmp_path / "pid").exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        build = int((tmp_path / "pid").read_text())
        start.kill()
    while (stat := Path(f"/proc/{build}/stat")).exists() and " Z " not in stat.read_text():
        assert time.monotonic() < deadline, "the build still runs"
        time.sleep(0.05)
