"""Latent attention, MLA (DeepSeek-V2, arXiv 2405.04434, section 2.1), in the form that reads the
cache as it is.

A head's key for a token is W_k c, and its value W_v c, where c is the token's latent vector, which
the cache holds. The score of a query q is q (W_k c) = (W_k^T q) c, and the weighted sum of values
is W_v times the weighted sum of latent vectors. So W_k^T moves to the query and W_v to the output
("absorbed"), and what remains is attention with one key/value head for all query heads: its keys
are the latent vectors with the rotated part behind them, its values are the same vectors.

Shape letters: T tokens, D model width, H query heads, R numbers of which queries are made, C
numbers of a latent vector, r of a rotated part, v of a value, d = C + r in the cache.
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
from tramontane.workers.model.indexer import HeadScaling, Indexer
from tramontane.workers.model.rotary import RotaryTables

# of both norms, whatever the model's is (transformers, modeling_mistral4.py), unless attention is
# sparse
NORM_EPS = 1e-6


class LatentAttention(nn.Module):
    """Latent attention of one layer. What hidden states are multiplied by is one matrix product.

    Where attention is sparse, a layer may have an indexer, no rotary embedding, or no keys of its
    own.
    """

    not_packed = frozenset({"wkv_b"})  # it is cut and transposed when it is complete

    def __init__(self, args: ModelArgs, layer: int) -> None:
        super().__init__()
        latent = args.latent_of(layer)
        self.layer, self.num_heads, self.latent, self.cached_dim = (
            layer,
            args.n_heads,
            latent,
            args.head_dim,
        )
        q_width, has_keys = args.n_heads * latent.qk_head_dim, args.kv_source(layer) == layer
        self.norm_eps = args.norm_eps if args.sparse else NORM_EPS
        self.first_widths = [latent.q_lora_rank or q_width, latent.cached_dim * has_keys]
        self.wqkv_a = Linear(args.dim, sum(self.first_widths))
        self.q_a_norm = (
            nn.RMSNorm(latent.q_lora_rank, self.norm_eps) if latent.q_lora_rank else None
        )
        self.wq_b = Linear(latent.q_lora_rank, q_width) if latent.q_lora_rank else None
        self.kv_a_norm = nn.RMSNorm(latent.kv_lora_rank, self.norm_eps) if has_keys else None
        self.wkv_b: nn.Module | None = Linear(
            latent.kv_lora_rank, args.n_heads * (latent.qk_nope_head_dim + latent.v_head_dim)
        )
        self.wo = Linear(args.n_heads * latent.v_head_dim, args.dim)
        self.keys: HeadProducts | None = None
        self.values: HeadProducts | None = None
        # Kernels divide scores by the root of the cache's width, and the model by that of its own
        # keys.
        self.query_factor = math.sqrt(self.cached_dim / latent.qk_head_dim)
        self.query_factor *= args.rope_scaling.score_factor if args.rope_scaling else 1.0
        self.head_scaling = HeadScaling(args.n_heads) if args.sparse else None
        self.indexer = Indexer(args, layer) if args.index_source(layer) == layer else None
        self.fused_ops = EAGER

    def finalize_weights(self, dtype: torch.dtype, products: RowProducts | None = None) -> None:
        """Make the matrices of keys and values, which move to queries and outputs, of that which
        makes both from the cache.
        """
        wkv_b, latent = self.wkv_b, self.latent
        assert isinstance(wkv_b, Linear | QuantizedLinear)
        shape = (self.num_heads, latent.qk_nope_head_dim + latent.v_head_dim)
        weight_HRC = wkv_b.weight.detach().view(*shape, latent.kv_lora_rank)
        scale_HR = wkv_b.scale.view(shape) if isinstance(wkv_b, QuantizedLinear) else None
        cut = latent.qk_nope_head_dim
        keys, values = (None, None) if scale_HR is None else (scale_HR[:, :cut], scale_HR[:, cut:])
        self.keys = HeadProducts(
            weight_HRC[:, :cut].transpose(1, 2), dtype, input_scale_HK=keys, products=products
        )
        self.values = HeadProducts(
            weight_HRC[:, cut:], dtype, output_scale_HN=values, products=products
        )
        self.wkv_b = None

    def forward(self, x_TD: Tensor, rotary: RotaryTables, attend: Attend) -> Tensor:
        """Project, rotate, attend, and project back: [T, D] to [T, D]."""
        q_TR, kv_Td = torch.split(self.wqkv_a(x_TD), self.first_widths, dim=1)
        k_T1d = self._keys_of_cache(kv_Td, rotary)
        index = None if self.indexer is None else self.indexer(x_TD, rotary, self.fused_ops)
        out_THd = attend(self.layer, self._queries(q_TR, rotary), k_T1d, k_T1d, index)
        assert self.values is not None
        values_THv = self.values(out_THd[..., : self.latent.kv_lora_rank])
        out_TD: Tensor = self.wo(values_THv.reshape(len(x_TD), -1))
        return out_TD

    def _queries(self, q_TR: Tensor, rotary: RotaryTables) -> Tensor:
        """Return queries [T, H, d] to the vectors in the cache."""
        latent, num_tokens = self.latent, len(q_TR)
        if self.wq_b is not None:
            assert self.q_a_norm is not None
            q_TR = self.wq_b(self.fused_ops.rms_norm(q_TR, self.q_a_norm.weight, self.norm_eps))
        widths = (latent.qk_nope_head_dim, latent.qk_rope_head_dim)
        parts = torch.split(q_TR, [self.num_heads * width for width in widths], dim=1)
        plain, rotated = (
            part.view(num_tokens, self.num_heads, width)
            for part, width in zip(parts, widths, strict=True)
        )
        assert self.keys is not None
        q_THd = q_TR.new_empty(num_tokens, self.num_heads, self.cached_dim)
        torch.mul(self.keys(plain), self.query_factor, out=q_THd[..., : latent.kv_lora_rank])
        self._rotate(rotated, rotary, self.query_factor, q_THd[..., latent.kv_lora_rank :])
        if self.head_scaling is not None:
            q_THd = self.head_scaling(q_THd, rotary)
        return rotary.scale_queries(q_THd)

    def _keys_of_cache(self, kv_Td: Tensor, rotary: RotaryTables) -> Tensor | None:
        """Return the vectors [T, 1, d] that the cache holds: normalized, with the rotated part
        behind. None without own keys.
        """
        if self.kv_a_norm is None:
            return None
        rank = self.latent.kv_lora_rank
        k_T1d = kv_Td.new_empty(len(kv_Td), 1, self.cached_dim)
        k_T1d[:, 0, :rank] = self.fused_ops.rms_norm(
            kv_Td[:, :rank], self.kv_a_norm.weight, self.norm_eps
        )
        self._rotate(
            kv_Td[:, rank:].view(len(kv_Td), 1, self.latent.qk_rope_head_dim),
            rotary,
            1.0,
            k_T1d[:, :, rank:],
        )
        return k_T1d

    def _rotate(self, x_THr: Tensor, rotary: RotaryTables, factor: float, out_THr: Tensor) -> None:
        """Write the rotated numbers times ``factor``, or zeros in a layer without rotary
        embedding.
        """
        if self.latent.qk_rope_head_dim:
            torch.mul(
                self.fused_ops.apply_rotary(x_THr, rotary.cos_Td, rotary.sin_Td),
                factor,
                out=out_THr,
            )
        else:
            out_THr.zero_()
