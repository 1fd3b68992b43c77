"""Events that mark a point in the work of a device."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


class DeviceEvent:
    """A point in the work that is queued on the current stream of a GPU; tests replace it.

    A waiting thread spins, without Python's lock: a sleeping thread has to be woken, and the GPU
    would wait for that before each step.
    """

    def __init__(self) -> None:
        self._event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._event.record()

    def wait(self) -> None:
        """Block until the device has reached the event. Raises errors of earlier work on the
        device.
        """
        self._event.synchronize()

    def seconds_since(self, earlier: "DeviceEvent") -> float:
        """Return the device's time between two events, both of which have been waited for."""
        return float(earlier._event.elapsed_time(self._event)) / 1000


RecordEvent = Callable[[], DeviceEvent]


# Copies between a GPU and the host through pinned memory, which the GPU accesses without help of
# the processor.
#
# A copy to a GPU from pageable memory waits until the GPU has finished all earlier work; a copy
# from pinned memory is only queued. torch reuses pinned memory once no tensor or array refers to it
# and its copies are done.


class PinnedTransfer:
    """Copies through pinned memory on the current stream of a CUDA device; tests replace it."""

    def empty_pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Allocate uninitialized pinned memory."""
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Start to copy ``source`` to ``target``."""
        target.copy_(source, non_blocking=True)

    def record(self, device: torch.device) -> Callable[[], None]:
        """Return a function that blocks until all work queued on the device so far is done; it
        spins, see ``DeviceEvent``.
        """
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(device))
        return event.synchronize

    def upload(self, pinned: Tensor, device: torch.device) -> Tensor:
        """Start to copy a pinned tensor to the device. Work that the device gets from now on sees
        the complete copy.
        """
        return pinned.to(device, non_blocking=True)


@dataclass(frozen=True, slots=True)
class HostCopy:
    """A contiguous tensor on the host, complete once ``wait`` has returned. It may be the original
    if that is on the host.
    """

    tensor: Tensor
    wait: Callable[[], None]


def copy_to_host_async(tensor: Tensor, transfer: PinnedTransfer | None = None) -> HostCopy:
    """Start to copy a tensor to the host. Work that the device gets later does not delay the
    copy.
    """
    if tensor.device.type == "cpu" and transfer is None:
        return HostCopy(tensor.contiguous(), lambda: None)
    transfer = transfer or PinnedTransfer()
    pinned = transfer.empty_pinned(tensor.shape, tensor.dtype)
    transfer.copy(pinned, tensor)
    return HostCopy(pinned, transfer.record(tensor.device))


def to_host(tensor: Tensor, transfer: PinnedTransfer | None = None) -> Tensor:
    """Return a contiguous, complete tensor on the host: a copy, or the original if it is contiguous
    and on the host.
    """
    host_copy = copy_to_host_async(tensor, transfer)
    host_copy.wait()
    return host_copy.tensor


def to_device(
    tensor: Tensor, device: torch.device, transfer: PinnedTransfer | None = None
) -> Tensor:
    """Copy a host tensor to the device without waiting for it; return the original if it is there
    already.

    The host tensor may be read-only, and may be freed once this returns.
    """
    if transfer is None and (device.type == "cpu" or tensor.device.type != "cpu"):
        return tensor.to(device)
    transfer = transfer or PinnedTransfer()
    pinned = transfer.empty_pinned(tensor.shape, tensor.dtype)
    pinned.copy_(tensor)
    return transfer.upload(pinned, device)


def tensor_on(
    values: Sequence[int] | Sequence[float] | Sequence[Sequence[int]],
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """Return a tensor of these numbers on the device, without waiting for the transfer."""
    return to_device(torch.tensor(values, dtype=dtype), device)


def fill(target: Tensor, values: Sequence[Sequence[int]]) -> None:
    """Overwrite a tensor with these numbers, without waiting for its device."""
    source = torch.tensor(values, dtype=target.dtype)
    if target.device.type == "cpu":
        target.copy_(source)
        return
    transfer = PinnedTransfer()
    pinned = transfer.empty_pinned(source.shape, source.dtype)
    pinned.copy_(source)
    transfer.copy(target, pinned)
