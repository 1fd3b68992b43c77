"""An ``IpcBackend`` without a GPU: shared memory of the host, for tests of channels between
processes.

Shape letters: N bytes.
"""

import mmap
import os
from typing import NoReturn

import msgpack
import torch
from torch import Tensor

from tramontane.workers.links.ipc_channel import SharedEvent, SharedMemory


class HostMemory:
    """An anonymous file: it disappears when both processes have ended, in whatever way."""

    def __init__(self, descriptor: int, num_bytes: int) -> None:
        self._descriptor: int | None = descriptor
        self.bytes_N = torch.frombuffer(mmap.mmap(descriptor, num_bytes), dtype=torch.uint8)
        self.handle: bytes = msgpack.packb((os.getpid(), descriptor))

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            self.bytes_N = torch.empty(0, dtype=torch.uint8)
            os.close(descriptor)


class HostEvent:
    """An event that is always complete: copies on the host are synchronous, and the control socket
    keeps the order.
    """

    handle = b""

    def record(self) -> None: ...

    def wait(self) -> None: ...

    def query(self) -> bool:
        return True

    def close(self) -> None: ...


class HostIpc:
    """``IpcBackend`` of the host. It needs Linux and processes that can open each other's
    ``/proc/PID/fd``.
    """

    def memory(self, num_bytes: int) -> SharedMemory:
        descriptor = os.memfd_create("channel")
        os.truncate(descriptor, num_bytes)
        return HostMemory(descriptor, num_bytes)

    def open_memory(self, handle: bytes, num_bytes: int) -> SharedMemory:
        process, descriptor = msgpack.unpackb(handle)
        return HostMemory(os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDWR), num_bytes)

    def event(self) -> SharedEvent:
        return HostEvent()

    def open_event(self, handle: bytes) -> SharedEvent:
        return HostEvent()

    def copy(self, target_N: Tensor, source_N: Tensor) -> None:
        with torch.inference_mode():  # inference tensors can only be written in this mode
            target_N.copy_(source_N)

    def end_process(self, reason: str) -> NoReturn:
        raise AssertionError(f"nothing is ever pending here: {reason}")
