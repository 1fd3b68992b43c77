"""Nodes that arrive late, and more and fewer pipelines by the lines of k8s/README.md."""

import copy
import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from kube_application import DEMO, Application, compare
from kube_nodes import nodes_with_folders
from kube_paths import CHECKOUT, node_name
from kube_processes import kubectl
from kube_report import Report
from test_kubernetes_deployments import messages_of, wait_until_running
from test_kubernetes_problems import wait_for

PROGRAM = Path(__file__).with_name("kube_cluster.py")
LATE = {"tramontane-tests/late": "true"}
AWAITED = "waiting for 1 of 2 stages: "
# eight streams are more than one pipeline is meant to have; less patient than the defaults
AUTOSCALED = "max_num_seqs: 4\nupscale_delay: 5\ndownscale_delay: 20\n"
Documents = list[dict[str, Any]]


def test_stages_that_wait_for_a_node_say_so_and_start_on_it(
    empty: Application, report: Report
) -> None:
    """One stage's pod finds no node until one is added: /health and the RayService name it."""
    documents = copy.deepcopy(empty.render(*DEMO))
    service = next(each for each in documents if each["kind"] == "RayService")
    groups = service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    (stages,) = (each for each in groups if each["groupName"] == "stages")
    pod = stages["template"]["spec"]
    pod["nodeSelector"] = LATE
    pod["containers"][0]["resources"]["requests"]["cpu"] = "1200m"  # a node has two cores
    first, late = max(nodes_with_folders()), max(nodes_with_folders()) + 1
    empty.create_key()
    try:
        mark(first)
        empty.apply(documents)
        began = time.monotonic()
        health = wait_for(lambda: said_by_health(empty), 180)
        named_s = time.monotonic() - began
        status = wait_for(lambda: said_by_status(empty), 90)
        subprocess.run([sys.executable, PROGRAM, "add-node", str(late)], check=True)
        mark(late)
        joined = time.monotonic()
        empty.wait_until_ready()
        empty.wait_for_answer()
        ready_s = time.monotonic() - joined
    finally:
        mark(first, "-")
        subprocess.run([sys.executable, PROGRAM, "remove-node", str(late)], check=True)
        empty.delete(documents)
    report.add(
        "stages whose node arrives late",
        f"named by /health {named_s:.0f} s after apply, then by the RayService; ready {ready_s:.0f}"
        " s after the node",
        health=health,
        status=status,
    )
    assert "offered by no node" in health
    assert "offered by no node" in status


def mark(number: int, end: str = "=true") -> None:
    """Give a node the label that stages ask for; with the end "-", take it away."""
    kubectl("label", "node", node_name(number), *(f"{name}{end}" for name in LATE))


def said_by_health(application: Application) -> str:
    """What /health says of the wait, "" if it does not."""
    status, content = application.ask("/health", key=None)
    return content if status == 503 and AWAITED in content else ""


def said_by_status(application: Application) -> str:
    """What the status of the RayService says of the wait, "" if it does not."""
    path = "{.status.pendingServiceStatus.applicationStatuses.tramontane}"
    active = path.replace("pending", "active")
    options = [f"-o=jsonpath={path}{active}"]
    text = application.kubectl("get", "rayservice", application.name, *options)
    message = messages_of(json.loads(text)) if text else ""
    return message if AWAITED in message else ""


def test_a_pipeline_more_and_less_by_the_lines_of_the_readme(
    demo: Application, undisturbed: Documents, report: Report
) -> None:
    def scale(replicas: int) -> None:
        demo.apply(demo.render(*DEMO, "--replicas", str(replicas)))

    def up() -> None:
        scale(2)
        demo.kubectl(*scaling_patch(demo, 4))

    outcome = compare(demo.streams("--tokens", "900", fault=up), undisturbed)
    began = time.monotonic()
    wait_for(lambda: num_routers(demo) == 2, 180)
    grown_s = time.monotonic() - began
    report.add("a second pipeline", f"{outcome}; there {grown_s:.0f} s after the streams")
    fewer = compare(demo.streams("--tokens", "900", fault=lambda: scale(1)), undisturbed)
    wait_for(lambda: num_routers(demo) == 1, 180)
    problem = wait_until_running(demo)
    demo.kubectl(*scaling_patch(demo, 2))
    wait_for(lambda: len(demo.pods("stage")) == 2, 60)
    demo.wait_for_answer()
    report.add("the second pipeline removed", f"{fewer}; {problem or 'then RUNNING'}")
    assert outcome.held, outcome.errors
    assert fewer.held, fewer.errors
    assert problem is None, problem


def test_the_autoscaler_makes_pods_for_a_second_pipeline(
    empty: Application, undisturbed: Documents, report: Report, tmp_path: Path
) -> None:
    """`--max-replicas 2`: Ray's autoscaler, a container of the head, asks the operator for pods."""
    config = tmp_path / "autoscaled.yaml"
    config.write_text(AUTOSCALED)
    documents = empty.render(*DEMO, "--max-replicas", "2", "--config", str(config))
    (service,) = (each for each in documents if each["kind"] == "RayService")
    service["spec"]["rayClusterConfig"]["autoscalerOptions"]["idleTimeoutSeconds"] = 60
    empty.create_key()
    empty.apply(documents)
    try:
        ready_s = empty.wait_until_ready()
        empty.wait_for_answer()
        assert len(empty.pods("stage")) == 2
        began = time.monotonic()
        grown_s = 0.0
        outcomes = []
        while not grown_s:
            outcomes.append(compare(empty.streams("--tokens", "900"), undisturbed))
            if num_routers(empty) == 2:
                grown_s = time.monotonic() - began
            assert time.monotonic() < began + 600, "there is no second pipeline"
        num_pods = len(empty.pods("stage"))
        began = time.monotonic()
        wait_for(lambda: len(empty.pods("stage")) == 2, 900)
        shrunk_s = time.monotonic() - began
        empty.wait_for_answer()
    finally:
        empty.delete(documents)
    num_streams = sum(len(each.streams) for each in outcomes)
    result = (
        f"Ready after {ready_s:.0f} s; a second pipeline with {num_pods} pods after {grown_s:.0f} s"
        f" of {num_streams} streams ({sum(each.num_lost for each in outcomes)} lost,"
        f" {sum(each.num_different for each in outcomes)} different), 2 pods again after"
        f" {shrunk_s:.0f} s"
    )
    report.add("the autoscaler adds and removes a pipeline", result)
    assert num_pods == 4
    assert all(each.held for each in outcomes)


def scaling_patch(demo: Application, num_pods: int) -> list[str]:
    """The patch of k8s/README.md, with another number of pods."""
    text = (CHECKOUT / "k8s" / "README.md").read_text()
    found = re.search(
        r"kubectl (patch raycluster) \$CLUSTER --type json -p '(\[.*?\])'", text, re.S
    )
    assert found is not None, "k8s/README.md has no patch of the number of pods"
    patch = json.loads(found[2])
    assert [each["value"] for each in patch] == [8, 8, 8]
    changed = json.dumps([each | {"value": num_pods} for each in patch])
    status = "{.status.activeServiceStatus.rayClusterName}"
    cluster = demo.kubectl("get", "rayservice", demo.name, f"-o=jsonpath={status}")
    return [*found[1].split(), cluster, "--type=json", "--patch", changed]


def num_routers(demo: Application) -> int:
    """The number of routers that Ray Serve runs."""
    path = "{.status.activeServiceStatus.applicationStatuses.tramontane}"
    demo.kubectl("get", "rayservice", demo.name, f"-o=jsonpath={path}")
    pod = demo.pod("head")
    script = "serve status 2> /dev/null"
    text = demo.execute(pod, script, "ray-head")
    found = re.search(r"Router:\s+status: (\w+).*?replica_states:\s+RUNNING: (\d+)", text, re.S)
    return int(found[2]) if found and found[1] == "HEALTHY" else 0
