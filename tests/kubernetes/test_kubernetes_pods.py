"""Pods that are lost while streams run: stages with and without grace, a raylet, an ingress."""

import json
import time
from collections.abc import Callable
from typing import Any

import pytest
from conftest import ServedDemo
from kube_application import DEMO, Application, compare
from kube_report import Report

Documents = list[dict[str, Any]]
NOW = ("--grace-period=0", "--force")
KILL_RAYLET = (
    'for f in /proc/[0-9]*/comm; do [ "$(cat $f)" = raylet ] && kill -9 $(basename ${f%/comm})'
    " && echo killed; done; true"
)


def delete_stage(demo: Application) -> None:
    """Delete a stage's pod, which has its time of grace."""
    demo.kubectl("delete", "pod", demo.pod("stage"), "--wait=false")


def delete_stage_now(demo: Application) -> None:
    """Delete a stage's pod without grace."""
    demo.kubectl("delete", "pod", demo.pod("stage"), *NOW)


def kill_raylet(demo: Application) -> None:
    """Kill the raylet inside of a stage's pod."""
    assert demo.execute(demo.pod("stage"), KILL_RAYLET).split() == ["killed"]


@pytest.mark.parametrize(
    ("subject", "fault"),
    [
        ("a stage's pod deleted without grace", delete_stage_now),
        ("a stage's pod deleted with grace", delete_stage),
        ("raylet killed in a stage's pod", kill_raylet),
    ],
)
def test_streams_survive_the_loss_of_a_stage(
    subject: str,
    fault: Callable[[Application], None],
    demo: Application,
    undisturbed: Documents,
    report: Report,
) -> None:
    streams = demo.streams("--tokens", "900", fault=lambda: fault(demo))
    outcome = compare(streams, undisturbed)
    back_s = wait_for_pods(demo)
    report.add(subject, f"{outcome}; pods and answers back {back_s:.0f} s after the streams")
    assert outcome.held, outcome.errors


def fullest(demo: Application) -> str:
    """The ingress pod with the most connections."""
    names = [pod["metadata"]["name"] for pod in demo.pods("ingress")]
    return max(names, key=lambda name: num_connections(demo, name))


def with_router(demo: Application) -> str:
    """The ingress pod in which the router runs."""
    script = "cat /proc/[0-9]*/cmdline 2> /dev/null | tr '\\0' ' ' | grep -c '[:]Router' || true"
    names = [pod["metadata"]["name"] for pod in demo.pods("ingress")]
    (name,) = (name for name in names if demo.execute(name, script, "ray-worker").strip() != "0")
    return name


@pytest.mark.parametrize(
    ("subject", "choose"),
    [
        ("the ingress pod with most streams deleted without grace", fullest),
        ("the ingress pod with the router deleted without grace", with_router),
    ],
)
def test_the_loss_of_an_ingress_pod_breaks_its_own_streams_only(
    subject: str,
    choose: Callable[[Application], str],
    demo: Application,
    undisturbed: Documents,
    report: Report,
) -> None:
    """Connections to a pod break with it; those to the other pod go on."""
    numbers: list[int] = []

    def fault() -> None:
        pod = choose(demo)
        numbers.append(num_connections(demo, pod))
        demo.kubectl("delete", "pod", pod, *NOW)

    outcome = compare(demo.streams("--tokens", "900", fault=fault), undisturbed)
    back_s = wait_for_pods(demo)
    report.add(subject, f"{outcome}, of {numbers[0]} there; back {back_s:.0f} s later")
    assert outcome.num_different == 0
    assert outcome.num_lost <= numbers[0], "the other pod's streams broke too"
    assert outcome.num_lost or choose is with_router
    assert all("ReadError" in error or "RemoteProtocol" in error for error in outcome.errors)


def num_connections(application: Application, pod: str) -> int:
    """The connections to the HTTP port of a pod that are established."""
    script = "awk '$2 ~ /:1F40$/ && $4 == \"01\"' /proc/net/tcp /proc/net/tcp6 | wc -l"
    return int(application.execute(pod, script, "ray-worker"))


def test_a_spare_pod_takes_the_stage_of_a_lost_one(
    served_demo: ServedDemo, undisturbed: Documents, report: Report
) -> None:
    """The stage loads there; nothing waits for the pod that the operator makes."""
    application = served_demo.remove()
    documents = application.render(*DEMO, "--spare-stages", "1")
    application.create_key()
    application.apply(documents)
    try:
        application.wait_until_ready()
        wait_for_pods(application, num_stages=3)
        spare = with_stage(application, has_one=False)[0]
        lost = with_stage(application, has_one=True)[0]
        streams = application.streams(
            "--tokens", "900", fault=lambda: application.kubectl("delete", "pod", lost, *NOW)
        )
        outcome = compare(streams, undisturbed)
        report.add("a stage's pod deleted without grace, with a spare", str(outcome))
        assert outcome.held, outcome.errors
        assert spare in with_stage(application, has_one=True)
    finally:
        application.delete(documents)


def with_stage(application: Application, *, has_one: bool) -> list[str]:
    """The pods for stages in which a stage runs, or none does."""
    script = "cat /proc/[0-9]*/comm | grep -c ray::Stage || true"
    names = [pod["metadata"]["name"] for pod in application.pods("stage")]
    return [each for each in names if has_one == (application.execute(each, script).strip() != "0")]


def wait_for_pods(demo: Application, limit_s: float = 400.0, *, num_stages: int = 2) -> float:
    """Wait until all pods are Ready and the server answers; the seconds that it took."""
    began = time.monotonic()
    numbers = {"head": 1, "ingress": 2, "stage": num_stages}
    while True:
        ready = {role: sum(map(is_ready, demo.pods(role))) for role in numbers}
        if ready == numbers:
            demo.wait_for_answer(limit_s)
            return time.monotonic() - began
        assert time.monotonic() < began + limit_s, json.dumps(ready)
        time.sleep(1)


def is_ready(pod: dict[str, Any]) -> bool:
    """Whether a pod is Ready."""
    conditions = pod["status"].get("conditions", [])
    return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)
