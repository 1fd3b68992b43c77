"""Events that mark a point in the work of a device."""

from collections.abc import Callable

import torch


class DeviceEvent:
    """A point in the work that is queued on the current stream of a GPU; tests replace it.

    A waiting thread spins, without Python's lock: one that sleeps has to be woken, and the GPU
    would wait for that before each step.
    """

    def __init__(self) -> None:
        self._event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._event.record()

    def wait(self) -> None:
        """Block until the device has reached the event. Raises what failed on the device before
        it.
        """
        self._event.synchronize()

    def seconds_since(self, earlier: "DeviceEvent") -> float:
        """Return the device's time between two events, both of which have been waited for."""
        return float(earlier._event.elapsed_time(self._event)) / 1000


RecordEvent = Callable[[], DeviceEvent]
