"""Grouped-query attention (arXiv 2305.13245), as in the Mistral 7B paper (arXiv 2310.06825).

Shape letters: T tokens of a micro-batch in one packed row, D model width, H query heads, G
key/value heads, d head_dim.
"""

from typing import Protocol, cast

from torch import Tensor, nn

from tramontane.proto.model_args import ModelArgs
from tramontane.workers.kernels.fused_ops import EAGER
from tramontane.workers.kernels.linear import Linear
from tramontane.workers.model.rotary import RotaryTables


class AttentionFn(Protocol):
    """Attends to a cache, and writes a micro-batch's own keys and values to it."""

    def __call__(
        self,
        layer: int,
        q_THd: Tensor,
        k_TGd: Tensor | None,
        v_TGd: Tensor | None,
        index: tuple[Tensor, Tensor, Tensor] | None = None,
        /,
    ) -> Tensor:
        """Return attended values [T, H, d]. Without keys, the keys of another layer are used;
        ``index``: see ``IndexInputs``.
        """


class RotatingAttentionFn(AttentionFn, Protocol):
    """An ``AttentionFn`` that may rotate and write the heads of single tokens itself."""

    def rotate_and_write(
        self, layer: int, qkv_BHd: Tensor, cos_Bd: Tensor, sin_Bd: Tensor
    ) -> Tensor | None:
        """Return the rotated queries, or None if the micro-batch is to be rotated by the layer."""

    def attend_cached(self, layer: int, q_BQd: Tensor) -> Tensor:
        """Return attended values after that."""


class GroupedQueryAttention(nn.Module):
    """H query heads share G key/value heads; queries, keys and values are one matrix product.

    ``rotates_in_cache``: the attention function is a ``RotatingAttentionFn``.
    """

    def __init__(self, args: ModelArgs, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.head_dim = args.head_dim
        # of queries, keys and values
        self.num_heads = (args.n_heads, args.n_kv_heads, args.n_kv_heads)
        self.wqkv = Linear(args.dim, sum(self.num_heads) * args.head_dim)
        self.wo = Linear(args.n_heads * args.head_dim, args.dim)
        self.fused_ops = EAGER
        self.rotates_in_cache = False

    def forward(self, x_TD: Tensor, rotary: RotaryTables, attend: AttentionFn) -> Tensor:
        """Project, rotate, attend, and project back: [T, D] to [T, D]."""
        num_queries, num_keys, _ = self.num_heads
        qkv_THd = self.wqkv(x_TD).view(len(x_TD), -1, self.head_dim)
        if self.rotates_in_cache:
            own = cast("RotatingAttentionFn", attend)
            if (
                q_TQd := own.rotate_and_write(self.layer, qkv_THd, rotary.cos_Td, rotary.sin_Td)
            ) is not None:
                return self._project(own.attend_cached(self.layer, rotary.scale_queries(q_TQd)))
        qk_THd, v_TGd = qkv_THd[:, : num_queries + num_keys], qkv_THd[:, num_queries + num_keys :]
        rotated_THd = self.fused_ops.apply_rotary(qk_THd, rotary.cos_Td, rotary.sin_Td)
        q_THd, k_TGd = (
            rotary.scale_queries(rotated_THd[:, :num_queries]),
            rotated_THd[:, num_queries:],
        )
        return self._project(attend(self.layer, q_THd, k_TGd, v_TGd))

    def _project(self, out_THd: Tensor) -> Tensor:
        out_TD: Tensor = self.wo(out_THd.reshape(len(out_THd), -1))
        return out_TD
