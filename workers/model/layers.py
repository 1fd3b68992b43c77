"""The parts of a Mistral-family transformer layer, as in the paper (arXiv 2310.06825).

No cache, no scheduling, no device choice: a layer gets rotary tables and an attention function.

Shape letters: T tokens of a micro-batch in one packed row, D model width (dim), H query heads, G key/value heads,
d head_dim, F feed-forward width (hidden_dim), k experts of each token.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from tramontane.proto.model_args import ModelArgs
from tramontane.workers.kernels.fused_ops import EAGER, FusedOps
from tramontane.workers.kernels.linear import Linear
from tramontane.workers.model.rotary import RotaryTables

# (layer, q_THd, k_TGd, v_TGd) -> attended values THd
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


class Attention(nn.Module):
    """Grouped-query attention: H query heads share G key/value heads. Queries, keys and values are one matrix product."""

    def __init__(self, args: ModelArgs, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.head_dim = args.head_dim
        self.num_heads = (args.n_heads, args.n_kv_heads, args.n_kv_heads)  # of queries, keys and values
        self.wqkv = Linear(args.dim, sum(self.num_heads) * args.head_dim)
        self.wo = Linear(args.n_heads * args.head_dim, args.dim)
        self.fused_ops = EAGER

    def forward(self, x_TD: Tensor, rotary: RotaryTables, attend: Attend) -> Tensor:
        """Project, rotate, attend, and project back: [T, D] to [T, D]."""
        num_queries, num_keys, _ = self.num_heads
        qkv_THd = self.wqkv(x_TD).view(len(x_TD), -1, self.head_dim)
        qk_THd, v_TGd = qkv_THd[:, : num_queries + num_keys], qkv_THd[:, num_queries + num_keys :]
        rotated_THd = self.fused_ops.apply_rotary(qk_THd, rotary.cos_Td, rotary.sin_Td)
        q_THd, k_TGd = rotary.scale_queries(rotated_THd[:, :num_queries]), rotated_THd[:, num_queries:]
        out_THd = attend(self.layer, q_THd, k_TGd, v_TGd)
        out_TD: Tensor = self.wo(out_THd.reshape(len(x_TD), -1))
        return out_TD


class FeedForward(nn.Module):
    """SwiGLU (arXiv 2002.05202): w2(silu(w1 x) * w3 x), where w1 and w3 are one matrix product. Also used as one expert."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.w13 = Linear(args.dim, 2 * args.hidden_dim)
        self.w2 = Linear(args.hidden_dim, args.dim)
        self.fused_ops = EAGER

    def forward(self, x_TD: Tensor) -> Tensor:
        """Compute [T, D] from [T, D]."""
        out_TD: Tensor = self.w2(self.fused_ops.silu_and_mul(self.w13(x_TD)))
        return out_TD


class Gate(nn.Module):
    """The gate of a mixture of experts: top-k of the logits first, then softmax over those k."""

    def __init__(self, dim: int, num_experts: int, top_k: int) -> None:
        super().__init__()
        self.num_experts, self.top_k = num_experts, top_k
        self.scores = Linear(dim, num_experts)

    def forward(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Return expert ids [T, k] and weights [T, k] that sum to 1 per token."""
        logits_Tk, expert_ids_Tk = torch.topk(self.scores(x_TD), self.top_k, dim=-1)
        return expert_ids_Tk, torch.softmax(logits_Tk, dim=-1, dtype=torch.float32).to(x_TD.dtype)


class TransformerBlock(nn.Module):
    """One layer without its experts. Its number is global: the same layer has the same number in every split."""

    def __init__(self, args: ModelArgs, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.norm_eps = args.norm_eps
        self.attention_norm = nn.RMSNorm(args.dim, args.norm_eps)  # arXiv 1910.07467, computed in float32
        self.attention = Attention(args, layer)
        self.ffn_norm = nn.RMSNorm(args.dim, args.norm_eps)
        self.feed_forward = None if args.moe else FeedForward(args)
        self.gate = Gate(args.dim, args.moe.num_experts, args.moe.num_experts_per_tok) if args.moe else None

    def forward(self, h_TD: Tensor, added_TD: Tensor | None, rotary: RotaryTables, attend: Attend) -> tuple[Tensor, Tensor]:
        """Return the hidden states after attention, and normalized for the feed-forward network or experts. Both [T, D].

        ``added_TD`` is what the layer before adds to its hidden states ``h_TD``; None before a stage's first layer.
        """
        ops, weight_D = self.attention.fused_ops, self.attention_norm.weight
        if added_TD is None:
            x_TD = ops.rms_norm(h_TD, weight_D, self.norm_eps)
        else:
            h_TD, x_TD = ops.fused_add_rms_norm(h_TD, added_TD, weight_D, self.norm_eps)
        return ops.fused_add_rms_norm(h_TD, self.attention(x_TD, rotary, attend), self.ffn_norm.weight, self.norm_eps)


def set_fused_ops(model: nn.Module, fused_ops: FusedOps) -> None:
    """Use these operations in every layer and expert."""
    for module in model.modules():
        if isinstance(module, (Attention, FeedForward)):
            module.fused_ops = fused_ops
