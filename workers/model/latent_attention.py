"""Latent attention, MLA (DeepSeek-V2, arXiv 2405.04434, section 2.1), in the absorbed form, which
reads the cache directly.

A head's key for a token is W_k c, and its value W_v c, where c is the token's latent vector, which
the cache holds. The score of a query q is q (W_k c) = (W_k^T q) c, and the weighted sum of values
is W_v times the weighted sum of latent vectors. So W_k^T is absorbed into the query projection and
W_v into the output projection. The result is attention with one key/value head for all query heads:
its keys are the latent vectors followed by the rotated part, its values are the latent vectors.

Shape letters: T tokens, D model width, H query heads, R query rank, C width of a latent vector, r
of a rotated part, v of a value, d = C + r in the cache.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tramontane.proto.model_args import ModelArgs
from tramontane.workers.kernels.fused_ops import EAGER, FusedOps
from tramontane.workers.kernels.head_products import HeadProducts
from tramontane.workers.kernels.linear import Linear
from tramontane.workers.kernels.quantized_linear import QuantizedLinear
from tramontane.workers.kernels.row_invariance import RowProducts
from tramontane.workers.model.grouped_query_attention import AttentionFn
from tramontane.workers.model.rotary import RotaryTables

# The indexer of sparse attention (DeepSeek-V3.2, arXiv 2512.02556, section 2.1), and the scaling of
# queries by position.
#
# The index score of a key k for a token is the sum over heads of w_h relu(q_h k). The token attends
# to the keys with the highest scores, see ``workers/attention/sparse_attention.py``. Formulas are
# those of transformers, modeling_mistral_large4.py.
#
# Shape letters: T tokens, D model width, H query heads, I heads of the indexer, d width of a query,
# i width of an indexer's query and key, r rotated numbers.

INDEXER_NORM_EPS = 1e-6  # of both norms, regardless of the model's epsilon
IndexInputs = tuple[
    Tensor, Tensor, Tensor
]  # queries [T, I, i] and keys [T, i] of an indexer, and the weights [T, I] of its heads


class HeadScaling(nn.Module):
    """Factors of queries: a head's scale * ln(position + 1) + its bias."""

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.scale, self.bias = (
            nn.Parameter(torch.zeros(num_heads)),
            nn.Parameter(torch.ones(num_heads)),
        )

    def forward(self, q_THd: Tensor, rotary: RotaryTables) -> Tensor:
        """Scale queries of any width."""
        assert rotary.log_position_T is not None
        factors_TH = rotary.log_position_T[:, None] * self.scale.float() + self.bias.float()
        return q_THd * factors_TH.to(q_THd.dtype)[..., None]


class Indexer(nn.Module):
    """Computes index queries, keys and weights from a layer's hidden states. Keys and weights are
    one matrix product.
    """

    def __init__(self, args: ModelArgs, layer: int) -> None:
        super().__init__()
        assert args.sparse is not None
        self.num_heads, self.width = args.sparse.index_n_heads, args.sparse.index_head_dim
        self.rotary_dim = args.latent_of(layer).qk_rope_head_dim
        self.q_norm, self.k_norm = (
            nn.LayerNorm(width, INDEXER_NORM_EPS) for width in (args.dim, self.width)
        )
        self.wq = Linear(args.dim, self.num_heads * self.width)
        self.wk_weights = Linear(args.dim, self.width + self.num_heads)
        self.head_scaling = HeadScaling(self.num_heads)

    def forward(self, x_TD: Tensor, rotary: RotaryTables, ops: FusedOps) -> IndexInputs:
        """Return queries and keys in the dtype of ``x_TD``, and weights in float32, which include
        the scale of the scores.
        """
        q_TIi = self.wq(_layer_norm(x_TD, self.q_norm)).view(len(x_TD), self.num_heads, self.width)
        k_Ti, weights_TI = torch.split(self.wk_weights(x_TD), [self.width, self.num_heads], dim=1)
        k_T1i = _layer_norm(k_Ti, self.k_norm)[:, None]
        scale = (self.width * self.num_heads) ** -0.5
        q_TIi = self._rotate(self.head_scaling(q_TIi, rotary), rotary, ops)
        return q_TIi, self._rotate(k_T1i, rotary, ops)[:, 0], weights_TI.float() * scale

    def _rotate(self, x_TIi: Tensor, rotary: RotaryTables, ops: FusedOps) -> Tensor:
        """Rotate the first r numbers of each head, whose pairs are adjacent, and leave them in
        halves: 0 1 2 3 become 0 2 1 3.

        Queries and keys have the same order, so their products do not change.
        """
        if not self.rotary_dim:
            return x_TIi
        pairs, plain = x_TIi[..., : self.rotary_dim], x_TIi[..., self.rotary_dim :]
        halves_TIr = (
            pairs.reshape(*pairs.shape[:-1], -1, 2).transpose(-1, -2).flatten(-2).contiguous()
        )
        return torch.cat(
            (ops.apply_rotary(halves_TIr, rotary.cos_Td, rotary.sin_Td), plain), dim=-1
        )


def _layer_norm(x_TD: Tensor, norm: nn.LayerNorm) -> Tensor:
    """Normalize each row in float32: a row's mean does not depend on how a library divides the
    rows.
    """
    return F.layer_norm(
        x_TD.float(), norm.normalized_shape, norm.weight.float(), norm.bias.float(), norm.eps
    ).to(x_TD.dtype)


# of both norms, whatever the model's is (transformers, modeling_mistral4.py), unless attention is
# sparse
NORM_EPS = 1e-6


class LatentAttention(nn.Module):
    """Latent attention of one layer. The down-projections of the hidden states are one matrix
    product.

    In sparse attention a layer may have an indexer, no rotary embedding, or no keys of its own.
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
        # Kernels divide scores by the root of the cache's width, the model by the root of its own
        # keys' width.
        self.query_factor = math.sqrt(self.cached_dim / latent.qk_head_dim)
        self.query_factor *= args.rope_scaling.score_factor if args.rope_scaling else 1.0
        self.head_scaling = HeadScaling(args.n_heads) if args.sparse else None
        self.indexer = Indexer(args, layer) if args.index_source(layer) == layer else None
        self.fused_ops = EAGER

    def finalize_weights(self, dtype: torch.dtype, products: RowProducts | None = None) -> None:
        """Absorb the up-projection of the latent cache into the query and output projections."""
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

    def forward(self, x_TD: Tensor, rotary: RotaryTables, attend: AttentionFn) -> Tensor:
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
        """Return the vectors [T, 1, d] to cache: normalized, followed by the rotated part. None
        without own keys.
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
