"""The transformer: one stage's share of the model, or the whole model where there is one stage.

``StageModel.forward`` is the whole computation between embedding and head where experts are inside
the stage. Where they are on actors of their own, ``workers/experts/remote_experts.py`` runs the
same layers.

Shape letters: T tokens of a micro-batch in one packed row, D model width, k experts of each token,
V vocabulary size, S rows that are sampled.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from tramontane.proto.model_args import ModelArgs
from tramontane.workers.device.kernel_selection import WITHOUT_MEMORY, KernelSelector
from tramontane.workers.kernels.fused_ops import FusedOps
from tramontane.workers.kernels.linear import Linear
from tramontane.workers.kernels.product_selection import select_products
from tramontane.workers.kernels.row_invariance import RowProducts, set_row_products
from tramontane.workers.model.gate import sigmoid
from tramontane.workers.model.grouped_query_attention import AttentionFn
from tramontane.workers.model.latent_attention import LatentAttention
from tramontane.workers.model.layers import TransformerBlock
from tramontane.workers.model.moe import (
    ExpertPermutation,
    ExpertTokenCounter,
    LocalExperts,
    layers_with_experts,
)
from tramontane.workers.model.rotary import RotaryTables, rotary_frequencies

# (layer, expert_ids_Tk), called when a layer's gate has chosen
OnChoices = Callable[[int, Tensor], None]


class StageModel(nn.Module):
    """Layers ``layers`` (global numbers) of the model; the whole model is the range of all.

    The first stage owns the embedding, the last one the final norm and the head.
    With tied embeddings the head is the embedding matrix, so both ends hold it.
    """

    rotary_alpha: Tensor | None

    def __init__(self, args: ModelArgs, layers: range, experts_inside: bool = True) -> None:
        super().__init__()
        assert len(layers) > 0
        assert layers.start >= 0
        assert layers.stop <= args.n_layers
        self.args = args
        self.global_layers = layers
        self.is_first = layers.start == 0
        self.is_last = layers.stop == args.n_layers
        self.tok_embeddings = _embedding(args) if self.is_first else None
        self.layers = nn.ModuleDict({str(layer): TransformerBlock(args, layer) for layer in layers})
        self.experts = LocalExperts(args, layers) if experts_inside else None
        self._expert_tokens = ExpertTokenCounter(
            layers_with_experts(args, layers), args.moe.num_experts if args.moe else 0
        )
        self.norm = nn.RMSNorm(args.dim, args.norm_eps) if self.is_last else None
        self.output = Linear(args.dim, args.vocab_size) if self.is_last else None
        self.register_buffer(
            "rotary_alpha", torch.empty(args.rotary_dim // 2) if args.sparse else None
        )

    def finalize_weights(
        self,
        device: torch.device,
        products: RowProducts | None = None,
        selector: KernelSelector = WITHOUT_MEMORY,
    ) -> None:
        """Prepare for the first step on this device, after the weights are in place.

        ``products`` replace the layers' products. Without them ``selector`` selects kernels on a
        GPU.
        """
        self._expert_tokens.to_device(device)
        set_row_products(self, products)
        for layer in self.global_layers:
            if isinstance(attention := self.block(layer).attention, LatentAttention):
                attention.finalize_weights(self.block(layer).attention_norm.weight.dtype, products)
        if self.experts is not None:
            self.experts.finalize_weights(
                self.block(self.global_layers.start).attention_norm.weight.dtype, products, selector
            )
        if products is None and device.type == "cuda":
            modules = [
                module for name, module in self.named_modules() if not name.startswith("experts.")
            ]
            select_products((module for module in modules if isinstance(module, Linear)), selector)

    def embed(self, token_ids_T: Tensor) -> Tensor:
        """Return the embeddings [T, D] of token ids. For the first stage."""
        assert self.tok_embeddings is not None
        hidden_TD: Tensor = self.tok_embeddings(token_ids_T)
        # matrices may be in another one
        return hidden_TD.to(self.block(0).attention_norm.weight.dtype)

    def forward(
        self,
        hidden_TD: Tensor,
        rotary: RotaryTables,
        attend: AttentionFn,
        on_choices: OnChoices | None = None,
        is_padding_T: Tensor | None = None,
    ) -> Tensor:
        """Run all layers, [T, D] to [T, D]. Padding is given to no expert and not counted."""
        added_TD: Tensor | None = None
        for layer in self.global_layers:
            hidden_TD, x_TD = self.block(layer)(hidden_TD, added_TD, rotary, attend)
            added_TD = self.feed_forward(layer, x_TD, on_choices, is_padding_T)
        assert added_TD is not None
        return hidden_TD + added_TD

    def feed_forward(
        self,
        layer: int,
        x_TD: Tensor,
        on_choices: OnChoices | None = None,
        is_padding_T: Tensor | None = None,
    ) -> Tensor:
        """Return a layer's addition after its attention, [T, D]: from its dense network, or from
        each token's experts.

        Padding gets 0 from experts.
        """
        dense = self.block(layer).feed_forward
        if dense is not None:
            dense_TD: Tensor = dense(x_TD)
            return dense_TD
        mixed_TD = self._mix_experts(layer, x_TD, on_choices, is_padding_T)
        shared_TD = self.run_shared_experts(layer, x_TD)
        return mixed_TD if shared_TD is None else mixed_TD + shared_TD

    def _mix_experts(
        self, layer: int, x_TD: Tensor, on_choices: OnChoices | None, is_padding_T: Tensor | None
    ) -> Tensor:
        """Return the weighted sum of each token's experts, [T, D], with 0 for padding."""
        gate = self.block(layer).gate
        assert gate is not None
        assert self.experts is not None
        few = self.experts.stack_for_small(layer, len(x_TD) * gate.top_k)
        if few is not None:
            expert_ids_Tk, weights_Tk = gate.select_small_products(
                x_TD, is_padding_T, self._expert_tokens.total_ends_E(layer)
            )
            if on_choices is not None:
                on_choices(layer, expert_ids_Tk)
            return few.mix_small(x_TD, expert_ids_Tk, weights_Tk)
        groups, weights_Tk = self.choose_experts(layer, x_TD, on_choices, is_padding_T)
        mixed_TD = groups.combine(self.experts(layer, groups.permute(x_TD), groups), weights_Tk)
        return mixed_TD if is_padding_T is None else mixed_TD.masked_fill(is_padding_T[:, None], 0)

    def run_shared_experts(self, layer: int, x_TD: Tensor) -> Tensor | None:
        """Return the addition of the shared experts, which compute every token, [T, D]; None if the
        layer has none.
        """
        shared = self.block(layer).shared_experts
        return None if shared is None else shared(x_TD)

    def choose_experts(
        self,
        layer: int,
        x_TD: Tensor,
        on_choices: OnChoices | None = None,
        is_padding_T: Tensor | None = None,
    ) -> tuple[ExpertPermutation, Tensor]:
        """Choose each token's experts and count the choices.

        Returns the choices, sorted by expert, and the weights [T, k] of each token's experts.
        """
        gate = self.block(layer).gate
        assert gate is not None
        expert_ids_Tk, weights_Tk = gate(x_TD)
        # one past the last expert: sorted behind all groups, so its rows are undefined
        if is_padding_T is not None:
            expert_ids_Tk = expert_ids_Tk.masked_fill(is_padding_T[:, None], gate.num_experts)
        if on_choices is not None:
            on_choices(layer, expert_ids_Tk)
        groups = ExpertPermutation.of(expert_ids_Tk, gate.num_experts)
        self._expert_tokens.count(layer, groups.offsets_E)
        return groups, weights_Tk

    @property
    def rotary_frequencies(self) -> Tensor:
        """Radians per position of each rotary pair, float32: of the configuration, times e^alpha if
        the model has alphas.
        """
        frequencies = rotary_frequencies(self.args)
        return (
            frequencies
            if self.rotary_alpha is None
            else frequencies.to(self.rotary_alpha.device) * self.rotary_alpha.exp()
        )

    @property
    def fused_ops(self) -> FusedOps:
        """The operations of all layers, see ``set_fused_ops``."""
        return self.block(self.global_layers[-1]).attention.fused_ops

    def head(self, hidden_SD: Tensor, out_SV: Tensor | None = None) -> Tensor:
        """Return logits [S, V] in float32 for the S rows that are to be sampled. For the last
        stage. With ``out_SV`` they are written there.
        """
        assert self.norm is not None
        assert self.output is not None
        logits_SV: Tensor = self.output(
            self.fused_ops.rms_norm(hidden_SD, self.norm.weight, self.args.norm_eps)
        )
        out_SV = logits_SV.float() if out_SV is None else out_SV.copy_(logits_SV)
        if (limit := self.args.final_logit_softcapping) is not None:
            out_SV.copy_(_cap(out_SV, limit))
        return out_SV

    def block(self, layer: int) -> TransformerBlock:
        """Return a layer by its global number."""
        block = self.layers[str(layer)]
        assert isinstance(block, TransformerBlock)
        return block

    @property
    def expert_load(self) -> dict[int, list[int]]:
        """How many tokens each expert was given, by layer. Can be read from any thread."""
        return self._expert_tokens.read()

    def clear_expert_load(self) -> None:
        """Reset the counts of chosen experts."""
        self._expert_tokens.clear()


def _cap(logits_SV: Tensor, limit: float) -> Tensor:
    """Return ``limit`` * tanh(x / limit) of each logit: tanh x = 2 sigmoid(2 x) - 1, see
    ``sigmoid`` for why so.
    """
    return (2 * sigmoid(logits_SV * (2 / limit)) - 1) * limit


def _embedding(args: ModelArgs) -> nn.Embedding:
    """Make an embedding without random numbers: on the meta device they make PyTorch import its
    compiler (70 MiB, seconds).
    """
    return nn.Embedding.from_pretrained(torch.empty(args.vocab_size, args.dim), freeze=False)  # type: ignore[no-untyped-call, no-any-return]
