"""The loop: keep the pipeline full, hand tokens out as they come."""

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable

from tramontane.proto.errors import PipelineError
from tramontane.proto.ports import StageChain
from tramontane.proto.request import SamplingParams, TokenEvent
from tramontane.proto.step import MicroBatch, StepResult
from tramontane.router.scheduler import Scheduler
from tramontane.router.sequence import Sequence

logger = logging.getLogger(__name__)


class Router:
    """Drives one pipeline. ``run`` must be running for ``generate`` to yield anything."""

    def __init__(self, scheduler: Scheduler, chain: StageChain, observe: Callable[[StepResult], None] | None = None) -> None:
        self.scheduler = scheduler
        self.chain = chain
        self._observe = observe
        self._streams: dict[int, asyncio.Queue[TokenEvent | PipelineError]] = {}
        self._in_flight: deque[tuple[MicroBatch, asyncio.Future[StepResult]]] = deque()
        self._wake = asyncio.Event()
        self._seq_ids = itertools.count()
        self._failure: PipelineError | None = None

    async def generate(self, prompt_ids: tuple[int, ...], sampling: SamplingParams) -> AsyncIterator[TokenEvent]:
        """Yield a sequence's tokens until it finishes. Closing the iterator aborts the sequence.

        Raises RequestError if the prompt cannot be served, PipelineError if the pipeline fails.
        """
        if self._failure is not None:
            raise PipelineError(str(self._failure)) from self._failure
        max_len = min(len(prompt_ids) + sampling.max_tokens, self.scheduler.limits.max_model_len)
        sequence = Sequence(next(self._seq_ids), prompt_ids, sampling, max_len)
        self.scheduler.add(sequence)
        stream = self._streams[sequence.seq_id] = asyncio.Queue()
        self._wake.set()
        try:
            while True:
                event = await stream.get()
                if isinstance(event, PipelineError):
                    raise PipelineError(str(event)) from event  # its own: every raise grows an exception's traceback
                yield event
                if event.finish is not None:
                    return
        finally:
            del self._streams[sequence.seq_id]
            self.scheduler.abort(sequence.seq_id)
            self._wake.set()

    async def run(self) -> None:
        """Submit and collect until cancelled, or until the pipeline fails."""
        try:
            await self.chain.fence(self.scheduler.epoch)
            while True:
                self._submit()
                await self._wake.wait()
                self._wake.clear()
                self._collect()
        except PipelineError as error:
            self._fail(error)
        except Exception as error:  # a defect of ours must not leave clients waiting for ever
            logger.exception("the router failed")
            self._fail(PipelineError(f"the router failed: {error!r}"))
        finally:
            if self._failure is None:
                self._fail(PipelineError("the router has stopped"))
            for _, future in self._in_flight:
                future.cancel()

    def _submit(self) -> None:
        while len(self._in_flight) < self.scheduler.limits.max_in_flight:
            batch = self.scheduler.schedule()
            if batch is None:
                return
            future = asyncio.ensure_future(self.chain.submit(batch))
            future.add_done_callback(lambda _: self._wake.set())
            self._in_flight.append((batch, future))

    def _collect(self) -> None:
        """Results come in the order of submission."""
        while self._in_flight and self._in_flight[0][1].done():
            batch, future = self._in_flight.popleft()
            self._deliver(batch, future.result())

    def _deliver(self, batch: MicroBatch, result: StepResult) -> None:
        if self._observe is not None:
            self._observe(result)
        for event in self.scheduler.complete(batch, result):
            if (stream := self._streams.get(event.seq_id)) is not None:
                stream.put_nowait(event)

    def _fail(self, error: PipelineError) -> None:
        """Every request that is alive ends with the reason, and so does every later one."""
        self._failure = error
        for stream in self._streams.values():
            stream.put_nowait(error)
