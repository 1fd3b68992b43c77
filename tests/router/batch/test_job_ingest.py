"""How lines come in: beside the event loop, and in bounded number."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from batch_jobs import LIMITS, Place, pieces, place_in, request, requests

from tramontane.proto.errors import JobRefusedError
from tramontane.proto.jobs import JobOptions
from tramontane.router.batch import submissions as job_intake
from tramontane.router.batch.input_lines import InputLine, LineSplitter


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    place = place_in(tmp_path)
    yield place
    place.close()


def test_lines_are_cut_beside_the_event_loop_and_not_too_many_at_once(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blank ones too, of which a piece may have millions."""
    real, cut_by, sizes = LineSplitter.feed, set[int](), list[int]()

    def feed(splitter: LineSplitter, piece: bytes) -> Iterator[InputLine]:
        cut_by.add(threading.get_ident())
        sizes.append(len(piece))
        yield from real(splitter, piece)

    monkeypatch.setattr(LineSplitter, "feed", feed)
    monkeypatch.setattr(job_intake, "SPLIT_BYTES", 1000)
    text = b"\n" * 3000 + b"\n".join(requests(500).splitlines(keepends=True))
    job = asyncio.run(place.service().submit(pieces(text, 10_000), JobOptions()))
    assert (job.num_lines, job.num_invalid) == (500, 0)
    assert threading.get_ident() not in cut_by
    assert (max(sizes), sum(sizes)) == (1000, len(text))


def test_many_small_pieces_are_cut_together(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    real, sizes = LineSplitter.feed, list[int]()

    def feed(splitter: LineSplitter, piece: bytes) -> Iterator[InputLine]:
        sizes.append(len(piece))
        return real(splitter, piece)

    monkeypatch.setattr(LineSplitter, "feed", feed)
    assert asyncio.run(place.service().submit(pieces(requests(500), 10), JobOptions())).num_lines == 500
    assert len(sizes) == 1


@pytest.mark.parametrize("ends", [b"\n", b""])
def test_blank_lines_count_among_those_that_may_be(place: Place, ends: bytes) -> None:
    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield b" \n"

    service = place.service()
    most = b"\n" * (LIMITS.max_lines - 1) + request("a", 1).strip() + ends
    assert asyncio.run(service.submit(pieces(most), JobOptions())).num_lines == 1
    for too_many in (pieces(b"\n" + most), endless()):
        with pytest.raises(JobRefusedError, match=f"more than {LIMITS.max_lines} lines"):
            asyncio.run(service.submit(too_many, JobOptions()))
