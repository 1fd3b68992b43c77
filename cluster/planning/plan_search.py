"""From configuration and hardware to a plan: of the GPUs that the stages may get, those that make it fastest. Pure arithmetic."""

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

from tramontane.cluster.config.engine_config import EngineConfig
from tramontane.cluster.config.expert_load import per_expert
from tramontane.cluster.planning.capacity import suggest_fixes
from tramontane.cluster.planning.expert_planner import ExpertRequest, plan_experts
from tramontane.cluster.planning.gpu_placement import GpuSlot, expert_slots, partition_gpus, placement_candidates
from tramontane.cluster.planning.hardware import Hardware
from tramontane.cluster.planning.planner import PlanRequest, TooLittleMemoryError, layer_costs, make_plan
from tramontane.proto.errors import PlanError
from tramontane.proto.model_args import ModelArgs
from tramontane.proto.plan import PipelinePlan


def plan_pipeline(config: EngineConfig, args: ModelArgs, hardware: Hardware) -> PipelinePlan:
    """The plan of one of ``config.max_pipelines`` pipelines that share the hardware."""
    return search_plan(config, args, hardware)[0]


def search_plan(config: EngineConfig, args: ModelArgs, hardware: Hardware) -> tuple[PipelinePlan, tuple[GpuSlot, ...]]:
    """The fastest plan that fits, and what its stages and then its expert actors run on."""
    for_stages, for_experts = partition_gpus(config, hardware)
    plan, places = _best_stages(config, args, for_stages, hardware)
    if not config.expert_actors:
        return plan, places
    holding = expert_slots(config, len(plan.stages), for_experts, hardware)
    request = ExpertRequest(
        budgets=tuple(place.budget for place in holding),
        dtype=plan.stages[0].dtype,
        quantize=config.quantize,
        replicas=None if config.expert_replicas == "auto" else config.expert_replicas,
        loads=None if config.expert_load is None else per_expert(config.expert_load),
    )
    return replace(plan, experts=plan_experts(args, request)), (*places, *holding)


def _best_stages(
    config: EngineConfig, args: ModelArgs, hardware: Hardware, cluster: Hardware
) -> tuple[PipelinePlan, tuple[GpuSlot, ...]]:
    """Of equally fast plans that on the roomiest GPUs, of the cluster's those that are for stages.

    No plan is faster than the sum of its stages' speeds, which is why most choices need no planning:
    once one takes 10, choices with speeds 2 and 2 are of no use to a model of cost 40.
    """
    choices = placement_candidates(config, args.n_layers, hardware, cluster)
    costs = layer_costs(args, experts_inside=not config.expert_actors)
    best: tuple[Fraction, PipelinePlan, tuple[GpuSlot, ...]] | None = None
    for places in sorted(choices, key=lambda places: -_total_speed(places)):  # stable: the roomiest of equals first
        if best is not None and Fraction(sum(costs), _total_speed(places)) >= best[0]:
            break
        try:
            plan = make_plan(args, _request(config, args, places))
        except TooLittleMemoryError:
            continue
        time = max(
            Fraction(sum(costs[layer] for layer in stage.layers), place.budget.speed)
            for stage, place in zip(plan.stages, places, strict=True)
        )
        if best is None or time < best[0]:
            best = time, plan, places
    if best is None:
        raise _explain_failure(args, _request(config, args, choices[0]), config.stages_per_gpu if hardware.gpus else None)
    _, plan, places = best
    threads, together = stage_threads(config, len(plan.stages), hardware), hardware.stages_per_slot(config.stages_per_gpu)
    at_once = hardware.stages_at_once(len(plan.stages), threads, config.max_pipelines, together)
    return replace(plan, max_concurrent_stages=at_once), places


def stage_threads(config: EngineConfig, num_stages: int, hardware: Hardware) -> int:
    """CPU threads of each stage and expert actor of a pipeline: as was asked for, or an even share of the cores."""
    num_all = (num_stages + config.expert_actors) * config.max_pipelines
    return config.threads_per_stage or hardware.threads_per_stage(num_all, hardware.stages_per_slot(config.stages_per_gpu))


def _total_speed(places: Sequence[GpuSlot]) -> int:
    return sum(place.budget.speed for place in places)


def _request(config: EngineConfig, args: ModelArgs, places: Sequence[GpuSlot]) -> PlanRequest:
    return PlanRequest(
        budgets=tuple(place.budget for place in places),
        dtype=args.dtype if config.dtype == "auto" else config.dtype,
        max_model_len=config.max_model_len or args.max_seq_len,
        max_num_seqs=config.max_num_seqs,
        page_size=config.page_size,
        kv_cache_memory=config.kv_cache_memory,
        quantize=config.quantize,
        experts_inside=not config.expert_actors,
    )


def _explain_failure(args: ModelArgs, request: PlanRequest, per_gpu: int | None) -> PlanError:
    try:
        make_plan(args, request)
    except TooLittleMemoryError as error:
        return PlanError(f"{error}; {suggest_fixes(args, request, per_gpu)}")
    raise AssertionError("it was impossible before")
