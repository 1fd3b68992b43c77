"""Stages with expert actors in this process: every actor has a real server, whose links can be cut."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

import torch

from tramontane.cluster.planning.expert_planner import ExpertRequest, plan_experts
from tramontane.cluster.planning.planner import StageBudget
from tramontane.proto.errors import ExpertUnavailableError, PipelineError
from tramontane.proto.model_args import ModelArgs
from tramontane.proto.model_folder import WeightSource
from tramontane.proto.plan import ExpertId, ExpertPlan, PipelinePlan
from tramontane.proto.step import MicroBatch, StepResult
from tramontane.workers.experts.expert_link import DirectExpertClient, ExpertMessageLayout, ExpertServer
from tramontane.workers.experts.expert_worker import ExpertCall, ExpertReply, ExpertWorker
from tramontane.workers.experts.remote_experts import RemoteExperts
from tramontane.workers.links.channel import Address, Channel, ChannelFactory, Listener
from tramontane.workers.links.tcp_channel import TcpChannelFactory
from tramontane.workers.stage.activation import Activation
from tramontane.workers.stage.ping_pong_executor import PingPongExecutor
from tramontane.workers.stage.stage_worker import StageWorker
from tramontane.workers.weights.tensor_specs import stage_tensors

HOST = "127.0.0.1"
CPU = torch.device("cpu")


def expert_plan(
    args: ModelArgs, num_actors: int, replicas: int | None = 1, loads: dict[ExpertId, float] | None = None, dtype: str = "float32"
) -> ExpertPlan:
    return plan_experts(args, ExpertRequest((StageBudget(2**30),) * num_actors, dtype, replicas=replicas, loads=loads))


class WatchedEdges(TcpChannelFactory):
    """Remembers every end that it made, so that all can be cut at once, as when a process dies."""

    def __init__(self) -> None:
        self.ends: list[Channel | Listener] = []

    def listen(self, host: str) -> Listener:  # type: ignore[override]
        listener = super().listen(host)
        self.ends.append(listener)
        return listener

    def connect(self, address: Address, host: str, /) -> Channel:  # type: ignore[override]
        edge = super().connect(address, host)
        self.ends.append(edge)
        return edge


class ExpertActors:
    """One worker and one server per actor. ``kill`` cuts all of an actor's links; it cannot be reached until ``revive``."""

    def __init__(self, plan: ExpertPlan, weights: WeightSource, edges: ChannelFactory | None = None) -> None:
        self.plan, self._fixed_edges = plan, edges  # of another kind; such actors cannot be killed
        self.workers = [ExpertWorker.load(plan, actor.actor_id, weights) for actor in plan.actors]
        self._edges = [WatchedEdges() for _ in plan.actors]
        self._servers = [self._make_server(actor.actor_id) for actor in plan.actors]
        self._dead: set[int] = set()
        self.failure = ""  # why dead actors will never be revived
        self.before_call: dict[int, Callable[[ExpertCall], None]] = {}  # by actor

    def connect(self, actor_id: int, notify: Callable[[], None]) -> DirectExpertClient:
        """See ``remote_experts.Connect``."""

        def introduce(calls: Address) -> Address:
            if actor_id in self._dead:
                raise PipelineError(self.failure) if self.failure else ExpertUnavailableError("dead")
            return self._servers[actor_id].open(calls)

        edges = self._fixed_edges or TcpChannelFactory()
        return DirectExpertClient(introduce, notify, ExpertMessageLayout.of(self.plan, CPU), HOST, edges, f"experts {actor_id}")

    def kill(self, actor_id: int) -> None:
        self._dead.add(actor_id)
        for end in self._edges[actor_id].ends:
            end.close()
        self._edges[actor_id] = WatchedEdges()
        self._servers[actor_id] = self._make_server(actor_id)

    def revive(self, actor_id: int) -> None:
        self._dead.remove(actor_id)

    def _make_server(self, actor_id: int) -> ExpertServer:
        worker, run = self.workers[actor_id], ExpertWorker.run

        def watched(call: ExpertCall, rows_CD: torch.Tensor) -> ExpertReply:
            self.before_call.get(actor_id, lambda _: None)(call)
            return run(worker, call, rows_CD)

        worker.run = watched  # type: ignore[method-assign]
        return ExpertServer(worker, self.plan, HOST, self._fixed_edges or self._edges[actor_id], num_threads=1)


class OpenChain:
    """A ``StageChain`` of stages that play ping-pong."""

    def __init__(self, stages: Sequence[PingPongExecutor], experts: Sequence[RemoteExperts] = ()) -> None:
        self.stages, self.experts = stages, experts
        self._threads = ThreadPoolExecutor(64)  # each waits for one micro-batch

    @property
    def num_stages(self) -> int:
        return len(self.stages)

    def submit(self, batch: MicroBatch) -> Awaitable[StepResult]:
        return asyncio.get_running_loop().run_in_executor(self._threads, self._run, batch)

    async def fence(self) -> int:
        epoch = max(stage.worker.epoch for stage in self.stages) + 1
        for stage in self.stages:
            stage.fence(epoch)
        return epoch

    def _run(self, batch: MicroBatch) -> StepResult:
        carried: Activation | StepResult | None = None
        for stage in self.stages:
            incoming = carried
            assert not isinstance(incoming, StepResult)
            carried = stage.step(batch, lambda: incoming)  # noqa: B023 - called before the next round
        assert isinstance(carried, StepResult)
        return carried


@contextmanager
def open_chain(plan: PipelinePlan, weights: WeightSource, actors: ExpertActors, max_open: int = 2) -> Iterator[OpenChain]:
    """The plan's stages, without their experts."""
    experts = [RemoteExperts(actors.plan, actors.connect) for _ in plan.stages]
    workers = [StageWorker.load(replace(stage, experts_inside=False), weights) for stage in plan.stages]
    stages = [PingPongExecutor(worker, own, max_open, num_threads=1) for worker, own in zip(workers, experts, strict=True)]
    try:
        yield OpenChain(stages, experts)
    finally:
        for stage, own in zip(stages, experts, strict=True):
            stage.close()
            own.close()


def wait_until(condition: Callable[[], bool]) -> None:
    bell = threading.Event()
    while not condition():
        bell.wait(0.005)


def without_experts(plan: PipelinePlan, experts: ExpertPlan) -> PipelinePlan:
    """The same stages, whose experts are elsewhere."""
    args, first = plan.args, plan.stages[0]
    own = [range(stage.first_layer, stage.last_layer) for stage in plan.stages]
    sizes = [
        sum(spec.num_bytes(first.dtype, first.quantize) for spec in stage_tensors(args, layers, with_experts=False))
        for layers in own
    ]
    stages = [replace(stage, experts_inside=False, weight_bytes=size) for stage, size in zip(plan.stages, sizes, strict=True)]
    return replace(plan, stages=tuple(stages), experts=experts)
