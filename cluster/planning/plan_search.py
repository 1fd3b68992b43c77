"""Search for the fastest plan: the assignment of the available GPUs to stages. Pure arithmetic."""

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from functools import partial

from tramontane.cluster.config.engine_config import EngineConfig
from tramontane.cluster.config.measurements import per_expert
from tramontane.cluster.planning.batch_limits import (
    Limits,
    least_limits,
    matrix_tflops,
    with_chosen_limits,
)
from tramontane.cluster.planning.capacity import suggest_fixes
from tramontane.cluster.planning.expert_planner import ExpertRequest, plan_experts
from tramontane.cluster.planning.gpu_placement import (
    GpuSlot,
    expert_slots,
    partition_gpus,
    placement_candidates,
    without_draft_gpus,
)
from tramontane.cluster.planning.hardware import Hardware
from tramontane.cluster.planning.planner import (
    PlanRequest,
    TooLittleMemoryError,
    layer_costs,
    make_plan,
)
from tramontane.cluster.planning.runtime_memory import config_runtime
from tramontane.proto.errors import PlanError
from tramontane.proto.model_args import ModelArgs
from tramontane.proto.plan import PipelinePlan


def plan_pipeline(config: EngineConfig, args: ModelArgs, hardware: Hardware) -> PipelinePlan:
    """Return the plan of one of ``config.max_pipelines`` pipelines that share the hardware; raises
    the errors of ``search_plan``.
    """
    return search_plan(config, args, hardware)[0]


def search_plan(
    config: EngineConfig, args: ModelArgs, hardware: Hardware
) -> tuple[PipelinePlan, tuple[GpuSlot, ...]]:
    """Return the fastest plan that fits, and the slots of its stages, then of its expert actors.

    Raises PlanError if nothing fits, with changes that would help, or ConfigError.
    """
    for_stages, for_experts = partition_gpus(config, without_draft_gpus(config, hardware))
    plan, slots = _best_stages(config, args, for_stages, hardware)
    if not config.expert_actors:
        return plan, slots
    slots_of_experts = expert_slots(config, len(plan.stages), for_experts, hardware)
    request = ExpertRequest(
        budgets=tuple(slot.budget for slot in slots_of_experts),
        dtype=plan.stages[0].dtype,
        quantize=config.quantize,
        replicas=None if config.expert_replicas == "auto" else config.expert_replicas,
        loads=None if config.expert_load is None else per_expert(config.expert_load),
        batch_invariant=config.batch_invariant,
    )
    return replace(plan, experts=plan_experts(args, request)), (*slots, *slots_of_experts)


def _best_stages(
    config: EngineConfig, args: ModelArgs, hardware: Hardware, cluster: Hardware
) -> tuple[PipelinePlan, tuple[GpuSlot, ...]]:
    """Return the fastest plan on the stages' GPUs; of equally fast plans, the one on the largest
    GPUs.

    No plan is faster than the model's cost divided by the sum of its stages' speeds, so most
    candidates need no planning: once a plan takes 10, candidates with speeds 2 and 2 are useless
    for a model of cost 40.
    """
    candidates = placement_candidates(config, len(args.layer_groups), hardware, cluster)
    costs = layer_costs(
        args, experts_inside=not config.expert_actors, stage_times=config.stage_times
    )
    limits = least_limits(config)
    best: tuple[Fraction, PipelinePlan, tuple[GpuSlot, ...]] | None = None
    # the sort is stable: of equally fast candidates, the one with the largest GPUs stays first
    for slots in sorted(candidates, key=lambda slots: -_total_speed(slots)):
        if best is not None and Fraction(sum(costs), _total_speed(slots)) >= best[0]:
            break
        try:
            plan = make_plan(args, _request(config, args, slots, hardware, limits))
        except TooLittleMemoryError:
            continue
        time = max(
            Fraction(sum(costs[layer] for layer in stage.layers), slot.budget.speed)
            for stage, slot in zip(plan.stages, slots, strict=True)
        )
        if best is None or time < best[0]:
            best = time, plan, slots
    if best is None:
        request = _request(config, args, candidates[0], hardware, limits)
        raise _explain_failure(args, request, config.stages_per_gpu if hardware.gpus else None)
    _, plan, slots = best
    if hardware.gpus:
        tflops = matrix_tflops(gpu.name for gpu in hardware.gpus)
        plan = with_chosen_limits(
            config, args, plan, partial(_request, config, args, slots, hardware), tflops
        )
    threads, per_slot = (
        stage_threads(config, len(plan.stages), hardware),
        hardware.stages_per_slot(config.stages_per_gpu),
    )
    at_once = hardware.stages_at_once(len(plan.stages), threads, config.max_pipelines, per_slot)
    return replace(plan, max_concurrent_stages=at_once, on_gpus=bool(hardware.gpus)), slots


def stage_threads(config: EngineConfig, num_stages: int, hardware: Hardware) -> int:
    """Return the CPU threads of each stage, expert actor and draft model: as configured, or an even
    share of the cores.
    """
    num_all = (num_stages + config.expert_actors + config.num_draft_models) * config.max_pipelines
    return config.threads_per_stage or hardware.threads_per_stage(
        num_all, hardware.stages_per_slot(config.stages_per_gpu)
    )


def _total_speed(slots: Sequence[GpuSlot]) -> int:
    return sum(slot.budget.speed for slot in slots)


def _request(
    config: EngineConfig,
    args: ModelArgs,
    slots: Sequence[GpuSlot],
    hardware: Hardware,
    limits: Limits,
) -> PlanRequest:
    dtype = args.dtype if config.dtype == "auto" else config.dtype
    is_inside = not config.expert_actors
    runtime = (
        config_runtime(config, args, dtype, *limits, experts_inside=is_inside)
        if hardware.gpus
        else None
    )
    return PlanRequest(
        budgets=tuple(replace(slot.budget, runtime=runtime) for slot in slots),
        dtype=dtype,
        max_model_len=config.max_model_len or args.max_seq_len,
        max_num_seqs=limits.num_seqs,
        max_num_batched_tokens=limits.num_tokens,
        page_size=config.page_size,
        kv_cache_memory=config.kv_cache_memory,
        quantize=config.quantize,
        experts_inside=is_inside,
        stage_times=config.stage_times,
        batch_invariant=config.batch_invariant,
        num_drafts=config.num_drafts,
        kv_cache_dtype=config.kv_cache_dtype,
        panel_rows=1 if hardware.gpus else hardware.panel_rows,
    )


def _explain_failure(args: ModelArgs, request: PlanRequest, per_gpu: int | None) -> PlanError:
    """Return the error of a request that does not fit, with changes that would help."""
    try:
        make_plan(args, request)
    except TooLittleMemoryError as error:
        return PlanError(f"{error}; {suggest_fixes(args, request, per_gpu)}")
    raise AssertionError("no candidate had a plan")
