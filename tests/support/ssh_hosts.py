"""Hosts (namespaces of this machine) with sshd, each with its own home, /tmp and processes."""

import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from hosts import Host, Network, namespaces_unavailable_reason, network

HOME = "/run/home"  # of root on these hosts: the machine's own home may contain the interpreter
PASSWD = f"root:x:0:0:root:{HOME}:/bin/bash\nsshd:x:105:65534::/run/sshd:/usr/sbin/nologin\n"
SSHD = "/usr/sbin/sshd"
SSHD_SETTINGS = f"""HostKey {HOME}/host_key
PermitRootLogin prohibit-password
UsePAM no
StrictModes no
PidFile none
"""
# Ray's command in the environment that ``ray up`` creates there: dependencies are links, so their
# commands are not installed.
RAY = f"""#!/bin/sh
exec {HOME}/tramontane/bin/python -c 'from ray.scripts.scripts import main; main()' "$@"
"""


@dataclass(frozen=True, slots=True)
class SshHost:
    """``home`` is its home as a path of this machine; ``environment`` is that of processes which
    this machine starts there.
    """

    host: Host
    folder: Path
    environment: Mapping[str, str]

    @property
    def home(self) -> Path:
        return self.folder / "run" / "home"

    def start_sshd(self) -> None:
        with (self.folder / "sshd.log").open("ab") as log:
            self.host.start(SSHD, "-D", "-e", env=self.environment, stdout=log, stderr=log)

    def lose(self) -> None:
        """Lose the host as in a power failure: its link is dropped without notice, and its
        processes are killed.
        """
        self.host.drop_link()
        own = os.readlink(f"/proc/{self.host.first_pid}/ns/pid")
        while self.running():
            # these include the parent of its first process, outside of the host
            for process in self.host.processes():
                with suppress(OSError):
                    if (
                        process.pid != self.host.first_pid
                        and os.readlink(f"/proc/{process.pid}/ns/pid") == own
                    ):
                        os.kill(process.pid, signal.SIGKILL)
            time.sleep(0.1)

    def bring_back(self) -> None:
        """Return the host as after a boot: only sshd runs."""
        shutil.rmtree(self.folder / "tmp" / "ray", ignore_errors=True)
        self.host.restore_link()
        self.start_sshd()

    def running(self) -> list[str]:
        """Return the names of the host's processes, without sshd and the first process."""
        return sorted(
            line
            for line in self.host.run("ps", "-e", "-o", "comm=").split()
            if line not in ("bash", "sshd", "ps")
        )


def ssh_unavailable_reason() -> str:
    """Return why such hosts are not available on this machine; empty if they are."""
    if missing := [
        tool
        for tool in ("sshd", "ssh", "ssh-keygen", "rsync")
        if shutil.which(tool, path=_path()) is None
    ]:
        return f"missing: {', '.join(missing)} (openssh-server, rsync)"
    if any(
        Path(prefix).is_relative_to(folder)
        for prefix in (sys.prefix, sys.base_prefix)
        for folder in ("/tmp", "/run")
    ):
        return "the interpreter is in /tmp or /run, of which hosts have their own"
    return namespaces_unavailable_reason()


@contextmanager
def ssh_hosts(folder: Path, number: int) -> Iterator[list[SshHost]]:
    """Start ``number`` hosts with sshd and one without: the client, which has the key for the
    others.
    """
    for name in ("key", "host_key"):
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True
        )
    _lend_dependencies(folder / "dependencies")
    with network() as switch:
        hosts = [_ssh_host(switch, folder, str(each)) for each in range(1, number + 2)]
        for host in hosts[:-1]:
            host.start_sshd()
        shutil.copy(folder / "key", hosts[-1].home / ".ssh" / "key")
        yield hosts


def _ssh_host(switch: Network, folder: Path, name: str) -> SshHost:
    own = folder / name
    for path in ("run/sshd", "run/home/.ssh", "run/home/bin", "tmp", "shm", "etc"):
        (own / path).mkdir(parents=True)
    (own / "tmp").chmod(0o1777)
    home = own / "run" / "home"
    (own / "passwd").write_text(PASSWD)
    (own / "etc" / "sshd_config").write_text(SSHD_SETTINGS)
    shutil.copy(folder / "host_key", home / "host_key")
    shutil.copy(folder / "key.pub", home / ".ssh" / "authorized_keys")
    (home / ".bashrc").write_text(
        f"export PATH={HOME}/bin:{sys.base_prefix}/bin:$PATH PYTHONPATH=/tmp/dependencies\n"
    )
    (home / "bin" / "ray").write_text(RAY)
    (home / "bin" / "ray").chmod(0o755)
    (own / "tmp" / "dependencies").mkdir()
    folders = {
        "/run": own / "run",
        "/etc/passwd": own / "passwd",
        "/etc/ssh": own / "etc",
        "/dev/shm": own / "shm",
    }
    lent = {str(own / "tmp" / "dependencies"): folder / "dependencies"}
    host = switch.add_host(apart=True, own_folders={**folders, **lent, "/tmp": own / "tmp"})
    return SshHost(host, own, {"HOME": HOME, "PATH": _path(), "LANG": "C.UTF-8", "TERM": "dumb"})


def _lend_dependencies(folder: Path) -> None:
    """Link the packages installed here, except Tramontane: the hosts cannot reach a package
    index.
    """
    folder.mkdir()
    for home in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
        for entry in Path(home).iterdir():
            if (
                entry.suffix != ".pth"
                and "tramontane" not in entry.name
                and not (folder / entry.name).exists()
            ):
                (folder / entry.name).symlink_to(entry)


def _path() -> str:
    system = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    return f"{Path(sys.executable).parent}:{system}"
