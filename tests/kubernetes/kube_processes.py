"""The cluster's services: started in a network namespace and a control group, recorded, ended."""

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import kube_cgroups
from kube_paths import BINARIES, CONTROL_PLANE, KUBECONFIG, LOGS, PROCESSES

from tramontane.proto.errors import UserError


def in_network(namespace: str) -> list[str]:
    """The words that a command begins with to run in a network namespace.

    Not `ip netns exec`, which mounts a new /sys without the control groups.
    """
    return ["nsenter", f"--net=/run/netns/{namespace}"]


def start(
    name: str, group: str, command: Sequence[str], *, variables: Mapping[str, str] | None = None
) -> None:
    """Start a service in a control group if it does not run: its output goes to log/NAME.log."""
    if is_running(name):
        return
    LOGS.mkdir(parents=True, exist_ok=True)
    PROCESSES.mkdir(parents=True, exist_ok=True)
    with (LOGS / f"{name}.log").open("ab") as output:
        process = subprocess.Popen(
            [*kube_cgroups.in_group(group), *command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | dict(variables or {}),
            start_new_session=True,
        )
    record = {"pid": process.pid, "started": start_time(process.pid)}
    unfinished = PROCESSES / f".{name}"
    unfinished.write_text(json.dumps(record))
    unfinished.rename(PROCESSES / name)


def start_time(pid: int) -> str | None:
    """When a process started, in ticks since the machine did; None if there is none.

    A process with the same number that is another one has another start time.
    """
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = status.rpartition(")")[2].split()  # the name before it may have spaces
    return None if fields[0] == "Z" else fields[19]


def running_pid(name: str) -> int | None:
    """The process of a service that was started, by this run or an earlier one."""
    try:
        record = json.loads((PROCESSES / name).read_text())
    except FileNotFoundError:
        return None
    is_same = record["started"] is not None and start_time(record["pid"]) == record["started"]
    return record["pid"] if is_same else None


def is_running(name: str) -> bool:
    """Whether a service that was started runs."""
    return running_pid(name) is not None


def stop(name: str, grace_s: float = 10.0) -> None:
    """End a service, if it is still the process that was started."""
    deadline = time.monotonic() + grace_s
    number = signal.SIGTERM
    while (pid := running_pid(name)) is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
        time.sleep(0.1)
        if time.monotonic() > deadline:
            number = signal.SIGKILL
    (PROCESSES / name).unlink(missing_ok=True)


def wait_until(what: str, is_true: Callable[[], bool], limit_s: float, service: str) -> None:
    """Wait until something is so that a service does; a UserError if it ends, or at the limit."""
    deadline = time.monotonic() + limit_s
    while not is_true():
        if not is_running(service):
            raise UserError(f"{what} failed: {service} has ended, see {LOGS / service}.log")
        if time.monotonic() > deadline:
            raise UserError(f"{what} took more than {limit_s:.0f} s: see {LOGS / service}.log")
        time.sleep(0.2)


def cluster_environment() -> dict[str, str]:
    """The variables of a command that talks to the cluster."""
    return {
        "KUBECONFIG": str(KUBECONFIG),
        "PATH": f"{BINARIES}:{os.environ.get('PATH', '/usr/bin:/bin')}",
    }


def inside(
    command: Sequence[str], *, text: str | None = None, timeout_s: float = 120.0
) -> subprocess.CompletedProcess[str]:
    """Run a command in the control plane's network, with kubectl's settings."""
    return subprocess.run(
        [*in_network(CONTROL_PLANE), *command],
        input=text,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        env=os.environ | cluster_environment(),
    )


def kubectl(*arguments: str, text: str | None = None, timeout_s: float = 120.0) -> str:
    """The output of kubectl; a RuntimeError with its message if it failed."""
    done = inside([str(BINARIES / "kubectl"), *arguments], text=text, timeout_s=timeout_s)
    if done.returncode != 0:
        raise RuntimeError(f"kubectl {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout
