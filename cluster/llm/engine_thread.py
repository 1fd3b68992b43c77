"""An engine in its own thread, so that its router and its heartbeats run between the caller's
calls.
"""

import asyncio
import signal
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

from tramontane.cluster.common.signals import keep_handler
from tramontane.cluster.config.engine_config import EngineConfig
from tramontane.cluster.console.display import Display
from tramontane.cluster.pipeline.engine import Engine, open_engine
from tramontane.proto.errors import PipelineError

Result = TypeVar("Result")


class EngineThread:
    """Start a pipeline in a new event loop; ``run`` executes coroutines there, ``close`` removes
    the pipeline.

    Raises:
        UserError: the configuration, the checkpoint or the plan does not fit.
        PipelineError: the pipeline could not be started.
    """

    def __init__(self, config: EngineConfig, display: Display | None) -> None:
        self._config, self._display = config, display
        self._started: Future[Engine] = Future()
        self._loop = asyncio.new_event_loop()
        self._closing = asyncio.Event()
        # so that ``close`` can end it at any time
        self._main = self._loop.create_task(self._serve())
        self._thread = threading.Thread(
            target=self._run_loop, name="tramontane-engine", daemon=True
        )
        self._thread.start()
        try:
            # the caller's thread may be the main one, and Ray starts in ours
            with keep_handler(signal.SIGTERM):
                self.engine = self._started.result()
        except BaseException:  # Ctrl-C too: the pipeline is removed completely
            self.close()
            raise

    def run(self, work: Callable[[Engine], Coroutine[Any, Any, Result]]) -> Result:
        """Return the result of ``work``. An exception in the waiting thread, such as Ctrl-C,
        cancels the work.
        """
        if not self._thread.is_alive():
            raise PipelineError("this LLM is closed; create a new one")
        future = asyncio.run_coroutine_threadsafe(work(self.engine), self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        """Remove the pipeline, and a cluster that was started for it. Safe to call more than
        once.
        """
        if self._thread.is_alive():
            with suppress(RuntimeError):  # the loop was closed in this moment
                self._loop.call_soon_threadsafe(self._request_stop)
        self._thread.join()

    def _request_stop(self) -> None:
        """Let a started pipeline end; cancel one that is still starting."""
        self._closing.set()
        if not self._started.done() or self._started.exception() is not None:
            self._main.cancel()

    def _run_loop(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.get_loop().run_until_complete(self._main)

    async def _serve(self) -> None:
        try:
            await self._serve_until_closed()
        except asyncio.CancelledError:
            self._fail(PipelineError("the start of the pipeline was cancelled"))
        except BaseException as error:
            self._fail(error)

    async def _serve_until_closed(self) -> None:
        display = self._display
        report = display.report if display else lambda _: None
        try:
            async with open_engine(
                self._config, report, show_loading=display.loading if display else None
            ) as engine:
                if display:
                    display.stop()
                self._started.set_result(engine)
                await self._closing.wait()
        finally:
            if display:
                display.stop()

    def _fail(self, error: BaseException) -> None:
        if not self._started.done():
            self._started.set_exception(error)
