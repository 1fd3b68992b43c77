"""How lines come in: outside the event loop, and in bounded number."""

import asyncio
import hashlib
import sqlite3
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest
from batch_fixtures import sqlite_harness
from batch_jobs import LIMITS, BatchHarness, new_batch_harness, pieces, request, requests
from event_loops import in_event_loop

from tramontane.proto.errors import FileTooLargeError, JobRefusedError, PipelineError
from tramontane.proto.jobs import JobOptions
from tramontane.router.batch import database as batch_database
from tramontane.router.batch import submissions as job_intake
from tramontane.router.batch.database import JobThreadPool
from tramontane.router.batch.input_lines import InputLine, LineSplitter, ParsedLine, parse_line
from tramontane.router.batch.store import StoredJob
from tramontane.router.batch.submissions import JobSubmissions
from tramontane.router.openai.json_limits import MAX_GROUPS

harness = sqlite_harness


def test_lines_are_cut_outside_the_event_loop_and_not_too_many_at_once(
    harness: BatchHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blank ones too, of which a piece may have millions."""
    real, cut_by, sizes = LineSplitter.feed, set[int](), list[int]()

    def feed(splitter: LineSplitter, piece: bytes) -> Iterator[InputLine]:
        cut_by.add(threading.get_ident())
        sizes.append(len(piece))
        yield from real(splitter, piece)

    monkeypatch.setattr(LineSplitter, "feed", feed)
    monkeypatch.setattr(job_intake, "SPLIT_BYTES", 1000)
    text = b"\n" * 3000 + b"\n".join(requests(500).splitlines(keepends=True))
    job = asyncio.run(harness.service().submit(pieces(text, 10_000), JobOptions()))
    assert (job.num_lines, job.num_invalid) == (500, 0)
    assert threading.get_ident() not in cut_by
    assert (max(sizes), sum(sizes)) == (1000, len(text))


@pytest.fixture
def cut_sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of each piece that is cut into lines."""
    real, sizes = LineSplitter.feed, list[int]()

    def feed(splitter: LineSplitter, piece: bytes) -> Iterator[InputLine]:
        sizes.append(len(piece))
        return real(splitter, piece)

    monkeypatch.setattr(LineSplitter, "feed", feed)
    return sizes


def test_many_small_pieces_are_cut_together(harness: BatchHarness, cut_sizes: list[int]) -> None:
    assert (
        asyncio.run(harness.service().submit(pieces(requests(500), 10), JobOptions())).num_lines
        == 500
    )
    assert len(cut_sizes) == 1


def test_64_kibibytes_are_cut_at_once(harness: BatchHarness, cut_sizes: list[int]) -> None:
    asyncio.run(harness.service().submit(pieces(b"x" * (2**17 + 1), 2**16), JobOptions()))
    assert cut_sizes == [65_536, 65_536, 1]


def test_an_input_may_have_as_many_bytes_as_the_limit_says(harness: BatchHarness) -> None:
    """Also when its request is repeated, and its bytes are compared."""
    text = requests(3)
    service = harness.service(limits=replace(LIMITS, max_bytes=len(text)))
    made = {
        asyncio.run(service.submit(pieces(text, 50), JobOptions(), "key")).job_id for _ in range(2)
    }
    assert len(made) == 1
    for key in ("key", None):
        with pytest.raises(FileTooLargeError, match="the input is larger than"):
            asyncio.run(service.submit(pieces(text + b"\n", 50), JobOptions(), key))


def test_pieces_of_64_kibibytes_are_compared_outside_the_event_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real, on_loop, loop_thread = hashlib.sha256, list[int](), threading.get_ident()

    class Digest:
        def __init__(self) -> None:
            self._real = real()

        def update(self, piece: bytes) -> None:
            if threading.get_ident() == loop_thread:
                on_loop.append(len(piece))
            self._real.update(piece)

        def hexdigest(self) -> str:
            return self._real.hexdigest()

    async def scenario() -> str:
        threads = JobThreadPool(1)
        digest = await job_intake.digest_of_text(pieces(b"x" * (2**17 - 1), 2**16), 2**20, threads)
        threads.close()
        return digest

    monkeypatch.setattr(hashlib, "sha256", Digest)
    assert asyncio.run(scenario()) == real(b"x" * (2**17 - 1)).hexdigest()
    assert on_loop == [2**16 - 1]


_OF_2048 = "x" * (2048 - len(request("0000", "").strip()))  # with it 512 lines are a mebibyte


@pytest.mark.parametrize(
    ("count", "prompt", "sizes"),
    [
        (2500, "x", [1000, 1000, 500]),
        (1200, "x" * 1900, [528, 528, 144]),
        (1100, _OF_2048, [513, 513, 74]),
    ],
)
def test_a_transaction_adds_a_thousand_lines_or_a_mebibyte(
    harness: BatchHarness,
    monkeypatch: pytest.MonkeyPatch,
    count: int,
    prompt: str,
    sizes: list[int],
) -> None:
    """Other writers wait for it. The line with which there is more than a mebibyte is the last
    one.
    """
    real, added = JobSubmissions.add_lines, list[int]()

    def add_lines(
        submissions: JobSubmissions, job: StoredJob, first_place: int, new: Sequence[ParsedLine]
    ) -> None:
        added.append(len(new))
        real(submissions, job, first_place, new)

    monkeypatch.setattr(JobSubmissions, "add_lines", add_lines)
    text = b"".join(request(f"{number:04}", prompt) for number in range(count))
    service = harness.service(limits=replace(LIMITS, max_line_bytes=2048, max_bytes=2**22))
    assert asyncio.run(service.submit(pieces(text, 100_000), JobOptions())).num_invalid == 0
    assert added == sizes


@pytest.mark.parametrize("ends", [b"\n", b""])
def test_blank_lines_count_among_those_that_may_be(harness: BatchHarness, ends: bytes) -> None:
    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield b" \n"

    service = harness.service()
    most = b"\n" * (LIMITS.max_lines - 1) + request("a", 1).strip() + ends
    assert asyncio.run(service.submit(pieces(most), JobOptions())).num_lines == 1
    for too_many in (pieces(b"\n" + most), endless()):
        with pytest.raises(JobRefusedError, match=f"more than {LIMITS.max_lines} lines"):
            asyncio.run(service.submit(too_many, JobOptions()))


def _count_steps(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Count the instructions that SQLite executes, in hundreds."""
    num_steps = 0

    def count() -> int:
        nonlocal num_steps
        num_steps += 1
        return 0

    def prepare(connection: sqlite3.Connection, record: object) -> None:
        real(connection, record)
        connection.set_progress_handler(count, 100)

    real = batch_database._prepare_sqlite
    monkeypatch.setattr(batch_database, "_prepare_sqlite", prepare)
    return lambda: num_steps


_KINDS: dict[str, Callable[[int], bytes]] = {
    "distinct": lambda count: requests(2 * count),
    "all the same": lambda count: request("a", 1) * 2 * count,
    "valid after invalid": lambda count: (
        request("a", 1, method="GET") * count + request("a", 1) * count
    ),
    "invalid after valid": lambda count: (
        request("a", 1) * count + request("a", 1, method="GET") * count
    ),
}


@pytest.mark.parametrize("keeps_order", [True, False])
@pytest.mark.parametrize("kind", _KINDS)
def test_custom_ids_are_compared_in_work_linear_in_the_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, keeps_order: bool
) -> None:
    """Twice the lines are twice the instructions of the database, a few more for a larger index."""
    num_steps = _count_steps(monkeypatch)
    steps: list[int] = []
    for count in (1000, 2000):
        harness, before = new_batch_harness(tmp_path / str(count)), num_steps()
        text = _KINDS[kind](count)
        job = asyncio.run(
            harness.service().submit(pieces(text, 100_000), JobOptions(keeps_order=keeps_order))
        )
        assert job.num_lines == 2 * count
        assert job.num_invalid == (0 if kind == "distinct" else 2 * count - 1)
        harness.close()
        steps.append(num_steps() - before)
    assert steps[0] > 100
    assert steps[1] < 2.3 * steps[0]


def test_a_line_with_too_many_elements_is_invalid_before_it_is_parsed() -> None:
    """Half a million lists have room in a line, and a parser would hold the interpreter lock for as
    long as they take.
    """
    text = request("a", "b", extra=[[]] * MAX_GROUPS).strip()
    line = parse_line(InputLine(7, text), "/v1/completions", 2**20)
    assert (line.custom_id, line.text) == (None, None)
    assert (
        line.problem
        == f"line 7: it has more than {MAX_GROUPS} lists and objects; send fewer at once"
    )


@pytest.mark.parametrize("name", ["utf-16", "utf-16-le", "utf-16-be"])
def test_every_line_of_a_file_in_utf_16_is_named_as_such(name: str) -> None:
    text = (request("a", "b") + request("c", "d")).decode().encode(name)
    splitter = LineSplitter(2**20)
    lines = [*splitter.feed(text), *splitter.finish()][:2]
    for number, line in enumerate(lines, start=1):
        problem = parse_line(line, "/v1/completions", 2**20).problem
        assert problem == f"line {number}: it is UTF-16, which JSON is not; send the file as UTF-8"


def test_a_custom_id_has_1_to_256_characters() -> None:
    for length, is_valid in ((0, False), (1, True), (256, True), (257, False)):
        line = parse_line(InputLine(7, request("é" * length, 1).strip()), "/v1/completions", 2**20)
        assert (line.problem is None) == is_valid
        assert is_valid or line.problem == "line 7: custom_id must be a text of 1 to 256 characters"


@in_event_loop
async def test_a_service_that_accepts_nothing_now_still_reads_what_is_there(
    harness: BatchHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = harness.service()
    file = await service.upload("in.jsonl", "batch", iter([requests(2)]))
    job = await service.submit_file(file.file_id, JobOptions())

    async def refuse() -> NoReturn:
        raise PipelineError("not now")

    monkeypatch.setattr(service, "require_accepting", refuse)
    for refused in (
        service.submit(pieces(requests(1)), JobOptions()),
        service.submit_url("file:///in.jsonl", JobOptions()),
        service.submit_file(file.file_id, JobOptions()),
        service.check_upload(1),
        service.upload("in.jsonl", "batch", iter([requests(1)])),
    ):
        with pytest.raises(PipelineError, match="not now"):
            await refused
    assert [each.job_id for each in await service.list(10)] == [job.job.job_id]
    assert await service.file(file.file_id) == file
