"""The head's pod, or its Redis, is lost while streams run: without Redis everything starts again,
with it not.
"""

import contextlib
import shutil
import time
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from conftest import ServedDemo
from kube_application import DEMO, Application, compare
from kube_control_plane import apply
from kube_paths import CLUSTER
from kube_processes import kubectl
from kube_report import Report
from test_kubernetes_pods import NOW, is_ready, wait_for_pods
from test_kubernetes_problems import wait_for

Documents = list[dict[str, Any]]
VOLUME, REDIS_POD = "redis-of-the-tests", "tramontane-redis-0"


def test_without_redis_the_server_starts_again(demo: Application, report: Report) -> None:
    demo.kubectl("delete", "pod", demo.pod("head"), *NOW)
    began = time.monotonic()
    while demo.complete()[0] == 200:
        assert time.monotonic() < began + 60, "the loss of the head has no effect"
        time.sleep(1)
    demo.wait_for_answer()
    took_s = time.monotonic() - began
    wait_for_pods(demo)
    report.add("head's pod deleted without grace, no Redis", f"answers again after {took_s:.0f} s")


@pytest.fixture(scope="module")
def redis_documents(served_demo: ServedDemo, report: Report) -> Iterator[Documents]:
    """The documents of the demo with Redis, whose volume is a folder of this machine. What is made
    of them is removed at the end.
    """
    application = served_demo.remove()
    folder = CLUSTER / "redis"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    folder.chmod(0o777)
    volume = {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": VOLUME},
        "spec": {
            "capacity": {"storage": "5Gi"},
            "accessModes": ["ReadWriteOnce"],
            "hostPath": {"path": str(folder)},
            "persistentVolumeReclaimPolicy": "Retain",
        },
    }
    documents = application.render(*DEMO, "--redis")
    try:
        apply(yaml.safe_dump(volume))
        application.create_key()
        application.create_secret("tramontane-redis", password="password-of-the-tests")
        yield documents
    finally:
        began = time.monotonic()
        # in the order of k8s/README.md: the operator's job that empties Redis needs the settings
        application.kubectl("delete", "rayservice", application.name, "--ignore-not-found")
        wait_for(lambda: not application.get("rayclusters")["items"], 300)
        application.delete(documents)
        deleted_s = time.monotonic() - began
        application.kubectl("delete", "persistentvolumeclaim", "--all")
        application.kubectl("delete", "persistentvolume", VOLUME, "--ignore-not-found")
        report.add("demo with Redis deleted", f"no pod left after {deleted_s:.0f} s")


def test_a_start_survives_the_deaths_of_its_head(
    served_demo: ServedDemo, redis_documents: Documents, report: Report
) -> None:
    """The head is killed as soon as the supervisor runs, and again when a stage is created."""
    application = served_demo.application
    application.apply(redis_documents)
    killed_s = []
    began = time.monotonic()
    for process in ("ray::Supervisor", "ray::StageActor"):
        wait_for(lambda name=process: runs(application, name), 300)
        head = application.pod("head")
        application.kubectl("delete", "pod", head, *NOW)
        killed_s.append(f"{time.monotonic() - began:.0f}")
        wait_for(lambda old=head: another_head(application, old), 300)
    application.wait_until_ready()
    application.wait_for_answer()
    report.add(
        "head's pod deleted twice during a start, with Redis",
        f"{' and '.join(killed_s)} s after apply; answers after {time.monotonic() - began:.0f} s",
    )


def runs(application: Application, process: str) -> bool:
    """Whether a pod of an ingress or a stage has a process of this name."""
    for role in ("ingress", "stage"):
        for pod in application.pods(role):
            with contextlib.suppress(RuntimeError):  # its container does not run yet
                name = pod["metadata"]["name"]
                if application.execute(name, f"grep -lx {process} /proc/[0-9]*/comm; true"):
                    return True
    return False


def another_head(application: Application, old: str) -> bool:
    """Whether the head's successor is ready."""
    heads = application.pods("head")
    return bool(heads) and heads[0]["metadata"]["name"] != old and is_ready(heads[0])


@pytest.fixture(scope="module")
def with_redis(served_demo: ServedDemo, redis_documents: Documents) -> Application:
    """The demo with Redis, which is Ready."""
    application = served_demo.application
    application.apply(redis_documents)
    application.wait_until_ready()
    application.wait_for_answer()
    return application


def test_with_redis_the_streams_survive_the_head(with_redis: Application, report: Report) -> None:
    undisturbed = with_redis.streams("--tokens", "900")
    head = with_redis.pod("head")
    fault = lambda: with_redis.kubectl("delete", "pod", head, *NOW)  # noqa: E731
    outcome = compare(with_redis.streams("--tokens", "900", fault=fault), undisturbed)
    back_s = wait_for_pods(with_redis)
    report.add(
        "head's pod deleted without grace, with Redis",
        f"{outcome}; all pods ready {back_s:.0f} s after the streams",
    )
    assert outcome.held, outcome.errors
    assert with_redis.pod("head") != head


def test_the_streams_survive_redis_on_another_node(with_redis: Application, report: Report) -> None:
    """Redis' pod is evicted from its node; the head, which cannot work without it, comes back."""
    undisturbed = with_redis.streams("--tokens", "900")
    redis = with_redis.get("pod", REDIS_POD)
    node = redis["spec"]["nodeName"]

    def move() -> None:
        kubectl("cordon", node)
        with_redis.kubectl("delete", "pod", REDIS_POD, *NOW)

    try:
        outcome = compare(with_redis.streams("--tokens", "900", fault=move), undisturbed)
        back_s = wait_for_pods(with_redis)
    finally:
        kubectl("uncordon", node)
    moved = with_redis.get("pod", REDIS_POD)["spec"]["nodeName"]
    report.add(
        "Redis' pod moved to another node",
        f"{outcome}; all pods ready {back_s:.0f} s after the streams",
    )
    assert outcome.held, outcome.errors
    assert moved != node


def test_the_streams_survive_head_and_redis_at_once(
    with_redis: Application, report: Report
) -> None:
    undisturbed = with_redis.streams("--tokens", "900")
    stages = loads_of_stages(with_redis)
    head = with_redis.pod("head")
    fault = lambda: with_redis.kubectl("delete", "pod", head, REDIS_POD, *NOW)  # noqa: E731
    outcome = compare(with_redis.streams("--tokens", "900", fault=fault), undisturbed)
    back_s = wait_for_pods(with_redis)
    report.add(
        "head's pod and Redis' pod deleted at once",
        f"{outcome}; all pods ready {back_s:.0f} s after the streams",
    )
    assert outcome.held, outcome.errors
    assert with_redis.pod("head") != head
    assert loads_of_stages(with_redis) == stages, "a stage has loaded its weights again"


def loads_of_stages(application: Application) -> list[str]:
    """The processes of the stages' actors, by their pods: others would have loaded again."""
    script = "for f in /proc/[0-9]*/comm; do grep -lE '^ray::Stage' $f; done; true"
    pods = [pod["metadata"]["name"] for pod in application.pods("stage")]
    found = [(pod, application.execute(pod, script, "ray-worker").strip()) for pod in pods]
    assert all(process for _, process in found), found
    return [f"{pod}{process}" for pod, process in found]
