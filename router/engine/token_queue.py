"""Where one request's tokens wait for whoever reads them."""

import asyncio

from tramontane.proto.errors import TramontaneError
from tramontane.proto.request import RequestOutput


class OutputQueue:
    """What arrives between two readings is read in one piece, so a slow reader makes few and large readings."""

    def __init__(self) -> None:
        self._batches: list[RequestOutput] = []
        self._error: TramontaneError | None = None
        self._filled = asyncio.Event()

    def put(self, item: RequestOutput | TramontaneError) -> None:
        if isinstance(item, RequestOutput):
            self._batches.append(item)
        else:
            self._error = item
        self._filled.set()

    async def get(self) -> RequestOutput:
        """Everything that is there, waiting for the first if nothing is. Raises an error that was put, after the tokens."""
        await self._filled.wait()
        if not self._batches:
            assert self._error is not None
            raise self._error
        batch, self._batches = RequestOutput.merge(self._batches), []
        if self._error is None:
            self._filled.clear()
        return batch
