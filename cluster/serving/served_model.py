"""The model that an ingress and the batch runner use, read from its folder."""

import ray

from tramontane.cluster.actors.worker_actor import annotate_node
from tramontane.cluster.config.engine_config import EngineConfig
from tramontane.cluster.config.engine_keys import MAX_SEQS_ON_GPUS, SEQS_ON_CPUS
from tramontane.proto.errors import CheckpointError
from tramontane.proto.model_folder import resolve_model_args
from tramontane.router.openai.served_model import ServedModel
from tramontane.router.tokenization.chat import ChatTemplate, NoChatTemplate
from tramontane.router.tokenization.loader import load_chat_template, load_tokenizer
from tramontane.workers.weights.checkpoint import CheckpointDigest, check_checkpoint_digest

WEIGHTS_SUFFIX = ".safetensors"  # files that only stages read


def load_checked_model(config: EngineConfig, checkpoint_digest: CheckpointDigest) -> ServedModel:
    """Load the model in a replica, if its folder on this node equals the folder of the node where
    the application was built.

    Raises CheckpointError, with the name of the node.
    """
    with annotate_node():
        check_checkpoint_digest(
            config.model,
            tuple(entry for entry in checkpoint_digest if not entry[0].endswith(WEIGHTS_SUFFIX)),
        )
        return load_served_model(config)


def load_served_model(config: EngineConfig) -> ServedModel:
    """Load the tokenizer and the model's bounds. Raises CheckpointError."""
    args = resolve_model_args(config.model)
    return ServedModel(
        name=config.model_name,
        tokenizer=load_tokenizer(config.model, args.vocab_size),
        max_model_len=config.max_model_len or args.max_seq_len,
        max_sequences=max_running(config) + config.max_queued_requests,
        vocab_size=args.vocab_size,
        expert_layers=args.moe_layers,
        experts_per_token=args.moe.num_experts_per_tok if args.moe else 0,
        eos_token_ids=frozenset(args.eos_token_ids),
        aliases=config.model_names[1:],
    )


def max_running(config: EngineConfig) -> int:
    """Return the most sequences that a pipeline may admit at once: as given, else the most that is
    ever planned here.
    """
    has_gpus = ray.is_initialized() and ray.cluster_resources().get("GPU", 0) > 0  # type: ignore[no-untyped-call]
    return config.max_num_seqs or (MAX_SEQS_ON_GPUS if has_gpus else SEQS_ON_CPUS)


def load_chat_format(config: EngineConfig, model: ServedModel) -> ChatTemplate:
    """Load the chat template; for a model without one, a template that refuses every conversation
    with the reason.
    """
    if model.tokenizer is None:
        return NoChatTemplate(
            "this model has no tokenizer, so it has no conversations; give token ids to"
            " /v1/completions"
        )
    try:
        return load_chat_template(config.model, model.tokenizer)
    except CheckpointError as error:
        return NoChatTemplate(str(error).replace(str(config.model), "the model's folder"))
