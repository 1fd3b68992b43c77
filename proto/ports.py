"""Protocols between the rooms: of requests to a router, and of steps to stages."""

from collections.abc import AsyncGenerator, Awaitable, Sequence
from typing import Protocol

from tramontane.proto.request import Request, RequestOutput
from tramontane.proto.step import DraftRequest, MicroBatch, StepResult


class TokenSource(Protocol):
    """A router, or a client of one in another process: it turns requests into tokens."""

    def generate(self, request: Request) -> AsyncGenerator[RequestOutput, None]:
        """Yield the tokens of all sequences of a request until every one has finished.

        Each item holds all tokens that became ready since the previous one. Closing the generator
        aborts the unfinished sequences. Raises RequestError if the request cannot be accepted or
        OverloadedError if the queue is full, both before the first token, and PipelineError at any
        time.
        """
        ...

    def check_capacity(self, num_sequences: int, owner: int = 0) -> None:
        """Raise if a request of ``num_sequences`` would certainly be refused now, as far as is
        known without a remote call.

        An ingress calls this before it tokenizes. Raises OverloadedError if the queue is full,
        DrainingError if the server is about to stop.
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

        Micro-batches enter every stage in the order of these calls. The awaitable raises
        PipelineError if any part of the chain fails.
        """
        ...

    async def replace_hung_workers(self, limit_s: float) -> str:
        """Replace actors that do not respond, or have computed for longer than ``limit_s``, after a
        micro-batch timed out.

        Returns the reason to fence the stages, or an empty string if the micro-batch may still come
        back.
        """
        ...

    @property
    def has_lost_node(self) -> bool:
        """Whether a node of the pipeline has died between the last two fences."""
        ...

    async def fence(self) -> int:
        """Reset the sequences of every stage; return the new epoch, the only one that stages accept
        from now on.

        Raises PipelineError if a stage cannot be reached or another router holds the lease.
        """
        ...


class DraftPort(Protocol):
    """A draft model, usually in another process."""

    async def draft(
        self, requests: Sequence[DraftRequest], ended: Sequence[int]
    ) -> list[tuple[int, ...] | None]:
        """Return drafts of each request, or None where the model does not have the sequence. Raises
        PipelineError.

        Sequences in ``ended`` are dropped first.
        """
        ...
