"""What edges between processes of one machine share: memory, and events that say how far the work on it is.

Shape letters: N bytes.
"""

import mmap
import os
from typing import Protocol

import msgpack
import torch
from torch import Tensor


class SharedMemory(Protocol):
    """Of whoever made it, and opened by another process."""

    @property
    def bytes_N(self) -> Tensor: ...

    @property
    def handle(self) -> bytes:
        """By which another process opens it."""
        ...

    def close(self) -> None:
        """Whoever has opened it closes it first; nothing here may use it then, or be about to."""


class SharedEvent(Protocol):
    """A point in the order of what an end has begun. Whoever made it records it, the other end waits for it.

    Between a wait and the record that it means the ends have spoken over their line: it is for the record before.
    """

    @property
    def handle(self) -> bytes: ...

    def record(self) -> None:
        """After all that this end has begun so far."""

    def wait(self) -> None:
        """All that this end begins from now on comes after what was recorded. Does not block."""

    def synchronize(self) -> None:
        """Block until all is done that came before the last record."""

    def close(self) -> None:
        """As of memory."""


class IpcBackend(Protocol):
    """One way of doing so. All raise RuntimeError or OSError where it cannot be done."""

    def memory(self, num_bytes: int) -> SharedMemory: ...

    def open_memory(self, handle: bytes, num_bytes: int) -> SharedMemory: ...

    def event(self) -> SharedEvent: ...

    def open_event(self, handle: bytes) -> SharedEvent: ...

    def copy(self, target_N: Tensor, source_N: Tensor) -> None:
        """Begin to; it comes after what was begun, or waited for, before."""


class HostMemory:
    """A file without a name: nothing of it stays when both processes are gone, however they ended."""

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
    """On the host a copy is done when it returns, and the line brings the news in order: there is nothing to wait for."""

    handle = b""

    def record(self) -> None: ...

    def wait(self) -> None: ...

    def synchronize(self) -> None: ...

    def close(self) -> None: ...


class HostIpc:
    """Without a GPU. It needs Linux, and processes that see each other's numbers."""

    def memory(self, num_bytes: int) -> SharedMemory:
        descriptor = os.memfd_create("edge")
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
        with torch.inference_mode():  # slots that were made in it may be written nowhere else
            target_N.copy_(source_N)
