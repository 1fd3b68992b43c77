"""Planned changes while streams run: an upgrade of the application, nodes that are drained."""

import json
import threading
import time
from collections import Counter
from typing import Any

import pytest
from kube_application import DEMO, Application, compare
from kube_nodes import nodes_with_folders
from kube_paths import node_name
from kube_processes import kubectl
from kube_report import Report
from test_kubernetes_network import ask_the_operators_service
from test_kubernetes_pods import wait_for_pods
from test_kubernetes_problems import wait_for

OPERATOR = ("--namespace=default", "--selector=app.kubernetes.io/component=kuberay-operator")
Documents = list[dict[str, Any]]


def test_an_upgrade_of_the_application_loses_nothing(demo: Application, report: Report) -> None:
    """The streams are long enough to be there when the operator has seen the other config."""

    def upgrade(*flags: str) -> None:
        demo.apply(demo.render(*DEMO, *flags))

    long = ("--tokens", "1400")
    undisturbed = demo.streams(*long)
    before = router_replicas(demo)
    config = demo.get("rayservice", demo.name)["spec"]["serveConfigV2"]
    other = "40" if "max_num_seqs: 48" in config else "48"
    began, changed_at = [0.0], list[float]()

    def fault() -> None:
        began[0] = time.monotonic()
        upgrade("--max-num-seqs", other)
        wait_for(lambda: router_replicas(demo) != before, 60)  # while the streams run
        changed_at.append(time.monotonic())

    try:
        streams = demo.streams(*long, fault=fault)
        outcome = compare(streams, undisturbed)
        demo.wait_for_answer()
        problem = wait_until_running(demo)
        changed_s = changed_at[0] - began[0]
        longest_s = max(each["ended_s"] for each in streams)
        report.add(
            "upgrade of the application (--max-num-seqs)",
            f"{outcome}; new routers {changed_s:.0f} s after it was applied, the last stream ended"
            f" {longest_s:.0f} s after the first began; {problem or 'then RUNNING'}",
        )
        # a stream begins before the upgrade is applied, by 3 s and the time to its first token
        assert longest_s > changed_s + 3, "the streams had ended before the upgrade began"
    finally:
        upgrade()
    if problem is None:
        time.sleep(10)  # the operator looks every two seconds
        wait_until_running(demo)
    assert outcome.held, outcome.errors
    assert problem is None, problem


def test_a_second_cluster_takes_over_from_the_first(demo: Application, report: Report) -> None:
    """`upgradeStrategy: NewCluster`, and a change of the pods: requests are asked all the time, by
    the operator's own Service.
    """
    documents = demo.render(*DEMO)
    (service,) = (each for each in documents if each["kind"] == "RayService")
    service["spec"]["upgradeStrategy"] = {"type": "NewCluster"}
    head = service["spec"]["rayClusterConfig"]["headGroupSpec"]["template"]["spec"]
    changed = {"name": "CHANGED_BY_A_TEST", "value": str(time.time_ns())}
    head["containers"][0].setdefault("env", []).append(changed)
    (first,) = clusters_of(demo)
    statuses: list[str] = []
    is_over = threading.Event()

    def ask() -> None:
        while not is_over.wait(0.2):
            statuses.append(ask_the_operators_service(demo))

    asking = threading.Thread(target=ask)
    asking.start()
    began = time.monotonic()
    try:
        demo.apply(documents)
        wait_for(lambda: len(clusters_of(demo)) == 2, 60)
        wait_for(lambda: first not in clusters_of(demo), 900)
        took_s = time.monotonic() - began
        wait_for_pods(demo)
    finally:
        is_over.set()
        asking.join()
        demo.apply(demo.render(*DEMO))
    counts = dict(Counter(statuses))
    report.add(
        "a second cluster takes over (upgradeStrategy: NewCluster)",
        f"the first one is gone after {took_s:.0f} s; requests one after the other: {counts}",
    )
    assert counts.keys() == {"200"}


def clusters_of(application: Application) -> list[str]:
    """The names of the application's RayClusters."""
    return [each["metadata"]["name"] for each in application.get("rayclusters")["items"]]


@pytest.mark.parametrize("has_room", [True, False], ids=["room", "no-room"])
def test_streams_survive_a_drained_node(
    demo: Application, undisturbed: Documents, report: Report, *, has_room: bool
) -> None:
    """A stage's node is drained; without room elsewhere the streams wait, here for 40 s, in which
    they are kept alive and /health says what is awaited.
    """
    node = node_to_drain(demo)
    others = [] if has_room else [node_name(each) for each in nodes_with_folders()]
    health: list[tuple[int, str]] = []

    def drain() -> None:
        for each in others:
            kubectl("cordon", each)
        options = ("--ignore-daemonsets", "--delete-emptydir-data", "--timeout=300s")
        kubectl("drain", node, *options, timeout_s=330)
        if others:
            time.sleep(40)
            health.append(demo.ask("/health", key=None))
        for each in others:
            kubectl(*(("cordon",) if each == node else ("uncordon",)), each)

    try:
        outcome = compare(demo.streams("--tokens", "900", fault=drain), undisturbed)
        wait_for_pods(demo)
        used = {pod["spec"]["nodeName"] for pod in demo.pods("stage")}
    finally:
        for each in {node, *others}:
            kubectl("uncordon", each)
    subject = f"node with a stage drained, {'others free' if has_room else 'no other for 40 s'}"
    if has_room:
        report.add(subject, str(outcome))
    else:
        silence_s = max(each["longest_silence_s"] for each in outcome.streams)
        comments = min(each["num_comments"] for each in outcome.streams)
        kept = f"{comments} comments or more in each, at most {silence_s:.0f} s without a byte"
        report.add(subject, f"{outcome}; {kept}; /health {health[0][0]}", health=health[0][1])
        assert comments > 0
        assert "waiting for 1 of 2 stages" in health[0][1]
    assert node not in used
    assert outcome.held, outcome.errors


def node_to_drain(demo: Application) -> str:
    """A node with a stage and without pods that are not to move: the operator's, which makes the
    successor, and the head's, whose budget allows no eviction. A stage is moved if need be.
    """
    operator = json.loads(kubectl("get", "pods", *OPERATOR, "--output=json"))["items"]
    fixed = {pod["spec"].get("nodeName") for pod in (*operator, *demo.pods("head"))}
    while not (nodes := {pod["spec"]["nodeName"] for pod in demo.pods("stage")} - fixed):
        try:
            for each in fixed:
                kubectl("cordon", each)
            demo.kubectl("delete", "pod", demo.pod("stage"))
            wait_for_pods(demo)
        finally:
            for each in fixed:
                kubectl("uncordon", each)
    return min(nodes)


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
