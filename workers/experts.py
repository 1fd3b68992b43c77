"""Experts (Mixtral, arXiv 2401.04088, section 2.1), inside their stage.

Shape letters: T tokens, k experts of each, C = T * k choices, D model width.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tramontane.proto.model_args import ModelArgs
from tramontane.workers.layers import FeedForward


@dataclass(frozen=True, slots=True)
class ByExpert:
    """A micro-batch's choices sorted by expert, so that each expert runs once, on its group.

    Example with k = 2: three tokens choose [[1, 0], [1, 2], [0, 1]]. Flattened choices [1, 0, 1, 2, 0, 1] sort (stably)
    to choice numbers [1, 4, 0, 2, 5, 3], that is tokens [0, 2, 0, 1, 2, 1] in groups of 2, 3 and 1.
    """

    order_C: Tensor
    sizes: list[int]  # of the groups, one per expert

    @classmethod
    def of(cls, expert_ids_Tk: Tensor, num_experts: int) -> "ByExpert":
        choices_C = expert_ids_Tk.reshape(-1)
        return cls(torch.argsort(choices_C, stable=True), torch.bincount(choices_C, minlength=num_experts).tolist())

    def sort(self, hidden_TD: Tensor) -> Tensor:
        """Each choice's token, group after group: [C, D]."""
        return hidden_TD[self.order_C // (len(self.order_C) // len(hidden_TD))]

    def mix(self, done_CD: Tensor, weights_Tk: Tensor) -> Tensor:
        """Weighted sum of each token's experts, [T, D]; the order of addition is fixed."""
        by_choice_CD = torch.empty_like(done_CD).index_copy(0, self.order_C, done_CD)
        return (by_choice_CD.view(*weights_Tk.shape, -1) * weights_Tk[..., None]).sum(dim=1)


class LocalExperts(nn.Module):
    """All experts of a stage's layers; the in-process ``ExpertBackend``."""

    def __init__(self, args: ModelArgs, layers: range) -> None:
        super().__init__()
        num_experts = args.moe.num_experts if args.moe else 0
        self.layers = nn.ModuleDict(
            {str(layer): nn.ModuleList(FeedForward(args) for _ in range(num_experts)) for layer in layers if args.moe}
        )

    def forward(self, layer: int, hidden_TD: Tensor, expert_ids_Tk: Tensor, weights_Tk: Tensor) -> Tensor:
        """Weighted sum of each token's experts, [T, D]."""
        experts = self.layers[str(layer)]
        assert isinstance(experts, nn.ModuleList)
        by_expert = ByExpert.of(expert_ids_Tk, len(experts))
        groups = torch.split(by_expert.sort(hidden_TD), by_expert.sizes)
        done_CD = torch.cat([expert(group) for expert, group in zip(experts, groups, strict=True) if len(group)])
        return by_expert.mix(done_CD, weights_Tk)
