"""Pending result of a step whose GPU work has been launched but not awaited."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from tramontane.proto.step import StepResult
from tramontane.workers.stage.activation import Activation

Outcome = Activation | StepResult


@dataclass(frozen=True, slots=True)
class PendingOutcome:
    """A step that has been launched.

    ``hidden_TD``: the output of a stage that is not the last one, to be sent in the order of the device's work.
    ``is_stateful``: reading changes what the next step begins with, so it has to be read before that.
    ``read``: waits for the device and returns the outcome; called once.
    """

    hidden_TD: Tensor | None
    is_stateful: bool
    read: Callable[[], Outcome]
