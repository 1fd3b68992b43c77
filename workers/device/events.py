"""Events that mark a point in the work of a device."""

from collections.abc import Callable
from typing import Protocol

import torch


class DeviceEvent(Protocol):
    """A point in the queue of work of a device."""

    def wait(self) -> None:
        """Block until the device has reached the event. Raises what failed on the device before it."""

    def seconds_since(self, earlier: "DeviceEvent") -> float:
        """Return the device's time between two events, both of which have been waited for."""


class CudaDeviceEvent:
    """An event in the current stream. A waiting thread sleeps, so that other threads can prepare the next step."""

    def __init__(self) -> None:
        self.event = torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
        self.event.record()

    def wait(self) -> None:
        """Block until the device has reached the event."""
        self.event.synchronize()

    def seconds_since(self, earlier: DeviceEvent) -> float:
        """Return the device's time between two events."""
        assert isinstance(earlier, CudaDeviceEvent)
        return float(earlier.event.elapsed_time(self.event)) / 1000


RecordEvent = Callable[[], DeviceEvent]
