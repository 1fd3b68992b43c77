"""Planned changes while streams run: an upgrade of the application, nodes that are drained."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from kube_application import DEMO, Application, compare
from kube_nodes import nodes_with_folders
from kube_paths import node_name
from kube_processes import kubectl
from kube_report import Report
from test_kubernetes_pods import wait_for_pods

PROGRAM = Path(__file__).with_name("kube_cluster.py")
Documents = list[dict[str, Any]]


def test_an_upgrade_of_the_application_loses_nothing(
    demo: Application, undisturbed: Documents, report: Report
) -> None:
    def upgrade(*flags: str) -> None:
        demo.apply(demo.render(*DEMO, *flags))

    before = router_replicas(demo)
    streams = demo.streams("--tokens", "900", fault=lambda: upgrade("--max-num-seqs", "48"))
    outcome = compare(streams, undisturbed)
    demo.wait_for_answer()
    problem = wait_until_running(demo)
    changed = router_replicas(demo) != before
    report.add(
        "upgrade of the application (--max-num-seqs)", f"{outcome}; {problem or 'then RUNNING'}"
    )
    upgrade()
    if problem is None:
        wait_until_running(demo)
    assert outcome.held, outcome.errors
    assert changed, "the operator did not deploy the other config"
    assert problem is None, problem


def test_a_drained_node_with_another_that_is_free(
    demo: Application, undisturbed: Documents, report: Report
) -> None:
    free = max(nodes_with_folders()) + 1
    subprocess.run([sys.executable, PROGRAM, "add-node", str(free)], check=True)
    stage = demo.pods("stage")[0]
    node = stage["spec"]["nodeName"]

    def drain() -> None:
        options = ("--ignore-daemonsets", "--delete-emptydir-data", "--timeout=300s")
        kubectl("drain", node, *options, timeout_s=330)

    try:
        outcome = compare(demo.streams("--tokens", "900", fault=drain), undisturbed)
        wait_for_pods(demo)
        used = {pod["spec"]["nodeName"] for pod in demo.pods("stage")}
    finally:
        kubectl("uncordon", node)
    spare = next(n for n in nodes_with_folders() if node_name(n) == node)
    subprocess.run([sys.executable, PROGRAM, "remove-node", str(spare)], check=True)
    subprocess.run([sys.executable, PROGRAM, "add-node", str(spare)], check=True)
    report.add("node with a stage drained, another one free", str(outcome))
    assert node_name(free) in used
    assert outcome.held, outcome.errors


def router_replicas(demo: Application) -> str:
    """What Ray Serve says of the replicas of the Router: their ids change with a new version."""
    script = "ls -d /tmp/ray/session_latest/logs/serve/replica_*Router* 2> /dev/null | sort"
    return "\n".join(
        demo.execute(pod["metadata"]["name"], script, "ray-worker") for pod in demo.pods("ingress")
    )


def wait_until_running(demo: Application, limit_s: float = 180.0) -> str | None:
    """Wait until Ray Serve has deployed the application; what it waits for if it does not."""
    deadline = time.monotonic() + limit_s
    path = "{.status.activeServiceStatus.applicationStatuses.tramontane}"
    while True:
        text = demo.kubectl("get", "rayservice", demo.name, f"-o=jsonpath={path}")
        state = json.loads(text or "{}")
        if state.get("status") == "RUNNING":
            return None
        if time.monotonic() > deadline:
            return f"{state.get('status')} after {limit_s:.0f} s: {messages_of(state)}"
        time.sleep(1)


def messages_of(state: dict[str, Any]) -> str:
    """What an application's status says of its deployments."""
    found = [each.get("message", "") for each in state["serveDeploymentStatuses"].values()]
    return " ".join(filter(None, [state.get("message"), *found]))
