"""Threads for the jobs' storage and for clients' URLs, which may be slow."""

import asyncio
import inspect
from collections.abc import AsyncGenerator, Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import ParamSpec, TypeVar
from weakref import WeakValueDictionary

P = ParamSpec("P")
T = TypeVar("T")

THREADS, TENANT_THREADS = 32, 4
READ_TIMEOUT_S = 3600.0  # total wait for one file: 4 GiB at 1.2 MB/s

Pieces = Generator[bytes, None, None]


class StorageThreads:
    """``count`` threads for blocking calls. One tenant uses at most ``per_tenant`` at a time; its
    further calls wait.

    They run no other work: prompts are tokenized on the event loop's threads, and the database has
    its own. A call that hangs counts until it returns, even if its caller has been cancelled.
    """

    def __init__(
        self,
        count: int = THREADS,
        per_tenant: int = TENANT_THREADS,
        timeout_s: float = READ_TIMEOUT_S,
    ) -> None:
        assert 0 < per_tenant < count
        self._per_tenant, self._timeout_s = per_tenant, timeout_s
        self._pool = ThreadPoolExecutor(count, thread_name_prefix="storage")
        # kept while a call of the tenant uses it
        self._free: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    async def run(self, tenant: str, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a blocking call in a thread."""
        return await asyncio.wrap_future(await self._start(tenant, lambda: call(*args, **kwargs)))

    async def read(self, tenant: str, pieces: Pieces) -> AsyncGenerator[bytes, None]:
        """Yield the items of a blocking generator up to its first empty piece, and close it in any
        case.

        Raises TimeoutError after a total wait of ``timeout_s``, and the errors of the generator.
        """
        loop = asyncio.get_running_loop()
        step: Future[bytes] | None = None
        left_s = self._timeout_s
        try:
            while True:
                begun_at = loop.time()
                async with asyncio.timeout(left_s):
                    step = await self._start(tenant, lambda: next(pieces, b""))
                    piece = await asyncio.wrap_future(step)
                if not piece:
                    return
                left_s -= loop.time() - begun_at
                yield piece
        finally:
            self._close(pieces, step)

    def close(self) -> None:
        """Wait for running calls, and cancel the others."""
        self._pool.shutdown(cancel_futures=True)

    async def _start(self, tenant: str, call: Callable[[], T]) -> Future[T]:
        loop = asyncio.get_running_loop()
        free = self._free.setdefault(tenant, asyncio.Semaphore(self._per_tenant))
        await free.acquire()
        try:
            future = self._pool.submit(call)
        except BaseException:
            free.release()
            raise

        def release(_: Future[T]) -> None:
            with suppress(RuntimeError):  # the loop has ended, and all waiting tasks with it
                loop.call_soon_threadsafe(free.release)

        future.add_done_callback(release)
        return future

    def _close(self, pieces: Pieces, step: Future[bytes] | None) -> None:
        """Close a generator in a thread, after its current step."""
        if step is not None and not step.done():
            step.add_done_callback(lambda _: pieces.close())
        elif inspect.getgeneratorstate(pieces) != inspect.GEN_CLOSED:
            with suppress(RuntimeError):  # no further call is accepted: the process ends
                self._pool.submit(pieces.close)
