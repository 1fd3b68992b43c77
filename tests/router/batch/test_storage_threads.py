"""Threads for the storage and URLs: one tenant cannot have all, what hangs counts, and prompts
never wait for them.
"""

import asyncio
import gc
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import fsspec
import pytest
from batch_jobs import new_batch_harness, requests
from event_loops import in_event_loop
from fsspec.implementations.memory import MemoryFileSystem

from tramontane.proto.errors import JobRefusedError, JobStoreError
from tramontane.router.batch.storage_threads import Pieces, StorageThreads
from tramontane.router.batch.urls import UrlReader
from tramontane.router.openai.served_model import OFFLOAD_CHARS, offload_if_large

NUM_HANGING = 64  # more than the event loop has threads: 32 at most
WAIT_TIMEOUT_S = 60.0  # for what fails if it waits at all


class Gate:
    """Counts blocking calls, which wait until it is opened."""

    def __init__(self) -> None:
        self.open, self.num_waiting, self.names = threading.Event(), 0, set[str]()
        self._lock = threading.Lock()

    def wait(self) -> None:
        with self._lock:
            self.num_waiting += 1
            self.names.add(threading.current_thread().name)
        self.open.wait()

    async def until(self, count: int) -> None:
        while self.num_waiting < count:
            await asyncio.sleep(0)


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.open.set()


class HangingFile:
    """A file whose reads wait for a gate."""

    def __init__(self, gate: Gate) -> None:
        self._gate, self.is_closed = gate, threading.Event()

    def pieces(self, count: int = 1) -> Pieces:
        try:
            for _ in range(count):
                self._gate.wait()
                yield b"piece"
        finally:
            self.is_closed.set()


async def _read(threads: StorageThreads, tenant: str, pieces: Pieces) -> bytes:
    return b"".join([piece async for piece in threads.read(tenant, pieces)])


@in_event_loop
async def test_a_tenant_has_some_of_the_threads_only(gate: Gate) -> None:
    threads = StorageThreads(5, 2)
    own = [asyncio.create_task(_read(threads, "own", HangingFile(gate).pieces())) for _ in range(9)]
    await gate.until(2)
    assert await threads.run("other", lambda: "done") == "done"
    assert gate.num_waiting == 2
    gate.open.set()
    assert await asyncio.gather(*own) == [b"piece"] * 9
    threads.close()


@in_event_loop
async def test_a_call_whose_caller_has_gone_counts_until_it_returns(gate: Gate) -> None:
    threads = StorageThreads(5, 2)
    files = [HangingFile(gate), HangingFile(gate)]
    hanging = [asyncio.create_task(_read(threads, "own", file.pieces())) for file in files]
    await gate.until(2)
    for task in hanging:
        task.cancel()
    await asyncio.gather(*hanging, return_exceptions=True)
    third = asyncio.create_task(threads.run("own", gate.wait))
    for _ in range(20):
        await asyncio.sleep(0)
    assert gate.num_waiting == 2
    assert not any(file.is_closed.is_set() for file in files), "their reads still run"
    gate.open.set()
    await third
    assert all(file.is_closed.wait(WAIT_TIMEOUT_S) for file in files)
    threads.close()


@in_event_loop
async def test_a_file_is_closed_wherever_its_reader_stops(gate: Gate) -> None:
    gate.open.set()
    threads = StorageThreads(5, 2)
    broken, whole = HangingFile(gate), HangingFile(gate)
    reading = threads.read("own", broken.pieces(3))
    assert await anext(reading) == b"piece"
    assert not broken.is_closed.is_set()
    await reading.aclose()
    assert await _read(threads, "own", whole.pieces(3)) == b"piece" * 3
    assert await asyncio.to_thread(broken.is_closed.wait, WAIT_TIMEOUT_S)
    assert whole.is_closed.is_set()
    threads.close()


def test_the_limit_is_of_a_whole_file_and_not_of_each_piece() -> None:
    """Each of six pieces takes 10 s of the 25 s that the file may take, by a clock that only the
    pieces move.
    """
    passed_s = [0.0]

    def pieces() -> Pieces:
        for _ in range(6):
            passed_s[0] += 10.0
            yield b"piece"

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        loop.time = lambda: passed_s[0]  # type: ignore[method-assign]
        threads = StorageThreads(3, 2, timeout_s=25.0)
        with pytest.raises(TimeoutError):
            await _read(threads, "own", pieces())
        threads.close()

    asyncio.run(scenario())
    assert passed_s[0] < 60.0


@in_event_loop
async def test_all_the_waiting_for_a_file_is_bounded(gate: Gate) -> None:
    """Also the waiting for a thread."""
    threads = StorageThreads(3, 2, timeout_s=0.0)
    file = HangingFile(gate)
    for pieces in (file.pieces(), HangingFile(gate).pieces(), HangingFile(gate).pieces()):
        with pytest.raises(TimeoutError):
            await _read(threads, "own", pieces)
    gate.open.set()
    threads.close()


def test_time_that_a_reader_takes_for_itself_does_not_count() -> None:
    """The clock of this loop jumps while a piece is used; the time between two pieces is what
    counts.
    """

    class Clock(asyncio.SelectorEventLoop):
        jump = 0.0

        def time(self) -> float:
            return super().time() + self.jump

    def pieces(loop: Clock | None) -> Pieces:
        for _ in range(3):
            if loop is not None:
                loop.jump += 4000
            yield b"piece"

    async def read(loop: Clock, slow: Clock | None) -> int:
        threads, num_pieces = StorageThreads(), 0
        async for _ in threads.read("own", pieces(slow)):
            loop.jump += 10_000
            num_pieces += 1
        threads.close()
        return num_pieces

    with asyncio.Runner(loop_factory=Clock) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, Clock)
        assert runner.run(read(loop, None)) == 3
        with pytest.raises(TimeoutError):
            runner.run(read(loop, loop))


@in_event_loop
async def test_tenants_that_are_gone_leave_nothing() -> None:
    threads = StorageThreads()
    for number in range(100):
        await threads.run(f"tenant {number}", lambda: None)
    await asyncio.sleep(0)
    gc.collect()
    assert len(threads._free) <= 1
    threads.close()


def _hanging_filesystem(gate: Gate) -> None:
    class Hanging(MemoryFileSystem):
        protocol = "hanging"

        def open(self, path: str, mode: str = "rb", **options: object) -> object:
            if mode == "rb":
                gate.wait()
            return super().open(path, mode, **options)

        @classmethod
        def _strip_protocol(cls, path: str) -> str:
            return "/" + path.removeprefix("hanging://").strip("/")

    fsspec.register_implementation("hanging", Hanging, clobber=True)


async def _tokenize() -> None:
    """Let a long prompt be tokenized, without waiting forever."""
    work = offload_if_large(OFFLOAD_CHARS + 1, lambda: "tokens")
    assert await asyncio.wait_for(work, WAIT_TIMEOUT_S) == "tokens"


@in_event_loop
async def test_prompts_do_not_wait_for_slow_urls(gate: Gate) -> None:
    _hanging_filesystem(gate)

    async def read(reader: UrlReader, tenant: str) -> None:
        with suppress(JobRefusedError):
            assert [piece async for piece in reader.read("hanging://in/missing", tenant)] == []

    reader = UrlReader(["hanging://in"])
    reads = [asyncio.create_task(read(reader, str(number % 16))) for number in range(NUM_HANGING)]
    await gate.until(32)
    await _tokenize()
    assert gate.num_waiting == 32
    assert all(name.startswith("storage") for name in gate.names)
    gate.open.set()
    await asyncio.gather(*reads)


@in_event_loop
async def test_prompts_and_other_keys_do_not_wait_for_slow_storage(
    gate: Gate, tmp_path: Path
) -> None:
    _hanging_filesystem(gate)
    harness = new_batch_harness(tmp_path)
    harness.storage = "hanging://jobs"

    shared = harness.service()
    own, other = shared.for_tenant("own"), shared.for_tenant("other")
    files = [
        await service.upload("in.jsonl", "batch", iter([requests(1)])) for service in (own, other)
    ]
    reads = [asyncio.create_task(own.content(files[0].file_id)) for _ in range(NUM_HANGING)]
    await gate.until(4)
    reads.append(asyncio.create_task(other.content(files[1].file_id)))
    await gate.until(5)
    await _tokenize()
    assert gate.num_waiting == 5
    gate.open.set()
    for pieces in await asyncio.gather(*reads):
        assert b"".join([piece async for piece in pieces]) == requests(1)
    shared.close()


@in_event_loop
async def test_a_file_that_takes_too_long_is_an_error_of_the_storage(tmp_path: Path) -> None:
    service = new_batch_harness(tmp_path).service()
    file = await service.upload("in.jsonl", "batch", iter([requests(1)]))
    service._reads.close()
    service._reads = StorageThreads(timeout_s=0.0)
    with pytest.raises(JobStoreError, match=r"has not delivered a file within 3600 s"):
        await service.content(file.file_id)
    service.close()
