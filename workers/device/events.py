"""Events that mark a point in the work of a device."""

from collections.abc import Callable
from typing import Protocol

import torch


class DeviceEvent(Protocol):
    """A point in what a device does."""

    def wait(self) -> None:
        """Until the device has come to it. Raises what has failed there before it."""

    def seconds_since(self, earlier: "DeviceEvent") -> float:
        """Of the device's time; both have been waited for."""


class CudaDeviceEvent:
    """An event in the current stream. Whoever waits sleeps: other threads prepare the next step meanwhile."""

    def __init__(self) -> None:
        self.event = torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
        self.event.record()

    def wait(self) -> None:
        self.event.synchronize()

    def seconds_since(self, earlier: DeviceEvent) -> float:
        assert isinstance(earlier, CudaDeviceEvent)
        return float(earlier.event.elapsed_time(self.event)) / 1000


RecordEvent = Callable[[], DeviceEvent]
