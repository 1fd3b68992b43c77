"""The first operation of a channel between two GPUs, in which NCCL connects: both ends begin it, or
both fail.
"""

import multiprocessing
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from multiprocessing.connection import Connection
from typing import TypeVar

import pytest
import torch
from host_ipc import HostIpc
from lazy_groups import HERE, LAZY, MORTAL, THERE, LazyGroup
from torch import Tensor
from torch.distributed import Work  # type: ignore[attr-defined]

from tramontane.workers.links import gpu_channel, process_group_channel
from tramontane.workers.links.channel import Address, Channel
from tramontane.workers.links.control_socket import ControlSocket
from tramontane.workers.links.gpu_channel import (
    ChannelOptions,
    DeviceLocation,
    GpuChannelFactory,
    GpuListener,
    num_abandoned_operations,
)
from tramontane.workers.links.process_group_channel import Group, ProcessGroupChannelFactory
from tramontane.workers.links.tcp_channel import connect

HOST = "127.0.0.1"
TIMEOUT_S = 60.0  # for what does not end at all where it is wrong
T = TypeVar("T")


def _factory(place: DeviceLocation, backend: str = LAZY) -> GpuChannelFactory:
    return GpuChannelFactory(
        ChannelOptions(place, torch.device("cpu"), HostIpc(), ProcessGroupChannelFactory(backend))
    )


def _begin(call: Callable[[], T]) -> "Future[T]":
    """Call it in a thread that nothing waits for."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def _make_ends(
    backend: str, other: str | None = None
) -> tuple["Future[Channel]", "Future[Channel]"]:
    """Begin to make both ends in threads of this process: the sender's, and the receiver's with
    ``other``.
    """
    listener = _factory(HERE, backend).listen(HOST)
    accepted = _begin(listener.accept)
    return accepted, _begin(
        lambda: _factory(THERE, other or backend).connect(listener.address, HOST)
    )


def test_groups_that_connect_in_their_first_call_are_linked() -> None:
    """The call returns only when the other end has called too, so neither may wait for a message
    about the other one's.
    """
    accepted, connected = _make_ends(LAZY)
    outlet, inlet = accepted.result(TIMEOUT_S), connected.result(TIMEOUT_S)
    for number in range(5):
        received_TD = torch.zeros(3, 4)
        outlet.send(torch.full((3, 4), float(number)))
        inlet.receive(received_TD)
        assert torch.equal(received_TD, torch.full((3, 4), float(number)))
    outlet.close()
    inlet.close()
    assert num_abandoned_operations() == 0


class _StuckGroup(LazyGroup):
    """An end that never joins; its call ends when the test does."""

    has_called, over = threading.Event(), threading.Event()

    def _joined(self) -> Group:
        self.has_called.set()
        self.over.wait()
        raise RuntimeError("the test is over")


@pytest.fixture
def over(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Ends the calls of "stuck" groups, at the latest after the test."""
    event = threading.Event()
    monkeypatch.setattr(_StuckGroup, "over", event)
    monkeypatch.setattr(_StuckGroup, "has_called", threading.Event())
    monkeypatch.setitem(process_group_channel.BACKENDS, "stuck", _StuckGroup)
    monkeypatch.setitem(process_group_channel.TIMEOUTS, "stuck", None)
    yield event
    event.set()
    _join_abandoned()


def _join_abandoned() -> None:
    for thread in threading.enumerate():
        if thread.name == gpu_channel.ABANDONED:
            thread.join(TIMEOUT_S)
    assert num_abandoned_operations() == 0


def test_ends_that_do_not_join_are_given_up_with_an_error_at_both(
    monkeypatch: pytest.MonkeyPatch, over: threading.Event
) -> None:
    """The threads that wait are left behind and counted, and are none of those that made the
    channels.
    """
    monkeypatch.setattr(gpu_channel, "FIRST_OPERATION_TIMEOUT_S", 0.2)
    for end in _make_ends("stuck"):
        with pytest.raises(
            ConnectionError,
            match=r"first transfer between two GPUs did not succeed: .*(for 0 s|was closed)",
        ):
            end.result(TIMEOUT_S)
    assert num_abandoned_operations() == 2
    left = [thread for thread in threading.enumerate() if thread.name == gpu_channel.ABANDONED]
    assert all(thread.daemon for thread in left), "the process can end"
    over.set()
    _join_abandoned()


@pytest.mark.usefixtures("over")
@pytest.mark.parametrize("role", ["sender", "receiver"])
def test_an_end_that_fails_at_once_ends_the_wait_of_the_other(
    role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which is in a call that does not end, and whose time limit is far away."""
    monkeypatch.setattr(gpu_channel, "FIRST_OPERATION_TIMEOUT_S", 1e6)
    _backend_that_fails(monkeypatch)
    sender, receiver = (
        _make_ends("broken", "stuck") if role == "sender" else _make_ends("stuck", "broken")
    )
    broken, stuck = (sender, receiver) if role == "sender" else (receiver, sender)
    with pytest.raises(ConnectionError, match="Duplicate GPU detected"):
        broken.result(TIMEOUT_S)
    with pytest.raises(
        ConnectionError, match="did not succeed: the link to a neighbor is broken: it was closed"
    ):
        stuck.result(TIMEOUT_S)


def _backend_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(LazyGroup):
        """It fails when the other end is in its call, as it learns of a neighbor that is gone
        before in another way.
        """

        def _joined(self) -> Group:
            _StuckGroup.has_called.wait()
            raise RuntimeError("Duplicate GPU detected")

    monkeypatch.setitem(process_group_channel.BACKENDS, "broken", Broken)
    monkeypatch.setitem(process_group_channel.TIMEOUTS, "broken", None)


def test_a_number_that_arrives_wrong_is_an_error_at_both(monkeypatch: pytest.MonkeyPatch) -> None:
    class Garbled(LazyGroup):
        def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Work:
            return super().recv([torch.empty_like(tensor) for tensor in tensors], peer, tag)

    monkeypatch.setitem(process_group_channel.BACKENDS, "garbled", Garbled)
    monkeypatch.setitem(
        process_group_channel.TIMEOUTS, "garbled", process_group_channel.STEP_TIMEOUT
    )
    accepted, connected = _make_ends("garbled")
    with pytest.raises(ConnectionError, match=r"0\.0 was received where 1 was sent"):
        connected.result(TIMEOUT_S)
    with pytest.raises(ConnectionError, match="it was closed"):
        accepted.result(TIMEOUT_S)


def test_no_operation_begins_with_a_neighbor_that_died_before_it_could(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun: list[object] = []
    monkeypatch.setattr(
        gpu_channel, "_run_first_operation", lambda *arguments: begun.append(arguments)
    )
    listener = _factory(HERE).listen(HOST)
    accepted = _begin(listener.accept)
    neighbor = ControlSocket(connect(listener.address))
    neighbor.send((THERE.boot_id, THERE.gpu))
    neighbor.receive(TIMEOUT_S)  # where the other end is
    neighbor.receive(TIMEOUT_S)  # the address of the group's store
    neighbor.connection.close()
    with pytest.raises(ConnectionError, match="is broken"):
        accepted.result(TIMEOUT_S)
    listener.close()
    neighbor.close()
    neighbor.close_fds()
    assert not begun


def _mortal_end(pipe: "Connection[Address, Address]", role: str) -> None:
    """Make one end, whose process is killed in its first operation."""
    factory = _factory(THERE, MORTAL)
    if role == "receiver":
        factory.connect(pipe.recv(), HOST)
    else:
        listener = factory.listen(HOST)
        pipe.send(listener.address)
        listener.accept()


@pytest.mark.usefixtures("over")
@pytest.mark.parametrize("role", ["sender", "receiver"])
def test_an_end_that_is_killed_in_the_first_operation_ends_the_other(
    role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the control socket: the call itself waits on, and its time limit would be far away."""
    monkeypatch.setattr(gpu_channel, "FIRST_OPERATION_TIMEOUT_S", 1e6)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_mortal_end, args=(theirs, role), daemon=True)
    process.start()
    listener: GpuListener | None = None
    if role == "receiver":
        listener = _factory(HERE, "stuck").listen(HOST)
        ours.send(listener.address)
        end = _begin(listener.accept)
    else:
        address = ours.recv()
        end = _begin(lambda: _factory(HERE, "stuck").connect(address, HOST))
    with pytest.raises(ConnectionError, match="is broken"):
        end.result(TIMEOUT_S)
    process.join(TIMEOUT_S)
    assert process.exitcode == -9
    if listener is not None:
        listener.close()
