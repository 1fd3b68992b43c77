"""Tiny random models for tests: geometry, checkpoints, and workers that run them."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import sentencepiece
import torch
from safetensors.torch import save_file

from tramontane.cluster.planning.planner import PlanRequest, StageBudget, make_plan
from tramontane.proto.model_args import (
    GateScores,
    LatentArgs,
    ModelArgs,
    MoeArgs,
    SparseArgs,
    YarnScaling,
)
from tramontane.proto.plan import PipelinePlan
from tramontane.proto.weight_format import WeightFormat
from tramontane.workers.kernels.packed_linear import PackedLinear
from tramontane.workers.model.moe import ExpertPermutation
from tramontane.workers.model.transformer import StageModel
from tramontane.workers.sampling.structured_output import LoadVocabulary
from tramontane.workers.stage.device_backend import DeviceBackend
from tramontane.workers.stage.stage_worker import StageWorker
from tramontane.workers.weights.config_writer import to_hf_config
from tramontane.workers.weights.loader import allocate_contiguous
from tramontane.workers.weights.tensor_specs import stage_tensors

GIB = 2**30
SINGLE_NAME, INDEX_NAME = "model.safetensors", "model.safetensors.index.json"


def tiny_args(
    *,
    n_layers: int = 8,
    window: int | None = 24,
    windows: Sequence[int | None] | None = None,
    moe: bool = True,
    n_heads: int = 4,
    n_kv_heads: int = 2,
    head_dim: int = 8,
    max_seq_len: int = 1024,
    tied: bool = False,
) -> ModelArgs:
    return ModelArgs(
        dim=32,
        n_layers=n_layers,
        head_dim=head_dim,
        hidden_dim=48,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        norm_eps=1e-5,
        vocab_size=96,
        rope_theta=10_000.0,
        max_seq_len=max_seq_len,
        windows=tuple(windows) if windows is not None else (window,) * n_layers,
        moe=MoeArgs(4, 2) if moe else None,
        tied_embeddings=tied,
        dtype="float32",
    )


def latent_args(
    *, n_layers: int = 8, max_seq_len: int = 1024, is_sigmoid: bool = False
) -> ModelArgs:
    """Return a geometry with latent attention, a layer without experts, a shared expert, and odd
    ratios.
    """
    latent = LatentArgs(
        None if is_sigmoid else 50,
        kv_lora_rank=34,
        qk_nope_head_dim=10,
        qk_rope_head_dim=6,
        v_head_dim=18,
    )
    softmax = MoeArgs(
        5, 3, expert_dim=70, n_shared_experts=1, first_k_dense_replace=1, scores=GateScores.SOFTMAX
    )
    sigmoid = replace(
        softmax,
        num_experts=6,
        num_experts_per_tok=2,
        scores=GateScores.SIGMOID,
        n_group=3,
        topk_group=2,
    )
    return replace(
        tiny_args(n_layers=n_layers, window=None, max_seq_len=max_seq_len),
        n_kv_heads=1,
        head_dim=latent.cached_dim,
        latent=latent,
        moe=replace(sigmoid, routed_scaling_factor=1.5) if is_sigmoid else softmax,
        rope_scaling=YarnScaling(
            factor=8.0, original_max_seq_len=32, llama4_beta=0.1, score_factor=1.4
        ),
    )


def sparse_args(*, max_seq_len: int = 1024) -> ModelArgs:
    """Return a geometry with sparse attention, of which stages can begin with layers 0, 1, 2 and
    4.
    """
    base = latent_args(n_layers=5, max_seq_len=max_seq_len)
    assert base.latent is not None
    return replace(
        base,
        latent=replace(base.latent, q_lora_rank=None),
        moe=base.moe and replace(base.moe, float32_gate=True),
        rope_scaling=YarnScaling(factor=8.0, original_max_seq_len=32),
        sparse=SparseArgs(
            rope_layers=(True, False, True, True, True),
            kv_source_layers=(0, 1, 2, 2, 4),
            index_source_layers=(0, 1, 2, 2, 4),
            index_n_heads=7,
            index_head_dim=22,
            index_topk=21,
        ),
        final_logit_softcapping=20.0,
    )


ATTENTION_KINDS = {
    "window": tiny_args(n_layers=4, window=24, max_seq_len=256),
    "interleaved": tiny_args(n_layers=4, windows=(None, 24, 7, None), max_seq_len=256),
    "dense": tiny_args(n_layers=4, window=None, moe=False, max_seq_len=256),
    "latent": latent_args(n_layers=4, max_seq_len=256),
    "sparse": sparse_args(max_seq_len=256),
}


def few_experts(args: ModelArgs) -> ModelArgs:
    """Return a geometry with 16 experts in a layer at most: 128 small ones take seconds to load,
    and show no more.
    """
    return (
        replace(args, moe=replace(args.moe, num_experts=min(args.moe.num_experts, 16)))
        if args.moe
        else args
    )


def random_model(args: ModelArgs, seed: int = 0) -> StageModel:
    """Return a complete model in float32, with weights large enough that its logits differ
    clearly.
    """
    generator = torch.Generator().manual_seed(seed)
    model = StageModel(args, range(args.n_layers))
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            std = 1.0 if "tok_embeddings" in name else 1.2 / parameter.shape[1] ** 0.5
            parameter.data = torch.randn(parameter.shape, generator=generator) * std
        elif name.endswith("head_scaling.scale"):
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.2
    for buffer in model.buffers():  # of gates, and of rotary frequencies
        buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.3)
    if args.tied_embeddings:
        assert model.output is not None
        assert model.tok_embeddings is not None
        model.output.weight = model.tok_embeddings.weight
    return model.eval()


def split_model(
    whole: StageModel,
    plan: PipelinePlan,
    read_pieces: LoadVocabulary = tuple,
    backend: DeviceBackend | None = None,
) -> list[StageWorker]:
    """Return stages that share the complete model's weights."""
    workers = []
    state = whole.state_dict()
    for stage in plan.stages:
        with torch.device("meta"):
            part = StageModel(plan.args, stage.layers)
        part.load_state_dict({name: state[name] for name in part.state_dict()}, assign=True)
        workers.append(StageWorker(stage, part, read_pieces=read_pieces, backend=backend))
    return workers


def experts_together(model: StageModel, dtype: torch.dtype = torch.float32) -> StageModel:
    """Return the model with its experts contiguous in memory."""
    args = model.args
    name = str(dtype).removeprefix("torch.")
    places = allocate_contiguous(
        stage_tensors(args, model.global_layers), WeightFormat(name, stored=name), "cpu"
    )
    state = {name: tensor.to(dtype) for name, tensor in model.state_dict().items()}
    for name, place in places.items():
        state[name] = place.copy_(state[name])
    with torch.device("meta"):
        made = StageModel(args, model.global_layers)
    made.load_state_dict(state, assign=True)
    made.finalize_weights(torch.device("cpu"))
    return made.eval()


def groups_of(sizes: Sequence[int]) -> ExpertPermutation:
    """Return a permutation with these numbers of rows per expert."""
    expert_ids = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    return ExpertPermutation.of(expert_ids[:, None], len(sizes))


def loaded_state(worker: StageWorker) -> dict[str, torch.Tensor]:
    """Return a stage's weights by parameter name, with packed ones in plain order."""
    packed = {
        name: module
        for name, module in worker.model.named_modules()
        if isinstance(module, PackedLinear)
    }
    return worker.model.state_dict() | {
        f"{name}.weight": unpacked(module) for name, module in packed.items()
    }


def unpacked(linear: PackedLinear) -> torch.Tensor:
    """Return the weight in plain order, without its scales: the products with every unit vector."""
    unit_KK = torch.eye(linear.in_features, dtype=linear.matmul.dtype)
    weight_KN = linear.matmul.multiply(unit_KK, linear.weight, linear.out_features)
    is_integer = not linear.weight.dtype.is_floating_point
    return (weight_KN.round() if is_integer else weight_KN).T.contiguous().to(linear.weight.dtype)


def tiny_plan(
    args: ModelArgs,
    num_stages: int = 1,
    page_size: int = 16,
    max_num_seqs: int = 64,
    **changes: Any,
) -> PipelinePlan:
    request = PlanRequest(
        budgets=(StageBudget(4 * GIB),) * num_stages,
        dtype="float32",
        max_model_len=args.max_seq_len,
        max_num_seqs=max_num_seqs,
        page_size=page_size,
    )
    return make_plan(args, replace(request, **changes))


def write_each_kind(folder: Path) -> dict[str, Path]:
    """Write a checkpoint of each of ``ATTENTION_KINDS``; return their folders."""
    return {
        kind: write_checkpoint(folder / kind, args, random_model(args))
        for kind, args in ATTENTION_KINDS.items()
    }


def write_checkpoint(folder: Path, args: ModelArgs, model: StageModel | None = None) -> Path:
    """Write a checkpoint in the Hugging Face layout, without a tokenizer; with random weights if no
    model is given.
    """
    state = (model or random_model(args)).state_dict()
    tensors = {
        s.name: state[s.parameter][s.rows].clone()
        for s in stage_tensors(args, range(args.n_layers))
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(to_hf_config(args)))
    return folder


SAMPLE = (
    "The quick brown fox jumps over the lazy dog.\nIt was the best of times, it was the worst of"
    " times.\n"
)


def write_tokenizer(folder: Path, vocab_size: int = 300) -> Path:
    """Train a SentencePiece model with few pieces, so that most characters fall back to bytes."""
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SAMPLE.splitlines() * 20),
        model_prefix=str(folder / "tokenizer"),
        vocab_size=vocab_size,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    return folder
