"""The two seams of the engine: how steps reach stages, how tokens reach experts."""

from collections.abc import Awaitable
from typing import TYPE_CHECKING, Protocol

from tramontane.proto.step import MicroBatch, StepResult

if TYPE_CHECKING:
    from torch import Tensor


class StageChain(Protocol):
    """The stages of one pipeline, in order."""

    @property
    def num_stages(self) -> int: ...

    def submit(self, batch: MicroBatch) -> Awaitable[StepResult]:
        """Start one micro-batch down the chain; the result is awaited later.

        Micro-batches enter every stage in the order of these calls. A failure
        anywhere in the chain is raised by the awaitable as ``PipelineError``.
        """
        ...

    async def fence(self, epoch: int) -> None:
        """Make every stage forget its sequences and obey ``epoch`` from now on."""
        ...


class ExpertBackend(Protocol):
    """Whoever runs the experts of a layer: the stage itself, or actors of their own."""

    def forward(self, layer: int, hidden_TD: "Tensor", expert_ids_Tk: "Tensor", weights_Tk: "Tensor") -> "Tensor":
        """Return the weighted sum over each token's experts, [T, D]."""
        ...
