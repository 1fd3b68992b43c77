"""Sizes of published models with latent attention, which can be neither planned nor served yet.

Latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1) caches one compressed vector per token in place of keys and values.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class LatentMoeGeometry:
    """Geometry of a model with latent attention, and with shared experts in addition to those that are chosen."""

    dim: int
    n_layers: int
    n_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    rotary_dim: int  # of a query head, and of the one key of all heads, that are rotated
    plain_dim: int  # of a query and key head that are not
    value_dim: int
    vocab_size: int
    expert_dim: int
    num_experts: int
    num_experts_per_tok: int
    num_dense_layers: int = 0  # the first ones, without experts
    dense_dim: int = 0  # of their feed-forward

    @property
    def num_parameters(self) -> int:
        """Parameters of the language model."""
        return self._count(self.num_experts)

    @property
    def num_active_parameters(self) -> int:
        """Parameters that compute a token."""
        return self._count(self.num_experts_per_tok)

    def _count(self, num_experts: int) -> int:
        """Count with so many chosen experts, and one shared expert, in each layer that has experts."""
        queries = self.dim * self.q_lora_rank + self.q_lora_rank * self.n_heads * (self.plain_dim + self.rotary_dim)
        keys = self.dim * (self.kv_lora_rank + self.rotary_dim)
        keys += self.kv_lora_rank * self.n_heads * (self.plain_dim + self.value_dim)
        attention = queries + keys + self.n_heads * self.value_dim * self.dim
        norms = 2 * self.dim + self.q_lora_rank + self.kv_lora_rank
        experts = 3 * self.dim * self.expert_dim * (num_experts + 1) + self.num_experts * self.dim  # with the gate
        dense = 3 * self.dim * self.dense_dim
        sparse_layers = self.n_layers - self.num_dense_layers
        embeddings = 2 * self.vocab_size * self.dim + self.dim  # with the head and its norm
        layers = self.n_layers * (attention + norms) + sparse_layers * experts + self.num_dense_layers * dense
        return layers + embeddings


LATENT_MODELS: Mapping[str, LatentMoeGeometry] = MappingProxyType(
    {
        "mistral-small-4-119b": LatentMoeGeometry(
            dim=4096,
            n_layers=36,
            n_heads=32,
            q_lora_rank=1024,
            kv_lora_rank=256,
            rotary_dim=64,
            plain_dim=64,
            value_dim=128,
            vocab_size=131_072,
            expert_dim=2048,
            num_experts=128,
            num_experts_per_tok=4,
        ),
        "mistral-large-3-675b": LatentMoeGeometry(
            dim=7168,
            n_layers=61,
            n_heads=128,
            q_lora_rank=1536,
            kv_lora_rank=512,
            rotary_dim=64,
            plain_dim=128,
            value_dim=128,
            vocab_size=131_072,
            expert_dim=4096,
            num_experts=128,
            num_experts_per_tok=4,
            num_dense_layers=3,
            dense_dim=16_384,
        ),
    }
)
MISSING = "latent attention (one compressed vector per token in the cache), shared experts, and their routing"


def describe_missing(name: str) -> str:
    """Describe such a model's size, and what it needs that stages cannot compute yet."""
    geometry = LATENT_MODELS[name]
    total, active = (number / 1e9 for number in (geometry.num_parameters, geometry.num_active_parameters))
    return (
        f"{name} has {total:.1f} billion parameters, of which {active:.1f} billion compute a token; "
        f"it can be neither planned nor served yet, because stages do not have {MISSING}"
    )
