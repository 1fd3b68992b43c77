"""What a step leaves behind while a GPU may still be at it: the host has asked for everything, and reads it later."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from tramontane.proto.step import StepResult
from tramontane.workers.stage.activation import Activation

Outcome = Activation | StepResult


class Mark(Protocol):
    """A point in what a device does."""

    def wait(self) -> None:
        """Until the device has come to it. Raises what has failed there before it."""

    def seconds_since(self, earlier: "Mark") -> float:
        """Of the device's time; both have been waited for."""


class CudaMark:
    """An event in the current stream. Whoever waits sleeps: other threads prepare the next step meanwhile."""

    def __init__(self) -> None:
        self.event = torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
        self.event.record()

    def wait(self) -> None:
        self.event.synchronize()

    def seconds_since(self, earlier: Mark) -> float:
        assert isinstance(earlier, CudaMark)
        return float(earlier.event.elapsed_time(self.event)) / 1000


MakeMark = Callable[[], Mark]


@dataclass(frozen=True, slots=True)
class Unread:
    """``hidden_TD``: of a stage that is not the last one, to be sent on in the order of the device's work.

    ``needs_turn``: reading it changes what the next step begins with, so it is read before that. ``read`` waits for the device,
    and is called once.
    """

    hidden_TD: Tensor | None
    needs_turn: bool
    read: Callable[[], Outcome]
