"""Threads for what the jobs' database and storage make one wait for; prompts are tokenized in others, and do not wait."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class JobThreads:
    """At most ``count``; whoever comes when all are taken waits, without holding anything up but jobs."""

    def __init__(self, count: int) -> None:
        self._pool = ThreadPoolExecutor(count, thread_name_prefix="jobs")

    async def run(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, lambda: call(*args, **kwargs))

    def close(self) -> None:
        """Waits for what is running, so that no connection stays open behind it."""
        self._pool.shutdown(cancel_futures=True)
