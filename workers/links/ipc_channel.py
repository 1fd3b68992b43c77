"""Edges between processes of one machine: bytes lie in memory that both have open, and a line says that they do.

Neither end waits on the host for what the GPU does: events keep the order there. A slot is written, an event is
recorded, and the other end told; it has its GPU wait for the event, copies, records one of its own, and answers at once.

Shape letters: N bytes.
"""

import threading
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from tramontane.proto.errors import LinkError
from tramontane.workers.links.channel import CONNECT_TIMEOUT, MAX_PENDING_SENDS
from tramontane.workers.links.control_socket import ControlSocket
from tramontane.workers.links.ipc_memory import IpcBackend, SharedEvent, SharedMemory

NUM_SLOTS = MAX_PENDING_SENDS
MIN_BYTES = 2**21  # of what is smaller CUDA puts some into one piece, and would share all of that


TIMEOUT_S = CONNECT_TIMEOUT.total_seconds()


class IpcUnavailableError(RuntimeError):
    """One of the ends cannot open what the other has."""


class _End:
    """What both ends have: events of their own, those of the neighbour, and what has to be closed, in its order, at the end."""

    def __init__(self, line: ControlSocket, sharing: IpcBackend) -> None:
        self._line, self._sharing = line, sharing
        self._slots: list[SharedMemory | None] = [None] * NUM_SLOTS
        self._num_done = 0  # tensors that were sent, or received
        self._turn = threading.Lock()
        self._own: list[SharedEvent | SharedMemory] = []
        self._opened: list[SharedEvent | SharedMemory] = []
        self._events: list[SharedEvent] = []
        self._their_events: list[SharedEvent] = []

    def make_events(self) -> list[bytes]:
        """Handles of our own events, one for each slot."""
        for _ in range(NUM_SLOTS):
            self._events.append(self._sharing.event())
            self._own.append(self._events[-1])
        return [event.handle for event in self._events]

    def open_events(self, handles: Sequence[bytes]) -> None:
        for handle in handles:
            self._their_events.append(self._sharing.open_event(handle))
            self._opened.append(self._their_events[-1])

    def close(self) -> None:
        self._line.close()
        if self._line.claim_teardown():
            threading.Thread(target=self._wait_for_peer_release, name="edge-leave", daemon=True).start()

    def free(self) -> None:
        """Of an end that was never used, and whose neighbour has opened nothing, or has closed it."""
        _close((*self._opened, *self._own))

    def _wait_for_peer_release(self) -> None:
        """What the neighbour shares is closed before it hears of that; what it has opened of ours, once it has let go or died."""
        try:
            with self._turn:
                for event in self._events:
                    event.synchronize()
                self._slots = [None] * NUM_SLOTS
                _close(self._opened)
        finally:
            self._line.shutdown_write()
            self._line.wait_peer_closed()
            _close(self._own)


class IpcSender(_End):
    """The ``Channel`` of whoever sends. The memory is its own."""

    def send(self, hidden_TD: Tensor) -> None:
        source_N = _bytes_of(hidden_TD.contiguous())
        with self._turn:
            slot = self._num_done % NUM_SLOTS
            if self._num_done >= NUM_SLOTS:
                self._line.receive()  # the answer to what lies there: it was taken, or will be when the GPU gets there
                self._their_events[slot].wait()
            news = self.make_room(slot, len(source_N))
            memory = self._slots[slot]
            assert memory is not None
            self._sharing.copy(memory.bytes_N[: len(source_N)], source_N)
            self._events[slot].record()
            self._line.send(news)
            self._num_done += 1

    def receive(self, hidden_TD: Tensor) -> None:
        raise AssertionError("this end sends")

    def make_room(self, slot: int, num_bytes: int) -> tuple[bytes, int] | None:
        """The slot's new memory, if it has become too small. What it had is kept to the end: the neighbour may be reading it.

        Sizes are powers of two from 2 MiB on, so that all of it together is less than twice what is in use: 5 MiB after
        1 MiB: a slot of 8 MiB after one of 2.
        """
        held = self._slots[slot]
        if held is not None and len(held.bytes_N) >= num_bytes:
            return None
        memory = self._sharing.memory(max(MIN_BYTES, 1 << (num_bytes - 1).bit_length()))
        self._own.append(memory)
        self._slots[slot] = memory
        return memory.handle, len(memory.bytes_N)


class IpcReceiver(_End):
    """The ``Channel`` of whoever receives."""

    def send(self, hidden_TD: Tensor) -> None:
        raise AssertionError("this end receives")

    def receive(self, hidden_TD: Tensor) -> None:
        target_N = _bytes_of(hidden_TD)
        with self._turn:
            slot = self._num_done % NUM_SLOTS
            if (news := self._line.receive()) is not None:
                try:
                    self.open_slot(slot, *news)
                except (OSError, RuntimeError) as error:
                    raise LinkError(f"the link to a neighbour is broken: {error}") from error
            memory = self._slots[slot]
            assert memory is not None
            self._their_events[slot].wait()
            self._sharing.copy(target_N, memory.bytes_N[: len(target_N)])
            self._events[slot].record()
            self._line.send(None)
            self._num_done += 1

    def open_slot(self, slot: int, handle: bytes, num_bytes: int) -> None:
        memory = self._sharing.open_memory(handle, num_bytes)
        self._opened.append(memory)
        self._slots[slot] = memory


def offer_ipc(line: ControlSocket, sharing: IpcBackend) -> IpcSender:
    """The sending end. It shows its events and the first slot, and is shown the other end's.

    Raises IpcUnavailableError at both ends where one cannot make or open them: the line can then be used for something else.
    Raises LinkError where the neighbour is gone.
    """
    outlet = IpcSender(line, sharing)
    try:
        shown = {"events": outlet.make_events(), "slot": outlet.make_room(0, MIN_BYTES)}
    except (OSError, RuntimeError) as error:
        outlet.free()
        line.send({"why": str(error)})
        raise IpcUnavailableError(str(error)) from error
    try:
        line.send(shown)
        answer = line.receive(TIMEOUT_S)
        if "why" not in answer:
            outlet.open_events(answer["events"])
            return outlet
    except (LinkError, OSError, RuntimeError) as error:
        outlet.close()
        raise LinkError(str(error)) from error
    outlet.free()
    raise IpcUnavailableError(answer["why"])


def accept_ipc(line: ControlSocket, sharing: IpcBackend) -> IpcReceiver:
    """The receiving end; raises as ``offer_ipc`` does."""
    shown = line.receive(TIMEOUT_S)
    if "why" in shown:
        raise IpcUnavailableError(shown["why"])
    inlet = IpcReceiver(line, sharing)
    try:
        inlet.open_events(shown["events"])
        inlet.open_slot(0, *shown["slot"])
        answer = {"events": inlet.make_events()}
    except (OSError, RuntimeError) as error:
        inlet.free()
        line.send({"why": str(error)})
        raise IpcUnavailableError(str(error)) from error
    try:
        line.send(answer)
    except LinkError:
        inlet.close()
        raise
    return inlet


def _close(things: Iterable[SharedEvent | SharedMemory]) -> None:
    for thing in things:
        thing.close()


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)
