"""Protocols between the rooms: how requests reach a router, how steps reach stages, how tokens reach experts."""

from collections.abc import AsyncGenerator, Awaitable, Sequence
from typing import TYPE_CHECKING, Protocol

from tramontane.proto.request import RequestOutput, SequenceRequest
from tramontane.proto.step import ExpertUsage, MicroBatch, StepResult

if TYPE_CHECKING:
    from torch import Tensor


class TokenSource(Protocol):
    """A router, or a client of one in another process: it turns requests into tokens."""

    def generate(self, specs: Sequence[SequenceRequest]) -> AsyncGenerator[RequestOutput, None]:
        """Yield the tokens of all sequences of one request until every one has finished.

        Each item holds everything that became ready since the previous one. Closing the generator aborts the
        unfinished sequences.

        Raises:
            RequestError: before the first token, if the request cannot be accepted.
            OverloadedError: before the first token, if the queue is full.
            PipelineError: at any time.
        """
        ...

    def check_capacity(self, num_sequences: int, owner: int = 0) -> None:
        """Raise if a request of so many sequences would certainly be refused now, by what is known without a remote call.

        An ingress calls this before it tokenizes.

        Raises:
            OverloadedError: if the queue is full.
            DrainingError: if the server is about to stop.
        """
        ...


class StageChain(Protocol):
    """The stages of one pipeline, in order."""

    @property
    def num_stages(self) -> int:
        """Length of the chain."""
        ...

    def submit(self, batch: MicroBatch) -> Awaitable[StepResult]:
        """Start one micro-batch down the chain and return its pending result.

        Micro-batches enter every stage in the order of these calls. The awaitable raises PipelineError if any part of
        the chain fails.
        """
        ...

    async def replace_hung_workers(self, limit_s: float) -> str:
        """Replace actors that do not respond, or have computed for longer than ``limit_s``, after a micro-batch timed out.

        Returns the reason to fence the stages, or an empty string if the micro-batch may still come back.
        """
        ...

    async def fence(self) -> int:
        """Make every stage forget its sequences; return the new epoch, the only one that stages accept from now on.

        Raises PipelineError if a stage cannot be reached or another router holds the lease.
        """
        ...


class PendingExperts(Protocol):
    """Rows that were dispatched to the experts of one layer. Only the computing thread uses it."""

    @property
    def layer(self) -> int:
        """Global number of the layer."""
        ...

    @property
    def is_ready(self) -> bool:
        """Whether ``poll`` has something to do."""
        ...

    def wait(self) -> None:
        """Block until ``is_ready``."""
        ...

    def poll(self) -> bool:
        """Process results and failures that have arrived; return whether all rows are there.

        Raises PipelineError if an expert has become unreachable for good.
        """
        ...

    @property
    def usage(self) -> ExpertUsage:
        """Times and rows of the actors that computed, once all rows are there."""
        ...

    def result(self) -> "Tensor":
        """Return the output rows in the order of the input rows, once all are there."""
        ...


class ExpertGroups(Protocol):
    """Division of consecutive rows among the experts of a layer."""

    @property
    def offsets_E(self) -> "Tensor":
        """Where each expert's group ends, int32 [E] on the device of the rows: groups of 2, 0 and 3 end at 2, 2 and 5."""
        ...

    @property
    def sizes(self) -> list[int]:
        """Size of each expert's group, on the host. On a GPU this waits for the device."""
        ...


class ExpertBackend(Protocol):
    """What runs the experts of a layer: the stage itself, or expert actors."""

    @property
    def is_graph_safe(self) -> bool:
        """Whether ``dispatch`` never waits for the device and always launches the same work, so that a CUDA graph can hold it."""
        ...

    def dispatch(self, layer: int, rows_CD: "Tensor", groups: ExpertGroups) -> PendingExperts:
        """Have each expert run its group of rows. Rows after the last group are padding; their results are undefined."""
        ...
