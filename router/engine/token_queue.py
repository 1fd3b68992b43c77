"""The output queue of one request: tokens wait here until the client's stream reads them."""

import asyncio

from tramontane.proto.errors import TramontaneError
from tramontane.proto.request import RequestOutput


class OutputQueue:
    """Merges all outputs that arrive between two reads, so a slow reader makes few and large reads."""

    def __init__(self) -> None:
        self._batches: list[RequestOutput] = []
        self._error: TramontaneError | None = None
        self._filled = asyncio.Event()

    def put(self, item: RequestOutput | TramontaneError) -> None:
        """Add an output, or the error that ends the request."""
        if isinstance(item, RequestOutput):
            self._batches.append(item)
        else:
            self._error = item
        self._filled.set()

    async def get(self) -> RequestOutput:
        """Return all outputs as one, waiting for the first. Raises an error that was put, after the outputs."""
        await self._filled.wait()
        if not self._batches:
            assert self._error is not None
            raise self._error
        batch, self._batches = RequestOutput.merge(self._batches), []
        if self._error is None:
            self._filled.clear()
        return batch
