"""The direct link: hidden states go from stage to stage over process groups of two, made anew for every epoch."""

import os
import re
import socket
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import psutil
import torch
from torch import Tensor
from torch.distributed import ProcessGroupGloo, TCPStore, Work  # type: ignore[attr-defined]

from tramontane.proto.errors import LinkError
from tramontane.proto.step import MicroBatch, StepResult
from tramontane.workers.activation import Activation
from tramontane.workers.stage_worker import StageWorker

Address = tuple[str, int]
Group = Any  # one of torch's backends, of whose methods its type stubs know few

CONNECT_TIMEOUT = timedelta(seconds=20)
STEP_TIMEOUT = timedelta(seconds=600)  # of a neighbour that neither sends nor dies; a group that has timed out is broken
MAX_UNSENT = 2  # micro-batches that the next stage has not taken yet; then computing waits
SENDER, RECEIVER = 0, 1  # ranks
TAG = 0  # of all messages: they are taken in the order in which they were sent


class Edge:
    """The way from one stage to the next: a process group of these two, apart from torch's default group.

    A group has no way to be closed but to be forgotten, by its object and by all that was
    started on it; the neighbour, also one that waits for us, hears of that at once.
    """

    def __init__(self, group: Group) -> None:
        self._group: Group | None = group
        self._unsent: deque[tuple[Work, Tensor]] = deque()  # a tensor lives until it is sent

    def send(self, hidden_TD: Tensor) -> None:
        """Returns while it is still on its way."""
        self._wait_for_room()
        hidden_TD = hidden_TD.contiguous()
        self._unsent.append((self._start(lambda group: group.send([hidden_TD], RECEIVER, TAG)), hidden_TD))

    def receive(self, hidden_TD: Tensor) -> None:
        """Into this: what comes next from the stage before, of a size that both know from the micro-batch."""
        _finish(self._start(lambda group: group.recv([hidden_TD], SENDER, TAG)))

    def close(self) -> None:
        """From any thread."""
        group, self._group = self._group, None
        self._unsent.clear()
        if group is not None:
            group.abort()  # NCCL needs it, gloo does nothing

    def _wait_for_room(self) -> None:
        while len(self._unsent) >= MAX_UNSENT:
            try:
                work, _ = self._unsent.popleft()
            except IndexError:  # closed meanwhile
                return
            _finish(work)

    def _start(self, operation: Callable[[Group], Work]) -> Work:
        group = self._group
        if group is None:
            raise LinkError("the link to a neighbour is closed")
        try:
            return operation(group)
        except RuntimeError as error:
            raise LinkError(f"the link to a neighbour is broken: {_why(error)}") from error.with_traceback(None)
        finally:
            del group  # an exception's traceback would keep it open


def _finish(work: Work) -> None:
    try:
        work.wait(STEP_TIMEOUT)
    except RuntimeError as error:
        del work  # an exception's traceback would keep the group open
        raise LinkError(f"the link to a neighbour is broken: {_why(error)}") from error.with_traceback(None)


class StageLink:
    """The edges of one stage in one epoch. What breaks one closes both, so that no stage beyond is left waiting.

    One thread calls ``listen``, ``connect`` and ``step``; ``close`` may come from any other.
    ``host`` is the only address at which anything listens.
    """

    def __init__(self, worker: StageWorker, host: str) -> None:
        self._worker = worker
        self._host = host
        self._store: TCPStore | None = None
        self._edges: dict[int, Edge] = {}  # by the rank that we have in it
        self._is_closed = False

    def listen(self) -> Address | None:
        """Where the next stage finds us; None if there is none."""
        if self._worker.plan.is_last:
            return None
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        listener = socket.create_server((self._host, 0), family=family)  # TCPStore by itself listens on all interfaces
        port: int = listener.getsockname()[1]
        self._store = TCPStore(
            self._host, port, is_master=True, wait_for_workers=False, timeout=CONNECT_TIMEOUT, master_listen_fd=listener.detach()
        )
        return self._host, port

    def connect(self, inlet: Address | None) -> None:
        """Make the edges, in the order of the stages: first from the one before, which listens at ``inlet``, then to the next."""
        outlet = self._store
        try:
            if inlet is not None:
                store = TCPStore(*inlet, is_master=False, wait_for_workers=False, timeout=CONNECT_TIMEOUT)
                self._edges[RECEIVER] = self._edge(store, RECEIVER)
            if outlet is not None:
                self._edges[SENDER] = self._edge(outlet, SENDER)
        except RuntimeError as error:
            self.close()
            stage = self._worker.plan.label
            raise LinkError(
                f"{stage} at {self._host} could not be linked to a neighbour: {_why(error)}"
            ) from error.with_traceback(None)
        if self._is_closed:
            self.close()

    def step(self, batch: MicroBatch) -> StepResult:
        """As ``StageWorker.step``, with hidden states from the stage before and to the next; returns this stage's own part.

        Raises StaleEpochError, which changes nothing, LinkError, and whatever the computation raises.
        """
        self._worker.check_epoch(batch)
        try:
            return self._linked_step(batch)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._is_closed = True
        self._store = None
        for edge in list(self._edges.values()):
            edge.close()

    def _linked_step(self, batch: MicroBatch) -> StepResult:
        plan, incoming = self._worker.plan, None
        if self._is_closed:
            raise LinkError(f"the link of {plan.label} to its neighbours is closed")
        if len(self._edges) < (not plan.is_first) + (not plan.is_last):
            raise LinkError(f"{plan.label} is not linked to its neighbours")
        self._worker.check_turn(batch)  # before anything is taken from the stage before
        if not plan.is_first:
            hidden_TD = torch.empty(batch.num_tokens, plan.args.dim, dtype=self._worker.dtype, device=self._worker.device)
            self._edges[RECEIVER].receive(hidden_TD)
            incoming = Activation(hidden_TD, ())
        outcome = self._worker.step(batch, incoming)
        if isinstance(outcome, StepResult):
            return outcome
        self._edges[SENDER].send(outcome.hidden_TD)
        return StepResult(batch.epoch, batch.step_id, (), outcome.timings)

    def _edge(self, store: TCPStore, rank: int) -> Edge:
        return Edge((_nccl if self._worker.device.type == "cuda" else _gloo)(store, rank, self._host))


def _gloo(store: TCPStore, rank: int, host: str) -> Group:
    gloo: Any = ProcessGroupGloo  # whose options are called otherwise in torch's type stubs
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=host)]
    options._threads = 1  # they are for collective operations
    options._timeout = CONNECT_TIMEOUT
    return gloo(store, rank, 2, options)


def _nccl(store: TCPStore, rank: int, host: str) -> Group:
    from torch.distributed import ProcessGroupNCCL  # not in every build of torch

    os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface_of(host)}")  # NCCL has no other way to be told
    return ProcessGroupNCCL(store, rank, 2, ProcessGroupNCCL.Options())


def interface_of(host: str) -> str:
    """The name of the interface that has this address: ``lo`` for 127.0.0.1."""
    return next(name for name, addresses in psutil.net_if_addrs().items() if any(a.address == host for a in addresses))


def _why(error: Exception) -> str:
    """gloo's messages begin with a line of its source and go on with advice."""
    return re.sub(r"^\[\S+\] ", "", str(error).strip().splitlines()[0]).split(". ")[0]
