"""The cluster's control groups: every process that it starts is in one, so that it can be ended.

A node's services and its pods are in groups of the node; processes that they start inherit them,
also those that are no longer children of anything of ours.
"""

import contextlib
import os
import signal
import time
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
GROUP = "tramontane-kube"  # of the whole cluster
SERVICES, PODS = "services", "pods"
# With cgroup v1 a group weighs as much as one process of the root group, where all others may be
SHARES = 8 * 1024
CONTROLLERS = "+cpu +cpuset +memory +pids +io"


def is_unified() -> bool:
    """Whether this machine has one hierarchy for all controllers (cgroup v2)."""
    return (ROOT / "cgroup.controllers").exists()


def hierarchies() -> list[Path]:
    """The roots of this machine's hierarchies: one with cgroup v2, one per controller with v1."""
    if is_unified():
        return [ROOT]
    found = [path for path in sorted(ROOT.iterdir()) if not path.is_symlink()]
    return [path for path in found if (path / "cgroup.procs").exists()]


def create(name: str) -> None:
    """Create a group ("node-1/pods") and those above it, with all controllers."""
    for root in hierarchies():
        group = root / GROUP
        for part in ("", *Path(name).parts):
            group = group / part
            if is_unified():
                _enable(group.parent)
            group.mkdir(exist_ok=True)
            if (group / "cpuset.mems").exists() and not is_unified():
                for file in ("cpuset.cpus", "cpuset.mems"):
                    if not (group / file).read_text().strip():
                        (group / file).write_text((group.parent / file).read_text())

    for root in hierarchies():
        if (root / GROUP / "cpu.shares").exists():
            (root / GROUP / "cpu.shares").write_text(str(SHARES))


def _enable(group: Path) -> None:
    """Let the groups inside of a group have the controllers that it has itself."""
    for controller in CONTROLLERS.split():
        with contextlib.suppress(OSError):
            (group / "cgroup.subtree_control").write_text(controller)


def in_group(name: str) -> list[str]:
    """The words that a command begins with to be in a group, with all that it starts later."""
    files = " ".join(str(root / GROUP / name / "cgroup.procs") for root in hierarchies())
    return ["sh", "-ec", f'for file in {files}; do echo $$ > "$file"; done; exec "$@"', "sh"]


def processes(name: str = "") -> set[int]:
    """The processes of a group and of those inside of it."""
    found: set[int] = set()
    for root in hierarchies():
        for file in (root / GROUP / name).rglob("cgroup.procs"):
            with contextlib.suppress(OSError):  # the group has gone since
                found.update(int(pid) for pid in file.read_text().split())
    return found - {0}


def end(name: str, grace_s: float = 0.0) -> None:
    """End the processes of a group: by SIGTERM if there is a time to wait, then by SIGKILL."""
    deadline = time.monotonic() + grace_s
    if grace_s:
        send(name, signal.SIGTERM)
        while processes(name) and time.monotonic() < deadline:
            time.sleep(0.1)
    limit = time.monotonic() + 60
    while processes(name):
        send(name, signal.SIGKILL)
        time.sleep(0.1)
        assert time.monotonic() < limit, f"processes of {name} do not end: {processes(name)}"


def send(name: str, number: signal.Signals) -> None:
    """Send a signal to the processes of a group."""
    for pid in processes(name):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def remove(name: str = "") -> None:
    """Remove a group without processes, and those inside of it."""
    for root in hierarchies():
        group = root / GROUP / name
        inside = [path for path in group.rglob("*") if path.is_dir()]
        for path in [*sorted(inside, key=lambda path: -len(path.parts)), group]:
            for _ in range(50):  # the kernel still releases the last process
                try:
                    path.rmdir()
                except FileNotFoundError:
                    break
                except OSError:
                    time.sleep(0.1)
                else:
                    break
