"""Edges between GPUs. The two ends say where they are, over a line, and choose: CUDA IPC on one GPU, NCCL between two.

NCCL refuses two ends on one GPU; within a machine it goes from GPU to GPU by itself. The line stays: a neighbour that dies is
missed by it, which NCCL does not do, and nothing is begun on a GPU that the other end has not begun as well: what waits
there keeps everything waiting that comes after it.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tramontane.proto.errors import LinkError
from tramontane.workers.device.pinned_memory import to_device, to_host
from tramontane.workers.links.channel import MAX_PENDING_SENDS, Address, Channel, ChannelFactory, Listener
from tramontane.workers.links.control_socket import ControlSocket
from tramontane.workers.links.ipc_channel import TIMEOUT_S, IpcUnavailableError, accept_ipc, offer_ipc
from tramontane.workers.links.ipc_cuda import CudaIpc
from tramontane.workers.links.ipc_memory import IpcBackend
from tramontane.workers.links.process_group_channel import ProcessGroupChannelFactory
from tramontane.workers.links.tcp_channel import TcpChannel, TcpListener, connect

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DeviceLocation:
    """Where an end is. Containers of one machine have the same boot id."""

    boot_id: str
    gpu: str  # its uuid

    @classmethod
    def of(cls, device: torch.device) -> "DeviceLocation":
        return cls(BOOT_ID.read_text().strip(), str(torch.cuda.get_device_properties(device).uuid))


@dataclass(frozen=True, slots=True)
class ChannelOptions:
    """What the edges of one device are made of."""

    location: DeviceLocation
    device: torch.device
    ipc: IpcBackend  # to an end at the same place
    process_groups: ChannelFactory  # to any other

    @classmethod
    def of(cls, device: torch.device) -> "ChannelOptions":
        return cls(DeviceLocation.of(device), device, CudaIpc(device), ProcessGroupChannelFactory("nccl"))


class HandshakeChannel:
    """An edge whose ends tell each other by a line what they begin: one sends where there is room, the other takes what was sent.

    Of what a neighbour has begun and died of, an end hears by its next call; ``close`` ends what waits for it on the GPU.
    """

    def __init__(self, line: ControlSocket, edge: Channel) -> None:
        self._line, self._edge = line, edge
        self._num_unanswered = 0

    def send(self, hidden_TD: Tensor) -> None:
        if self._num_unanswered == MAX_PENDING_SENDS:
            self._line.receive()
            self._num_unanswered -= 1
        self._edge.send(hidden_TD)
        self._line.send(None)
        self._num_unanswered += 1

    def receive(self, hidden_TD: Tensor) -> None:
        self._line.receive()
        self._edge.receive(hidden_TD)
        self._line.send(None)

    def close(self) -> None:
        self._line.close()
        if self._line.claim_teardown():
            self._edge.close()
            self._line.close_fds()


class HostStagedChannel:
    """Where two processes may not open each other's memory on a GPU: through the host, over a connection."""

    def __init__(self, edge: TcpChannel) -> None:
        self._edge = edge

    def send(self, hidden_TD: Tensor) -> None:
        self._edge.send(to_host(hidden_TD))

    def receive(self, hidden_TD: Tensor) -> None:
        host_TD = torch.empty(hidden_TD.shape, dtype=hidden_TD.dtype)
        self._edge.receive(host_TD)
        hidden_TD.copy_(to_device(host_TD, hidden_TD.device), non_blocking=True)

    def close(self) -> None:
        self._edge.close()


class GpuListener:
    def __init__(self, ways: ChannelOptions, host: str) -> None:
        self._ways, self._host = ways, host
        self._listener = TcpListener(host)
        self._line: ControlSocket | None = None  # while the two find out how
        self._store: Listener | None = None
        self.address: Address = self._listener.address

    def accept(self) -> Channel:
        """Raises OSError."""
        self._line = line = ControlSocket(self._listener.accept_connection())
        edge = _negotiated(line, self._made)
        self._line = None
        return edge

    def close(self) -> None:
        self._listener.close()
        for end in (self._line, self._store):
            if end is not None:
                end.close()

    def _made(self, line: ControlSocket) -> Channel:
        if _is_same_device(line, self._ways.location):
            return _ipc_or_host_staged(line, lambda: offer_ipc(line, self._ways.ipc))
        self._store = self._ways.process_groups.listen(self._host)
        line.send(self._store.address)
        edge = HandshakeChannel(line, self._store.accept())
        return _warm_up(edge, edge.send, torch.zeros(1, device=self._ways.device))


class GpuChannelFactory:
    """``ChannelFactory`` between GPUs. Whoever listens sends, whoever connects receives."""

    def __init__(self, ways: ChannelOptions) -> None:
        self._ways = ways

    def listen(self, host: str) -> GpuListener:
        return GpuListener(self._ways, host)

    def connect(self, address: Address, host: str, /) -> Channel:
        return _negotiated(ControlSocket(connect(address)), lambda line: self._made(line, host))

    def _made(self, line: ControlSocket, host: str) -> Channel:
        if _is_same_device(line, self._ways.location):
            return _ipc_or_host_staged(line, lambda: accept_ipc(line, self._ways.ipc))
        store_host, port, word = line.receive(TIMEOUT_S)
        edge = HandshakeChannel(line, self._ways.process_groups.connect((store_host, port, word), host))
        return _warm_up(edge, edge.receive, torch.empty(1, device=self._ways.device))


def _is_same_device(line: ControlSocket, ours: DeviceLocation) -> bool:
    """Whether the neighbour is at the same place."""
    line.send((ours.boot_id, ours.gpu))
    return DeviceLocation(*line.receive(TIMEOUT_S)) == ours


def _warm_up(edge: HandshakeChannel, operation: Callable[[Tensor], None], number: Tensor) -> HandshakeChannel:
    """NCCL connects when it is first used; what fails then is to fail now."""
    try:
        operation(number)
    except BaseException:
        edge.close()
        raise
    return edge


def _ipc_or_host_staged(line: ControlSocket, share: Callable[[], Channel]) -> Channel:
    try:
        return share()
    except IpcUnavailableError as error:
        logger.warning("hidden states go to a neighbour on the same GPU by way of the host: %s", error)
        return HostStagedChannel(TcpChannel(line.detach()))


def _negotiated(line: ControlSocket, make: Callable[[ControlSocket], Channel]) -> Channel:
    """Errors as edges in the making have them: OSError and RuntimeError."""
    try:
        return make(line)
    except BaseException as error:
        line.close()
        if line.claim_teardown():
            line.close_fds()
        if isinstance(error, LinkError):
            raise ConnectionError(str(error)) from error
        raise
