"""Edges between processes that share memory, on a GPU that takes its time, and how two ends choose
their kind of edge.
"""

import itertools
import logging
import multiprocessing
import os
import random
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import cast

import pytest
import torch
from host_ipc import HostEvent, HostIpc
from lazy_gpu import LazyGpu, LazyIpc, ProcessEnded
from torch import Tensor

from tramontane.proto.errors import LinkError
from tramontane.workers.links import ipc_channel
from tramontane.workers.links.channel import MAX_PENDING_SENDS, Address, Channel
from tramontane.workers.links.control_socket import ControlSocket
from tramontane.workers.links.gpu_channel import (
    ChannelOptions,
    DeviceLocation,
    GpuChannelFactory,
    HandshakeChannel,
    HostStagedChannel,
)
from tramontane.workers.links.ipc_channel import (
    MIN_BYTES,
    IpcBackend,
    IpcReceiver,
    IpcSender,
    SharedEvent,
    SharedMemory,
    accept_ipc,
    offer_ipc,
)
from tramontane.workers.links.process_group_channel import ProcessGroupChannelFactory
from tramontane.workers.links.tcp_channel import TcpListener, connect

HOST = "127.0.0.1"
HERE, THERE = DeviceLocation("this boot", "GPU-1"), DeviceLocation("this boot", "GPU-2")
ROUNDS = 60


def _lines() -> tuple[ControlSocket, ControlSocket]:
    listener = TcpListener(HOST)
    with ThreadPoolExecutor(1) as thread:
        accepted = thread.submit(listener.accept_connection)
        connected = connect(listener.address)
        return ControlSocket(accepted.result()), ControlSocket(connected)


def _pair(sending: IpcBackend, receiving: IpcBackend) -> tuple[IpcSender, IpcReceiver]:
    at_outlet, at_inlet = _lines()
    with ThreadPoolExecutor(1) as thread:
        offered = thread.submit(offer_ipc, at_outlet, sending)
        inlet = accept_ipc(at_inlet, receiving)
        return offered.result(), inlet


def _leave(*edges: Channel) -> None:
    for edge in edges:
        edge.close()
    for thread in threading.enumerate():
        if thread.name == "channel-close":
            thread.join()


@pytest.mark.parametrize("seed", range(12))
def test_whatever_the_gpu_does_first_what_arrives_is_what_was_sent(seed: int) -> None:
    """Also with slots that grow, and an end that closes while the GPU has work to do."""
    gpu, choice = LazyGpu(seed), random.Random(seed)
    outlet, inlet = _pair(gpu.process(), gpu.process())
    sent, received = [], []
    while len(received) < ROUNDS:
        on_its_way = len(sent) - len(received)
        begin = choice.choice(["send", "receive", "work", "work", "work"])
        if begin == "send" and on_its_way < MAX_PENDING_SENDS and len(sent) < ROUNDS:
            num_rows = choice.choice([1, 3, 3 * len(sent) + 1])
            sent.append(torch.full((num_rows, 2**14), float(len(sent) + 1)))  # 64 KiB a row
            outlet.send(sent[-1])
        elif begin == "receive" and on_its_way:
            received.append(torch.zeros_like(sent[len(received)]))
            inlet.receive(received[-1])
        elif begin == "work" and not gpu.is_idle:
            gpu.run_one_operation()
    assert max(tensor.nbytes for tensor in sent) > MIN_BYTES, "slots have grown"
    _leave(inlet, outlet)  # both finish what they have begun
    assert gpu.is_idle
    assert all(torch.equal(one, other) for one, other in zip(sent, received, strict=True))
    assert gpu.num_kept == 0


def test_memory_is_kept_until_the_neighbor_has_closed_it() -> None:
    gpu = LazyGpu(0)
    outlet, inlet = _pair(gpu.process(), gpu.process())
    outlet.send(torch.ones(4))
    outlet.close()
    with pytest.raises(LinkError, match="it was closed"):
        _receive_all_that_comes(inlet)
    assert gpu.num_kept == 1, "the inlet has it open"
    _leave(inlet)
    assert gpu.num_kept == 0


def _receive_all_that_comes(inlet: Channel) -> None:
    """What was sent last may arrive or not."""
    for _ in range(MAX_PENDING_SENDS + 1):
        inlet.receive(torch.zeros(4))


def test_who_waits_is_woken_by_its_own_end_s_close() -> None:
    outlet, inlet = _pair(HostIpc(), HostIpc())
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(inlet.receive, torch.zeros(4))
        inlet.close()
        with pytest.raises(LinkError, match="closed"):
            waiting.result()
    with pytest.raises(LinkError):
        _send_all_that_goes(outlet)
    _leave(outlet)


def _send_all_that_goes(outlet: Channel) -> None:
    """More than may be on its way to a neighbor that receives nothing."""
    for _ in range(MAX_PENDING_SENDS + 1):
        outlet.send(torch.ones(4))


def test_slots_may_be_made_while_a_model_runs_and_written_when_it_does_not() -> None:
    outlet, inlet = _pair(HostIpc(), HostIpc())
    received = torch.zeros(2**20)
    for mode in (True, True, False, False, True):
        with torch.inference_mode(mode):
            outlet.send(torch.ones(2**20))
            inlet.receive(received)
        assert torch.equal(received, torch.ones(2**20))
        received.zero_()
    _leave(outlet, inlet)


class _BusyEvent(HostEvent):
    """Of a GPU that has still to do."""

    def __init__(self, done: threading.Event) -> None:
        self._done = done

    def query(self) -> bool:
        return self._done.is_set()


class _Busy(HostIpc):
    def __init__(self) -> None:
        self.done = threading.Event()

    def event(self) -> SharedEvent:
        return _BusyEvent(self.done)


def test_a_neighbor_is_notified_of_a_close_before_the_gpu_is_done() -> None:
    busy = _Busy()
    outlet, inlet = _pair(busy, HostIpc())
    outlet.close()
    with pytest.raises(LinkError, match="it was closed"):
        inlet.receive(torch.zeros(4))
    assert not busy.done.is_set()
    busy.done.set()
    _leave(inlet)


def _die(gpu: LazyGpu, process: LazyIpc, end: IpcSender | IpcReceiver) -> None:
    """End a process as ``kill -9`` does: what it has launched is dropped, and the kernel closes its
    sockets.
    """
    gpu.kill(process)
    end._control.connection.shutdown(socket.SHUT_RDWR)
    end._control.close_fds()


@pytest.fixture
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ipc_channel, "POLL_S", 0.0)


@pytest.mark.usefixtures("no_pause")
@pytest.mark.parametrize("killed", ["sender", "receiver"])
def test_a_stage_whose_gpu_waits_for_a_killed_neighbor_ends_its_process(killed: str) -> None:
    """The receiver waits for hidden states that are not computed, the sender for a slot that is not
    read; forever.
    """
    gpu = LazyGpu(0)
    sending, receiving = gpu.process(), gpu.process()
    outlet, inlet = _pair(sending, receiving)
    received: list[Tensor] = []
    for number in range(MAX_PENDING_SENDS + (killed == "receiver")):
        outlet.send(torch.full((4,), float(number)))
        if len(received) < MAX_PENDING_SENDS:
            received.append(torch.zeros(4))
            inlet.receive(received[-1])
    dead, end = ((sending, outlet), inlet) if killed == "sender" else ((receiving, inlet), outlet)
    _die(gpu, *dead)
    end._control.close()
    with pytest.raises(
        ProcessEnded, match="the GPU waits for hidden states of a process that is dead"
    ):
        end._wait_for_peer_release()  # which a thread does when the channel is closed


def _slow() -> Callable[[], bool]:
    """An operation that takes many looks to be done."""
    looks = itertools.count()
    return lambda: next(looks) > 3 * ipc_channel.MAX_LOOKS


@pytest.mark.usefixtures("no_pause")
@pytest.mark.parametrize(
    "how",
    ["it lives and is slow", "it is killed after its work is done", "it is killed before it works"],
)
def test_a_stage_whose_gpu_will_go_on_lives_on(how: str) -> None:
    """However long its own work takes that does not wait for the dead, or that of the living for
    which it waits.
    """
    gpu = LazyGpu(0)
    sending, receiving = gpu.process(), gpu.process()
    outlet, inlet = _pair(sending, receiving)
    received = torch.zeros(4)
    (sending if how == "it lives and is slow" else receiving).stream.begin(_slow())
    if how != "it is killed before it works":
        outlet.send(torch.ones(4))
        inlet.receive(received)
    if how == "it lives and is slow":
        outlet.close()
    else:
        while sending.stream.begun:
            gpu.run_one_operation()
        _die(gpu, sending, outlet)
    _leave(inlet)
    assert torch.equal(
        received, torch.zeros(4) if how == "it is killed before it works" else torch.ones(4)
    )


@pytest.mark.usefixtures("no_pause")
def test_an_event_of_a_killed_neighbor_that_nothing_waits_for_ends_nothing() -> None:
    """It was killed after it had recorded the event again, and before it could say so; this end
    still has work to do.
    """
    gpu = LazyGpu(0)
    sending, receiving = gpu.process(), gpu.process()
    outlet, inlet = _pair(sending, receiving)
    outlet.send(torch.ones(4))
    while sending.stream.begun:
        gpu.run_one_operation()
    received = torch.zeros(4)
    inlet.receive(received)
    outlet._events[0].record()
    _die(gpu, sending, outlet)
    _leave(inlet)
    assert torch.equal(received, torch.ones(4))


class _Said:
    """A control socket and a channel that record their calls."""

    def __init__(self) -> None:
        self.order: list[str] = []

    def send(self, tensor_or_message: object) -> None:
        self.order.append("announce" if tensor_or_message is None else "send")

    def receive(self, _into: object = None) -> None:
        self.order.append("listen" if _into is None else "receive")

    def close(self) -> None: ...


def test_between_gpus_both_ends_begin_the_same_and_only_so_much() -> None:
    said = _Said()
    outlet = HandshakeChannel(cast(ControlSocket, said), said)
    for _ in range(MAX_PENDING_SENDS + 2):
        outlet.send(torch.ones(4))
    assert (
        said.order == ["send", "announce"] * MAX_PENDING_SENDS + ["listen", "send", "announce"] * 2
    )
    said.order.clear()
    outlet.receive(torch.ones(4))
    assert said.order == ["listen", "receive", "announce"]


def _send(pipe: "Connection[Address, str]") -> None:
    """And report what was sent; then wait to be killed."""
    listener = _edges(HERE).listen(HOST)
    pipe.send(listener.address)
    edge = listener.accept()
    edge.send(torch.ones(2**20))
    pipe.send(("sent", 0, ""))
    pipe.recv()


def test_nothing_stays_behind_of_a_sender_that_is_killed() -> None:
    in_shm = set(os.listdir("/dev/shm"))
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    sender = context.Process(target=_send, args=(theirs,))
    sender.start()
    edge = _edges(HERE).connect(ours.recv(), HOST)
    assert isinstance(edge, IpcReceiver)
    ours.recv()
    received = torch.zeros(2**20)
    edge.receive(received)
    assert torch.equal(received, torch.ones(2**20))
    # also by other processes, most of which have something there for a moment
    made = set(os.listdir("/dev/shm")) - in_shm
    # of tests of another process
    made = {name for name in made if not name.startswith("PostgreSQL.")}
    waits = threading.Thread(target=sender.kill)
    waits.start()
    with pytest.raises(LinkError, match="is broken"):
        edge.receive(received)
    waits.join()
    sender.join()
    assert _shared_here() > 0
    _leave(edge)
    assert _shared_here() == 0
    assert not made & set(os.listdir("/dev/shm"))


def test_epochs_leave_no_memory_behind() -> None:
    for _ in range(5):
        outlet, inlet = _pair(HostIpc(), HostIpc())
        outlet.send(torch.ones(2**20))
        inlet.receive(torch.zeros(2**20))
        assert _shared_here() > 0
        _leave(outlet, inlet)
        assert _shared_here() == 0


def _shared_here() -> int:
    """Pieces of shared memory that this process has mapped, and files of them that it has open."""
    mapped = Path("/proc/self/maps").read_text().count("memfd:channel")
    files = [os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    return mapped + sum("memfd:channel" in name for name in files)


def _edges(place: DeviceLocation, sharing: IpcBackend | None = None) -> GpuChannelFactory:
    return GpuChannelFactory(
        ChannelOptions(
            place, torch.device("cpu"), sharing or HostIpc(), ProcessGroupChannelFactory("gloo")
        )
    )


def _chosen(listening: GpuChannelFactory, connecting: GpuChannelFactory) -> tuple[Channel, Channel]:
    listener = listening.listen(HOST)
    with ThreadPoolExecutor(1) as thread:
        accepted = thread.submit(listener.accept)
        connected = connecting.connect(listener.address, HOST)
        return accepted.result(), connected


def _carry(outlet: Channel, inlet: Channel) -> None:
    for number in range(5):
        sent_TD, received_TD = (
            torch.full((3, 4), float(number), dtype=torch.bfloat16),
            torch.zeros(3, 4, dtype=torch.bfloat16),
        )
        outlet.send(sent_TD)
        inlet.receive(received_TD)
        assert torch.equal(sent_TD, received_TD)
    _leave(outlet, inlet)


@pytest.mark.parametrize(
    ("there", "kinds"),
    [
        (HERE, (IpcSender, IpcReceiver)),
        (THERE, (HandshakeChannel, HandshakeChannel)),
        (DeviceLocation("another boot", HERE.gpu), (HandshakeChannel, HandshakeChannel)),
    ],
    ids=["one GPU", "two GPUs", "two machines whose GPUs say they were one"],
)
def test_ends_choose_by_where_they_are(there: DeviceLocation, kinds: tuple[type, type]) -> None:
    outlet, inlet = _chosen(_edges(HERE), _edges(there))
    assert (type(outlet), type(inlet)) == kinds
    _carry(outlet, inlet)


class _CannotOpen(HostIpc):
    def open_memory(self, handle: bytes, num_bytes: int) -> SharedMemory:
        raise RuntimeError("CUDA: cudaErrorInvalidContext")


class _CannotMake(HostIpc):
    def memory(self, num_bytes: int) -> SharedMemory:
        raise RuntimeError("CUDA: cudaErrorNotSupported")


@pytest.mark.parametrize(
    ("sending", "receiving", "why"),
    [(HostIpc(), _CannotOpen(), "InvalidContext"), (_CannotMake(), HostIpc(), "NotSupported")],
)
def test_where_memory_cannot_be_shared_both_say_so_and_go_by_way_of_the_host(
    sending: IpcBackend, receiving: IpcBackend, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        outlet, inlet = _chosen(_edges(HERE, sending), _edges(HERE, receiving))
    assert [why in record.message for record in caplog.records] == [True, True]
    assert (type(outlet), type(inlet)) == (HostStagedChannel, HostStagedChannel)
    _carry(outlet, inlet)
    assert _shared_here() == 0


def _says(*messages: object) -> Callable[[Address], None]:
    """A neighbor that sends the token and so many messages, receives as many, and dies."""

    def neighbor(address: Address) -> None:
        connection = connect(address)
        control = ControlSocket(connection)
        for message in messages:
            control.receive(60)
            control.send(message)
        connection.close()
        _close(control)

    return neighbor


@pytest.mark.parametrize(
    "neighbor",
    [_says(), _says((HERE.boot_id, HERE.gpu)), _says((THERE.boot_id, THERE.gpu))],
    ids=["before a word of where it is", "in the middle of an offer", "before the groups are made"],
)
def test_a_neighbor_that_dies_during_the_negotiation_is_noticed_at_once(
    neighbor: Callable[[Address], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    from datetime import timedelta

    monkeypatch.setattr(
        "tramontane.workers.links.process_group_channel.CONNECT_TIMEOUT", timedelta(seconds=1)
    )
    listener = _edges(HERE).listen(HOST)
    with ThreadPoolExecutor(1) as thread:
        accepted = thread.submit(listener.accept)
        neighbor(listener.address)
        with pytest.raises((OSError, RuntimeError)):
            accepted.result()
    listener.close()
    _leave()
    assert _shared_here() == 0


def test_a_listener_that_dies_while_they_choose_is_missed_at_once() -> None:
    listener = TcpListener(HOST)
    with ThreadPoolExecutor(1) as thread:
        connected = thread.submit(_edges(HERE).connect, listener.address, HOST)
        connection = listener.accept_connection()
        control = ControlSocket(connection)
        control.send((HERE.boot_id, HERE.gpu))
        connection.close()
        _close(control)
        with pytest.raises(ConnectionError, match="is broken"):
            connected.result()


def test_a_listener_that_is_closed_while_they_choose_waits_no_longer() -> None:
    listener = _edges(HERE).listen(HOST)
    with ThreadPoolExecutor(1) as thread:
        accepted = thread.submit(listener.accept)
        control = ControlSocket(connect(listener.address))
        control.receive(60)  # where it is; it waits for us to say as much
        listener.close()
        with pytest.raises(ConnectionError, match="is closed"):
            accepted.result()
        _close(control)


def _close(control: ControlSocket) -> None:
    control.close()
    control.close_fds()


@pytest.mark.parametrize("said", [b"", b"0" * 16])
def test_an_intruder_gets_no_answer(said: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tramontane.workers.links.tcp_channel.AUTH_TOKEN_TIMEOUT_S", 0.1)
    listener = _edges(HERE).listen(HOST)
    with (
        socket.create_connection(listener.address[:2]) as intruder,
        ThreadPoolExecutor(1) as thread,
    ):
        intruder.sendall(said)
        neighbor = connect(listener.address)  # it has sent the token before the listener reads it
        monkeypatch.setattr(
            "tramontane.workers.links.gpu_channel.connect", lambda _address: neighbor
        )
        accepted = thread.submit(listener.accept)
        inlet = _edges(HERE).connect(listener.address, HOST)
        assert intruder.recv(1) == b"", "it was hung up on"
        _carry(accepted.result(), inlet)
