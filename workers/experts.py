"""Experts (Mixtral, arXiv 2401.04088, section 2.1), inside their stage.

Shape letters: T tokens, k experts of each, C = T * k choices, D model width.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tramontane.proto.expert_plan import ExpertId
from tramontane.proto.model_args import ModelArgs
from tramontane.proto.step import ExpertUsage
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


def run_each(experts: Sequence[nn.Module], sizes: Sequence[int], rows_CD: Tensor) -> Tensor:
    """Each expert on its group of rows, [C, D]: sizes [2, 3] are rows 0 and 1, and 2 to 4. Those with none do not run."""
    groups = torch.split(rows_CD, list(sizes))
    return torch.cat([expert(group) for expert, group in zip(experts, groups, strict=True) if len(group)])


class ExpertSet(nn.Module):
    """Some experts of some layers, by their global numbers."""

    def __init__(self, args: ModelArgs, held: Iterable[ExpertId]) -> None:
        super().__init__()
        by_layer: dict[str, nn.ModuleDict] = {}
        for layer, expert in held:
            by_layer.setdefault(str(layer), nn.ModuleDict())[str(expert)] = FeedForward(args)
        self.layers = nn.ModuleDict(by_layer)

    def run(self, layer: int, experts: Sequence[int], sizes: Sequence[int], rows_CD: Tensor) -> Tensor:
        """These experts of a layer, each on its group of rows."""
        return run_each([self.expert(ExpertId(layer, expert)) for expert in experts], sizes, rows_CD)

    def expert(self, which: ExpertId) -> nn.Module:
        own = self.layers[str(which.layer)]
        assert isinstance(own, nn.ModuleDict)
        return own[str(which.expert)]


@dataclass(frozen=True, slots=True)
class Answered:
    """``AskedExperts`` that have answered already."""

    layer: int
    done_CD: Tensor

    @property
    def has_news(self) -> bool:
        return True

    def wait(self) -> None:
        return

    def advance(self) -> bool:
        return True

    @property
    def usage(self) -> ExpertUsage:
        return ExpertUsage()

    def result(self) -> Tensor:
        return self.done_CD


class LocalExperts(ExpertSet):
    """All experts of a stage's layers; the in-process ``ExpertBackend``."""

    def __init__(self, args: ModelArgs, layers: range) -> None:
        num_experts = args.moe.num_experts if args.moe else 0
        super().__init__(args, (ExpertId(layer, expert) for layer in layers for expert in range(num_experts)))

    def ask(self, layer: int, rows_CD: Tensor, sizes: Sequence[int]) -> Answered:
        return Answered(layer, self.run(layer, range(len(sizes)), sizes, rows_CD))
