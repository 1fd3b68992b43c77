"""The seams: how requests reach a router, how steps reach stages, how tokens reach experts."""

from collections.abc import AsyncGenerator, Awaitable, Sequence
from typing import TYPE_CHECKING, Protocol

from tramontane.proto.request import RequestOutput, SequenceRequest
from tramontane.proto.step import ExpertUsage, MicroBatch, StepResult

if TYPE_CHECKING:
    from torch import Tensor


class TokenSource(Protocol):
    """Whoever turns a request into tokens: a router in this process, or one far away."""

    def generate(self, specs: Sequence[SequenceRequest]) -> AsyncGenerator[RequestOutput, None]:
        """Yield the tokens of all sequences of one request until every one has finished.

        What has become ready since the last time comes in one piece. Closing the
        generator aborts what is unfinished. Raises RequestError or OverloadedError
        before the first token, PipelineError at any time.
        """
        ...

    def check_capacity(self, num_sequences: int, owner: int = 0) -> None:
        """Whether a request of so many sequences would certainly be refused now, as far as is known without asking anybody.

        For doors, before they tokenize. Raises OverloadedError or DrainingError.
        """
        ...


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

    async def replace_hung_workers(self, limit_s: float) -> str:
        """A micro-batch has not come back in time: replace whatever does not answer, or has computed for longer than this.

        Returns why to fence the stages anew, or nothing if it is worth waiting on.
        """
        ...

    async def fence(self) -> int:
        """Make every stage forget its sequences; returns the epoch that they obey from now on.

        Raises PipelineError if a stage cannot be reached or somebody else drives them.
        """
        ...


class PendingExperts(Protocol):
    """Rows that experts of one layer have been asked to run. For the thread that computes."""

    @property
    def layer(self) -> int: ...

    @property
    def is_ready(self) -> bool:
        """Whether ``advance`` has something to do."""
        ...

    def wait(self) -> None:
        """Until there is news."""
        ...

    def poll(self) -> bool:
        """Do what there is to do about answers that came, or never will; whether all are there.

        Raises PipelineError where one of them is out of reach for good.
        """
        ...

    @property
    def usage(self) -> ExpertUsage:
        """What it took, once all are there."""
        ...

    def result(self) -> "Tensor":
        """The rows that experts made of those that they were given, in the same order; once all are there."""
        ...


class ExpertGroups(Protocol):
    """How rows that lie one after the other are shared out among the experts of a layer."""

    @property
    def offsets_E(self) -> "Tensor":
        """Where each expert's group ends, int32 [E] on the rows' device: groups of 2, 0 and 3 end at 2, 2 and 5."""
        ...

    @property
    def sizes(self) -> list[int]:
        """Of the groups, one per expert: for whoever needs them on the host. On a GPU this waits for them."""
        ...


class ExpertBackend(Protocol):
    """Whoever runs the experts of a layer: the stage itself, or actors of their own."""

    @property
    def is_graph_safe(self) -> bool:
        """Whether asking never waits for the device, and does the same whatever is chosen: then a CUDA graph may hold it."""
        ...

    def dispatch(self, layer: int, rows_CD: "Tensor", groups: ExpertGroups) -> PendingExperts:
        """Have each expert run its group of rows. Rows after the last group are padding, and come back as anything."""
        ...
