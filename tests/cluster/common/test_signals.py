"""Ctrl-C while Ray is being started: it is finished and then shut down, since a half started one
ends Python in a crash.
"""

import asyncio
import ctypes
import os
import signal
import subprocess
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from tramontane.cluster.common.signals import cancel_on_signal, defer_signals, until_interrupted
from tramontane.cluster.config.engine_config import EngineConfig
from tramontane.cluster.llm import engine_thread
from tramontane.cluster.pipeline.ray_cluster import local_ray_cluster

SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """As the command sets them for ``serve``."""
    before = {number: signal.signal(number, signal.default_int_handler) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", SIGNALS)
def test_ray_is_whole_and_then_shut_down_when_a_signal_comes_while_it_starts(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], number: signal.Signals
) -> None:
    happened = []

    def init(**_: Any) -> None:
        # as ray.init does
        ray._private.utils.set_sigterm_handler(lambda *_: happened.append("Ray's own handler"))
        os.kill(os.getpid(), number)
        happened.append("started")

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "shutdown", lambda: happened.append("shut down"))
    with pytest.raises(KeyboardInterrupt), local_ray_cluster(num_cpus=1):
        happened.append("used")
    assert happened == ["started", "shut down"]
    assert signal.default_int_handler not in [signal.getsignal(each) for each in SIGNALS], (
        "a second one ends at once"
    )
    assert (
        capfd.readouterr().err
        == "Interrupted: stopping the local Ray cluster; Ctrl-C again ends at once.\n"
    )


def test_native_code_that_starts_with_ray_does_not_keep_sigterm(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ray's library aborts the process three seconds after a SIGTERM that it handles, whatever is
    still to be removed.
    """
    received: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: received.append(number))

    def init(**_: object) -> SimpleNamespace:
        ctypes.CDLL(None).signal(signal.SIGTERM, int(signal.SIG_IGN))
        return SimpleNamespace(dashboard_url="")

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    with local_ray_cluster(num_cpus=1):
        os.kill(os.getpid(), signal.SIGTERM)
        assert received == [signal.SIGTERM]


def test_a_program_keeps_its_handler_where_ray_starts_in_another_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As with ``LLM``, whose engine has a thread of its own."""

    @asynccontextmanager
    async def open_engine(*_: object, **__: object) -> AsyncIterator[str]:
        ctypes.CDLL(None).signal(signal.SIGTERM, int(signal.SIG_IGN))
        yield "the engine"

    received: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: received.append(number))
    monkeypatch.setattr(engine_thread, "open_engine", open_engine)
    thread = engine_thread.EngineThread(EngineConfig(), None)
    os.kill(os.getpid(), signal.SIGTERM)
    thread.close()
    assert received == [signal.SIGTERM]


def _exits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the statuses of exits at once, which do not happen."""
    statuses: list[int] = []
    monkeypatch.setattr(os, "_exit", statuses.append)
    return statuses


def test_the_first_signal_is_reported_at_once_and_a_second_one_ends_the_process(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    statuses = _exits(monkeypatch)
    child = subprocess.Popen(["sleep", "1000"])

    def work() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        assert capfd.readouterr().err == "Interrupted: please wait.\n"
        assert not statuses
        os.kill(os.getpid(), signal.SIGTERM)
        assert statuses == [130]

    with pytest.raises(KeyboardInterrupt), defer_signals("Interrupted: please wait."):
        work()
    os.kill(os.getpid(), signal.SIGINT)
    assert statuses == [130, 130], "in the clean-up, too"
    assert child.wait() == -signal.SIGKILL


def test_an_event_loop_sees_a_signal_after_the_block(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """As the commands that run in a loop, which ``ray.init`` blocks."""
    statuses, happened = _exits(monkeypatch), list[str]()

    async def work() -> None:
        with defer_signals("Interrupted: please wait."):
            os.kill(os.getpid(), signal.SIGINT)
            happened.append(capfd.readouterr().err)
        happened.append("the block is over")
        try:
            await asyncio.sleep(1000)
        finally:
            os.kill(os.getpid(), signal.SIGINT)
            happened.append("cleaned up")

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(cancel_on_signal(work()))
    assert happened == ["Interrupted: please wait.\n", "the block is over", "cleaned up"]
    assert statuses == [130]


def test_what_has_a_handler_of_its_own_keeps_it() -> None:
    received: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: received.append(number))
    with defer_signals(""):
        os.kill(os.getpid(), signal.SIGTERM)
        assert received == [signal.SIGTERM]


def test_nothing_is_held_outside_the_main_thread() -> None:
    ended = []

    def run() -> None:
        with defer_signals(""):
            ended.append(True)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert ended == [True]


@pytest.mark.parametrize("number", SIGNALS)
def test_the_first_signal_ends_what_runs_until_interrupted_and_a_second_changes_nothing(
    number: signal.Signals,
) -> None:
    happened = []
    with until_interrupted():
        try:
            happened.append("begun")
            os.kill(os.getpid(), number)
            happened.append("not interrupted")
        finally:
            os.kill(os.getpid(), signal.SIGTERM)
            happened.append("cleaned up")
    os.kill(os.getpid(), signal.SIGINT)
    assert happened == ["begun", "cleaned up"]


def test_a_signal_that_is_ignored_remains_so() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with until_interrupted():
        os.kill(os.getpid(), signal.SIGHUP)
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
