"""Channels between GPUs: CUDA IPC on one GPU, NCCL between two. The ends exchange their locations
over a control socket.

NCCL refuses two ends on one GPU; within a machine it copies from GPU to GPU directly. The control
socket stays open: it detects a dead neighbor, which NCCL does not, and it keeps an end from
launching an operation on its GPU before the other end has: an operation that waits there blocks all
later work of the GPU. The first operation is the exception: NCCL connects in it, and its call
returns only when both ends have called, so both begin it at the same time.
"""

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tramontane.proto.errors import LinkError
from tramontane.workers.device.cuda import to_device, to_host
from tramontane.workers.links.channel import (
    MAX_PENDING_SENDS,
    Address,
    Channel,
    ChannelFactory,
    Listener,
)
from tramontane.workers.links.control_socket import ControlSocket
from tramontane.workers.links.ipc_channel import (
    TIMEOUT_S,
    IpcBackend,
    IpcUnavailableError,
    accept_ipc,
    offer_ipc,
)
from tramontane.workers.links.ipc_cuda import CudaIpc
from tramontane.workers.links.process_group_channel import ProcessGroupChannelFactory
from tramontane.workers.links.tcp_channel import TcpChannel, TcpChannelFactory, TcpListener, connect

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
# NCCL connects in seconds. Together with TIMEOUT_S, the time that the ends wait for each other
# first, it is less than the timeout of a fence.
FIRST_OPERATION_TIMEOUT_S = 30.0
ABANDONED = "abandoned first operation"  # name of the threads that NCCL may never return to

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DeviceLocation:
    """The GPU of one end. Containers of one machine have the same boot id."""

    boot_id: str
    gpu: str  # UUID

    @classmethod
    def of(cls, device: torch.device) -> "DeviceLocation":
        """Return the location of a device of this machine."""
        return cls(BOOT_ID.read_text().strip(), str(torch.cuda.get_device_properties(device).uuid))


@dataclass(frozen=True, slots=True)
class ChannelOptions:
    """The ways to make channels of one device."""

    location: DeviceLocation
    device: torch.device
    ipc: IpcBackend  # to an end on the same GPU
    process_groups: ChannelFactory  # to any other end


class HandshakeChannel:
    """A channel whose ends announce each operation over a control socket.

    The sender sends while fewer than ``MAX_PENDING_SENDS`` tensors are unanswered; the receiver
    receives announced tensors. If the neighbor dies during an operation, the next call raises
    LinkError; ``close`` ends operations that wait on the GPU.
    """

    def __init__(self, control: ControlSocket, channel: Channel) -> None:
        self._control, self._channel = control, channel
        self._num_unanswered = 0

    def send(self, hidden_TD: Tensor) -> None:
        """See ``Channel``."""
        if self._num_unanswered == MAX_PENDING_SENDS:
            self._control.receive()
            self._num_unanswered -= 1
        self._channel.send(hidden_TD)
        self._control.send(None)
        self._num_unanswered += 1

    def receive(self, hidden_TD: Tensor) -> None:
        """See ``Channel``."""
        self._control.receive()
        self._channel.receive(hidden_TD)
        self._control.send(None)

    def close(self) -> None:
        """See ``Channel``."""
        self._control.close()
        if self._control.claim_teardown():
            self._channel.close()
            self._control.close_fds()


class HostStagedChannel:
    """A channel over TCP through host memory, for processes that may not open each other's GPU
    memory.
    """

    def __init__(self, channel: TcpChannel) -> None:
        self._channel = channel

    def send(self, hidden_TD: Tensor) -> None:
        """See ``Channel``."""
        self._channel.send(to_host(hidden_TD))

    def receive(self, hidden_TD: Tensor) -> None:
        """See ``Channel``."""
        host_TD = torch.empty(hidden_TD.shape, dtype=hidden_TD.dtype)
        self._channel.receive(host_TD)
        hidden_TD.copy_(to_device(host_TD, hidden_TD.device), non_blocking=True)

    def close(self) -> None:
        """See ``Channel``."""
        self._channel.close()


class GpuListener:
    """The listening end, which becomes the sender of the channel."""

    def __init__(self, options: ChannelOptions, host: str) -> None:
        self._options, self._host = options, host
        self._listener = TcpListener(host)
        self._control: ControlSocket | None = None  # during the negotiation
        self._store: Listener | None = None
        self.address: Address = self._listener.address

    def accept(self) -> Channel:
        """Wait for the other end and negotiate the channel. Raises OSError or RuntimeError."""
        self._control = control = ControlSocket(self._listener.accept_connection())
        channel = _negotiate(control, self._make)
        self._control = None
        return channel

    def close(self) -> None:
        """See ``Listener``."""
        self._listener.close()
        for end in (self._control, self._store):
            if end is not None:
                end.close()

    def _make(self, control: ControlSocket) -> Channel:
        if _is_same_device(control, self._options.location):
            return _ipc_or_host_staged(control, lambda: offer_ipc(control, self._options.ipc))
        self._store = self._options.process_groups.listen(self._host)
        control.send(self._store.address)
        return _join(control, self._store.accept(), self._options.device, is_sender=True)


class GpuChannelFactory:
    """The ``ChannelFactory`` between GPUs. The listening end sends, the connecting end receives."""

    def __init__(self, options: ChannelOptions) -> None:
        self._options = options

    def listen(self, host: str) -> GpuListener:
        """See ``ChannelFactory``."""
        return GpuListener(self._options, host)

    def connect(self, address: Address, host: str, /) -> Channel:
        """See ``ChannelFactory``."""
        return _negotiate(
            ControlSocket(connect(address)), lambda control: self._make(control, host)
        )

    def _make(self, control: ControlSocket, host: str) -> Channel:
        if _is_same_device(control, self._options.location):
            return _ipc_or_host_staged(control, lambda: accept_ipc(control, self._options.ipc))
        store_host, port, token = control.receive(TIMEOUT_S)
        channel = self._options.process_groups.connect((store_host, port, token), host)
        return _join(control, channel, self._options.device, is_sender=False)


def channel_factory_for(device: torch.device) -> ChannelFactory:
    """Return the fastest channel factory for stages on this kind of device."""
    if device.type != "cuda":
        return TcpChannelFactory()
    return GpuChannelFactory(
        ChannelOptions(
            DeviceLocation.of(device), device, CudaIpc(device), ProcessGroupChannelFactory("nccl")
        )
    )


def _is_same_device(control: ControlSocket, location: DeviceLocation) -> bool:
    """Exchange locations with the neighbor; returns whether they are equal."""
    control.send((location.boot_id, location.gpu))
    return DeviceLocation(*control.receive(TIMEOUT_S)) == location


def num_abandoned_operations() -> int:
    """Return how many threads of this process are still in an abandoned first operation."""
    return sum(thread.name == ABANDONED for thread in threading.enumerate())


def _join(
    control: ControlSocket, channel: Channel, device: torch.device, is_sender: bool
) -> HandshakeChannel:
    """Run the first operation of a channel at both ends at once, and return the channel with
    announcements from then on.

    The receiver says that the number has arrived, then the sender that it knows; so each end always
    listens to the control socket, and detects at once that the other end has failed or is dead.
    Raises LinkError, or the operation's own error.
    """
    try:
        control.send(None)
        control.receive(TIMEOUT_S)  # the other end has its group, too
        _run_first_operation(control, lambda: _transfer_one(control, channel, device, is_sender))
        if is_sender:
            control.send(None)
    except BaseException:
        channel.close()
        raise
    return HandshakeChannel(control, channel)


def _transfer_one(
    control: ControlSocket, channel: Channel, device: torch.device, is_sender: bool
) -> None:
    """Send or receive the number 1, on the current stream of the calling thread."""
    if is_sender:
        channel.send(torch.ones(1, device=device))
        return
    number = torch.zeros(1, device=device)
    channel.receive(number)
    if (received := number.item()) != 1:  # ``item`` waits for the device
        raise LinkError(
            f"the link to a neighbor is broken: {received} was received where 1 was sent"
        )
    control.send(None)


def _run_first_operation(control: ControlSocket, operation: Callable[[], None]) -> None:
    """Run an operation in a thread until both ends have completed it. Raises LinkError, or the
    operation's own error.

    A call of NCCL that waits for a missing neighbor cannot be ended: neither by closing its sockets
    nor by aborting the group, which does not know the connection yet. Such a thread is left
    running, separate from the threads that compute.
    """
    done: Future[None] = Future()

    def run() -> None:
        try:
            operation()
        except BaseException as error:
            done.set_exception(error)
            control.close()  # wakes the thread that waits below, and the other end
        else:
            done.set_result(None)

    thread = threading.Thread(target=run, name="first operation", daemon=True)
    thread.start()
    try:
        control.receive(FIRST_OPERATION_TIMEOUT_S)
        done.result(FIRST_OPERATION_TIMEOUT_S)
    except (LinkError, TimeoutError) as error:
        if done.done():
            done.result()
        thread.name = ABANDONED
        reason = str(error) or f"it has not ended here for {FIRST_OPERATION_TIMEOUT_S:.0f} s"
        raise LinkError(f"the first transfer between two GPUs did not succeed: {reason}") from error


def _ipc_or_host_staged(control: ControlSocket, share: Callable[[], Channel]) -> Channel:
    try:
        return share()
    except IpcUnavailableError as error:
        logger.warning(
            "Hidden states travel by way of the host to a neighbor on the same GPU: %s", error
        )
        return HostStagedChannel(TcpChannel(control.detach()))


def _negotiate(control: ControlSocket, make: Callable[[ControlSocket], Channel]) -> Channel:
    """Make a channel; a LinkError becomes ConnectionError, as ``Listener`` and ``ChannelFactory``
    raise it.
    """
    try:
        return make(control)
    except BaseException as error:
        control.close()
        if control.claim_teardown():
            control.close_fds()
        if isinstance(error, LinkError):
            raise ConnectionError(str(error)) from error
        raise
