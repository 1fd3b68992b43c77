"""What a step leaves behind while a GPU may still be at it: the host has asked for everything, and reads it later."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from tramontane.proto.step import StepResult
from tramontane.workers.stage.activation import Activation

Outcome = Activation | StepResult


@dataclass(frozen=True, slots=True)
class PendingOutcome:
    """``hidden_TD``: of a stage that is not the last one, to be sent on in the order of the device's work.

    ``is_stateful``: reading it changes what the next step begins with, so it is read before that. ``read`` waits for the device,
    and is called once.
    """

    hidden_TD: Tensor | None
    is_stateful: bool
    read: Callable[[], Outcome]
