"""A simulated GPU whose operations complete late, and in any order between processes that events
allow.

As in CUDA, a wait covers what had been recorded when the wait was issued, and it is an error to
free memory that another process has open or that pending work uses.
"""

import random
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NoReturn

import torch
from torch import Tensor

from tramontane.workers.links.ipc_channel import SharedEvent, SharedMemory


class ProcessEnded(Exception):
    """Instead of the end of the process."""


@dataclass(eq=False)
class LazyMemory:
    bytes_N: Tensor
    handle: bytes
    stream: "Stream"  # of the process that made or opened it
    opened_of: "LazyMemory | None" = None
    num_open: int = 0
    is_closed: bool = False

    def close(self) -> None:
        assert not self.is_closed
        assert not self.num_open, "the neighbor has it open"
        assert not any(
            self.bytes_N.data_ptr() == other.data_ptr()
            for _, used in self.stream.begun
            for other in used
        ), "in use"
        self.is_closed = True
        if self.opened_of is not None:
            self.opened_of.num_open -= 1


@dataclass(eq=False)
class LazyEvent:
    handle: bytes
    gpu: "LazyGpu"
    stream: "Stream"  # of the process that records
    num_requests: int = 0
    num_done: int = 0
    is_closed: bool = False

    def record(self) -> None:
        self.num_requests += 1
        self.stream.begin(self._done(self.num_requests))

    def _done(self, number: int) -> Callable[[], bool]:
        def done() -> bool:
            self.num_done = number
            return True

        return done

    def query(self) -> bool:
        self.gpu.run_one_operation()
        return self.gpu.is_done(self)

    def wait(self) -> None:
        raise AssertionError("only the peer waits for this event")

    def close(self) -> None:
        self.is_closed = True


@dataclass(eq=False)
class OpenedEvent:
    event: LazyEvent
    stream: "Stream"  # of the process that waits
    handle: bytes = b""

    def record(self) -> None:
        raise AssertionError("only the peer records this event")

    def query(self) -> bool:
        return self.event.gpu.is_done(self.event)

    def wait(self) -> None:
        assert not self.event.is_closed
        number = self.event.num_requests
        self.stream.begin(lambda: self.event.num_done >= number)

    def close(self) -> None: ...


@dataclass(eq=False)
class Stream:
    """A process's queue of operations. An operation returns False if it still has to wait."""

    begun: deque[tuple[Callable[[], bool], tuple[Tensor, ...]]] = field(default_factory=deque)

    def begin(self, operation: Callable[[], bool], *used: Tensor) -> None:
        self.begun.append((operation, used))


class LazyGpu:
    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._turn = threading.Lock()
        self._memories: list[LazyMemory] = []
        self._opened: list[LazyMemory] = []
        self._events: list[LazyEvent] = []
        self._streams: list[Stream] = []

    def process(self) -> "LazyIpc":
        self._streams.append(Stream())
        return LazyIpc(self, self._streams[-1], self._memories, self._opened, self._events)

    def kill(self, process: "LazyIpc") -> None:
        """Drop what a process has launched and not been done, and close the memory that it has
        opened.
        """
        with self._turn:
            self._streams.remove(process.stream)
            process.stream.begun.clear()
        for memory in self._opened:
            if memory.stream is process.stream and not memory.is_closed:
                memory.close()

    @property
    def is_idle(self) -> bool:
        return not any(stream.begun for stream in self._streams)

    @property
    def num_kept(self) -> int:
        """Number of allocations that have not been closed."""
        return sum(not memory.is_closed for memory in self._memories)

    def is_done(self, event: LazyEvent) -> bool:
        """Return True if the event was reached; waits while another thread removes a finished
        operation from its stream.
        """
        with self._turn:
            return event.num_done >= event.num_requests

    def run_one_operation(self) -> None:
        """Run one operation of a random process, unless it still has to wait."""
        with self._turn:  # channels are closed in threads of their own
            busy = [stream for stream in self._streams if stream.begun]
            stream = self._random.choice(busy) if busy else None
            if stream is not None and stream.begun[0][0]():
                stream.begun.popleft()


@dataclass(frozen=True)
class LazyIpc:
    """One process's ``IpcBackend``."""

    gpu: LazyGpu
    stream: Stream
    memories: list[LazyMemory]
    opened: list[LazyMemory]
    events: list[LazyEvent]

    def memory(self, num_bytes: int) -> SharedMemory:
        self.memories.append(
            LazyMemory(
                torch.zeros(num_bytes, dtype=torch.uint8), bytes([len(self.memories)]), self.stream
            )
        )
        return self.memories[-1]

    def open_memory(self, handle: bytes, num_bytes: int) -> SharedMemory:
        made = self.memories[handle[0]]
        assert not made.is_closed
        assert len(made.bytes_N) == num_bytes
        made.num_open += 1
        self.opened.append(LazyMemory(made.bytes_N, handle, self.stream, opened_of=made))
        return self.opened[-1]

    def event(self) -> SharedEvent:
        self.events.append(LazyEvent(bytes([len(self.events)]), self.gpu, self.stream))
        return self.events[-1]

    def open_event(self, handle: bytes) -> SharedEvent:
        return OpenedEvent(self.events[handle[0]], self.stream)

    def copy(self, target_N: Tensor, source_N: Tensor) -> None:
        def done() -> bool:
            target_N.copy_(source_N)
            return True

        self.stream.begin(done, target_N, source_N)

    def end_process(self, reason: str) -> NoReturn:
        self.gpu.kill(self)
        raise ProcessEnded(reason)
