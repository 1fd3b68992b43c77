"""Tramontane in the cluster: an overlay that is applied, its pods, requests to it, streams."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from kube_control_plane import DEMO_NAMESPACE, apply
from kube_nodes import nodes_with_folders
from kube_paths import CHECKOUT, CLUSTER, node_name
from kube_processes import cluster_environment, in_network, kubectl
from kube_streams import NUM_STREAMS

PROGRAM = CHECKOUT / ".venv" / "bin" / "tramontane"
KEY = "key-of-the-tests"
DEMO = ("--cpu", "--stages", "2", "--gpu-memory", "2GiB")
Document = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Outcome:
    """Streams against the same without a disturbance; times in seconds."""

    num_lost: int
    num_different: int
    longest_gap_s: float
    errors: tuple[str, ...]
    streams: list[Document]

    @property
    def held(self) -> bool:
        """Whether every stream ended with the text that it has without a disturbance."""
        return not self.num_lost and not self.num_different

    def __str__(self) -> str:
        total = len(self.streams)
        return (
            f"{total} streams: {self.num_lost} lost, {self.num_different} different, longest gap"
            f" {self.longest_gap_s:.1f} s"
        )


def compare(streams: list[Document], undisturbed: list[Document]) -> Outcome:
    """Compare streams with the undisturbed ones of the same requests."""
    expected = {each["number"]: each["text"] for each in undisturbed}
    lost = [each for each in streams if each["error"] or each["finish"] != "length"]
    others = [each for each in streams if each not in lost]
    return Outcome(
        num_lost=len(lost),
        num_different=sum(each["text"] != expected[each["number"]] for each in others),
        longest_gap_s=max(each["longest_gap_s"] for each in streams),
        errors=tuple(sorted({str(each["error"]) for each in lost})),
        streams=streams,
    )


class Application:
    """A RayService of a namespace."""

    def __init__(self, name: str = "tramontane", key: str = KEY) -> None:
        self.namespace, self.name = DEMO_NAMESPACE, name
        self.key = key

    def kubectl(self, *arguments: str, text: str | None = None, timeout_s: float = 120.0) -> str:
        """The output of kubectl in the namespace."""
        return kubectl("--namespace", self.namespace, *arguments, text=text, timeout_s=timeout_s)

    def get(self, *arguments: str) -> Document:
        """An object, or a list of objects."""
        answer: Document = json.loads(self.kubectl("get", *arguments, "--output=json"))
        return answer

    def render(self, *flags: str) -> list[Document]:
        """The documents of an overlay that `tramontane k8s` writes."""
        folder = CLUSTER / "overlays" / f"{self.namespace}-{self.name}"
        folder.mkdir(parents=True, exist_ok=True)
        image = yaml.safe_load((CHECKOUT / "k8s/overlays/demo/kustomization.yaml").read_text())
        named = f"{image['images'][0]['newName']}:{image['images'][0]['newTag']}"
        if self.name == "tramontane":
            named_by = ["--base", os.path.relpath(CHECKOUT / "k8s", folder)]
        else:
            named_by = ["--name", self.name]
        subprocess.run(
            [PROGRAM, "k8s", *flags, "--image", named, *named_by, "--out", folder],
            check=True,
            capture_output=True,
            cwd=folder,
        )
        return list(yaml.safe_load_all(kubectl("kustomize", str(folder))))

    def apply(self, documents: Sequence[Document]) -> None:
        """Apply documents in the namespace, as `kubectl apply -k` does."""
        text = yaml.safe_dump_all(documents)
        self.kubectl("apply", "--filename=-", text=text)

    def create_key(self) -> None:
        """Create the Secret of the API keys."""
        self.create_secret(f"{self.name}-api-keys", keys=self.key)

    def create_secret(self, name: str, **values: str) -> None:
        """Create a Secret, or change it."""
        literals = [f"--from-literal={key}={value}" for key, value in values.items()]
        arguments = ("create", "secret", "generic", name, *literals)
        document = self.kubectl(*arguments, "--dry-run=client", "--output=yaml")
        apply(document.replace("metadata:", f"metadata:\n  namespace: {self.namespace}", 1))

    def wait_until_ready(self, limit_s: float = 600.0) -> float:
        """Wait until the RayService is Ready; the seconds that it took."""
        began = time.monotonic()
        what = f"rayservice/{self.name}"
        arguments = ("wait", what, "--for=condition=Ready", f"--timeout={limit_s:.0f}s")
        self.kubectl(*arguments, timeout_s=limit_s + 30)
        return time.monotonic() - began

    def pods(self, role: str) -> list[Document]:
        """The pods of a role (head, ingress, stage) that are not being deleted, by age."""
        selector = f"--selector=app={self.name},tramontane-role={role}"
        found: list[Document] = self.get("pods", selector)["items"]
        living = [pod for pod in found if "deletionTimestamp" not in pod["metadata"]]
        return sorted(living, key=lambda pod: pod["metadata"]["creationTimestamp"])

    def pod(self, role: str, which: int = 0) -> str:
        """The name of one pod of a role."""
        name: str = self.pods(role)[which]["metadata"]["name"]
        return name

    def execute(self, pod: str, script: str, container: str = "") -> str:
        """The output of a shell's lines in a pod."""
        options = [f"--container={container}"] if container else []
        return self.kubectl("exec", pod, *options, "--", "bash", "-c", script)

    def address(self, kind: str = "http") -> str:
        """The address of a Service, as the cluster's nodes reach it."""
        spec = self.get("service", f"{self.name}-{kind}")["spec"]
        return f"{spec['clusterIP']}:{spec['ports'][0]['port']}"

    def ask(self, path: str, body: Document | None = None, key: str | None = "") -> tuple[int, str]:
        """The status and the body of an answer; status 0 if there was none. ``key``: "" for the
        application's own, None for none.
        """
        key = self.key if key == "" else key
        command = ["curl", "-sS", "--max-time", "60", "--write-out", "\n%{http_code}"]
        if key is not None:
            command += ["--header", f"Authorization: Bearer {key}"]
        if body is not None:
            command += ["--header", "Content-Type: application/json", "--data", json.dumps(body)]
        done = inside_node([*command, f"http://{self.address()}{path}"])
        content, _, status = done.stdout.rpartition("\n")
        return int(status or 0), content or done.stderr

    def complete(self, text: str = "The wind", key: str | None = "") -> tuple[int, str]:
        """Ask for some tokens."""
        body = {"model": "demo", "prompt": text, "max_tokens": 8}
        return self.ask("/v1/completions", body, key)

    def wait_for_answer(self, limit_s: float = 600.0) -> float:
        """Wait until a completion succeeds; the seconds that it took."""
        began = time.monotonic()
        while (answer := self.complete())[0] != 200:
            assert time.monotonic() < began + limit_s, f"no answer in {limit_s:.0f} s: {answer}"
            time.sleep(0.5)
        return time.monotonic() - began

    def streams(
        self,
        *options: str,
        fault: Callable[[], object] | None = None,
        wait_s: float = 3.0,
        limit_s: float = 900.0,
    ) -> list[Document]:
        """Run the seeded streams, with a fault some seconds after all have their first token."""
        kind = "grpc" if "--grpc" in options else "http"
        program = Path(__file__).with_name("kube_streams.py")
        process = subprocess.Popen(
            [
                *in_node_network(),
                sys.executable,
                program,
                self.address(kind),
                self.key,
                *options,
            ],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            if line == "flowing\n":
                if fault is not None:
                    time.sleep(wait_s)
                    assert process.poll() is None, "the streams ended before the fault"
                    fault()
                line, _ = process.communicate(timeout=limit_s)
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()
        streams: list[Document] = json.loads(line.strip().splitlines()[-1])
        assert len(streams) == NUM_STREAMS
        return streams

    def delete(self, documents: Sequence[Document], limit_s: float = 300.0) -> float:
        """Delete documents and wait until no pod of theirs is left; the seconds that it took."""
        began = time.monotonic()
        text = yaml.safe_dump_all(documents)
        arguments = ("delete", "--filename=-", "--ignore-not-found", f"--timeout={limit_s:.0f}s")
        self.kubectl(*arguments, text=text, timeout_s=limit_s + 30)
        selector = f"--selector=app in ({self.name}, {self.name}-redis)"
        while self.get("pods", selector)["items"]:
            assert time.monotonic() < began + limit_s, "pods are left"
            time.sleep(0.5)
        return time.monotonic() - began


def in_node_network() -> list[str]:
    """The words that a command begins with to run on a node, where Services have addresses."""
    return in_network(node_name(nodes_with_folders()[0]))


def inside_node(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run a command on a node."""
    return subprocess.run(
        [*in_node_network(), *command],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env=os.environ | cluster_environment(),
    )
