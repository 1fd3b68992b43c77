"""Stages on torch's meta device, which has shapes and no numbers: what takes the place of a GPU's
driver.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tramontane.workers.device.cuda import PinnedTransfer
from tramontane.workers.stage.cuda_graphs import Compute, Cut

META = torch.device("meta")


class OtherMemory(PinnedTransfer):
    """Of a driver that is not there."""

    def empty_pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype)

    def copy(self, target: Tensor, source: Tensor) -> None:
        assert target.shape == source.shape

    def record(self, device: torch.device) -> Callable[[], None]:
        return lambda: None

    def upload(self, pinned: Tensor, device: torch.device) -> Tensor:
        return torch.empty(pinned.shape, dtype=pinned.dtype, device=device)


class Once:
    """Records nothing, and computes twice, as CUDA graphs are warmed up."""

    def __call__(self, compute: Compute) -> Compute:
        compute()
        return compute

    def in_pieces(self, compute: Callable[[Cut], Tensor]) -> list[Compute]:
        """Return pieces that do nothing: all have been computed here."""
        cuts: list[None] = []
        out = compute(lambda: cuts.append(None))
        return [lambda: out] * (len(cuts) + 1)
