"""Latent attention, MLA (DeepSeek-V2, arXiv 2405.04434, section 2.1), in the form that reads the cache as it is.

A head's key for a token is W_k c, and its value W_v c, where c is the token's latent vector, which the cache holds. The score of
a query q is q (W_k c) = (W_k^T q) c, and the weighted sum of values is W_v times the weighted sum of latent vectors. So W_k^T
moves to the query and W_v to the output ("absorbed"), and what remains is attention with one key/value head for all query heads:
its keys are the latent vectors with the rotated part behind them, its values are the same vectors.

Shape letters: T tokens, D model width, H query heads, R numbers of which queries are made, C numbers of a latent vector, r of a
rotated part, v of a value, d = C + r in the cache.
"""

import math

import torch
from torch import Tensor, nn

from tramontane.proto.model_args import ModelArgs
from tramontane.workers.kernels.fused_ops import EAGER
from tramontane.workers.kernels.head_products import HeadProducts
from tramontane.workers.kernels.linear import Linear
from tramontane.workers.kernels.quantized_linear import QuantizedLinear
from tramontane.workers.kernels.row_products import RowProducts
from tramontane.workers.model.grouped_query_attention import Attend
from tramontane.workers.model.rotary import RotaryTables

NORM_EPS = 1e-6  # of both norms, whatever the model's is (transformers, modeling_mistral4.py)


class LatentAttention(nn.Module):
    """Latent attention. What hidden states are multiplied by is one matrix product."""

    not_packed = frozenset({"wkv_b"})  # it is cut and transposed when it is complete

    def __init__(self, args: ModelArgs, layer: int) -> None:
        super().__init__()
        assert args.latent is not None
        self.layer, self.num_heads, self.latent = layer, args.n_heads, args.latent
        latent, q_width = args.latent, args.n_heads * args.latent.qk_head_dim
        self.first_width = latent.q_lora_rank or q_width
        self.wqkv_a = Linear(args.dim, self.first_width + latent.cached_dim)
        self.q_a_norm = nn.RMSNorm(latent.q_lora_rank, NORM_EPS) if latent.q_lora_rank else None
        self.wq_b = Linear(latent.q_lora_rank, q_width) if latent.q_lora_rank else None
        self.kv_a_norm = nn.RMSNorm(latent.kv_lora_rank, NORM_EPS)
        self.wkv_b: nn.Module | None = Linear(latent.kv_lora_rank, args.n_heads * (latent.qk_nope_head_dim + latent.v_head_dim))
        self.wo = Linear(args.n_heads * latent.v_head_dim, args.dim)
        self.keys: HeadProducts | None = None
        self.values: HeadProducts | None = None
        # Kernels divide scores by the root of the cache's width, and the model by that of its own keys.
        self.query_factor = math.sqrt(latent.cached_dim / latent.qk_head_dim)
        self.query_factor *= args.rope_scaling.score_factor if args.rope_scaling else 1.0
        self.fused_ops = EAGER

    def finalize_weights(self, products: RowProducts | None = None) -> None:
        """Make the matrices of keys and values, which move to queries and outputs, of that which makes both from the cache."""
        wkv_b, latent = self.wkv_b, self.latent
        assert isinstance(wkv_b, Linear | QuantizedLinear)
        dtype, shape = self.kv_a_norm.weight.dtype, (self.num_heads, latent.qk_nope_head_dim + latent.v_head_dim)
        weight_HRC = wkv_b.weight.detach().view(*shape, latent.kv_lora_rank)
        scale_HR = wkv_b.scale.view(shape) if isinstance(wkv_b, QuantizedLinear) else None
        cut = latent.qk_nope_head_dim
        keys, values = (None, None) if scale_HR is None else (scale_HR[:, :cut], scale_HR[:, cut:])
        self.keys = HeadProducts(weight_HRC[:, :cut].transpose(1, 2), dtype, input_scale_HK=keys, products=products)
        self.values = HeadProducts(weight_HRC[:, cut:], dtype, output_scale_HN=values, products=products)
        self.wkv_b = None

    def forward(self, x_TD: Tensor, rotary: RotaryTables, attend: Attend) -> Tensor:
        """Project, rotate, attend, and project back: [T, D] to [T, D]."""
        q_TR, kv_Td = torch.split(self.wqkv_a(x_TD), [self.first_width, self.latent.cached_dim], dim=1)
        k_T1d = self._keys_of_cache(kv_Td, rotary)
        out_THd = attend(self.layer, self._queries(q_TR, rotary), k_T1d, k_T1d)
        assert self.values is not None
        values_THv = self.values(out_THd[..., : self.latent.kv_lora_rank])
        out_TD: Tensor = self.wo(values_THv.reshape(len(x_TD), -1))
        return out_TD

    def _queries(self, q_TR: Tensor, rotary: RotaryTables) -> Tensor:
        """Return queries [T, H, d] to the vectors in the cache."""
        latent, num_tokens = self.latent, len(q_TR)
        if self.wq_b is not None:
            assert self.q_a_norm is not None
            q_TR = self.wq_b(self.fused_ops.rms_norm(q_TR, self.q_a_norm.weight, NORM_EPS))
        widths = [self.num_heads * latent.qk_nope_head_dim, self.num_heads * latent.qk_rope_head_dim]
        plain, rotated = (part.view(num_tokens, self.num_heads, -1) for part in torch.split(q_TR, widths, dim=1))
        assert self.keys is not None
        q_THd = q_TR.new_empty(num_tokens, self.num_heads, latent.cached_dim)
        torch.mul(self.keys(plain), self.query_factor, out=q_THd[..., : latent.kv_lora_rank])
        rotated_THr = self.fused_ops.apply_rotary(rotated, rotary.cos_Td, rotary.sin_Td)
        torch.mul(rotated_THr, self.query_factor, out=q_THd[..., latent.kv_lora_rank :])
        return rotary.scale_queries(q_THd)

    def _keys_of_cache(self, kv_Td: Tensor, rotary: RotaryTables) -> Tensor:
        """Return the vectors [T, 1, d] that the cache holds: normalized, with the rotated part behind."""
        rank = self.latent.kv_lora_rank
        k_T1d = kv_Td.new_empty(len(kv_Td), 1, self.latent.cached_dim)
        k_T1d[:, 0, :rank] = self.fused_ops.rms_norm(kv_Td[:, :rank], self.kv_a_norm.weight, NORM_EPS)
        rotated_T1r = kv_Td[:, rank:].view(len(kv_Td), 1, -1)
        k_T1d[:, :, rank:] = self.fused_ops.apply_rotary(rotated_T1r, rotary.cos_Td, rotary.sin_Td)
        return k_T1d
