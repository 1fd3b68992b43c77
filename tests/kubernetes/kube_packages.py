"""Debian's packages: the programs that the cluster runs, and root file systems of images."""

import hashlib
import os
import platform
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from kube_paths import CACHE, LOGS

from tramontane.proto.errors import UserError

# the program by which each package is recognized
PROGRAMS = {
    "etcd": "etcd-server",
    "containerd": "containerd",
    "runc": "runc",
    "/usr/lib/cni/ptp": "containernetworking-plugins",
    "iptables": "iptables",
    "conntrack": "conntrack",
    "socat": "socat",
    "debootstrap": "debootstrap",
    "curl": "curl",
    "ip": "iproute2",
    "nsenter": "util-linux",
}


def install_missing(report: Callable[[str], None]) -> None:
    """Install the packages that are missing. Where systemd runs, it starts services of some."""
    missing = sorted({name for program, name in PROGRAMS.items() if shutil.which(program) is None})
    if not missing:
        return
    if shutil.which("apt-get") is None:
        raise UserError(f"this machine has no apt-get: install {', '.join(missing)} yourself")
    report(f"installing {', '.join(missing)}")
    _apt("update")
    _apt("install", "--yes", "--no-install-recommends", *missing)


def _apt(*arguments: str) -> None:
    command = ["nice", "-n", "10", "apt-get", "-q", *arguments]
    _logged(command, "apt", {"DEBIAN_FRONTEND": "noninteractive"})


def _logged(command: list[str], log: str, variables: dict[str, str] | None = None) -> None:
    """Run a command whose output goes to a log file, which a UserError names if it fails."""
    LOGS.mkdir(parents=True, exist_ok=True)
    with (LOGS / f"{log}.log").open("ab") as output:
        done = subprocess.run(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            check=False,
            env=os.environ | (variables or {}),
        )
    if done.returncode != 0:
        raise UserError(f"{' '.join(command[:4])} ... failed: see {LOGS / log}.log")


def root_file_system(packages: list[str], report: Callable[[str], None]) -> Path:
    """Debian's root file system with packages, of this machine's release; kept in the cache."""
    release = platform.freedesktop_os_release().get("VERSION_CODENAME", "")
    names = sorted({"bash", *packages})
    key = hashlib.sha256(" ".join([release, *names]).encode()).hexdigest()[:12]
    root = CACHE / f"root-{key}"
    if root.exists():
        return root
    report(f"making a root file system with {', '.join(names)}")
    unfinished = root.with_name(f".{root.name}")
    shutil.rmtree(unfinished, ignore_errors=True)
    CACHE.mkdir(parents=True, exist_ok=True)
    # in a mount namespace, so that no mount of the new system is left here
    _logged(
        [
            *("nice", "-n", "10", "unshare", "--mount", "debootstrap", "--variant=minbase"),
            *(f"--include={','.join(names)}", release, str(unfinished), _mirror(release)),
        ],
        "debootstrap",
    )
    for folder in ("var/cache/apt", "var/lib/apt/lists"):
        shutil.rmtree(unfinished / folder, ignore_errors=True)
    unfinished.rename(root)
    return root


def _mirror(release: str) -> str:
    """Where this machine gets the packages of its release from."""
    done = subprocess.run(
        ["apt-get", "indextargets", "--format", "$(CREATED_BY) $(CODENAME) $(COMPONENT) $(SITE)"],
        capture_output=True,
        text=True,
        check=True,
    )
    for line in done.stdout.splitlines():
        kind, codename, component, site = line.split(" ", 3)
        if (kind, codename, component) == ("Packages", release, "main"):
            return site
    raise UserError(f"apt knows no source of Debian's packages for {release or 'this release'}")
