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

from tramontane.proto import wire
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


class Edge:
    """The way from one stage to the next: a process group of these two, apart from torch's default group.

    A group has no way to be closed but to be forgotten, by its object and by all that was
    started on it; the neighbour, also one that waits for us, hears of that at once.
    """

    def __init__(self, group: Group, device: torch.device) -> None:
        self._group: Group | None = group
        self._device = device
        self._unsent: deque[tuple[list[Work], tuple[Tensor, Tensor]]] = deque()  # tensors live until they are sent

    def send(self, batch: MicroBatch, activation: Activation) -> None:
        """Returns while the tensors are still on their way."""
        self._wait_for_room()
        hidden_TD = activation.hidden_TD.contiguous()
        dtype = str(hidden_TD.dtype).removeprefix("torch.")
        header = wire.encode_edge_header(batch, dtype, tuple(hidden_TD.shape), activation.timings)
        tensors = torch.frombuffer(bytearray(header), dtype=torch.uint8).to(self._device), hidden_TD
        self._unsent.append((self._start(lambda group, tensor, tag: group.send([tensor], RECEIVER, tag), tensors), tensors))

    def receive(self, batch: MicroBatch, num_timings: int, dim: int, dtype: torch.dtype) -> Activation:
        """What the stage before has made of the same micro-batch; its size is known from that."""
        header = torch.empty(wire.edge_header_bytes(num_timings), dtype=torch.uint8, device=self._device)
        hidden_TD = torch.empty(batch.num_tokens, dim, dtype=dtype, device=self._device)
        _finish(self._start(lambda group, tensor, tag: group.recv([tensor], SENDER, tag), (header, hidden_TD)))
        about = wire.decode_edge_header(header.cpu().numpy().tobytes())
        expected = (batch.epoch, batch.step_id, str(dtype).removeprefix("torch."), tuple(hidden_TD.shape))
        assert about[:-1] == expected, f"{about[:-1]} came where {expected} was due"
        return Activation(hidden_TD, about[-1])

    def close(self) -> None:
        """From any thread."""
        group, self._group = self._group, None
        self._unsent.clear()
        if group is not None:
            group.abort()  # NCCL needs it, gloo does nothing

    def _wait_for_room(self) -> None:
        while len(self._unsent) >= MAX_UNSENT:
            try:
                works, _ = self._unsent.popleft()
            except IndexError:  # closed meanwhile
                return
            _finish(works)

    def _start(self, operation: Callable[[Group, Tensor, int], Work], tensors: tuple[Tensor, Tensor]) -> list[Work]:
        group = self._group
        if group is None:
            raise LinkError("the link to a neighbour is closed")
        try:
            return [operation(group, tensor, tag) for tag, tensor in enumerate(tensors)]
        except RuntimeError as error:
            raise LinkError(f"the link to a neighbour is broken: {_why(error)}") from error.with_traceback(None)
        finally:
            del group  # an exception's traceback would keep it open


def _finish(works: list[Work]) -> None:
    try:
        while works:
            works.pop(0).wait(STEP_TIMEOUT)
    except RuntimeError as error:
        works.clear()  # an exception's traceback would keep the group open
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

    def step(self, batch: MicroBatch) -> StepResult | None:
        """As ``StageWorker.step``, with hidden states from the stage before and to the next; the last stage's result is returned.

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

    def _linked_step(self, batch: MicroBatch) -> StepResult | None:
        plan, incoming = self._worker.plan, None
        if self._is_closed:
            raise LinkError(f"the link of {plan.label} to its neighbours is closed")
        if len(self._edges) < (not plan.is_first) + (not plan.is_last):
            raise LinkError(f"{plan.label} is not linked to its neighbours")
        self._worker.check_turn(batch)  # before anything is taken from the stage before
        if not plan.is_first:
            incoming = self._edges[RECEIVER].receive(batch, plan.stage_id, plan.args.dim, self._worker.dtype)
        outcome = self._worker.step(batch, incoming)
        if isinstance(outcome, StepResult):
            return outcome
        self._edges[SENDER].send(batch, outcome)
        return None

    def _edge(self, store: TCPStore, rank: int) -> Edge:
        device = self._worker.device
        return Edge(_nccl(store, rank, self._host) if device.type == "cuda" else _gloo(store, rank, self._host), device)


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
