"""The parts of a Mistral-family transformer layer, as in the paper (arXiv 2310.06825).

No cache, no scheduling, no device choice: a layer gets rotary tables and an attention function.

Shape letters: T tokens of a micro-batch in one packed row, D model width (dim), F feed-forward
width (hidden_dim).
"""

from torch import Tensor, nn

from tramontane.proto.model_args import ModelArgs
from tramontane.workers.kernels.fused_ops import EAGER, FusedOps
from tramontane.workers.kernels.linear import Linear
from tramontane.workers.model.gate import Gate
from tramontane.workers.model.grouped_query_attention import AttentionFn, GroupedQueryAttention
from tramontane.workers.model.latent_attention import LatentAttention
from tramontane.workers.model.rotary import RotaryTables

Attention = GroupedQueryAttention | LatentAttention


def make_attention(args: ModelArgs, layer: int) -> Attention:
    """Return the attention that the model has."""
    return LatentAttention(args, layer) if args.latent else GroupedQueryAttention(args, layer)


class FeedForward(nn.Module):
    """SwiGLU (arXiv 2002.05202): w2(silu(w1 x) * w3 x), where w1 and w3 are one matrix product.
    Also used as one expert.
    """

    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.w13 = Linear(dim, 2 * hidden_dim)
        self.w2 = Linear(hidden_dim, dim)
        self.fused_ops = EAGER

    def forward(self, x_TD: Tensor) -> Tensor:
        """Compute [T, D] from [T, D]."""
        out_TD: Tensor = self.w2(self.fused_ops.silu_and_mul(self.w13(x_TD)))
        return out_TD


class TransformerBlock(nn.Module):
    """One layer without its experts. Its number is global: the same layer has the same number in
    every split.
    """

    def __init__(self, args: ModelArgs, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.norm_eps = args.norm_eps
        # arXiv 1910.07467, computed in float32
        self.attention_norm = nn.RMSNorm(args.dim, args.norm_eps)
        self.attention: Attention = make_attention(args, layer)
        self.ffn_norm = nn.RMSNorm(args.dim, args.norm_eps)
        moe = args.moe if layer in args.moe_layers else None
        self.feed_forward = None if moe else FeedForward(args.dim, args.hidden_dim)
        self.gate = Gate(args.dim, moe) if moe else None
        shared_dim = moe.n_shared_experts * args.expert_dim if moe else 0
        self.shared_experts = FeedForward(args.dim, shared_dim) if shared_dim else None

    def forward(
        self, h_TD: Tensor, added_TD: Tensor | None, rotary: RotaryTables, attend: AttentionFn
    ) -> tuple[Tensor, Tensor]:
        """Return the hidden states after attention, and normalized for the feed-forward network or
        experts. Both [T, D].

        ``added_TD``: the previous layer's output, to be added to the hidden states ``h_TD``; None
        before a stage's first layer.
        """
        ops, weight_D = self.attention.fused_ops, self.attention_norm.weight
        if added_TD is None:
            x_TD = ops.rms_norm(h_TD, weight_D, self.norm_eps)
        else:
            h_TD, x_TD = ops.fused_add_rms_norm(h_TD, added_TD, weight_D, self.norm_eps)
        return ops.fused_add_rms_norm(
            h_TD, self.attention(x_TD, rotary, attend), self.ffn_norm.weight, self.norm_eps
        )


def set_fused_ops(model: nn.Module, fused_ops: FusedOps, *, rotates_in_cache: bool = False) -> None:
    """Use these operations in every layer and expert. ``rotates_in_cache``: see
    ``GroupedQueryAttention``.
    """
    for module in model.modules():
        if isinstance(module, Attention | FeedForward):
            module.fused_ops = fused_ops
        if isinstance(module, GroupedQueryAttention):
            module.rotates_in_cache = rotates_in_cache
