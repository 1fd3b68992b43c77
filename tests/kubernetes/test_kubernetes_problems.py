"""What a person sees when something is wrong: the reason, by the commands of k8s/README.md."""

import contextlib
import copy
import json
import os
import time
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest
from kube_application import DEMO, Application, compare
from kube_processes import kubectl
from kube_report import Report
from test_kubernetes_pods import wait_for_pods


def test_an_image_that_cannot_be_pulled_is_named(empty: Application, report: Report) -> None:
    documents = copy.deepcopy(empty.render(*DEMO))
    service = next(each for each in documents if each["kind"] == "RayService")
    head = service["spec"]["rayClusterConfig"]["headGroupSpec"]["template"]["spec"]
    head["containers"][0]["image"] = "registry.example.com/no-such-image:1"
    empty.create_key()
    empty.apply(documents)
    try:
        began = time.monotonic()
        pod = wait_for(lambda: [each["metadata"]["name"] for each in empty.pods("head")], 60)[0]
        text = wait_for(lambda: part_of(empty.kubectl("describe", "pod", pod), "no-such-image"), 90)
        events = empty.kubectl("get", "events")
        report.add(
            "image that cannot be pulled",
            f"named by describe pod and get events after {time.monotonic() - began:.0f} s",
        )
        assert "Failed to pull image" in text
        assert "Failed to pull image" in events
    finally:
        empty.delete(documents)


# In a pod: processes that take 64 MiB each, one after the other, until the stage's process there
# has been killed; then they end. Ray makes its workers the first that the kernel kills, so none of
# these may be large. Ray's own monitor kills when 95 % are used, and looks four times a second.
TAKE_MEMORY = """
import os, pathlib, signal, sys, time
from tramontane.cluster.planning.hardware import num_memory_kills, usable_memory

def processes(name):
    found = {}
    for path in pathlib.Path("/proc").glob("[0-9]*/stat"):
        title, state = path.read_text().partition("(")[2].rpartition(")")[::2]
        if title.startswith(name) and state.split()[0] != "Z":
            found[int(path.parent.name)] = title
    return found

def take():
    taken = bytearray(b"x") * 2**26
    os.kill(os.getpid(), signal.SIGSTOP)

before, takers, (raylet,) = processes("ray::Stage"), [], processes("raylet")
assert before, "no stage runs here"
killed_before = num_memory_kills()
deadline = time.monotonic() + 90
while before.items() <= processes("ray::Stage").items() and num_memory_kills() == killed_before:
    if time.monotonic() > deadline:
        break
    if sys.argv[1] == "kernel" and usable_memory() < 2**29:  # not for long: Ray has health checks
        os.kill(raylet, signal.SIGSTOP)
    takers.append(os.fork())
    if takers[-1] == 0:
        take()
    os.waitpid(takers[-1], os.WUNTRACED)
    time.sleep(0 if sys.argv[1] == "kernel" else 0.2)
for each in takers:
    os.kill(each, signal.SIGKILL)
os.kill(raylet, signal.SIGCONT)
"""


@pytest.mark.parametrize(
    ("killer", "says"),
    [
        ("ray", ("running low on memory",)),
        # the kernel may kill one process only, or also the container's first one or all of it
        ("kernel", ("memory was full", "OOMKilled")),
    ],
)
def test_a_stage_that_was_killed_for_its_memory_is_named(
    killer: str,
    says: tuple[str, ...],
    demo: Application,
    undisturbed: list[dict[str, Any]],
    report: Report,
) -> None:
    killed = demo.pod("stage")
    restarts = num_restarts(demo, killed)
    began = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")

    def fault() -> None:
        with contextlib.suppress(RuntimeError):  # the shell there is killed with the container
            demo.kubectl("exec", killed, "--", "python", "-c", TAKE_MEMORY, killer)

    outcome = compare(demo.streams("--tokens", "900", fault=fault), undisturbed)
    wait_for_pods(demo)
    said = demo.kubectl("logs", killed, f"--since-time={began}")
    if num_restarts(demo, killed) > restarts:
        said += demo.kubectl("describe", "pod", killed)
    print(said)
    seen = [each for each in says if each in said]
    report.add(f"a stage killed for its memory by {killer.capitalize()}", f"{outcome}; {seen}")
    assert outcome.held, outcome.errors
    assert seen


def num_restarts(demo: Application, pod: str) -> int:
    """How often a pod's container was started again."""
    return int(demo.get("pod", pod)["status"]["containerStatuses"][0]["restartCount"])


def part_of(text: str, word: str) -> str:
    """The lines of a text that have a word and tell of a failure."""
    lines = [line for line in text.splitlines() if word in line and "Failed" in line]
    return "\n".join(lines)


def wait_for(ask: Callable[[], Any], limit_s: float) -> Any:
    """The answer of a question as soon as there is one."""
    deadline = time.monotonic() + limit_s
    while not (answer := ask()):
        assert time.monotonic() < deadline, "there is no answer"
        time.sleep(1)
    return answer


def test_memory_of_idle_pods(demo: Application, report: Report) -> None:
    time.sleep(30)  # what requests need is given back
    used: dict[str, list[float]] = {}
    for role in ("head", "ingress", "stage"):
        for pod in demo.pods(role):
            name, node = pod["metadata"]["name"], pod["spec"]["nodeName"]
            used.setdefault(role, []).append(resident_mib(node, name))
    amounts = ", ".join(
        f"{role} {' and '.join(f'{each:.0f}' for each in values)}" for role, values in used.items()
    )
    report.add("resident memory of idle pods", f"MiB: {amounts}", mib=used)
    assert all(0 < each < 4096 for values in used.values() for each in values)


def resident_mib(node: str, pod: str) -> float:
    """The resident memory of a pod, as its kubelet measures it."""
    summary = json.loads(kubectl("get", "--raw", f"/api/v1/nodes/{node}/proxy/stats/summary"))
    found = next(each for each in summary["pods"] if each["podRef"]["name"] == pod)
    return float(found["memory"]["rssBytes"]) / 2**20


# while a head is away, and when two controllers write at the same time, the operator tries again;
# a namespace that a test has removed takes no more events
PASSING = (
    "Serve applica",
    "0 head",
    "find head service",
    "the object has been modified",
    "unhealthy worker",
    "Server rejected event",
)
QUIET_S = float(os.environ.get("KUBERNETES_QUIET_S", "60"))


def test_the_operator_finds_no_fault_in_the_overlay(demo: Application, report: Report) -> None:
    """Nothing lasting in all of its log, and nothing at all while the demo is left alone."""
    began = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    time.sleep(QUIET_S)
    quiet = errors_of_operator(f"--since-time={began}")
    errors = errors_of_operator()
    lasting = [text for text in errors if not any(each in text for each in PASSING)]
    kinds = Counter(text.partition(":")[0] for text in errors.elements())
    counts = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
    result = f"{quiet.total()} in {QUIET_S / 60:.0f} quiet minutes; in all {counts or 'none'}"
    report.add("errors in the operator's log", result, errors=dict(errors), quiet=dict(quiet))
    assert not quiet
    assert not lasting


def errors_of_operator(*options: str) -> Counter[str]:
    """The errors in the operator's log, by their text."""
    log = kubectl("--namespace", "default", "logs", "deployment/kuberay-operator", *options)
    lines = [json.loads(line) for line in log.splitlines() if '"level":"error"' in line]
    return Counter(f"{line['msg']}: {line.get('error', '')}" for line in lines)
