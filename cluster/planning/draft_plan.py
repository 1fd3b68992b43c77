"""Plan of a draft model: the whole model on one actor, with caches for as many sequences as it has
memory for.
"""

from dataclasses import replace

from tramontane.cluster.config.engine_config import EngineConfig
from tramontane.cluster.planning.hardware import Hardware
from tramontane.cluster.planning.planner import PlanRequest, StageBudget, make_plan
from tramontane.cluster.planning.runtime_memory import config_runtime
from tramontane.proto.errors import PlanError
from tramontane.proto.model_args import ModelArgs
from tramontane.proto.plan import PipelinePlan, StagePlan


def plan_draft_model(
    config: EngineConfig, args: ModelArgs, target: PipelinePlan, hardware: Hardware
) -> StagePlan:
    """Return the plan of the draft model's only stage. Raises PlanError if its weights and one
    sequence do not fit.
    """
    assert config.speculative_config is not None
    num_all = (len(target.stages) + config.expert_actors + 1) * config.max_pipelines
    memory = (
        min(gpu.memory for gpu in hardware.gpus)
        if hardware.gpus
        else hardware.stage_memory(num_all)
    )
    dtype = args.dtype if config.dtype == "auto" else config.dtype
    runtime = (
        config_runtime(config, args, dtype, target.max_num_seqs, target.max_num_batched_tokens)
        if hardware.gpus
        else None
    )
    request = PlanRequest(
        budgets=(StageBudget(memory, runtime=runtime),),
        dtype=dtype,
        max_model_len=min(target.max_model_len, args.max_seq_len),
        max_num_seqs=target.max_num_seqs,
        max_num_batched_tokens=target.max_num_batched_tokens,
        page_size=config.page_size,
        # it drafts before results come
        num_drafts=config.num_drafts + 1 + config.speculative_config.num_speculative_tokens,
        panel_rows=1 if hardware.gpus else hardware.panel_rows,
    )
    try:
        (stage,) = make_plan(args, request).stages
    except PlanError as error:
        raise PlanError(f"the draft model of --speculative-config: {error}") from error
    num_seqs = min(c.num_pages // c.ring_pages for c in stage.cache.classes)
    return replace(stage, max_num_seqs=min(num_seqs, target.max_num_seqs))
