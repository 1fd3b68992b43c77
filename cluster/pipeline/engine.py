"""Construction of an engine: configuration -> plan -> stages -> stage chain -> router."""

import asyncio
import logging
import threading
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from tramontane.cluster.actors.draft_actor import draft_port
from tramontane.cluster.actors.pipeline_spec import PipelineSpec, TokenPieceLoader
from tramontane.cluster.config.engine_config import EngineConfig
from tramontane.cluster.config.measurements import StageDevice
from tramontane.cluster.pipeline.draft_model import draft_model_spec
from tramontane.cluster.pipeline.lifecycle import running_pipeline
from tramontane.cluster.pipeline.load_progress import LoadProgress, ShowLoading
from tramontane.cluster.pipeline.ray_cluster import join_ray_cluster, local_ray_cluster
from tramontane.cluster.pipeline.resources import check_placeable, read_resources
from tramontane.cluster.pipeline.stage_chain import weights_name
from tramontane.cluster.planning.gpu_placement import stage_speeds
from tramontane.cluster.planning.hardware import (
    Hardware,
    TooFewNodesError,
    check_ray_gpus,
    probe_local,
)
from tramontane.cluster.planning.plan_search import plan_pipeline, search_plan, stage_threads
from tramontane.cluster.ray_internals.accessors import has_autoscaler
from tramontane.proto.end_tokens import NOTHING_ENDS
from tramontane.proto.errors import PipelineError
from tramontane.proto.model_args import ModelArgs
from tramontane.proto.model_folder import is_preset, resolve_model_args
from tramontane.proto.plan import PipelinePlan
from tramontane.proto.ports import DraftPort, StageChain
from tramontane.proto.step import StepResult
from tramontane.router.engine.router import Router, run_with_drafts
from tramontane.router.engine.stats import UsageMeter
from tramontane.router.scheduling.balanced_policy import BalancedPolicy
from tramontane.router.scheduling.policy import FixedInFlightPolicy, Policy
from tramontane.router.scheduling.scheduler import Scheduler
from tramontane.router.scheduling.waiting_queue import SchedulerLimits
from tramontane.workers.stage.step_profile import read_profile
from tramontane.workers.weights.checkpoint import (
    Checkpoint,
    CheckpointDigest,
    checkpoint_digest_without_weights,
)

logger = logging.getLogger(__name__)

Report = Callable[[str], None]


class Chain(StageChain, Protocol):
    """A stage chain that knows the devices of its stages."""

    async def device_names(self) -> list[str]:
        """Return the name of every stage's device. Raises PipelineError if a stage does not
        answer.
        """
        ...

    async def fingerprint(self) -> str:
        """Return the pipeline's fingerprint; "" if it is unavailable now."""
        ...


Started = tuple[PipelinePlan, Chain, Hardware, DraftPort | None]


@dataclass(frozen=True, slots=True)
class Engine:
    """A running pipeline: its plan, its router, the usage of its stages, and a function that
    queries their devices.
    """

    plan: PipelinePlan
    router: Router
    usage: UsageMeter
    list_devices: Callable[[], Awaitable[tuple[StageDevice, ...]]]


@asynccontextmanager
async def open_engine(
    config: EngineConfig,
    report: Report = lambda _: None,
    observe: Callable[[StepResult], None] = lambda _: None,
    show_loading: ShowLoading | None = None,
) -> AsyncIterator[Engine]:
    """Start a pipeline, run its router, and remove everything at the end.

    ``report`` is called with descriptions of waits, ``show_loading`` with the progress of loading,
    ``observe`` with every step's result. Raises CheckpointError, ConfigError, PlanError or
    PipelineError.
    """
    report("checking the checkpoint")
    args = validate_model(config)
    pipeline = _local_pipeline if config.local else _ray_pipeline
    async with pipeline(config, args, report, show_loading) as (plan, chain, hardware, draft_model):
        usage = UsageMeter(len(plan.stages))

        def on_result(result: StepResult) -> None:
            usage.observe(result)
            observe(result)

        scheduler = make_scheduler(config, plan)
        router = Router(
            scheduler,
            chain,
            on_result,
            step_timeout_s=config.step_timeout,
            read_fingerprint=chain.fingerprint,
        )
        running = asyncio.create_task(run_with_drafts(router, draft_model))
        try:
            yield Engine(plan, router, usage, partial(_list_devices, config, hardware, chain))
        finally:
            running.cancel()
            with suppress(asyncio.CancelledError):
                await running


async def _list_devices(
    config: EngineConfig, hardware: Hardware, chain: Chain
) -> tuple[StageDevice, ...]:
    names = await chain.device_names()
    return tuple(map(StageDevice, names, stage_speeds(config, hardware, names)))


def validate_model(config: EngineConfig) -> ModelArgs:
    """Return the model's arguments. Raises CheckpointError if the checkpoint's tensors do not match
    them.

    A head that differs from the embeddings is used, even if the configuration says that they are
    tied. With ``dtype`` float32 matrices keep their stored dtype, so the arguments then have the
    stored dtype and not the configuration's. Logs a warning if the model has no end token. Raises
    ConfigError if the environment requests a profile that no stage could record.
    """
    read_profile()
    args = resolve_model_args(config.model)
    if not args.eos_token_ids:
        logger.warning(NOTHING_ENDS, config.model)
    if config.load_format != "auto":
        return args
    checkpoint = Checkpoint(config.model)
    args = checkpoint.with_stored_head(args)
    stored = checkpoint.check(args)
    return replace(args, dtype=stored) if config.dtype == "float32" else args


def model_checkpoint_digest(config: EngineConfig) -> CheckpointDigest:
    """Return the digest of the files that are read from the model's folder; () for a preset."""
    if is_preset(config.model):
        return ()
    if config.load_format == "dummy":
        return checkpoint_digest_without_weights(config.model)
    return Checkpoint(config.model).digest()


def make_scheduler(
    config: EngineConfig, plan: PipelinePlan, *, bounded: bool = False, model: str = ""
) -> Scheduler:
    """Return a scheduler for the plan. ``bounded``: the waiting queue is limited, as it must be
    behind an ingress.

    ``model``: see ``SchedulerLimits``.
    """
    limits = SchedulerLimits(
        max_num_seqs=plan.max_num_seqs,
        max_num_batched_tokens=_max_tokens(config, plan),
        max_model_len=plan.max_model_len,
        vocab_size=plan.args.vocab_size,
        eos_token_ids=plan.args.eos_token_ids,
        max_queued_seqs=config.max_queued_requests if bounded else None,
        max_queued_tokens=config.max_queued_tokens if bounded else None,
        enable_prefix_caching=config.enable_prefix_caching,
        share_prefixes=config.share_prefixes,
        model=model,
        speculative=config.speculative_config,
        async_scheduling=_schedules_async(config, plan),
    )
    return Scheduler(plan.cache, limits, _policy_for(config, plan))


def _max_tokens(config: EngineConfig, plan: PipelinePlan) -> int:
    """Return the maximum number of tokens of a micro-batch: as configured now, else from the plan
    of the pipeline, which may be an earlier one.
    """
    return config.max_num_batched_tokens or plan.max_num_batched_tokens


def _schedules_async(config: EngineConfig, plan: PipelinePlan) -> bool:
    """Return whether steps are submitted before the tokens of the previous steps are known.

    Stages that compute at the same time are kept busy by several micro-batches, and drafts go ahead
    of tokens in their own way. With expert actors a step begins before the previous one has
    sampled. With ``--local`` there is almost no gap between two steps. Stages that take turns on
    the cores of a machine need all of them, and would share them with the router.
    """
    is_one_at_a_time = len(plan.stages) == 1 or (plan.on_gpus and plan.max_concurrent_stages == 1)
    is_possible = is_one_at_a_time and not (
        plan.experts or config.speculative_config or config.local
    )
    return config.async_scheduling and is_possible and config.max_in_flight is None


def _policy_for(config: EngineConfig, plan: PipelinePlan) -> Policy:
    """Return the configured policy; with ``--local`` one micro-batch runs at a time, and splitting
    decodes would only cost time.
    """
    max_in_flight = config.max_in_flight or (1 if config.local else None)
    if max_in_flight is not None:
        return FixedInFlightPolicy(max_in_flight, _max_tokens(config, plan))
    itl_target_s = None if config.itl_target_ms is None else config.itl_target_ms / 1000
    return BalancedPolicy(
        len(plan.stages),
        _max_tokens(config, plan),
        itl_target_s,
        plan.max_concurrent_stages,
        open_per_stage=config.expert_micro_batches if plan.experts else None,
        async_scheduling=_schedules_async(config, plan),
    )


def local_devices(num_gpus: int, stages_per_gpu: int) -> list[str]:
    """Return the devices of consecutive stages: cuda:0, cuda:0, cuda:1, cuda:1 for 2 GPUs with 2
    stages each.
    """
    return [f"cuda:{index}" for index in range(num_gpus) for _ in range(stages_per_gpu)] or ["cpu"]


@asynccontextmanager
async def _local_pipeline(
    config: EngineConfig, args: ModelArgs, report: Report, show_loading: ShowLoading | None
) -> AsyncIterator[Started]:
    hardware = probe_local()
    plan = plan_pipeline(config, args, hardware)
    report(f"loading the model, {plan.describe_memory()}")
    import torch  # only with --local are the stages in this process

    from tramontane.cluster.pipeline.local_chain import LocalStageChain

    # one stage computes at a time
    torch.set_num_threads(config.threads_per_stage or hardware.threads_per_stage(1))
    devices = local_devices(len(hardware.gpus), config.stages_per_gpu)
    stopped = threading.Event()

    def show_unless_stopped(loading: Sequence[LoadProgress]) -> None:
        if stopped.is_set():
            raise PipelineError("loading was interrupted")
        if show_loading is not None:
            show_loading(loading)

    pieces = TokenPieceLoader(config.model, args.vocab_size)

    def load() -> LocalStageChain:
        name = weights_name(config.weights, model_checkpoint_digest(config), config.model)
        return LocalStageChain.load(
            plan, config.weights, devices, show_unless_stopped, pieces, name
        )

    try:  # in a thread, so that the event loop can handle Ctrl-C
        chain = await asyncio.to_thread(load)
    finally:
        stopped.set()
    try:
        yield plan, chain, hardware, None
    finally:
        chain.close()


@asynccontextmanager
async def _ray_pipeline(
    config: EngineConfig, args: ModelArgs, report: Report, show_loading: ShowLoading | None
) -> AsyncIterator[Started]:
    if config.address is not None:
        report(f"joining Ray at {config.address}")
        with join_ray_cluster(config.address, compare_gpus=config.gpu_speed is None) as hardware:
            spec = joined_pipeline_spec(config, args, hardware)
            check_placeable(spec, await asyncio.to_thread(read_resources))
            async with running_pipeline(spec, report, show_loading=show_loading) as chain:
                yield spec.plan, chain, hardware, draft_port(spec)
        return
    hardware = probe_local()
    spec = pipeline_spec(config, args, hardware)  # raises PlanError before Ray is started
    report("starting Ray")
    with local_ray_cluster(
        num_cpus=spec.num_workers * spec.threads_per_stage,
        inline_hidden_states_below=config.inline_hidden_states_below,
    ):
        check_ray_gpus(hardware)
        async with running_pipeline(spec, report, show_loading=show_loading) as chain:
            yield spec.plan, chain, hardware, draft_port(spec)


def joined_pipeline_spec(config: EngineConfig, args: ModelArgs, hardware: Hardware) -> PipelineSpec:
    """Return ``pipeline_spec`` of the joined cluster. Raises the same errors.

    A plan is made for the existing GPUs, and Ray's autoscaler is not asked for more before there is
    a plan.
    """
    try:
        return pipeline_spec(config, args, hardware)
    except TooFewNodesError as error:
        if not has_autoscaler():
            raise
        raise TooFewNodesError(
            f"{error}, or let Ray's autoscaler add nodes first (see docs/planning.md)"
        ) from error


def pipeline_spec(
    config: EngineConfig,
    args: ModelArgs,
    hardware: Hardware,
    name: str | None = None,
    checkpoint_digest: CheckpointDigest | None = None,
) -> PipelineSpec:
    """Return the specification of one of ``config.max_pipelines`` pipelines.

    Without a name it gets a unique one; without a checkpoint digest, the digest of the model's
    folder on this machine. Raises the errors of ``search_plan``.
    """
    plan, slots = search_plan(config, args, hardware)
    draft_model = (
        draft_model_spec(config, args, plan, hardware) if config.num_draft_models else None
    )
    per_slot, num_stages = hardware.stages_per_slot(config.stages_per_gpu), len(plan.stages)
    return PipelineSpec(
        name=name or f"tramontane-{uuid.uuid4().hex[:8]}",
        plan=plan,
        weights=config.weights,
        threads_per_stage=stage_threads(config, num_stages, hardware),
        use_gpus=bool(hardware.gpus),
        stages_per_gpu=per_slot,
        nodes=tuple(slot.nodes for slot in (*slots[:num_stages:per_slot], *slots[num_stages:])),
        checkpoint_digest=model_checkpoint_digest(config)
        if checkpoint_digest is None
        else checkpoint_digest,
        link=config.link,
        expert_micro_batches=config.expert_micro_batches,
        pieces=TokenPieceLoader(config.model, args.vocab_size),
        placement_timeout_s=config.placement_timeout,
        logs=config.logs,
        draft_model=draft_model,
    )
