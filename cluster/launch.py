"""Wires everything: configuration -> plan -> stages -> chain -> router."""

import asyncio
import logging
import os
import secrets
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from tramontane.cluster.config import EngineConfig
from tramontane.cluster.hardware import Hardware, joined_cluster, this_machine
from tramontane.cluster.planner import PlanRequest, make_plan
from tramontane.cluster.ray_chain import RayStageChain
from tramontane.cluster.supervisor import PipelineSpec, create_supervisor
from tramontane.proto.errors import ConfigError, PipelineError, PlanError
from tramontane.proto.model_args import ModelArgs
from tramontane.proto.plan import ClusterPlan
from tramontane.proto.ports import StageChain
from tramontane.proto.step import StepResult
from tramontane.router.router import Router
from tramontane.router.scheduler import Limits, Scheduler
from tramontane.router.usage import UsageMeter
from tramontane.workers.checkpoint import Checkpoint
from tramontane.workers.tensor_names import stage_tensors

PLACEMENT_TIMEOUT_S = 60.0
OBJECT_STORE_BYTES = 512 * 2**20  # of a local Ray: a few micro-batches of hidden states
Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Engine:
    """A pipeline that is running, and what there is to know about it."""

    plan: ClusterPlan
    router: Router
    usage: UsageMeter


@asynccontextmanager
async def open_engine(
    config: EngineConfig, report: Report = lambda _: None, observe: Callable[[StepResult], None] = lambda _: None
) -> AsyncIterator[Engine]:
    """Start a pipeline, run its router, and remove everything at the end.

    ``report`` hears what is being waited for; ``observe`` sees every step's result.
    """
    args = ModelArgs.from_folder(config.model)
    report("checking the checkpoint")
    Checkpoint(config.model).check(stage_tensors(args, range(args.n_layers)))
    pipeline = _local_pipeline if config.local else _ray_pipeline
    with pipeline(config, args, report) as (plan, chain):
        usage = UsageMeter(len(plan.stages))

        def on_result(result: StepResult) -> None:
            usage.observe(result)
            observe(result)

        router = Router(_scheduler(config, plan), chain, on_result)
        running = asyncio.create_task(router.run())
        try:
            yield Engine(plan, router, usage)
        finally:
            running.cancel()
            with suppress(asyncio.CancelledError):
                await running


def plan_for(config: EngineConfig, args: ModelArgs, hardware: Hardware) -> ClusterPlan:
    num_stages = config.stages or min(hardware.default_stages, args.n_layers)
    return make_plan(
        args,
        PlanRequest(
            num_stages=num_stages,
            stage_memory=hardware.stage_memory(num_stages),
            dtype=args.dtype if config.dtype == "auto" else config.dtype,
            max_model_len=config.max_model_len or args.max_seq_len,
            max_num_seqs=config.max_num_seqs,
            page_size=config.page_size,
            kv_cache_memory=config.kv_cache_memory,
        ),
    )


def _scheduler(config: EngineConfig, plan: ClusterPlan) -> Scheduler:
    limits = Limits(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=plan.max_model_len,
        max_in_flight=config.max_in_flight or len(plan.stages) + 1,
        eos_token_ids=plan.args.eos_token_ids,
    )
    return Scheduler(plan.cache, limits)


@contextmanager
def _local_pipeline(config: EngineConfig, args: ModelArgs, report: Report) -> Iterator[tuple[ClusterPlan, StageChain]]:
    hardware = this_machine()
    plan = plan_for(config, args, hardware)
    report("loading the model")
    import torch  # with --local the stages are in this process; otherwise it never needs torch

    from tramontane.cluster.local_chain import LocalStageChain
    from tramontane.workers.stage_worker import StageWorker

    torch.set_num_threads(config.threads_per_stage or hardware.num_cpus)  # one stage at a time works here
    device = "cuda" if hardware.num_gpus else "cpu"
    chain = LocalStageChain([StageWorker.load(stage, config.model, device) for stage in plan.stages])
    try:
        yield plan, chain
    finally:
        chain.close()


@contextmanager
def _ray_pipeline(config: EngineConfig, args: ModelArgs, report: Report) -> Iterator[tuple[ClusterPlan, StageChain]]:
    with _connected(config, args, report) as hardware:
        plan = plan_for(config, args, hardware)
        spec = PipelineSpec(
            name=f"tramontane-{uuid.uuid4().hex[:8]}",
            plan=plan,
            folder=config.model.resolve(),
            threads_per_stage=config.threads_per_stage or hardware.threads_per_stage(len(plan.stages)),
            use_gpus=hardware.num_gpus > 0,
        )
        report(f"loading {len(plan.stages)} stages")
        supervisor = create_supervisor(spec)
        try:
            yield plan, RayStageChain(_started(supervisor, spec))
        finally:
            report("removing the stages")
            with suppress(RayError):
                ray.get(supervisor.stop.remote())
            ray.kill(supervisor)


def _started(supervisor: ActorHandle[Any], spec: PipelineSpec) -> list[ActorHandle[Any]]:
    try:
        stages: list[ActorHandle[Any]] | None = ray.get(supervisor.start.remote(PLACEMENT_TIMEOUT_S))
    except RayError as error:
        raise PipelineError(f"the stages could not be started: {str(error).strip().splitlines()[-1]}") from error
    if stages is None:
        free = {name: ray.available_resources().get(name, 0) for name in spec.bundles[0]}
        raise PlanError(
            f"the cluster has no room for {len(spec.bundles)} stages of {spec.bundles[0]}: free are {free}; "
            "use fewer --stages or --threads-per-stage"
        )
    return stages


@contextmanager
def _connected(config: EngineConfig, args: ModelArgs, report: Report) -> Iterator[Hardware]:
    """Join the cluster at ``config.address``, or start one for this command alone."""
    if config.address is not None:
        report(f"joining Ray at {config.address}")
        try:
            ray.init(address=config.address, log_to_driver=False, logging_level=logging.ERROR)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise ConfigError(f"no Ray cluster answers at --address {config.address}: {str(error).splitlines()[0]}") from error
    else:
        hardware = this_machine()
        num_stages = len(plan_for(config, args, hardware).stages)  # refuse what cannot fit before Ray is started
        report("starting Ray")
        _start_ray(num_stages * (config.threads_per_stage or hardware.threads_per_stage(num_stages)))
    try:
        yield joined_cluster() if config.address is not None else hardware
    finally:
        ray.shutdown()


def _start_ray(num_cpus: int) -> None:
    # Ray asks for a token in clusters that ray.init starts, and would leave one in the user's home.
    # Ours lives as long as this process. Whoever sets RAY_AUTH_MODE has decided otherwise.
    if "RAY_AUTH_MODE" not in os.environ:
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    try:
        ray.init(
            address="local",
            num_cpus=num_cpus,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            object_store_memory=OBJECT_STORE_BYTES,
            _node_ip_address="127.0.0.1",
            _system_config={
                "max_direct_call_object_size": 2**20,  # hidden states up to 1 MiB ride inline
                "timeout_ms_task_wait_for_death_info": 0,  # a dead stage is seen at once
            },
        )
    except (RuntimeError, OSError) as error:
        raise PipelineError(f"Ray could not be started: {str(error).splitlines()[0]}") from error
