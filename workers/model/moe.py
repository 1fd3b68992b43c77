"""How many tokens each expert of some layers was given: added up where the tokens are, told to whoever asks."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor


def sizes_between(ends: Sequence[int]) -> list[int]:
    """Of groups that end there: 2, 2 and 5 are groups of 2, 0 and 3."""
    return [end - start for start, end in pairwise([0, *ends])]


class ExpertTokens:
    """One thread adds, any other may read. On a GPU adding waits for nothing, and may be part of a CUDA graph.

    Ends of groups are added, not their sizes: groups of 2, 0, 3 and of 1, 1, 0 end at 2, 2, 5 and at 1, 2, 2. That is
    3, 4, 7 in all, the ends of groups of 3, 1, 3.
    """

    def __init__(self, layers: range, num_experts: int) -> None:
        self._layers = layers if num_experts else range(0)
        self._ends_LE = torch.zeros(len(self._layers), num_experts, dtype=torch.int64, device="cpu")
        self._beside: torch.cuda.Stream | None = None  # on a GPU

    def settle(self, device: torch.device) -> None:
        """Where tokens will be; before any are added."""
        self._ends_LE = self._ends_LE.to(device)
        self._beside = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def add(self, layer: int, ends_E: Tensor) -> None:
        """One more micro-batch of a layer, whose experts' groups end there."""
        self._ends_LE[layer - self._layers.start].add_(ends_E)

    def read(self) -> dict[int, list[int]]:
        """By layer, each expert's tokens. It waits for no step: of one that a GPU is at, some layers may be counted already."""
        with torch.cuda.stream(self._beside):  # none on a CPU, and then this does nothing
            ends_LE = self._ends_LE.tolist()
        return {layer: sizes_between(ends) for layer, ends in zip(self._layers, ends_LE, strict=True)}
