"""Process groups that connect in their first call, as NCCL's do: the call returns once both ends
have called.

Importing this module adds them to the kinds of process groups: "lazy" with gloo underneath,
"mortal" whose process is killed in that call.
``BetweenPlaces`` makes channels over them, as between two GPUs.
"""

import os
import signal
from datetime import timedelta

import torch
from host_ipc import HostIpc
from torch import Tensor
from torch.distributed import TCPStore, Work  # type: ignore[attr-defined]

from tramontane.workers.links.channel import Address, Channel, Listener
from tramontane.workers.links.gpu_channel import ChannelOptions, DeviceLocation, GpuChannelFactory
from tramontane.workers.links.process_group_channel import (
    BACKENDS,
    STEP_TIMEOUT,
    TIMEOUTS,
    Group,
    ProcessGroupChannelFactory,
)

LAZY, MORTAL = "lazy", "mortal"
FOREVER = timedelta(days=1)  # for which a call waits for the other end, as nothing ends it


HERE, THERE = DeviceLocation("this boot", "GPU-1"), DeviceLocation("this boot", "GPU-2")


class LazyGroup:
    """One end."""

    def __init__(self, store: TCPStore, rank: int, host: str) -> None:
        self._store, self._rank, self._host = store, rank, host
        self._group: Group | None = None

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Work:
        return self._joined().send(tensors, peer, tag)  # type: ignore[no-any-return]

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Work:
        return self._joined().recv(tensors, peer, tag)  # type: ignore[no-any-return]

    def abort(self) -> None:
        """End nothing: a connection that is being made is not known to the group yet."""

    def _joined(self) -> Group:
        if self._group is None:
            self._store.set(f"called {self._rank}", "")
            self._store.wait([f"called {1 - self._rank}"], FOREVER)
            self._group = BACKENDS["gloo"](self._store, self._rank, self._host)
        return self._group


class MortalGroup(LazyGroup):
    """One end whose process is killed in its first call."""

    def _joined(self) -> Group:
        os.kill(os.getpid(), signal.SIGKILL)


BACKENDS.update({LAZY: LazyGroup, MORTAL: MortalGroup})
TIMEOUTS.update(dict.fromkeys((LAZY, MORTAL), STEP_TIMEOUT))


class BetweenPlaces:
    """Edges as between GPUs, from one that listens to one that connects."""

    def __init__(
        self, listening: DeviceLocation, connecting: DeviceLocation, backend: str = "gloo"
    ) -> None:
        self._listening, self._connecting = (
            GpuChannelFactory(
                ChannelOptions(
                    place, torch.device("cpu"), HostIpc(), ProcessGroupChannelFactory(backend)
                )
            )
            for place in (listening, connecting)
        )

    def listen(self, host: str) -> Listener:
        return self._listening.listen(host)

    def connect(self, address: Address, host: str, /) -> Channel:
        return self._connecting.connect(address, host)
