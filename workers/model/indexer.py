"""The indexer of sparse attention (DeepSeek-V3.2, arXiv 2512.02556, section 2.1), and the scaling
of queries by position.

The index score of a key k for a token is the sum over heads of w_h relu(q_h k). The token attends
to the keys with the highest scores, see ``workers/attention/sparse_attention.py``. Formulas are
those of transformers, modeling_mistral_large4.py.

Shape letters: T tokens, D model width, H query heads, I heads of the indexer, d width of a query, i
width of an indexer's query and key, r rotated numbers.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tramontane.proto.model_args import ModelArgs
from tramontane.workers.kernels.fused_ops import FusedOps
from tramontane.workers.kernels.linear import Linear
from tramontane.workers.model.rotary import RotaryTables

NORM_EPS = 1e-6  # of both norms, whatever the model's is
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
    """What makes index queries, keys and weights of a layer's hidden states. Keys and weights are
    one matrix product.
    """

    def __init__(self, args: ModelArgs, layer: int) -> None:
        super().__init__()
        assert args.sparse is not None
        self.num_heads, self.width = args.sparse.index_n_heads, args.sparse.index_head_dim
        self.rotary_dim = args.latent_of(layer).qk_rope_head_dim
        self.q_norm, self.k_norm = (
            nn.LayerNorm(width, NORM_EPS) for width in (args.dim, self.width)
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

        Queries and keys are sorted alike, which does not change their products.
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
