"""Stages with expert actors in this process, or in processes of their own without Ray: every actor
has a real server. In this process its channels can be cut.
"""

import asyncio
import multiprocessing
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from tramontane.cluster.planning.expert_planner import ExpertRequest, plan_experts
from tramontane.cluster.planning.planner import StageBudget
from tramontane.proto.errors import ExpertUnavailableError, PipelineError
from tramontane.proto.model_args import ModelArgs
from tramontane.proto.model_folder import RandomWeights, WeightSource
from tramontane.proto.plan import ExpertId, ExpertPlan, PipelinePlan
from tramontane.proto.step import MicroBatch, StepResult
from tramontane.workers.experts.expert_link import (
    DirectExpertClient,
    ExpertMessageLayout,
    ExpertServer,
)
from tramontane.workers.experts.expert_worker import ExpertCall, ExpertReply, ExpertWorker
from tramontane.workers.experts.remote_experts import RemoteExperts
from tramontane.workers.links.channel import Address, Channel, ChannelFactory, Listener
from tramontane.workers.links.tcp_channel import TcpChannelFactory
from tramontane.workers.stage.hidden_states import HiddenStates
from tramontane.workers.stage.ping_pong_executor import PingPongExecutor
from tramontane.workers.stage.stage_worker import StageWorker
from tramontane.workers.weights.tensor_specs import stage_tensors

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

HOST = "127.0.0.1"
CPU = torch.device("cpu")


def expert_plan(
    args: ModelArgs,
    num_actors: int,
    replicas: int | None = 1,
    loads: dict[ExpertId, float] | None = None,
    dtype: str = "float32",
) -> ExpertPlan:
    return plan_experts(
        args,
        ExpertRequest((StageBudget(2**30),) * num_actors, dtype, replicas=replicas, loads=loads),
    )


class TrackedChannelFactory(TcpChannelFactory):
    """A factory that keeps every channel and listener it made, so that all can be cut at once, as
    when a process dies.
    """

    def __init__(self) -> None:
        self.ends: list[Channel | Listener] = []

    def listen(self, host: str) -> Listener:  # type: ignore[override]
        listener = super().listen(host)
        self.ends.append(listener)
        return listener

    def connect(self, address: Address, host: str, /) -> Channel:  # type: ignore[override]
        channel = super().connect(address, host)
        self.ends.append(channel)
        return channel


class ExpertActors:
    """One worker and one server per actor. ``kill`` cuts all of an actor's channels; it is
    unreachable until ``revive``.

    With another channel factory than the default one actors cannot be killed.
    """

    def __init__(
        self, plan: ExpertPlan, weights: WeightSource, channels: ChannelFactory | None = None
    ) -> None:
        self.plan, self._fixed_channels = plan, channels
        self.workers = [ExpertWorker.load(plan, actor.actor_id, weights) for actor in plan.actors]
        self._channels = [TrackedChannelFactory() for _ in plan.actors]
        self._servers = [self._make_server(actor.actor_id) for actor in plan.actors]
        self._dead: set[int] = set()
        self.failure = ""  # why dead actors will never be revived
        self.before_call: dict[int, Callable[[ExpertCall], None]] = {}  # by actor

    def connect(self, actor_id: int, notify: Callable[[], None]) -> DirectExpertClient:
        """See ``remote_experts.Connect``."""

        def introduce(calls: Address) -> Address:
            if actor_id in self._dead:
                raise (
                    PipelineError(self.failure) if self.failure else ExpertUnavailableError("dead")
                )
            return self._servers[actor_id].open(calls)

        channels = self._fixed_channels or TcpChannelFactory()
        layout = ExpertMessageLayout.of(self.plan, CPU)
        return DirectExpertClient(introduce, notify, layout, HOST, channels, f"experts {actor_id}")

    def kill(self, actor_id: int) -> None:
        self._dead.add(actor_id)
        for end in self._channels[actor_id].ends:
            end.close()
        self._channels[actor_id] = TrackedChannelFactory()
        self._servers[actor_id] = self._make_server(actor_id)

    def revive(self, actor_id: int) -> None:
        self._dead.remove(actor_id)

    def _make_server(self, actor_id: int) -> ExpertServer:
        worker, run = self.workers[actor_id], ExpertWorker.run

        def watched(call: ExpertCall, rows_CD: torch.Tensor) -> ExpertReply:
            self.before_call.get(actor_id, lambda _: None)(call)
            return run(worker, call, rows_CD)

        worker.run = watched  # type: ignore[method-assign]
        return ExpertServer(
            worker, self.plan, HOST, self._fixed_channels or self._channels[actor_id], num_threads=1
        )


class PingPongChain:
    """A ``StageChain`` of stages with ping-pong executors."""

    has_lost_node = False

    def __init__(
        self, stages: Sequence[PingPongExecutor], experts: Sequence[RemoteExperts] = ()
    ) -> None:
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

    async def replace_hung_workers(self, limit_s: float) -> str:
        return ""

    def _run(self, batch: MicroBatch) -> StepResult:
        carried: HiddenStates | StepResult | None = None
        for stage in self.stages:
            incoming = carried
            assert not isinstance(incoming, StepResult)
            # called before the next round
            carried = stage.step(batch, lambda: incoming)  # noqa: B023
        assert isinstance(carried, StepResult)
        return carried


@contextmanager
def ping_pong_chain(
    plan: PipelinePlan, weights: WeightSource, actors: ExpertActors, max_open: int = 2
) -> Iterator[PingPongChain]:
    """Load the plan's stages without their experts, and connect them to the actors."""
    experts = [RemoteExperts(actors.plan, actors.connect) for _ in plan.stages]
    workers = [
        StageWorker.load(replace(stage, experts_inside=False), weights) for stage in plan.stages
    ]
    stages = [
        PingPongExecutor(worker, own, max_open, num_threads=1)
        for worker, own in zip(workers, experts, strict=True)
    ]
    try:
        yield PingPongChain(stages, experts)
    finally:
        for stage, own in zip(stages, experts, strict=True):
            stage.close()
            own.close()


def wait_until(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.005)


def without_experts(plan: PipelinePlan, experts: ExpertPlan) -> PipelinePlan:
    """Return the plan with its experts on actors instead of in its stages."""
    args, first = plan.args, plan.stages[0]
    own = [range(stage.first_layer, stage.last_layer) for stage in plan.stages]
    sizes = [
        sum(
            spec.num_bytes(first.weight_format)
            for spec in stage_tensors(args, layers, with_experts=False)
        )
        for layers in own
    ]
    stages = [
        replace(stage, experts_inside=False, weight_bytes=size)
        for stage, size in zip(plan.stages, sizes, strict=True)
    ]
    return replace(plan, stages=tuple(stages), experts=experts)


def _expert_process(pipe: "Connection[Any, Any]", plan: ExpertPlan, actor_id: int) -> None:
    """Run an expert actor. Sends None when loaded; then receives addresses of calls and sends those
    of replies.
    """
    worker = ExpertWorker.load(plan, actor_id, RandomWeights())
    server = ExpertServer(worker, plan, HOST, TcpChannelFactory(), num_threads=1)
    pipe.send(None)
    while True:
        pipe.send(server.open(pipe.recv()))


@contextmanager
def expert_processes(plan: ExpertPlan) -> Iterator[list["Connection[Any, Any]"]]:
    context = multiprocessing.get_context("spawn")
    with ExitStack() as stack:
        pipes = []
        for actor in plan.actors:
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_expert_process, args=(theirs, plan, actor.actor_id), daemon=True
            )
            process.start()
            stack.callback(process.kill)
            pipes.append(ours)
        for pipe in pipes:
            pipe.recv()
        yield pipes


def process_client(
    pipes: list["Connection[Any, Any]"], plan: ExpertPlan, actor_id: int, notify: Callable[[], None]
) -> DirectExpertClient:
    """Connect to the process of an actor, as ``remote_experts.Connect`` does."""

    def introduce(calls: Address) -> Address:
        pipes[actor_id].send(calls)
        address: Address = pipes[actor_id].recv()
        return address

    layout = ExpertMessageLayout.of(plan, CPU)
    return DirectExpertClient(
        introduce, notify, layout, HOST, TcpChannelFactory(), f"experts {actor_id}"
    )
