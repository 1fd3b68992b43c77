"""A shell that runs the commands of k8s/README.md in the cluster, as a person would."""

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from kube_paths import CHECKOUT, CONTROL_PLANE, KUBECONFIG
from kube_processes import cluster_environment, in_network
from readme_commands import README, commands_of, one_line

HELM = Path(os.environ.get("HELM_CACHE", "~/.cache/tramontane-helm")).expanduser()
Changes = Sequence[tuple[str, str]]


class ReadmeShell:
    """Runs commands of the README in a folder that has a copy of the checkout's k8s/."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ran: set[str] = set()
        self._known = frozenset(commands_of(README.read_text()))
        self._assignments: list[str] = []
        shutil.copytree(CHECKOUT / "k8s", folder / "k8s")
        shutil.copy(KUBECONFIG, folder / "kubeconfig")  # a command changes its namespace
        programs = [CHECKOUT / ".venv" / "bin", HELM]
        path = os.pathsep.join([*map(str, programs), cluster_environment()["PATH"]])
        self._environment = os.environ | {"KUBECONFIG": str(folder / "kubeconfig"), "PATH": path}

    def run(self, *texts: str, changes: Changes = (), limit_s: float = 600.0) -> str:
        """Run commands of the README, as one line of a shell each; what they print.

        ``changes`` are texts in place of others: what this cluster has for what the README says.
        """
        lines = []
        for text in texts:
            assert one_line(text) in self._known, f"k8s/README.md has no command {text!r}"
            self.ran.add(one_line(text))
            for old, new in changes:
                text = text.replace(old, new)
            lines.append(text)
            if re.match(r"[A-Z]+=", text):
                self._assignments.append(text)
        return self.own("\n".join(lines), limit_s)

    def own(self, script: str, limit_s: float = 600.0) -> str:
        """Run lines of a shell that are not the README's; what they print. Pytest shows them with
        what they print where a test fails, and with ``-s`` at once.
        """
        print(f"$ {script}", flush=True)
        # one that a command uses: what another asks for may be deleted by now
        used = [each for each in self._assignments if f"${each.partition('=')[0]}" in script]
        lines = "\n".join(["set -eo pipefail", *used, script])
        done = subprocess.run(
            [*in_network(CONTROL_PLANE), "bash", "-c", lines],
            cwd=self.folder,
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )
        print(said := done.stdout + done.stderr, flush=True)
        assert done.returncode == 0, f"status {done.returncode}: {script}\n{said}"
        return said

    def apply(self, manifest: str) -> None:
        """Apply a manifest that is not the README's."""
        self.own(f"kubectl apply --server-side --filename=- <<< {shlex.quote(manifest)}")

    def not_run(self) -> set[str]:
        """The commands of the README that did not run."""
        return set(self._known - self.ran)
