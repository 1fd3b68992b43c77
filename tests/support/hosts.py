"""Hosts on one machine: network namespaces with addresses of their own on a virtual switch, whose
links can be dropped.

    with network() as switch:
        one, other = switch.add_host(), switch.add_host(apart=True, own_folders={"/tmp/ray":
        folder}) other.start("python", "-m", "http.server")
        other.drop_link()

The network is isolated from the machine's own. At the end all of it is removed, with every process
in it. If the process that made it is killed, the processes of hosts with ``apart`` end with it; the
rest is removed when the next network is made.
"""

import ctypes
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

SUBNET = "10.77.0"
NAMESPACES = Path("/run/netns")
PREFIX = "hosts"
CLONE_NEWNET = 0x40000000
# The first process of a host with apart=True, which adopts orphans. It ends, and with it all
# others, when its input closes.
FIRST_PROCESS = "echo up; read -r _"


def namespaces_unavailable_reason() -> str:
    """Return why network namespaces are not available on this machine; empty if they are."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if missing := [tool for tool in ("ip", "nsenter", "unshare") if shutil.which(tool) is None]:
        return f"network namespaces need the commands {', '.join(missing)} (iproute2, util-linux)"
    tried = f"{PREFIX}-{os.getpid()}-try"
    made = subprocess.run(
        ["ip", "netns", "add", tried], capture_output=True, text=True, check=False
    )
    subprocess.run(["ip", "netns", "delete", tried], capture_output=True, check=False)
    return (
        f"network namespaces cannot be made here: {made.stderr.strip()}" if made.returncode else ""
    )


@dataclass(frozen=True, slots=True)
class Host:
    """``first_pid`` is the PID, in the machine's namespace, of the first process of a host with
    ``apart``.
    """

    name: str
    address: str
    port: str  # of the switch
    switch: str
    first_pid: int | None
    started: "list[subprocess.Popen[bytes]]" = field(default_factory=list)

    def command(self, *arguments: str) -> list[str]:
        """Return the command line that runs this command in the host."""
        if self.first_pid is None:
            return ["nsenter", f"--net={NAMESPACES / self.name}", *arguments]
        return [
            "nsenter",
            "-t",
            str(self.first_pid),
            "--net",
            "--mount",
            "--uts",
            "--pid",
            *arguments,
        ]

    def run(self, *arguments: str, timeout_s: float = 60) -> str:
        """Run a command and return its output. Raises subprocess.CalledProcessError if it fails."""
        return subprocess.run(
            self.command(*arguments),
            capture_output=True,
            text=True,
            check=True,
            timeout=timeout_s,
            stdin=subprocess.DEVNULL,
        ).stdout

    def start(self, *arguments: str, **options: object) -> "subprocess.Popen[bytes]":
        """Start a process; it ends with the network. A Ctrl-C in the terminal does not reach it."""
        command = self.command(*arguments)
        started = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, start_new_session=True, **options
        )  # type: ignore[call-overload]
        self.started.append(started)
        return started  # type: ignore[no-any-return]

    def drop_link(self) -> None:
        """Drop all packets in both directions, without notice to either end. Idempotent."""
        _ip("-n", self.switch, "link", "set", self.port, "down")

    def restore_link(self) -> None:
        _ip("-n", self.switch, "link", "set", self.port, "up")

    def processes(self) -> list[psutil.Process]:
        found = []
        for pid in _ip("netns", "pids", self.name).split():
            with suppress(psutil.NoSuchProcess):
                found.append(psutil.Process(int(pid)))
        return found

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Move this thread, and threads and processes that it starts in the block, to the host's
        network.
        """
        with open("/proc/thread-self/ns/net") as before, (NAMESPACES / self.name).open() as there:
            _set_network(there.fileno())
            try:
                yield
            finally:
                _set_network(before.fileno())


class Network:
    """A switch and its hosts. Made by ``network``."""

    def __init__(self, name: str, stack: ExitStack) -> None:
        self._name, self._stack = name, stack
        self._switch = f"{name}-switch"
        self.hosts: list[Host] = []
        stack.callback(self._wait)  # once all the rest has ended
        self._make_namespace(self._switch)
        _ip("-n", self._switch, "link", "add", "switch", "type", "bridge")
        _ip("-n", self._switch, "link", "set", "switch", "up")

    def add_host(
        self, *, apart: bool = False, own_folders: Mapping[str, Path] | None = None
    ) -> Host:
        """Add a host.

        With ``apart`` it has process and mount namespaces as well as a network, and sees only its
        own processes. ``own_folders`` maps paths in such a host to folders of this machine that are
        mounted there.
        """
        number = len(self.hosts) + 1
        name, address, port = f"{self._name}-{number}", f"{SUBNET}.{number}", f"port{number}"
        self._make_namespace(name)
        _ip(
            "-n",
            self._switch,
            "link",
            "add",
            port,
            "type",
            "veth",
            "peer",
            "name",
            "eth0",
            "netns",
            name,
        )
        _ip("-n", self._switch, "link", "set", port, "master", "switch", "up")
        _ip("-n", name, "address", "add", f"{address}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            _ip("-n", name, "link", "set", device, "up")
        first_pid = self._first_process(name, f"host{number}", own_folders or {}) if apart else None
        self.hosts.append(Host(name, address, port, self._switch, first_pid))
        return self.hosts[-1]

    def _wait(self) -> None:
        for host in self.hosts:
            for process in host.started:
                process.wait()

    def _make_namespace(self, name: str) -> None:
        _ip("netns", "add", name)
        self._stack.callback(_remove, name)

    def _first_process(self, name: str, hostname: str, own_folders: Mapping[str, Path]) -> int:
        mounts = [f"mount --rbind '{folder}' '{path}'" for path, folder in own_folders.items()]
        script = "; ".join(["set -e", f"hostname {hostname}", *mounts, FIRST_PROCESS])
        apart = [
            "unshare",
            "--mount",
            "--pid",
            "--uts",
            "--fork",
            "--mount-proc",
            "--kill-child",
            "bash",
            "-c",
            script,
        ]
        command = ["ip", "netns", "exec", name, *apart]
        parent = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        self._stack.callback(_end, parent)
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"up\n", "a host could not be set up"
        (first,) = psutil.Process(parent.pid).children()
        return first.pid


@contextmanager
def network() -> Iterator[Network]:
    _remove_orphans()
    with ExitStack() as stack:
        yield Network(f"{PREFIX}-{os.getpid()}", stack)


def _ip(*arguments: str) -> str:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


def _end(parent: "subprocess.Popen[bytes]") -> None:
    assert parent.stdin is not None
    assert parent.stdout is not None
    parent.kill()  # --kill-child ends the first process of the host, and that ends all others
    parent.wait()
    parent.stdin.close()
    parent.stdout.close()


def _remove(namespace: str) -> None:
    """Remove a namespace with the processes that still run in it; the kernel removes its links."""
    for pid in _ip("netns", "pids", namespace).split():
        if int(pid) != os.getpid():
            with suppress(ProcessLookupError):
                os.kill(int(pid), 9)
    _ip("netns", "delete", namespace)


def _remove_orphans() -> None:
    for path in NAMESPACES.glob(f"{PREFIX}-*"):
        owner = re.match(rf"{PREFIX}-(\d+)-", path.name)
        if owner and not psutil.pid_exists(int(owner[1])):
            _remove(path.name)


def _set_network(descriptor: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "a network namespace could not be entered")
