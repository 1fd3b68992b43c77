"""Experts that sit inside their stage (Mixtral, arXiv 2401.04088, section 2.1)."""

import torch
from torch import Tensor, nn

from tramontane.proto.model_args import ModelArgs
from tramontane.workers.layers import FeedForward


class LocalExperts(nn.Module):
    """All experts of a stage's layers; the in-process ``ExpertBackend``.

    Tokens are sorted by expert so that each expert runs once, on its group.
    Example with k = 2: three tokens choose [[1, 0], [1, 2], [0, 1]]. Flattened
    choices [1, 0, 1, 2, 0, 1] sort (stably) to choice numbers [1, 4, 0, 2, 5, 3],
    that is tokens [0, 2, 0, 1, 2, 1] in groups of 2, 3 and 1.
    """

    def __init__(self, args: ModelArgs, layers: range) -> None:
        super().__init__()
        num_experts = args.moe.num_experts if args.moe else 0
        self.layers = nn.ModuleDict(
            {str(layer): nn.ModuleList(FeedForward(args) for _ in range(num_experts)) for layer in layers if args.moe}
        )

    def forward(self, layer: int, hidden_TD: Tensor, expert_ids_Tk: Tensor, weights_Tk: Tensor) -> Tensor:
        """Weighted sum of each token's experts, [T, D]; the order of addition is fixed."""
        experts = self.layers[str(layer)]
        assert isinstance(experts, nn.ModuleList)
        tokens, top_k = expert_ids_Tk.shape
        choices = expert_ids_Tk.reshape(-1)
        order = torch.argsort(choices, stable=True)
        sizes = torch.bincount(choices, minlength=len(experts)).tolist()
        groups = torch.split(hidden_TD[order // top_k], sizes)
        done = torch.cat([expert(group) for expert, group in zip(experts, groups, strict=True) if len(group)])
        by_choice = torch.empty_like(done).index_copy(0, order, done)
        return (by_choice.view(tokens, top_k, -1) * weights_Tk[..., None]).sum(dim=1)
