"""Models of 200 to 300 million parameters for benchmarks, in the shapes of published ones."""

from dataclasses import replace

from tramontane.proto.model_args import GateScores, LatentArgs, ModelArgs, MoeArgs, YarnScaling
from tramontane.proto.presets import PRESETS

MISTRAL_300M = replace(
    PRESETS["mistral-7b-v0.1"],
    dim=1024,
    n_layers=16,
    head_dim=64,
    hidden_dim=3584,
    n_heads=16,
    n_kv_heads=4,
    max_seq_len=4096,
    windows=(512,) * 16,
)
MIXTRAL_200M = replace(
    MISTRAL_300M,
    dim=512,
    n_layers=8,
    hidden_dim=1792,
    n_heads=8,
    n_kv_heads=2,
    windows=(None,) * 8,
    moe=MoeArgs(8, 2),
)
# Mistral Small 4 with an eighth of its width, heads and layers. A token is in the cache as there,
# and has as many experts.
_SMALL_4_LATENT = LatentArgs(
    q_lora_rank=128, kv_lora_rank=256, qk_nope_head_dim=64, qk_rope_head_dim=64, v_head_dim=128
)
SMALL_4_200M = replace(
    MISTRAL_300M,
    dim=512,
    n_layers=4,
    head_dim=_SMALL_4_LATENT.cached_dim,
    hidden_dim=1536,
    n_heads=4,
    n_kv_heads=1,
    norm_eps=1e-6,
    max_seq_len=8192,
    windows=(None,) * 4,
    moe=MoeArgs(128, 4, expert_dim=256, n_shared_experts=1, scores=GateScores.SOFTMAX),
    rope_scaling=YarnScaling(factor=128.0, original_max_seq_len=8192, llama4_beta=0.1),
    latent=_SMALL_4_LATENT,
)
MODELS: dict[str, ModelArgs] = {
    "Mistral-300M": MISTRAL_300M,
    "Mixtral-200M": MIXTRAL_200M,
    "Small4-200M": SMALL_4_200M,
}
