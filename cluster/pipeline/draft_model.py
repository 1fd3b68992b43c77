"""The draft model of a pipeline: whether it matches the large model, and the specification of its
actor.
"""

from dataclasses import replace
from pathlib import Path

from tramontane.cluster.actors.pipeline_spec import DraftModelSpec
from tramontane.cluster.config.engine_config import EngineConfig
from tramontane.cluster.planning.gpu_placement import draft_memory, draft_shares_gpu
from tramontane.cluster.planning.hardware import Hardware
from tramontane.cluster.planning.planner import PlanRequest, StageBudget, make_plan
from tramontane.cluster.planning.runtime_memory import config_runtime
from tramontane.proto.errors import CheckpointError, ConfigError, PlanError
from tramontane.proto.model_args import ModelArgs
from tramontane.proto.model_folder import detect_layout, is_preset, resolve_model_args
from tramontane.proto.plan import PipelinePlan, StagePlan
from tramontane.router.tokenization.loader import load_tokenizer
from tramontane.workers.weights.checkpoint import Checkpoint

# Plan of a draft model: the whole model on one actor, with caches for as many sequences as it has
# memory for.

# Of a micro-batch: other sequences draft next to a long text, and on GPUs graphs compute this many
# tokens.
MAX_BATCH_TOKENS = 512


def plan_draft_model(
    config: EngineConfig, args: ModelArgs, target: PipelinePlan, hardware: Hardware
) -> StagePlan:
    """Return the plan of the draft model's only stage. Raises PlanError if its weights and one
    sequence do not fit.
    """
    assert config.speculative_config is not None
    num_all = (len(target.stages) + config.expert_actors + 1) * config.max_pipelines
    memory = draft_memory(config, hardware) if hardware.gpus else hardware.stage_memory(num_all)
    dtype = args.dtype if config.dtype == "auto" else config.dtype
    max_tokens = min(max(MAX_BATCH_TOKENS, target.max_num_seqs), target.max_num_batched_tokens)
    runtime = (
        config_runtime(config, args, dtype, target.max_num_seqs, max_tokens)
        if hardware.gpus
        else None
    )
    request = PlanRequest(
        budgets=(StageBudget(memory, runtime=runtime),),
        dtype=dtype,
        max_model_len=min(target.max_model_len, args.max_seq_len),
        max_num_seqs=target.max_num_seqs,
        max_num_batched_tokens=max_tokens,
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


def draft_model_spec(
    config: EngineConfig, target: ModelArgs, plan: PipelinePlan, hardware: Hardware
) -> DraftModelSpec:
    """Return the specification of the configured draft model's actor.

    Raises the errors of ``validate_draft_model``, and PlanError if the model does not fit.
    """
    folder, args = _folder(config), validate_draft_model(config, target)
    return DraftModelSpec(
        plan_draft_model(config, args, plan, hardware),
        folder.resolve(),
        Checkpoint(folder).digest(),
        draft_shares_gpu(config, hardware),
    )


def validate_draft_model(config: EngineConfig, target: ModelArgs) -> ModelArgs:
    """Return the draft model's arguments.

    Raises ConfigError unless its folder is a checkpoint with the same tokens as the ``target``, and
    CheckpointError if it cannot be loaded.
    """
    folder = _folder(config)
    if is_preset(folder):
        raise ConfigError(
            f"--speculative-config: model is {folder}, a published geometry without weights; give a"
            " folder"
        )
    try:
        detect_layout(folder)
    except CheckpointError as error:
        reason = str(error).partition("; ")[0]  # the rest is advice about --model
        raise ConfigError(
            f"--speculative-config: {reason}; model has to be a downloaded checkpoint's folder"
        ) from error
    args = resolve_model_args(folder)
    checkpoint = Checkpoint(folder)
    args = checkpoint.with_stored_head(args)
    stored = checkpoint.check(args)
    if args.vocab_size != target.vocab_size or not _has_same_tokens(
        config.model, folder, args.vocab_size
    ):
        raise ConfigError(
            f"--speculative-config: the draft model {folder} has other tokens than {config.model}"
            f" ({args.vocab_size} and {target.vocab_size}); drafts are only possible between models"
            " with the same tokenizer"
        )
    return replace(args, dtype=stored) if config.dtype == "float32" else args


def _folder(config: EngineConfig) -> Path:
    """Return the folder of the draft model."""
    assert config.speculative_config is not None
    return Path(config.speculative_config.model)


def _has_same_tokens(target: Path, draft: Path, vocab_size: int) -> bool:
    """Return whether both have the same vocabulary, or one of them has no tokenizer."""
    tokenizers = [
        load_tokenizer(folder, vocab_size) for folder in (target, draft) if not is_preset(folder)
    ]
    vocabularies = [tokenizer.vocabulary() for tokenizer in tokenizers if tokenizer is not None]
    return all(vocabulary == vocabularies[0] for vocabulary in vocabularies)
