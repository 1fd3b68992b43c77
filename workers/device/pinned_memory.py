"""Tensors on their way between a GPU and the host: through pinned memory, which the GPU copies without help of the processor.

A copy to a GPU from ordinary memory waits until the GPU has done all that it was given before; one from pinned memory only
joins the queue. torch keeps pinned memory and gives it out again only when nobody holds a tensor, or an array, on it any more
and the copies that it was part of are done.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class PinnedTransfer(Protocol):
    """What a GPU's driver does for us."""

    def empty_pinned(self, tensor: Tensor) -> Tensor:
        """Pinned memory of this size, with anything in it."""
        ...

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Begin to."""

    def mark(self, device: torch.device) -> Callable[[], None]:
        """What blocks until all that has been begun there by now is done."""
        ...

    def upload(self, pinned: Tensor, device: torch.device) -> Tensor:
        """A tensor there into which it is on its way: what the GPU does from now on comes after that."""
        ...


class CudaPinnedTransfer:
    """On the current stream."""

    def empty_pinned(self, tensor: Tensor) -> Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)

    def copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def mark(self, device: torch.device) -> Callable[[], None]:
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(device))
        return event.synchronize

    def upload(self, pinned: Tensor, device: torch.device) -> Tensor:
        return pinned.to(device, non_blocking=True)


@dataclass(frozen=True, slots=True)
class HostCopy:
    """A contiguous copy on the host, complete once ``wait`` has returned. Of what is there already, itself."""

    tensor: Tensor
    wait: Callable[[], None]


def copy_to_host_async(tensor: Tensor, pinning: PinnedTransfer | None = None) -> HostCopy:
    """What the GPU does later does not delay it."""
    if tensor.device.type == "cpu" and pinning is None:
        return HostCopy(tensor.contiguous(), lambda: None)
    pinning = pinning or CudaPinnedTransfer()
    pinned = pinning.empty_pinned(tensor)
    pinning.copy(pinned, tensor)
    return HostCopy(pinned, pinning.mark(tensor.device))


def to_host(tensor: Tensor, pinning: PinnedTransfer | None = None) -> Tensor:
    """Contiguous, and complete: of a GPU's tensor a copy; of one that is on the host itself, if it is contiguous."""
    left = copy_to_host_async(tensor, pinning)
    left.wait()
    return left.tensor


def to_device(tensor: Tensor, device: torch.device, pinning: PinnedTransfer | None = None) -> Tensor:
    """A host's tensor, which may be read-only and may be gone when this returns; itself where it is there already."""
    if pinning is None and (device.type == "cpu" or tensor.device.type != "cpu"):
        return tensor.to(device)
    pinning = pinning or CudaPinnedTransfer()
    pinned = pinning.empty_pinned(tensor)
    pinned.copy_(tensor)
    return pinning.upload(pinned, device)


def tensor_on(
    values: Sequence[int] | Sequence[float] | Sequence[Sequence[int]], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """A tensor of these numbers."""
    return to_device(torch.tensor(values, dtype=dtype), device)
