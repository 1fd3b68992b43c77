"""The direct link without Ray: each stage in a thread of its own, or one of them in a process that
can be killed.
"""

import asyncio
import multiprocessing
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection

import psutil
import pytest
import torch
from harness import PROMPTS, run_in_process, run_prompts, scheduler_for
from lazy_groups import HERE, LAZY, THERE, BetweenPlaces
from tiny_models import random_model, split_model, tiny_args, tiny_plan

from tramontane.proto.errors import LinkError, PipelineError, StaleEpochError
from tramontane.proto.request import SamplingParams
from tramontane.proto.step import Chunk, MicroBatch, StepResult
from tramontane.workers.links.channel import (
    MAX_PENDING_SENDS,
    Address,
    Channel,
    ChannelFactory,
    Listener,
)
from tramontane.workers.links.process_group_channel import (
    ProcessGroupChannel,
    ProcessGroupChannelFactory,
    interface_for_address,
)
from tramontane.workers.links.tcp_channel import TcpChannel, TcpChannelFactory, TcpListener
from tramontane.workers.stage.stage_link import StageLink
from tramontane.workers.stage.stage_worker import StageWorker
from tramontane.workers.stage.step_executor import SerialExecutor

ARGS = tiny_args(n_layers=3)
HOST = "127.0.0.1"


EDGES: list[ChannelFactory] = [
    TcpChannelFactory(),
    ProcessGroupChannelFactory("gloo"),
    BetweenPlaces(HERE, HERE),
    BetweenPlaces(HERE, THERE),
    BetweenPlaces(HERE, THERE, LAZY),
]
every_kind = pytest.mark.parametrize(
    "edges",
    EDGES,
    ids=["sockets", "groups", "one GPU", "two GPUs", "two GPUs, connected in the first call"],
)


def _workers(num_stages: int) -> list[StageWorker]:
    return split_model(random_model(ARGS), tiny_plan(ARGS, num_stages))


def _link(worker: StageWorker, edges: ChannelFactory) -> StageLink:
    return StageLink(worker, SerialExecutor(worker, 1), HOST, edges)


def _batch(step_id: int, epoch: int = 0) -> MicroBatch:
    """The next token of one sequence."""
    sampling = SamplingParams(temperature=0.0) if step_id == 0 else None
    return MicroBatch(
        epoch,
        step_id,
        (Chunk(0, step_id, (1,), ((0,),) if step_id == 0 else ((),), sampling, True),),
    )


def _send_on(link: StageLink, step_id: int) -> None:
    """More than may be on its way to a neighbor that receives nothing."""
    for more in range(MAX_PENDING_SENDS + 1):
        link.step(_batch(step_id + more))


class LinkedThreads:
    """A chain of stages as actors would be: one thread computes for each, and others may call it as
    well.
    """

    has_lost_node = False

    def __init__(self, workers: list[StageWorker], edges: ChannelFactory) -> None:
        self.workers = workers
        self.edges = edges
        self.links: list[StageLink] = []
        self.threads = [ThreadPoolExecutor(1) for _ in workers]

    @property
    def num_stages(self) -> int:
        return len(self.workers)

    def submit(self, batch: MicroBatch) -> Awaitable[StepResult]:
        return self._together([self.start(stage, batch) for stage in range(self.num_stages)])

    def start(self, stage: int, batch: MicroBatch) -> "Future[StepResult]":
        return self.threads[stage].submit(self.links[stage].step, batch)

    async def fence(self) -> int:
        epoch = max(worker.epoch for worker in self.workers) + 1
        self.link_up(epoch)
        return epoch

    def link_up(self, epoch: int) -> None:
        for link in self.links:
            link.close()
        self._in_threads([worker.fence for worker in self.workers], [(epoch,)] * self.num_stages)
        self.links = [_link(worker, self.edges) for worker in self.workers]
        outlets = self._in_threads([link.listen for link in self.links], [()] * self.num_stages)
        self._in_threads(
            [link.connect for link in self.links], [(inlet,) for inlet in [None, *outlets[:-1]]]
        )

    def close(self) -> None:
        for link, thread in zip(self.links, self.threads, strict=True):
            link.close()
            thread.shutdown()

    def _in_threads(
        self, calls: list[Callable[..., object]], arguments: list[tuple[object, ...]]
    ) -> list[object]:
        requested = [
            t.submit(call, *args)
            for t, call, args in zip(self.threads, calls, arguments, strict=True)
        ]
        return [future.result() for future in requested]

    async def _together(self, futures: "list[Future[StepResult]]") -> StepResult:
        parts = await asyncio.gather(*map(asyncio.wrap_future, futures))
        assert [timing.stage_id for part in parts for timing in part.timings] == [
            *range(self.num_stages)
        ], "each its own"
        assert not any(part.token_ids for part in parts[:-1]), "only the last stage samples"
        return parts[-1]


@contextmanager
def _linked(num_stages: int, edges: ChannelFactory) -> Iterator[LinkedThreads]:
    chain = LinkedThreads(_workers(num_stages), edges)
    try:
        chain.link_up(0)
        yield chain
    finally:
        chain.close()


@every_kind
@pytest.mark.parametrize("num_stages", [1, 2, 3])
def test_same_tokens_as_without_a_link(num_stages: int, edges: ChannelFactory) -> None:
    plan = tiny_plan(ARGS, num_stages)
    expected = run_in_process(plan, _workers(num_stages), PROMPTS[:8], budget=64)
    with _linked(num_stages, edges) as chain:
        assert asyncio.run(run_prompts(chain, scheduler_for(plan, 64), PROMPTS[:8])) == expected


@every_kind
def test_a_stage_that_fails_leaves_no_other_waiting_and_new_edges_work(
    monkeypatch: pytest.MonkeyPatch, edges: ChannelFactory
) -> None:
    plan = tiny_plan(ARGS, 3)
    with _linked(3, edges) as chain:
        expected = asyncio.run(run_prompts(chain, scheduler_for(plan, 64), PROMPTS[:8]))
        with monkeypatch.context() as patch:
            begin, failing = chain.workers[1].launch, iter([5])

            def fails_once(batch: MicroBatch, incoming: torch.Tensor | None) -> object:
                if batch.step_id == 5 and next(failing, None):
                    raise PipelineError("stage 2 is broken")
                return begin(batch, incoming)

            patch.setattr(chain.workers[1], "launch", fails_once)
            assert (
                asyncio.run(run_prompts(chain, scheduler_for(plan, 64), PROMPTS[:8])) == expected
            ), "computed again"
            assert next(failing, None) is None, "it has failed"
        assert asyncio.run(run_prompts(chain, scheduler_for(plan, 64), PROMPTS[:8])) == expected


@every_kind
def test_a_step_of_another_epoch_changes_nothing(edges: ChannelFactory) -> None:
    with _linked(3, edges) as chain:
        assert asyncio.run(_run(chain, _batch(0))).step_id == 0
        for stage in range(3):
            with pytest.raises(StaleEpochError, match="is at epoch 0"):
                chain.start(stage, _batch(1, epoch=1)).result()
        assert asyncio.run(_run(chain, _batch(1))).step_id == 1


def test_a_step_of_another_epoch_leaves_a_link_that_is_being_made_as_it_is() -> None:
    """It comes late, from a router that has lost the pipeline."""
    first, last = _workers(2)
    links = [_link(worker, TcpChannelFactory()) for worker in (first, last)]
    for worker in (first, last):
        worker.fence(5)
    address = links[0].listen()
    with pytest.raises(StaleEpochError, match="is at epoch 5"):
        links[0].step(_batch(0, epoch=4))
    with ThreadPoolExecutor(1) as thread:
        accepted = thread.submit(links[0].connect, None)
        links[1].connect(address)
        accepted.result(60)
        for link in links:
            assert link.step(_batch(0, epoch=5)).step_id == 0
    for link in links:
        link.close()


async def _run(chain: LinkedThreads, batch: MicroBatch) -> StepResult:
    return await chain.submit(batch)


@every_kind
def test_a_stage_that_waits_fails_when_its_neighbor_closes(edges: ChannelFactory) -> None:
    """The receiver of its sender, and the sender, who has sent all that may be on its way, of its
    receiver.
    """
    with _linked(3, edges) as chain:
        waiting = chain.start(2, _batch(0))
        chain.links[1].close()
        with pytest.raises(LinkError, match="is broken"):
            waiting.result()
        with pytest.raises(LinkError):
            _send_on(chain.links[0], 0)
        with pytest.raises(LinkError, match="is closed"):
            chain.start(1, _batch(0)).result()


@every_kind
def test_a_step_that_fails_frees_the_stage_that_waits_beyond(edges: ChannelFactory) -> None:
    with _linked(3, edges) as chain:
        waiting = chain.start(2, _batch(0))
        with pytest.raises(AssertionError, match="step 1 came where 0 was due"):
            chain.start(1, _batch(1)).result()
        with pytest.raises(LinkError, match="is broken"):
            waiting.result(timeout=60)


def test_only_so_much_is_on_its_way() -> None:
    with _linked(2, ProcessGroupChannelFactory("gloo")) as chain:
        started = [chain.start(0, _batch(step_id)) for step_id in range(MAX_PENDING_SENDS + 3)]
        for step_id in range(MAX_PENDING_SENDS):
            assert started[step_id].result().step_id == step_id, "it does not wait for the receiver"
        for step_id in range(MAX_PENDING_SENDS + 3):
            outlet = chain.links[0]._outlet
            assert isinstance(outlet, ProcessGroupChannel)
            assert len(outlet._unsent) <= MAX_PENDING_SENDS
            assert chain.start(1, _batch(step_id)).result().step_id == step_id
        assert [future.result().step_id for future in started] == [*range(MAX_PENDING_SENDS + 3)]


def _socket_pair() -> tuple[TcpChannel, TcpChannel]:
    listener = TcpListener(HOST)
    with ThreadPoolExecutor(1) as thread:
        accepted = thread.submit(listener.accept)
        connected = TcpChannelFactory().connect(listener.address, HOST)
        return accepted.result(), connected


def test_what_the_kernel_does_not_take_at_once_arrives_whole_and_in_order() -> None:
    sender, receiver = _socket_pair()
    # 4 MiB each
    sent = [torch.full((2048, 1024), float(number), dtype=torch.bfloat16) for number in range(5)]
    with ThreadPoolExecutor(1) as thread:
        sending = [thread.submit(sender.send, hidden_TD) for hidden_TD in sent]
        for number in range(MAX_PENDING_SENDS):
            sending[number].result()  # it does not wait for the receiver
        for hidden_TD in sent:
            assert len(sender._unsent) <= MAX_PENDING_SENDS
            taken_TD = torch.empty_like(hidden_TD)
            receiver.receive(taken_TD)
            assert torch.equal(taken_TD, hidden_TD)
        for future in sending:
            future.result()
    helpers = [thread for thread in threading.enumerate() if thread.name.startswith("channel")]
    assert helpers
    sender.close()
    receiver.close()
    for helper in helpers:
        helper.join(timeout=60)
        assert not helper.is_alive()


def test_a_neighbor_may_take_its_time() -> None:
    """Only a machine that answers no probes is lost: one that takes nothing may still be
    computing.
    """
    sender, receiver = _socket_pair()
    for edge in (sender, receiver):
        assert edge._connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 0
        assert edge._connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        edge.close()


@every_kind
def test_edges_of_earlier_epochs_leave_nothing_behind(edges: ChannelFactory) -> None:
    def open_sockets() -> int:
        return len(
            [
                s
                for s in psutil.Process().net_connections("tcp")
                if s.status == psutil.CONN_ESTABLISHED
            ]
        )

    before = open_sockets()
    with _linked(3, edges) as chain:
        asyncio.run(_run(chain, _batch(0)))
        once = open_sockets()
        for epoch in range(1, 6):
            chain.link_up(epoch)
            asyncio.run(_run(chain, _batch(0, epoch)))
        _wait_for_leave()
        assert open_sockets() == once > before
    _wait_for_leave()
    assert open_sockets() == before


def _wait_for_leave() -> None:
    """Some ends wait for each other before they are gone."""
    for thread in threading.enumerate():
        if thread.name == "channel-close":
            thread.join()


def test_edges_over_ipv6() -> None:
    try:
        listener = TcpListener("::1")
    except OSError:
        pytest.skip("this machine has no IPv6")
    with ThreadPoolExecutor(1) as thread:
        accepted = thread.submit(listener.accept)
        connected = TcpChannelFactory().connect(listener.address, "::1")
        accepted.result().send(torch.ones(2))
        received_T = torch.zeros(2)
        connected.receive(received_T)
    assert received_T.tolist() == [1, 1]
    connected.close()
    accepted.result().close()


@pytest.mark.parametrize("said", [b"", b"0" * 16, b"short"])
def test_a_connection_without_the_token_is_refused(
    said: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tramontane.workers.links.tcp_channel.AUTH_TOKEN_TIMEOUT_S", 0.1)
    listener = TcpListener(HOST)
    with (
        socket.create_connection(listener.address[:2]) as intruder,
        ThreadPoolExecutor(1) as thread,
    ):
        intruder.sendall(said)
        # it has sent the token before the listener reads it
        neighbor = TcpChannelFactory().connect(listener.address, HOST)
        accepted = thread.submit(listener.accept)
        accepted.result().send(torch.ones(3))
        received_T = torch.zeros(3)
        neighbor.receive(received_T)
        assert received_T.tolist() == [1, 1, 1]
        assert intruder.recv(1) == b"", "it was hung up on"
        neighbor.close()
        accepted.result().close()


def test_a_stage_that_was_not_linked_says_so() -> None:
    worker = _workers(2)[1]
    worker.fence(0)
    with pytest.raises(LinkError, match="is not linked"):
        _link(worker, TcpChannelFactory()).step(_batch(0))


@every_kind
def test_an_edge_that_cannot_be_made_is_named(
    monkeypatch: pytest.MonkeyPatch, edges: ChannelFactory
) -> None:
    for kind in ("tcp_channel", "process_group_channel"):
        monkeypatch.setattr(
            f"tramontane.workers.links.{kind}.CONNECT_TIMEOUT", timedelta(seconds=1)
        )
    worker = _workers(2)[1]
    worker.fence(0)
    with socket.socket() as unused:
        unused.bind((HOST, 0))  # does not listen, but keeps the port from others
        with pytest.raises(
            LinkError, match=r"Stage 2/2 layers \d-\d at 127.0.0.1 could not be linked"
        ):
            _link(worker, edges).connect((HOST, unused.getsockname()[1], "word"))


@every_kind
def test_everything_that_listens_does_so_at_the_given_address_and_ends_with_the_link(
    edges: ChannelFactory,
) -> None:
    before = _listening()
    link = _link(_workers(2)[0], edges)
    address = link.listen()
    assert address is not None
    assert _listening() - before == {address[:2]}
    link.close()
    with _linked(3, edges):
        assert {ip for ip, _ in _listening() - before} <= {HOST}
    assert _listening() <= before


def _listening() -> set[tuple[str, int]]:
    sockets = psutil.Process().net_connections("tcp")
    return {(s.laddr.ip, s.laddr.port) for s in sockets if s.status == psutil.CONN_LISTEN}


def test_the_interface_of_an_address() -> None:
    assert interface_for_address("127.0.0.1") == "lo"


class SlowEdges:
    """Edges that are made slowly: each is there only when all of them have been begun, at both
    ends.
    """

    def __init__(self, num_edges: int) -> None:
        # seconds, if one waits for another
        self._begun = threading.Barrier(2 * num_edges, timeout=10)

    def listen(self, host: str) -> Listener:
        return _SlowListener(self._begun, host)

    def connect(self, address: Address, host: str, /) -> Channel:
        self._begun.wait()
        return TcpChannelFactory().connect(address, host)


class _SlowListener(TcpListener):
    def __init__(self, begun: threading.Barrier, host: str) -> None:
        super().__init__(host)
        self._begun = begun

    def accept(self) -> TcpChannel:
        self._begun.wait()
        return super().accept()


def test_all_edges_of_fourteen_stages_are_made_at_once() -> None:
    """One after the other, the last stage would wait for thirteen edges in turn, and give up."""
    workers = split_model(
        random_model(tiny_args(n_layers=14)), tiny_plan(tiny_args(n_layers=14), 14)
    )
    chain = LinkedThreads(workers, SlowEdges(len(workers) - 1))
    try:
        chain.link_up(0)
        assert asyncio.run(_run(chain, _batch(0))).step_id == 0
    finally:
        chain.close()


class _LonelyEdges(TcpChannelFactory):
    """Edges to which no stage connects. ``were_closed``: whether a listener was closed while it
    waited.
    """

    def __init__(self) -> None:
        self.were_closed: list[bool] = []

    def listen(self, host: str) -> TcpListener:
        factory, is_closed = self, threading.Event()

        class Lonely(TcpListener):
            def accept(self) -> TcpChannel:
                factory.were_closed.append(is_closed.wait(10))  # seconds, if it is not closed
                raise TimeoutError

            def close(self) -> None:
                is_closed.set()
                super().close()

        return Lonely(host)


def test_a_stage_whose_inlet_fails_does_not_wait_for_its_outlet() -> None:
    worker, edges = _workers(3)[1], _LonelyEdges()
    worker.fence(0)
    link, before = _link(worker, edges), _listening()
    link.listen()
    with socket.socket() as unused:
        unused.bind((HOST, 0))  # does not listen, but keeps the port from others
        with pytest.raises(LinkError, match="could not be linked"):
            link.connect((HOST, unused.getsockname()[1], "word"))
    assert edges.were_closed == [True]
    assert _listening() == before
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("accept")]


def _middle_stage(pipe: "Connection[Address, Address | None]", kind: int) -> None:
    """Stage 2 of 3, which runs one step."""
    worker = _workers(3)[1]
    worker.fence(0)
    link = _link(worker, EDGES[kind])
    pipe.send(link.listen())
    link.connect(pipe.recv())
    link.step(_batch(0))
    pipe.recv()  # forever


@every_kind
def test_a_killed_neighbor_is_noticed_at_once_on_both_sides(edges: ChannelFactory) -> None:
    first, _, last = _workers(3)
    for worker in (first, last):
        worker.fence(0)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    middle = context.Process(target=_middle_stage, args=(theirs, EDGES.index(edges)))
    middle.start()
    with (
        ThreadPoolExecutor(1) as thread,
        closing(_link(first, edges)) as before,
        closing(_link(last, edges)) as after,
    ):
        outlet = ours.recv()
        ours.send(before.listen())
        linked = thread.submit(after.connect, outlet)
        before.connect(None)
        linked.result()
        before.step(_batch(0))
        assert len(after.step(_batch(0)).token_ids) == 1
        waiting = thread.submit(after.step, _batch(1))
        middle.kill()
        with pytest.raises(LinkError, match="is broken"):
            waiting.result()
        middle.join()  # the kernel ends the edges of a dying process one after the other
        with pytest.raises(LinkError):
            _send_on(before, 1)
