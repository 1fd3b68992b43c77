"""The seams: how requests reach a router, how steps reach stages."""

from collections.abc import AsyncGenerator, Awaitable, Sequence
from typing import Protocol

from tramontane.proto.request import RequestOutput, SequenceRequest
from tramontane.proto.step import MicroBatch, StepResult


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
