"""The measured load of an event loop and its machine."""

import asyncio
import logging
import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from virtual_time import in_virtual_time

from tramontane.cluster.common import load_meter
from tramontane.cluster.common.load_meter import (
    FIND_EVERY,
    INTERVAL_S,
    CpuReader,
    CpuTimes,
    LoadMeter,
    next_level,
)

BEGIN = CpuTimes(at_s=100.0, loop_s=5.0, proxy_s=7.0, idle_s=1000.0, throttled_s=3.0, num_cores=4)


def _after(
    loop: float = 0.0,
    proxy: float = 0.0,
    idle: float = 1.0,
    throttled_s: float = 0.0,
    seconds: float = 0.1,
) -> CpuTimes:
    """Shares of the time since ``BEGIN``; ``idle``, of all cores."""
    return CpuTimes(
        at_s=BEGIN.at_s + seconds,
        loop_s=BEGIN.loop_s + loop * seconds,
        proxy_s=BEGIN.proxy_s + proxy * seconds,
        idle_s=BEGIN.idle_s + idle * seconds * BEGIN.num_cores,
        throttled_s=BEGIN.throttled_s + throttled_s,
        num_cores=BEGIN.num_cores,
    )


@pytest.mark.parametrize(
    "busy",
    [
        {"loop": 0.75},
        {"proxy": 0.75},
        {"idle": 0.05},
        {"throttled_s": 0.001},
        {"loop": 0.3, "proxy": 2.5, "idle": 0.5},
    ],
)
def test_one_that_has_no_time_raises_the_level(busy: dict[str, float]) -> None:
    assert next_level(0.2, BEGIN, _after(**busy)) == pytest.approx(0.3)
    assert next_level(0.8, BEGIN, _after(**busy)) == 1.0
    assert next_level(0.0, BEGIN, _after(**busy)) == pytest.approx(0.02)


def test_the_level_falls_where_all_have_time() -> None:
    free = _after(loop=0.45, proxy=0.45, idle=0.25)
    assert next_level(0.6, BEGIN, free) == pytest.approx(0.5)
    assert next_level(0.01, BEGIN, free) == 0.0


@pytest.mark.parametrize("between", [{"loop": 0.6}, {"proxy": 0.6}, {"idle": 0.15}])
def test_between_the_limits_the_level_stays(between: dict[str, float]) -> None:
    assert next_level(0.2, BEGIN, _after(**between)) == 0.2
    assert next_level(0.0, BEGIN, _after(**between)) == 0.0


class Machine:
    """Its readings by the clock of the event loop, with a load that a test sets."""

    def __init__(self) -> None:
        self.share, self.used_s, self.num_readings, self.fails = 0.0, 0.0, 0, False
        self.num_searches = 0

    def find_proxy(self) -> None:
        """There is none."""
        self.num_searches += 1

    def __call__(self) -> CpuTimes:
        if self.fails:
            raise OSError("no such file")
        self.num_readings += 1
        self.used_s += self.share * INTERVAL_S
        now = asyncio.get_running_loop().time()
        return CpuTimes(
            at_s=now,
            loop_s=self.used_s,
            proxy_s=0.0,
            idle_s=0.5 * now,
            throttled_s=0.0,
            num_cores=1,
        )


async def _settle(seconds: float) -> None:
    await asyncio.sleep(seconds + INTERVAL_S / 2)


@pytest.fixture
def no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Virtual time passes while a thread works."""

    async def call(function: Callable[[], None]) -> None:
        function()

    monkeypatch.setattr(asyncio, "to_thread", call)


@pytest.mark.usefixtures("no_threads")
@in_virtual_time
async def test_the_level_follows_the_load_while_anything_watches() -> None:
    machine = Machine()
    machine.share = 1.0
    meter = LoadMeter(machine)
    assert meter.level == 1.0, "nothing is known"
    with meter.watching():
        with meter.watching():
            await _settle(1.0)
            assert meter.level == 1.0
        machine.share = 0.1
        await _settle(4.0)
        assert meter.level < 0.05
        machine.share = 0.9
        await _settle(3.0)
        assert meter.level == 1.0
    num_readings = machine.num_readings
    await _settle(5.0)
    assert machine.num_readings == num_readings, "nothing watches"
    assert len(asyncio.all_tasks()) == 1
    machine.share = 0.1
    with meter.watching():
        await _settle(4.0)
        assert meter.level < 0.05


@pytest.mark.usefixtures("no_threads")
@in_virtual_time
async def test_the_proxy_is_looked_for_again_as_it_may_have_been_replaced() -> None:
    machine = Machine()
    with LoadMeter(machine).watching():
        await _settle(2.5 * FIND_EVERY * INTERVAL_S)
    assert machine.num_searches == 3


def test_a_reading_is_of_this_thread_alone_and_a_core_that_waits_for_a_disk_is_idle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clocks = SimpleNamespace(
        monotonic=lambda: 100.0, thread_time=lambda: 5.0, process_time=lambda: 50.0
    )
    times = SimpleNamespace(idle=1000.0, iowait=20.0)
    monkeypatch.setattr(load_meter, "time", clocks)
    monkeypatch.setattr(load_meter.psutil, "cpu_times", lambda: times)
    reading = CpuReader()()
    assert (reading.at_s, reading.loop_s, reading.idle_s) == (100.0, 5.0, 1020.0)
    del times.iowait  # not on every system
    assert CpuReader()().idle_s == 1000.0


@pytest.mark.usefixtures("no_threads")
@in_virtual_time
async def test_a_load_that_cannot_be_measured_counts_as_full(
    caplog: pytest.LogCaptureFixture,
) -> None:
    machine = Machine()
    meter = LoadMeter(machine)
    with caplog.at_level(logging.WARNING), meter.watching():
        await _settle(4.0)
        assert meter.level < 0.05
        machine.fails = True
        await _settle(0.1)
        assert meter.level == 1.0
    assert "it counts as full" in caplog.text


@pytest.fixture
def proxy() -> Iterator["subprocess.Popen[bytes]"]:
    name = "ray::ProxyActor"
    with subprocess.Popen(
        ["bash", "-c", f"exec -a {name} bash -c 'read; while :; do :; done'"], stdin=subprocess.PIPE
    ) as process:
        yield process
        process.kill()


def test_a_reader_counts_this_thread_and_the_proxy(proxy: "subprocess.Popen[bytes]") -> None:
    reader = CpuReader(os.getpid())
    assert reader().proxy_s == 0.0, "none is known"
    while reader._proxy is None:  # until bash has given it its name
        reader.find_proxy()
    assert reader._proxy.pid == proxy.pid
    before = reader()
    other = threading.Thread(target=lambda: sum(range(10**6)))
    other.start()
    other.join()
    after = reader()
    assert after.loop_s >= before.loop_s
    assert after.at_s > before.at_s
    assert after.idle_s >= before.idle_s
    assert after.num_cores >= 1
    assert proxy.stdin is not None
    proxy.stdin.write(b"\n")
    proxy.stdin.flush()
    while reader().proxy_s <= before.proxy_s:
        pass
    begun_s = reader().loop_s
    while reader().loop_s <= begun_s:
        pass
    proxy.kill()
    proxy.wait()
    assert reader().proxy_s == 0.0, "it has ended"
    assert reader._proxy is None


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("usage_usec 5\nnr_throttled 3\nthrottled_usec 1500000\n", 1.5),
        ("usage_usec 5\n", 0.0),
        ("a b c\n", 0.0),
        (None, 0.0),
    ],
)
def test_where_a_container_has_a_limit_its_waits_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None, seconds: float
) -> None:
    monkeypatch.setattr(load_meter, "THROTTLED", tmp_path / "cpu.stat")
    if text is not None:
        (tmp_path / "cpu.stat").write_text(text)
    assert CpuReader()().throttled_s == seconds
