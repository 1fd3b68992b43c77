"""Channels that are process groups of two: NCCL between GPUs, with a control socket
(``gpu_channel``); gloo in tests.
"""

import os
import re
import socket
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import psutil
from torch import Tensor
from torch.distributed import ProcessGroupGloo, TCPStore, Work  # type: ignore[attr-defined]

from tramontane.proto.errors import LinkError
from tramontane.workers.links.channel import CONNECT_TIMEOUT, MAX_PENDING_SENDS, Address

Group = Any  # one of torch's backends; most methods are missing from its type stubs

# for a neighbor that neither sends nor dies; a group that has timed out is broken
STEP_TIMEOUT = timedelta(seconds=600)
SENDER, RECEIVER = 0, 1  # ranks
TAG = 0  # of all messages: they are received in the order in which they were sent


class ProcessGroupChannel:
    """The ``Channel`` over a process group, which is not torch's default group.

    A gloo group is closed only by dropping all references to it, including the references of its
    operations. The neighbor then fails at once, even while it waits.
    """

    def __init__(self, group: Group, timeout: timedelta | None) -> None:
        self._group: Group | None = group
        self._timeout = timeout
        self._unsent: deque[tuple[Work, Tensor]] = deque()  # a tensor lives until it is sent

    def send(self, hidden_TD: Tensor) -> None:
        """See ``Channel``."""
        self._limit_pending_sends()
        hidden_TD = hidden_TD.contiguous()
        self._unsent.append(
            (self._start(lambda group: group.send([hidden_TD], RECEIVER, TAG)), hidden_TD)
        )

    def receive(self, hidden_TD: Tensor) -> None:
        """See ``Channel``."""
        self._finish(self._start(lambda group: group.recv([hidden_TD], SENDER, TAG)))

    def close(self) -> None:
        """See ``Channel``."""
        group, self._group = self._group, None
        self._unsent.clear()
        if group is not None:
            group.abort()  # NCCL needs it, gloo ignores it

    def _limit_pending_sends(self) -> None:
        while len(self._unsent) >= MAX_PENDING_SENDS:
            try:
                work, _ = self._unsent.popleft()
            except IndexError:  # closed by another thread
                return
            self._finish(work)

    def _start(self, operation: Callable[[Group], Work]) -> Work:
        group = self._group
        if group is None:
            raise LinkError("the link to a neighbor is closed")
        try:
            return operation(group)
        except RuntimeError as error:
            raise LinkError(
                f"the link to a neighbor is broken: {first_line(error)}"
            ) from error.with_traceback(None)
        finally:
            del group  # an exception's traceback would keep it open

    def _finish(self, work: Work) -> None:
        """Wait for an operation. With NCCL only the current stream waits; with a time limit the
        host would wait as well.
        """
        try:
            work.wait() if self._timeout is None else work.wait(self._timeout)
        except RuntimeError as error:
            del work  # an exception's traceback would keep the group open
            raise LinkError(
                f"the link to a neighbor is broken: {first_line(error)}"
            ) from error.with_traceback(None)


class ProcessGroupListener:
    """The listening end: the store through which the two ends find each other. It has no
    authentication.
    """

    def __init__(self, host: str, backend: str) -> None:
        self._backend, self._host = backend, host
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        # TCPStore by itself listens on all interfaces
        listener = socket.create_server((host, 0), family=family)
        self.address: Address = (host, listener.getsockname()[1], "")
        port, descriptor = self.address[1], listener.detach()
        self._store: TCPStore | None = TCPStore(
            host,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=CONNECT_TIMEOUT,
            master_listen_fd=descriptor,
        )

    def accept(self) -> ProcessGroupChannel:
        """See ``Listener``."""
        assert self._store is not None
        return _make_channel(self._backend, self._store, SENDER, self._host)

    def close(self) -> None:
        """See ``Listener``."""
        self._store = None


class ProcessGroupChannelFactory:
    """The ``ChannelFactory`` of process groups; ``backend`` is nccl or gloo."""

    def __init__(self, backend: str) -> None:
        self._backend = backend

    def listen(self, host: str) -> ProcessGroupListener:
        """See ``ChannelFactory``."""
        return ProcessGroupListener(host, self._backend)

    def connect(self, address: Address, host: str, /) -> ProcessGroupChannel:
        """See ``ChannelFactory``."""
        store = TCPStore(
            address[0], address[1], is_master=False, wait_for_workers=False, timeout=CONNECT_TIMEOUT
        )
        return _make_channel(self._backend, store, RECEIVER, host)


def _make_channel(backend: str, store: TCPStore, rank: int, host: str) -> ProcessGroupChannel:
    return ProcessGroupChannel(BACKENDS[backend](store, rank, host), TIMEOUTS[backend])


def _gloo(store: TCPStore, rank: int, host: str) -> Group:
    gloo: Any = ProcessGroupGloo  # its options have other names in torch's type stubs
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=host)]
    options._threads = 1  # threads are used by collective operations only
    options._timeout = CONNECT_TIMEOUT
    return gloo(store, rank, 2, options)


def _nccl(store: TCPStore, rank: int, host: str) -> Group:
    from torch.distributed import ProcessGroupNCCL  # not in every build of torch

    # NCCL and its watchdog are configured by the environment only. By default they end the process
    # when a neighbor is lost.
    os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface_for_address(host)}")
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2")  # abort only the group
    return ProcessGroupNCCL(store, rank, 2, ProcessGroupNCCL.Options())


BACKENDS: dict[str, Callable[[TCPStore, int, str], Group]] = {"gloo": _gloo, "nccl": _nccl}
TIMEOUTS: dict[str, timedelta | None] = {"gloo": STEP_TIMEOUT, "nccl": None}


def interface_for_address(host: str) -> str:
    """Return the name of the interface that has this address: ``lo`` for 127.0.0.1. Raises OSError
    if no interface has it.
    """
    for name, addresses in psutil.net_if_addrs().items():
        if any(a.address == host for a in addresses):
            return name
    raise OSError(f"no network interface has the address {host}")


def first_line(error: Exception) -> str:
    """Return the main part of an error: gloo's messages begin with a source location and end with
    advice.
    """
    return re.sub(r"^\[\S+\] ", "", str(error).strip().splitlines()[0]).split(". ")[0]
