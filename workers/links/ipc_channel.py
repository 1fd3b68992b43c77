"""Channels between processes of one machine: both open the same memory, and notify each other over
a control socket.

Neither end waits on the host for the GPU: events keep the order there. The sender copies to a slot,
records an event and notifies the receiver. The receiver makes its GPU wait for the event, copies,
records its own event and answers at once.

Shape letters: N bytes.
"""

import atexit
import threading
import time
from collections.abc import Iterable, Sequence
from typing import NoReturn, Protocol

import torch
from torch import Tensor

from tramontane.proto.errors import LinkError
from tramontane.workers.links.channel import CONNECT_TIMEOUT, MAX_PENDING_SENDS
from tramontane.workers.links.control_socket import ControlSocket

NUM_SLOTS = MAX_PENDING_SENDS
MIN_BYTES = 2**21  # CUDA places smaller allocations in one block, and would share the whole block
TIMEOUT_S = CONNECT_TIMEOUT.total_seconds()
POLL_S = 0.005  # between two polls of the work that the device still has for a closed channel
# Number of polls of a dead neighbor's pending event before the device is given up. The event may
# also be one that the neighbor recorded and could not announce, and no work waits for it: then this
# end's work is soon done.
MAX_LOOKS = 200
EXIT_TIMEOUT_S = 5.0  # for which the exit of the process waits for a thread that releases memory


class SharedMemory(Protocol):
    """Memory of the process that allocated it, which another process opens by its handle."""

    @property
    def bytes_N(self) -> Tensor:
        """The memory as uint8."""

    @property
    def handle(self) -> bytes:
        """The handle with which another process opens it."""

    def close(self) -> None:
        """Free or unmap the memory. The process that has opened it closes it first; no work on it
        may be pending.
        """


class SharedEvent(Protocol):
    """A point in the order of one process's work. The process that made it records it, the other
    process waits for it.

    Between a record and its wait the two exchange a message over their control socket: a wait is
    for the latest record before that message.
    """

    @property
    def handle(self) -> bytes:
        """The handle with which another process opens it."""

    def record(self) -> None:
        """Mark the point after all work that this process has launched so far."""

    def wait(self) -> None:
        """Order all work that this process launches from now on after the recorded point. Does not
        block.
        """

    def query(self) -> bool:
        """Return True if all work before the last record is done; in the waiting process, before
        the last record that it knows.
        """

    def close(self) -> None:
        """Free the event; see ``SharedMemory.close``."""


class IpcBackend(Protocol):
    """A way to share memory and events. Its methods raise RuntimeError or OSError if the system
    cannot.
    """

    def memory(self, num_bytes: int) -> SharedMemory:
        """Allocate memory that another process can open."""

    def open_memory(self, handle: bytes, num_bytes: int) -> SharedMemory:
        """Open the memory of another process."""

    def event(self) -> SharedEvent:
        """Make an event that another process can open."""

    def open_event(self, handle: bytes) -> SharedEvent:
        """Open the event of another process."""

    def copy(self, target_N: Tensor, source_N: Tensor) -> None:
        """Launch a copy, ordered after all work and waits launched before."""

    def end_process(self, reason: str) -> NoReturn:
        """End this process at once, because the device waits for an event that is never reached,
        and such a wait cannot be ended otherwise.
        """


class IpcUnavailableError(RuntimeError):
    """One of the ends cannot make or open shared memory or events."""


class _IpcChannel:
    """The common part of both ends: their own events, the neighbor's events, and resources to close
    in order at the end.
    """

    def __init__(self, control: ControlSocket, ipc: IpcBackend) -> None:
        self._control, self._ipc = control, ipc
        self._slots: list[SharedMemory | None] = [None] * NUM_SLOTS
        self._num_done = 0  # tensors that were sent or received
        self._lock = threading.Lock()
        # of the thread that releases memory, while it is in torch or CUDA
        self._native_lock = threading.Lock()
        self._own: list[SharedEvent | SharedMemory] = []
        self._opened: list[SharedEvent | SharedMemory] = []
        self._events: list[SharedEvent] = []
        self._their_events: list[SharedEvent] = []

    def make_events(self) -> list[bytes]:
        """Make this end's events, one for each slot; returns their handles."""
        for _ in range(NUM_SLOTS):
            self._events.append(self._ipc.event())
            self._own.append(self._events[-1])
        return [event.handle for event in self._events]

    def open_events(self, handles: Sequence[bytes]) -> None:
        """Open the events of the neighbor."""
        for handle in handles:
            self._their_events.append(self._ipc.open_event(handle))
            self._opened.append(self._their_events[-1])

    def close(self) -> None:
        """See ``Channel``. Memory is released by a thread, once the neighbor has closed its end."""
        self._control.close()
        if self._control.claim_teardown():
            atexit.register(self._hold_release)
            threading.Thread(
                target=self._wait_for_peer_release, name="channel-close", daemon=True
            ).start()

    def free(self) -> None:
        """Release everything at once, for an end that was never used and whose neighbor has no
        memory open.
        """
        _close((*self._opened, *self._own))

    def _wait_for_peer_release(self) -> None:
        """Close the neighbor's shared memory and notify it; free our own memory once the neighbor
        has closed it or is dead.
        """
        try:
            self._wait_for_device()
            with self._native_lock, self._lock:
                self._slots = [None] * NUM_SLOTS
                _close(self._opened)
        finally:
            self._control.shutdown_write()
            self._control.wait_peer_closed()
            with self._native_lock:
                _close(self._own)
            atexit.unregister(self._hold_release)

    def _wait_for_device(self) -> None:
        """Wait until the device has completed the work launched for this channel; end the process
        if it never will.

        A neighbor that closes its end lives until its events have been reached. The events of a
        killed neighbor are never reached, and all work of this process after the first wait for
        them is blocked.
        """
        num_looks = 0
        while self._is_pending(self._events):
            if self._control.has_peer_ended() and self._is_pending(self._their_events):
                num_looks += 1
                if num_looks > MAX_LOOKS:
                    self._ipc.end_process(
                        "the GPU waits for hidden states of a process that is dead"
                    )
            time.sleep(POLL_S)

    def _is_pending(self, events: Iterable[SharedEvent]) -> bool:
        with self._native_lock, self._lock:
            return not all(event.query() for event in events)

    def _hold_release(self) -> None:
        """Block the thread that releases memory from calling torch and CUDA from now on, as the
        process exits.

        Python ends such a thread where it next takes the interpreter's lock. Within torch this
        unwinds functions that may not throw, and the C++ runtime aborts the process ("terminate
        called without an active exception").
        """
        self._native_lock.acquire(timeout=EXIT_TIMEOUT_S)


class IpcSender(_IpcChannel):
    """The sending end of a ``Channel``, which owns the memory."""

    def send(self, hidden_TD: Tensor) -> None:
        """See ``Channel``."""
        source_N = _bytes_of(hidden_TD.contiguous())
        with self._lock:
            slot = self._num_done % NUM_SLOTS
            if self._num_done >= NUM_SLOTS:
                # the answer for the slot's last tensor: its copy has been launched
                self._control.receive()
                self._their_events[slot].wait()
            new_slot = self.allocate_slot(slot, len(source_N))
            memory = self._slots[slot]
            assert memory is not None
            self._ipc.copy(memory.bytes_N[: len(source_N)], source_N)
            self._events[slot].record()
            self._control.send(new_slot)
            self._num_done += 1

    def receive(self, hidden_TD: Tensor) -> None:
        """Fail: this end sends."""
        raise AssertionError("this end sends")

    def allocate_slot(self, slot: int, num_bytes: int) -> tuple[bytes, int] | None:
        """Allocate memory for a slot if it is too small; returns its handle and size, or None if
        nothing changed.

        Old memory is kept until the channel is closed, because the neighbor may be reading it.
        Sizes are powers of two from 2 MiB on, so that the total is less than twice the memory in
        use: 5 MiB after 1 MiB is a slot of 8 MiB after one of 2.
        """
        current = self._slots[slot]
        if current is not None and len(current.bytes_N) >= num_bytes:
            return None
        memory = self._ipc.memory(max(MIN_BYTES, 1 << (num_bytes - 1).bit_length()))
        self._own.append(memory)
        self._slots[slot] = memory
        return memory.handle, len(memory.bytes_N)


class IpcReceiver(_IpcChannel):
    """The receiving end of a ``Channel``."""

    def send(self, hidden_TD: Tensor) -> None:
        """Fail: this end receives."""
        raise AssertionError("this end receives")

    def receive(self, hidden_TD: Tensor) -> None:
        """See ``Channel``."""
        target_N = _bytes_of(hidden_TD)
        with self._lock:
            slot = self._num_done % NUM_SLOTS
            if (new_slot := self._control.receive()) is not None:
                try:
                    self.open_slot(slot, *new_slot)
                except (OSError, RuntimeError) as error:
                    raise LinkError(f"the link to a neighbor is broken: {error}") from error
            memory = self._slots[slot]
            assert memory is not None
            self._their_events[slot].wait()
            self._ipc.copy(target_N, memory.bytes_N[: len(target_N)])
            self._events[slot].record()
            self._control.send(None)
            self._num_done += 1

    def open_slot(self, slot: int, handle: bytes, num_bytes: int) -> None:
        """Open the new memory of a slot."""
        memory = self._ipc.open_memory(handle, num_bytes)
        self._opened.append(memory)
        self._slots[slot] = memory


def offer_ipc(control: ControlSocket, ipc: IpcBackend) -> IpcSender:
    """Make the sending end: send the handles of its events and first slot, and open the other end's
    events.

    Raises IpcUnavailableError at both ends if one cannot make or open them; the connection can then
    be used for another channel. Raises LinkError if the neighbor is lost.
    """
    outlet = IpcSender(control, ipc)
    try:
        offer = {"events": outlet.make_events(), "slot": outlet.allocate_slot(0, MIN_BYTES)}
    except (OSError, RuntimeError) as error:
        outlet.free()
        control.send({"why": str(error)})
        raise IpcUnavailableError(str(error)) from error
    try:
        control.send(offer)
        answer = control.receive(TIMEOUT_S)
        if "why" not in answer:
            outlet.open_events(answer["events"])
            return outlet
    except (LinkError, OSError, RuntimeError) as error:
        outlet.close()
        raise LinkError(str(error)) from error
    outlet.free()
    raise IpcUnavailableError(answer["why"])


def accept_ipc(control: ControlSocket, ipc: IpcBackend) -> IpcReceiver:
    """Make the receiving end; raises as ``offer_ipc`` does."""
    offer = control.receive(TIMEOUT_S)
    if "why" in offer:
        raise IpcUnavailableError(offer["why"])
    inlet = IpcReceiver(control, ipc)
    try:
        inlet.open_events(offer["events"])
        inlet.open_slot(0, *offer["slot"])
        answer = {"events": inlet.make_events()}
    except (OSError, RuntimeError) as error:
        inlet.free()
        control.send({"why": str(error)})
        raise IpcUnavailableError(str(error)) from error
    try:
        control.send(answer)
    except LinkError:
        inlet.close()
        raise
    return inlet


def _close(resources: Iterable[SharedEvent | SharedMemory]) -> None:
    for resource in resources:
        resource.close()


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)
