"""A stage's share of the model: perhaps the embedding, some layers, perhaps norm and head."""

import torch
from torch import Tensor, nn

from tramontane.proto.model_args import ModelArgs
from tramontane.workers.experts import LocalExperts
from tramontane.workers.layers import Attend, RMSNorm, TransformerBlock
from tramontane.workers.linear import Linear
from tramontane.workers.rotary import Rotary


class StageModel(nn.Module):
    """Layers ``layers`` (global numbers) of the model; the whole model is the range of all.

    The first stage owns the embedding, the last one the final norm and the head.
    With tied embeddings the head is the embedding matrix, so both ends hold it.
    """

    def __init__(self, args: ModelArgs, layers: range) -> None:
        super().__init__()
        assert len(layers) > 0
        assert layers.start >= 0
        assert layers.stop <= args.n_layers
        self.args = args
        self.is_first = layers.start == 0
        self.is_last = layers.stop == args.n_layers
        self.tok_embeddings = _embedding(args) if self.is_first else None
        self.layers = nn.ModuleDict({str(layer): TransformerBlock(args, layer) for layer in layers})
        self.experts = LocalExperts(args, layers)
        self.norm = RMSNorm(args.dim, args.norm_eps) if self.is_last else None
        self.output = Linear(args.dim, args.vocab_size) if self.is_last else None

    def embed(self, token_ids_T: Tensor) -> Tensor:
        assert self.tok_embeddings is not None
        hidden_TD: Tensor = self.tok_embeddings(token_ids_T)
        return hidden_TD

    def forward(self, hidden_TD: Tensor, rotary: Rotary, attend: Attend) -> Tensor:
        for block in self.layers.values():
            hidden_TD = block(hidden_TD, rotary, attend, self.experts)
        return hidden_TD

    def head(self, hidden_SD: Tensor) -> Tensor:
        """Logits [S, V] in float32 for the S rows that want a token."""
        assert self.norm is not None
        assert self.output is not None
        logits_SV: Tensor = self.output(self.norm(hidden_SD))
        return logits_SV.float()


def _embedding(args: ModelArgs) -> nn.Embedding:
    """Without random numbers: on the meta device they make PyTorch import its compiler, 70 MiB and some seconds."""
    return nn.Embedding.from_pretrained(torch.empty(args.vocab_size, args.dim), freeze=False)  # type: ignore[no-untyped-call, no-any-return]
