"""What channels between processes of one machine share: memory, and events that mark how far the work on it is.

Shape letters: N bytes.
"""

from typing import Protocol

from torch import Tensor


class SharedMemory(Protocol):
    """Memory of the process that allocated it, which another process opens by its handle."""

    @property
    def bytes_N(self) -> Tensor:
        """The memory as uint8."""
        ...

    @property
    def handle(self) -> bytes:
        """What another process opens it with."""
        ...

    def close(self) -> None:
        """Free or unmap the memory. The process that has opened it closes it first; no work on it may be pending."""


class SharedEvent(Protocol):
    """A point in the order of one process's work. The process that made it records it, the other one waits for it.

    Between a record and its wait the two exchange a message over their control socket: a wait is for the latest record
    before that message.
    """

    @property
    def handle(self) -> bytes:
        """What another process opens it with."""
        ...

    def record(self) -> None:
        """Mark the point after all work that this process has launched so far."""

    def wait(self) -> None:
        """Order all work that this process launches from now on after the recorded point. Does not block."""

    def synchronize(self) -> None:
        """Block until all work before the last record is done."""

    def close(self) -> None:
        """Free the event; see ``SharedMemory.close``."""


class IpcBackend(Protocol):
    """A way to share memory and events. Its methods raise RuntimeError or OSError if the system cannot."""

    def memory(self, num_bytes: int) -> SharedMemory:
        """Allocate memory that another process can open."""
        ...

    def open_memory(self, handle: bytes, num_bytes: int) -> SharedMemory:
        """Open the memory of another process."""
        ...

    def event(self) -> SharedEvent:
        """Make an event that another process can open."""
        ...

    def open_event(self, handle: bytes) -> SharedEvent:
        """Open the event of another process."""
        ...

    def copy(self, target_N: Tensor, source_N: Tensor) -> None:
        """Launch a copy, ordered after all work and waits launched before."""
