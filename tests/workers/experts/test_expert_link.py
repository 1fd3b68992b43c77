"""A stage's end of the link to an expert actor: channels that are lost, calls that fail, and
replies in their order.
"""

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future

import pytest
import torch
from local_expert_actors import expert_plan
from tiny_models import tiny_args

from tramontane.proto.errors import (
    ExpertRelocatedError,
    ExpertUnavailableError,
    LinkError,
    PipelineError,
)
from tramontane.workers.experts import expert_link
from tramontane.workers.experts.expert_link import (
    FAILED,
    MOVED,
    DirectExpertClient,
    ExpertMessageLayout,
)
from tramontane.workers.experts.expert_worker import ExpertCall, ExpertReply
from tramontane.workers.links.channel import Address

ARGS = tiny_args(n_layers=2)
LIMIT_S = 30.0  # after which a test fails that would wait forever
LAYOUT = ExpertMessageLayout.of(expert_plan(ARGS, 1), torch.device("cpu"))


class FakeChannel:
    """An end whose incoming tensors are those of ``incoming``; after None, or once it is closed,
    every call fails.
    """

    def __init__(self) -> None:
        self.sent: list[torch.Tensor] = []
        self.incoming: queue.SimpleQueue[torch.Tensor | None] = queue.SimpleQueue()
        self.closed = threading.Event()

    def send(self, hidden_TD: torch.Tensor) -> None:
        if self.closed.is_set():
            raise LinkError("closed")
        self.sent.append(hidden_TD)

    def receive(self, hidden_TD: torch.Tensor) -> None:
        if (tensor := self.incoming.get()) is None:
            raise LinkError("the neighbor is gone")
        hidden_TD.copy_(tensor)

    def close(self) -> None:
        self.closed.set()
        self.incoming.put(None)


class FakeListener:
    address: Address = ("host", 1, "token")

    def __init__(self, accepted: FakeChannel) -> None:
        self._accepted = accepted

    def accept(self) -> FakeChannel:
        return self._accepted

    def close(self) -> None:
        """It has nothing to close."""


class Links:
    """A channel factory and an actor: every connection has a new pair of channels.

    ``introduce`` is called with the number of the connection, from 0, before the actor answers.
    """

    def __init__(self, introduce: Callable[[int], None] = lambda _: None) -> None:
        self._introduce = introduce
        self.num_connections = 0
        self.outlets: list[FakeChannel] = []  # of all connections
        self.inlet = FakeChannel()
        self.connect_error: Exception | None = None
        self.changes = threading.Semaphore(0)
        self.client = DirectExpertClient(
            self._exchange, self.changes.release, LAYOUT, "host", self, "experts 1"
        )

    def _exchange(self, _calls: Address) -> Address:
        self.num_connections += 1
        self._introduce(self.num_connections - 1)
        return "actor", 2, "token"

    def listen(self, _host: str) -> FakeListener:
        self.outlets.append(FakeChannel())
        return FakeListener(self.outlets[-1])

    def connect(self, _address: Address, _host: str, /) -> FakeChannel:
        self.inlet = FakeChannel()
        if self.connect_error is not None:
            error, self.connect_error = self.connect_error, None
            raise error
        return self.inlet

    def wait_until_up(self) -> None:
        while not self.client.is_up:
            self.wait_for_change()

    def wait_for_change(self) -> None:
        assert self.changes.acquire(timeout=LIMIT_S)

    def call(self, num_rows: int = 2) -> "Future[ExpertReply]":
        return self.client.call(ExpertCall(0, (1,), (num_rows,)), torch.ones(num_rows, ARGS.dim))

    def reply(self, busy_ns: int, *rows: torch.Tensor) -> None:
        for tensor in (LAYOUT.reply_header(busy_ns), *rows):
            self.inlet.incoming.put(tensor)


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_link, "RETRY_S", 0.0)


def test_replies_are_for_the_calls_in_their_order() -> None:
    """Also if some of them are failures, which have no rows."""
    links = Links()
    links.wait_until_up()
    calls = [links.call(num_rows) for num_rows in (1, 2, 3, 4)]
    assert [len(tensor) for tensor in links.outlets[-1].sent[1::2]] == [1, 2, 3, 4]
    links.reply(500_000_000, torch.full((1, ARGS.dim), 1.0))
    links.reply(FAILED)
    links.reply(MOVED)
    links.reply(250_000_000, torch.full((4, ARGS.dim), 4.0))
    first, last = calls[0].result(LIMIT_S), calls[3].result(LIMIT_S)
    assert (first.busy_s, first.rows_CD.tolist()) == (0.5, [[1.0] * ARGS.dim])
    assert (last.busy_s, last.rows_CD.tolist()) == (0.25, [[4.0] * ARGS.dim] * 4)
    assert [type(call.exception(LIMIT_S)) for call in calls[1:3]] == [
        PipelineError,
        ExpertRelocatedError,
    ]
    links.client.close()


def test_a_connection_that_is_lost_fails_its_calls_and_is_made_anew(
    caplog: pytest.LogCaptureFixture,
) -> None:
    links = Links()
    links.wait_until_up()
    lost, outlet = links.call(), links.outlets[-1]
    links.inlet.incoming.put(None)
    with pytest.raises(
        ExpertUnavailableError, match="the connection to experts 1 was lost: the neighbor is gone"
    ):
        lost.result(LIMIT_S)
    assert "The connection to experts 1 was lost: the neighbor is gone" in caplog.text
    assert outlet.closed.wait(LIMIT_S)
    links.wait_until_up()
    call = links.call(1)
    links.reply(0, torch.ones(1, ARGS.dim))
    assert len(call.result(LIMIT_S).rows_CD) == 1
    links.client.close()


def test_a_call_that_cannot_be_sent_fails_and_the_connection_is_made_anew() -> None:
    links = Links()
    links.wait_until_up()
    links.outlets[-1].closed.set()
    with pytest.raises(ExpertUnavailableError):
        links.call().result(LIMIT_S)
    links.wait_until_up()
    assert links.num_connections == 2
    links.client.close()


def test_no_call_is_sent_to_an_actor_that_is_not_connected() -> None:
    may_connect = threading.Event()
    links = Links(lambda _: bool(may_connect.wait()))
    assert not links.client.is_up
    with pytest.raises(ExpertUnavailableError, match="experts 1 is not connected"):
        links.call().result(LIMIT_S)
    may_connect.set()
    links.wait_until_up()
    links.client.close()


def test_a_connection_of_which_one_half_fails_leaves_no_channel_open() -> None:
    links = Links()
    links.wait_until_up()
    links.connect_error = OSError("refused")
    links.inlet.incoming.put(None)
    while links.num_connections < 3:
        links.wait_for_change()
    links.wait_until_up()
    assert [each.closed.is_set() for each in links.outlets] == [True, True, False]
    links.client.close()


def test_a_client_that_is_closed_while_it_connects_leaves_no_channel_open(
    caplog: pytest.LogCaptureFixture,
) -> None:
    links = Links(lambda number: links.client.close() if number else None)
    links.wait_until_up()
    links.inlet.incoming.put(None)
    while links.num_connections < 2:
        links.wait_for_change()
    assert links.outlets[-1].closed.wait(LIMIT_S)
    assert links.inlet.closed.wait(LIMIT_S)
    assert caplog.text.count("was lost") == 1, "that a client is closed is no loss"


def test_a_client_that_is_closed_fails_its_calls_without_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    links = Links()
    links.wait_until_up()
    call = links.call()
    links.client.close()
    with pytest.raises(ExpertUnavailableError), caplog.at_level(logging.WARNING):
        call.result(LIMIT_S)
    assert caplog.text == ""


def test_an_actor_that_cannot_load_is_never_called_again() -> None:
    def fail(number: int) -> None:
        if number:
            raise PipelineError("the disk is gone")

    links = Links(fail)
    links.wait_until_up()
    links.inlet.incoming.put(None)
    while links.client.failure is None:
        links.wait_for_change()
    assert str(links.client.failure) == "the disk is gone"
    with pytest.raises(ExpertUnavailableError):
        links.call().result(LIMIT_S)
    assert links.num_connections == 2
