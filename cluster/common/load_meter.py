"""The load of an event loop and its machine: optional work is done at once at low load, and in
larger batches otherwise.
"""

import asyncio
import itertools
import logging
import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from contextvars import Context
from pathlib import Path
from typing import NamedTuple, Protocol

import psutil

INTERVAL_S = 0.1
FIND_EVERY = 100  # readings: the proxy may have been replaced
BUSY, HAS_TIME = 0.7, 0.5  # shares of the time of an event loop's thread
FULL, HAS_CORES = 0.9, 0.8  # shares of a machine's cores
RAISE, LOWER = 1.5, 1 / 1.2  # of the level, with each reading
LOWEST = 0.01
PROXY = "ray::ProxyActor"  # every write of every ingress replica of the machine passes through it
THROTTLED = Path("/sys/fs/cgroup/cpu.stat")  # of the container, where its cores are limited

logger = logging.getLogger(__name__)


class CpuTimes(NamedTuple):
    """Seconds since an arbitrary moment: of the clock, and of processors.

    ``loop_s``: used by the thread that reads. ``proxy_s``: by Ray Serve's proxy of this machine, 0
    without a proxy. ``idle_s``: idle time of all ``num_cores``. ``throttled_s``: time in which this
    container had used up its cores.
    """

    at_s: float
    loop_s: float
    proxy_s: float
    idle_s: float
    throttled_s: float
    num_cores: int


class Reader(Protocol):
    """The interface of ``CpuReader``."""

    def __call__(self) -> CpuTimes:
        """Return the times used so far."""
        ...

    def find_proxy(self) -> None:
        """Look for the proxy's process."""
        ...


class CpuReader:
    """Reads ``CpuTimes`` in the thread of an event loop. It takes some 50 us.

    ``raylet``: which has started the proxy, and this process.
    """

    def __init__(self, raylet: int | None = None) -> None:
        self._raylet = os.getppid() if raylet is None else raylet
        self._proxy: psutil.Process | None = None

    def __call__(self) -> CpuTimes:
        """Return the times used so far."""
        machine = psutil.cpu_times()
        idle_s = machine.idle + getattr(machine, "iowait", 0.0)  # only Linux has the latter
        num_cores = psutil.cpu_count() or 1
        return CpuTimes(
            time.monotonic(), time.thread_time(), self._proxy_s(), idle_s, _throttled_s(), num_cores
        )

    def find_proxy(self) -> None:
        """Look for the proxy's process, which takes milliseconds where there are many processes."""
        if self._proxy is None or not self._proxy.is_running():
            self._proxy = next(filter(_is_proxy, psutil.Process(self._raylet).children()), None)

    def _proxy_s(self) -> float:
        if self._proxy is None:
            return 0.0
        try:
            times = self._proxy.cpu_times()
        except psutil.Error:  # it has ended
            self._proxy = None
            return 0.0
        return float(times.user + times.system)


def _is_proxy(process: psutil.Process) -> bool:
    try:
        return "".join(process.cmdline()[:1]).startswith(PROXY)
    except psutil.Error:  # it has ended
        return False


def _throttled_s() -> float:
    with suppress(OSError, ValueError, KeyError):
        return (
            int(
                dict(line.split() for line in THROTTLED.read_text(encoding="ascii").splitlines())[
                    "throttled_usec"
                ]
            )
            / 1e6
        )
    return 0.0


class FullLoad:
    """A constant full load, for callers that never have time for optional work."""

    level = 1.0

    def watching(self) -> AbstractContextManager[None]:
        """Do nothing: the load is constant."""
        return nullcontext()


class LoadMeter:
    """The ``level`` of load from 0, idle, to 1. It is measured while ``watching``.

    The load is high while the event loop's thread, or the proxy, which is one thread too, uses more
    than 0.7 of its time, or less than a tenth of the machine's cores is idle: then the level rises
    by half every 0.1 s. It falls by a sixth when all of them have spare time again. In between it
    stays.

    With a level of 1 and no load, it is 0.16 after a second, 0.03 after two, and 0 after 2.6 s.
    """

    def __init__(self, read: Reader | None = None) -> None:
        self._read = CpuReader() if read is None else read
        self.level = 1.0
        self._num_watching = 0
        self._measuring: asyncio.Task[None] | None = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Measure during the block, in the event loop that runs."""
        self._num_watching += 1
        if self._measuring is None:
            # of no request
            self._measuring = asyncio.create_task(self._measure(), context=Context())
        try:
            yield
        finally:
            self._num_watching -= 1
            if not self._num_watching and self._measuring is not None:
                self._measuring.cancel()
                self._measuring = None

    async def _measure(self) -> None:
        try:
            before = self._read()
            for number in itertools.count():
                if number % FIND_EVERY == 0:
                    await asyncio.to_thread(self._read.find_proxy)
                await asyncio.sleep(INTERVAL_S)
                now = self._read()
                self.level = next_level(self.level, before, now)
                before = now
        except Exception:
            logger.warning(
                "the load of this process cannot be measured; it counts as full", exc_info=True
            )
            self.level = 1.0


Load = FullLoad | LoadMeter
FULL_LOAD = FullLoad()


def next_level(level: float, before: CpuTimes, now: CpuTimes) -> float:
    """Return the level after the time between two readings.

    In 0.1 s the loop used 0.06 s, the proxy 0.08, and of 4 cores 0.1 s were idle: the proxy is at
    0.8, so 0.2 becomes 0.3.
    """
    elapsed_s = now.at_s - before.at_s
    thread = max(now.loop_s - before.loop_s, now.proxy_s - before.proxy_s) / elapsed_s
    cores = 1 - (now.idle_s - before.idle_s) / (elapsed_s * now.num_cores)
    if thread > BUSY or cores > FULL or now.throttled_s > before.throttled_s:
        return min(max(level * RAISE, 2 * LOWEST), 1.0)
    if thread < HAS_TIME and cores < HAS_CORES:
        return level * LOWER if level > LOWEST else 0.0
    return level
