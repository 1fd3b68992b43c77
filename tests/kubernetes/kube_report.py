"""The report of the cluster's tests: docs/reports/kubernetes-DATE.json, and .md made from it.

A row is replaced by the same test's of a later run on the same day, so parts can be run again.
"""

import datetime
import json
import os
import platform
import subprocess
import textwrap
from pathlib import Path
from typing import Any

import kube_builds
from kube_images import ROOMS
from kube_nodes import nodes_with_folders
from kube_paths import BUILDS, CHECKOUT, GIVEN_IMAGE
from processor import describe_processor

REPORTS = CHECKOUT / "docs" / "reports"


class Report:
    """The figures of a day's runs."""

    def __init__(self, folder: Path = REPORTS) -> None:
        self._date = datetime.datetime.now(datetime.UTC).date().isoformat()
        self._file = folder / f"kubernetes-{self._date}.json"
        self._data: dict[str, Any] = {"date": self._date, "rows": {}}
        self._of_this_test: list[str] = []
        if self._file.exists():
            self._data = json.loads(self._file.read_text())

    def add(self, subject: str, result: str, **figures: object) -> None:
        """Add a row: what was tried, what happened, and its figures; print it."""
        print(f"\n{subject}: {result}")
        row = {"result": result, "figures": figures, "commit": _commit(), "load": _load()}
        self._data |= {"machine": _machine()}
        self._data["rows"][subject] = row
        self._of_this_test.append(subject)
        self._write()

    def end_test(self, *, has_passed: bool) -> None:
        """Note in the rows of a test whether it has passed: they are added before its verdict."""
        for subject in self._of_this_test:
            self._data["rows"][subject]["test"] = "passed" if has_passed else "failed"
        if self._of_this_test:
            self._of_this_test = []
            self._write()

    def _write(self) -> None:
        self._file.write_text(json.dumps(self._data, indent=1, ensure_ascii=False) + "\n")
        machine = self._data["machine"]
        rows = [
            f"| {subject} | {row['result']} | {row.get('test', '')} | {row['commit']} |"
            f" {row['load']} |"
            for subject, row in self._data["rows"].items()
        ]
        versions = f"Kubernetes {machine['kubernetes']}, KubeRay {machine['kuberay']}"
        size = f"{machine['nodes']} nodes on {machine['cores']} cores, {machine['memory_gib']} GiB"
        text = f"""# Kubernetes, {self._date}

Written by `make test-kubernetes`: a cluster that `make kubernetes` made on one machine.

* {versions}, {size}
{textwrap.fill("* " + machine["processor"], width=110, subsequent_indent="  ")}
* {_image()}
* Pods have the security level "restricted". Their network enforces no NetworkPolicies.
* Not one run: a row is replaced when its test runs again on the same day, and is as old as its
  commit. The figures are in the [JSON](kubernetes-{self._date}.json).

| tried | result | test | commit | load of the machine |
|---|---|---|---|---|
"""
        self._file.with_suffix(".md").write_text("\n".join([text.rstrip("\n"), *rows, ""]))
        index = self._file.with_name("README.md")
        link = f"* [kubernetes-{self._date}](kubernetes-{self._date}.md)\n"
        if index.exists() and link not in index.read_text():
            index.write_text(f"{index.read_text()}{link}")  # its last list has these reports


def _commit() -> str:
    """The commit of the checkout, with "-dirty" where files of the product differ from it."""
    command = ["git", "-C", str(CHECKOUT), "describe", "--always", "--abbrev=8", "--exclude=*"]
    commit = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    changed = ["git", "-C", str(CHECKOUT), "status", "--porcelain", "--", *ROOMS, "k8s"]
    is_dirty = subprocess.run(changed, capture_output=True, text=True, check=False).stdout.strip()
    return f"{commit}-dirty" if is_dirty else commit


def _image() -> str:
    if GIVEN_IMAGE.exists():
        return f"The image is that of the archive {GIVEN_IMAGE.resolve().name}."
    return "The image is a stand-in: the checkout's environment, linked into a root file system."


def _load() -> float:
    """The machine's load: tests on a busy machine are slower."""
    return round(os.getloadavg()[0], 1)


def _machine() -> dict[str, object]:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "kubernetes": f"1.{kube_builds.KUBERNETES}",
        "kuberay": kuberay_version(),
        "nodes": len(nodes_with_folders()),
        "cores": os.cpu_count(),
        "memory_gib": round(memory / 2**30),
        "processor": describe_processor(),
        "system": platform.platform(),
    }


def kuberay_version() -> str:
    """The version of the operator, from the image that its manifests name."""
    file = BUILDS / "kuberay" / "config" / "default" / "kustomization.yaml"
    for line in file.read_text().splitlines() if file.exists() else []:
        if line.strip().startswith("newTag:"):
            return line.partition(":")[2].strip().strip('"')
    return "unknown"
