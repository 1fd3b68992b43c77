"""Batch jobs from their lines to their results, with engines that are up to the test."""

import asyncio
import itertools
import json
import os
import threading
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from batch_fixtures import sqlite_harness
from batch_jobs import LIMITS, POLL_S, BatchHarness, all_results, echo, pieces, request, requests
from event_loops import in_event_loop
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import select

from tramontane.proto.errors import (
    JobRefusedError,
    JobStoreError,
    OverloadedError,
    PipelineError,
    PipelineUnavailableError,
    RequestError,
    UnknownJobError,
)
from tramontane.proto.jobs import Job, JobOptions, JobState
from tramontane.router.batch import service as batch_service
from tramontane.router.batch.claims import JOB_LEASE_S, Claim, Outcome, PendingLine
from tramontane.router.batch.database import KEYLESS, JobThreadPool, jobs
from tramontane.router.batch.files import JobStorage, StorageFile
from tramontane.router.batch.input_lines import (
    COMPARED_CHARACTERS,
    SEARCHED_CHARACTERS,
    LineSplitter,
    ParsedLine,
    by_prefix,
)
from tramontane.router.batch.outcomes import OutcomeWriter
from tramontane.router.batch.runner import MAX_TRIES, MAX_WAIT_S, PAGE_SIZE, THREADS, BatchRunner
from tramontane.router.batch.storage_threads import StorageThreads
from tramontane.router.batch.submissions import TAKEOVER_TIMEOUT_S

GOOD = request("a", 1)
BAD = [
    b"{\n",
    b"[1]\n",
    b'{"custom_id": "\xff", "body": {}}\n',
    b'{"body": {}}\n',
    b'{"custom_id": 3, "body": {}}\n',
    b'{"custom_id": "", "body": {}}\n',
    b'{"custom_id": "x\\u0000", "body": {}}\n',
    b'{"custom_id": "\\ud800", "body": {}}\n',
    b'{"custom_id": "x"}\n',
    b'{"custom_id": "x", "body": []}\n',
    request("x", 1, url="/v1/embeddings"),
    request("x", 1, method="GET"),
    request("x", 1, custom_ids=1),
    request("x", 1, url="http://a/v1/embeddings"),
    request("x", 1, url="completions"),
    request("x", 1, url=["/v1/completions"]),
    request("x", "long" * 600),
    b"[" * 1500 + b"\n",
    GOOD,  # for the second time
]


harness = sqlite_harness


async def _whole(
    harness: BatchHarness,
    text: bytes,
    options: JobOptions = JobOptions(),  # noqa: B008
    **more: Any,
) -> tuple[Job, list[tuple[Any, ...]]]:
    """Submit and run; returns the job at its end and (line, custom_id, is_error) with the
    bodies.
    """
    service = harness.service()
    job = await service.submit(pieces(text), options)
    async with harness.running(harness.runner(**more)):
        reported = [
            (line.line, line.custom_id, line.is_error, json.loads(line.body))
            for line in await all_results(service, job.job_id)
        ]
    return await service.get(job.job_id), reported


@in_event_loop
async def test_a_line_that_has_run_has_the_status_of_its_answer(harness: BatchHarness) -> None:
    """It is in the files of results. One that fails ten times while it runs has 503."""
    num_failed = 0

    async def answer(_endpoint: str, body: dict[str, Any], _tenant: str = "") -> dict[str, Any]:
        nonlocal num_failed
        if body["prompt"] == 1:
            raise RequestError("no such prompt")
        if body["prompt"] == 2:
            num_failed += 1
            raise PipelineError("a stage died")
        return {}

    service = harness.service()
    job = await service.submit(pieces(requests(3)), JobOptions())
    async with harness.running(harness.runner(answer)):
        await all_results(service, job.job_id)
    stored = service._jobs.get(job.job_id)
    assert [result.http_status for result in service._jobs.results(stored, 0, 9)] == [200, 400, 503]
    assert num_failed == 10


@pytest.mark.parametrize(
    ("length", "is_refused"), [(0, True), (1, False), (256, False), (257, True)]
)
@in_event_loop
async def test_a_request_key_has_1_to_256_characters(
    harness: BatchHarness, length: int, is_refused: bool
) -> None:
    service = harness.service()
    with (
        pytest.raises(JobRefusedError, match="1 to 256 characters") if is_refused else nullcontext()
    ):
        await service.submit(pieces(GOOD), JobOptions(), "k" * length)
    assert len(await service.list(9)) == (not is_refused)


def test_what_ends_leaves_no_thread_and_no_connection(harness: BatchHarness) -> None:
    """A thread may hold a connection to the database."""
    before = set(threading.enumerate())
    runner, service = harness.runner(), harness.service()

    async def scenario() -> None:
        job = await service.submit(pieces(GOOD), JobOptions())
        async with harness.running(runner):
            await all_results(service, job.job_id)
        await service.upload("in.jsonl", "batch", iter([GOOD]))

    asyncio.run(scenario())
    service.close()
    assert [thread for thread in threading.enumerate() if thread not in before] == []
    runner._claims._database.close()
    database = harness.database.removeprefix("sqlite:///")
    opened = [os.readlink(each) for each in Path("/proc/self/fd").iterdir() if each.exists()]
    assert [file for file in opened if file.startswith(database)] == []


@given(
    st.lists(st.binary(max_size=12).filter(lambda line: b"\n" not in line), max_size=8),
    st.integers(1, 9),
    st.booleans(),
)
@settings(max_examples=examples(100), deadline=None)
def test_lines_are_the_same_wherever_the_text_is_cut(
    lines: list[bytes], size: int, ends: bool
) -> None:
    text = b"\n".join(lines) + (b"\n" if ends else b"")
    splitter = LineSplitter(max_bytes=6)
    cut = [text[i : i + size] for i in range(0, len(text), size)]
    found = [line for piece in cut for line in splitter.feed(piece)] + list(splitter.finish())
    parts = text.split(b"\n")
    expected = [line if len(line) <= 6 else None for line in (parts if parts[-1] else parts[:-1])]
    if expected and expected[0] is not None:
        expected[0] = expected[0].removeprefix(b"\xef\xbb\xbf")
    assert [line.text for line in found] == expected
    assert [line.number for line in found] == list(range(1, len(expected) + 1))


@pytest.mark.parametrize("keeps_order", [True, False])
def test_bad_lines_are_reported_by_number_and_affect_no_other(
    harness: BatchHarness, keeps_order: bool
) -> None:
    text = GOOD + b"\n  \n" + b"".join(BAD) + request("z", 2)[:-1]
    job, reported = asyncio.run(_whole(harness, text, JobOptions(keeps_order=keeps_order)))
    assert (job.state, job.num_lines, job.num_invalid) == (
        JobState.COMPLETED,
        len(BAD) + 2,
        len(BAD),
    )
    assert (job.num_done, job.num_failed) == (2, len(BAD))
    good = {custom_id: body for _, custom_id, is_error, body in reported if not is_error}
    assert good == {"a": {"said": 1}, "z": {"said": 2}}
    bad = {line: body["message"] for line, _, is_error, body in reported if is_error}
    assert sorted(bad) == list(range(4, 4 + len(BAD)))
    assert all(message.startswith(f"line {line}: ") for line, message in bad.items())
    if keeps_order:
        assert [line for line, *_ in reported] == sorted(line for line, *_ in reported)


@in_event_loop
async def test_a_url_may_be_whole_or_without_v1_and_unknown_keys_are_ignored(
    harness: BatchHarness,
) -> None:
    urls = ["/v1/completions", "/completions", "https://api.example.com/v1/completions"]
    lines = [request(f"r{i}", i, url=url, more={"a": 1}) for i, url in enumerate(urls)]
    job = await harness.service().submit(pieces(b"".join(lines)), JobOptions())
    assert (job.num_lines, job.num_invalid) == (3, 0)


@pytest.mark.parametrize("keeps_order", [True, False])
@in_event_loop
async def test_a_job_without_one_good_line_has_failed_and_says_why(
    harness: BatchHarness, keeps_order: bool
) -> None:
    service = harness.service()
    text = b"\n" + b"".join(request(f"r{i}", i, url="/v1/embeddings") for i in range(1200))
    job = await service.submit(pieces(text), JobOptions(keeps_order=keeps_order))
    assert (job.state, job.num_lines, job.num_invalid, job.num_failed) == (
        JobState.FAILED,
        1200,
        1200,
        1200,
    )
    assert job.ended_at == harness.clock.now
    assert job.error is not None
    assert job.error.startswith(
        "none of the 1200 lines is a request: line 2: url is '/v1/embeddings'"
    )
    assert job.error.count("/v1/embeddings") == 1, "what is wrong with all of them is said once"
    assert job.error.endswith("; and 1199 more")
    assert harness.claims().claim(5) == [], "there is nothing to run"
    assert [line.line for line in await all_results(service, job.job_id)] == list(range(2, 1202))
    one = await service.submit(pieces(b"x\n"), JobOptions())
    assert one.error is not None
    assert one.error.startswith("the only line is not a request: line 1: it is not JSON")
    two = (await service.submit(pieces(b"x\n[]\n"), JobOptions())).error
    assert two is not None
    assert two.startswith("none of the 2 lines is a request: line 1: it is not JSON")
    assert "; line 2: " in two
    assert not two.endswith(" more")
    mixed = (
        b"x\n" + request("a", 1, url="/v1/embeddings") * 2 + request("a", 1, method="GET") + b"[]\n"
    )
    several = (await service.submit(pieces(mixed), JobOptions())).error
    assert several is not None
    assert [
        each in several for each in ("line 1: ", "line 2: ", "line 3: ", "line 4: ", "line 5: ")
    ] == [1, 1, 0, 1, 0]
    assert several.endswith("; and 2 more")
    many = await service.submit(pieces(b"x\n" * 21), JobOptions())
    shown = (await service.get_stored(many.job_id)).problems
    assert [problem.line for problem in shown] == list(range(1, 21)), "the first twenty, one by one"


@in_event_loop
async def test_a_submission_that_breaks_off_or_is_refused_leaves_nothing(
    harness: BatchHarness,
) -> None:
    async def breaks_off() -> AsyncIterator[bytes]:
        yield requests(1500)
        raise ConnectionError("the client has left")

    async def too_many() -> AsyncIterator[bytes]:
        for _ in range(LIMITS.max_lines + 1):
            yield b"x\n"

    service = harness.service()
    for unknown in (service.get("batch_x"), service.cancel("batch_x")):
        with pytest.raises(UnknownJobError):
            await unknown
    assert await service.list(5) == []
    assert not Path(harness.database.removeprefix("sqlite:///")).parent.exists(), (
        "looking makes nothing"
    )
    with pytest.raises(ConnectionError):
        await service.submit(breaks_off(), JobOptions())
    for text in (too_many(), pieces(b"\n \n"), pieces(b"x" * (LIMITS.max_bytes + 1), 10_000)):
        with pytest.raises(RequestError):
            await service.submit(text, JobOptions())
    with pytest.raises(RequestError, match="endpoint"):
        await service.submit(pieces(GOOD), JobOptions(endpoint="/v1/chat/completions"))
    with pytest.raises(RequestError, match="metadata"):
        await service.submit(pieces(GOOD), JobOptions(metadata={"k": "v" * 513}))
    assert await service.list(5) == []
    with service._database.reading() as connection:
        assert [
            connection.exec_driver_sql(f"SELECT count(*) FROM tramontane_{t}").scalar()
            for t in ("jobs", "lines")
        ] == [0, 0]


@in_event_loop
async def test_what_died_while_it_was_submitted_is_removed(harness: BatchHarness) -> None:
    service = harness.service()
    begun = service._submissions.create(JobOptions(), request_key="k")
    await service.collect_garbage()
    with pytest.raises(OverloadedError):
        service._submissions.create(JobOptions(), request_key="k")
    harness.clock.now += 600
    await service.collect_garbage()
    assert harness.claims()._database.read(select(jobs.c.number)) == [(begun.number,)], (
        "it may still go on"
    )
    harness.clock.now += 1
    await service.collect_garbage()
    with pytest.raises(RequestError, match="made no progress"):
        await asyncio.to_thread(service._submissions.accept, begun)
    service._submissions.create(JobOptions(), request_key="k")


def test_a_request_that_comes_again_takes_over_what_stands_still(harness: BatchHarness) -> None:
    store = harness.service()._submissions
    dead = store.create(JobOptions(), request_key="k")
    store.add_lines(dead, 0, [ParsedLine(1, "a", "{}", None)])
    harness.clock.now += TAKEOVER_TIMEOUT_S
    with pytest.raises(OverloadedError, match="being submitted"):
        store.create(JobOptions(), request_key="k")
    store.add_lines(dead, 1, [])
    harness.clock.now += 1
    with pytest.raises(OverloadedError, match="being submitted"):
        store.create(JobOptions(), request_key="k")
    harness.clock.now += TAKEOVER_TIMEOUT_S
    again = store.create(JobOptions(), request_key="k")
    with pytest.raises(RequestError, match="made no progress"):
        store.accept(dead)
    store.add_lines(again, 0, [ParsedLine(1, "a", "{}", None)])
    assert store.accept(again).job.num_lines == 1
    with pytest.raises(OverloadedError):  # what was accepted never gives way
        store.create(JobOptions(), request_key="k")


@pytest.mark.parametrize("text", [requests(900), b"x" * 900], ids=["lines", "one line"])
def test_a_slow_submission_does_not_stand_still(harness: BatchHarness, text: bytes) -> None:
    """A line a second, or a line of which a byte comes every second."""

    async def slow() -> AsyncIterator[bytes]:
        for piece in (
            text.splitlines(keepends=True)
            if b"\n" in text
            else (text[i : i + 1] for i in range(len(text)))
        ):
            harness.clock.now += 1
            if harness.clock.now % 60 == 0:
                await service.collect_garbage()
            yield piece

    service = harness.service()
    job = asyncio.run(service.submit(slow(), JobOptions()))
    assert job.num_lines == max(1, text.count(b"\n"))


@in_event_loop
async def test_a_full_service_says_when_to_retry(harness: BatchHarness) -> None:
    service = harness.service()
    for _ in range(LIMITS.max_open_jobs):
        await service.submit(pieces(GOOD), JobOptions())
    with pytest.raises(OverloadedError):
        await service.submit(pieces(GOOD), JobOptions())
    assert len({job.job_id for job in await service.list(100)}) == LIMITS.max_open_jobs


def test_overload_and_failures_are_tried_again_and_refusals_are_not(
    harness: BatchHarness, caplog: pytest.LogCaptureFixture
) -> None:
    requested: dict[str, int] = {}

    async def answer(_endpoint: str, body: dict[str, Any], _tenant: str = "") -> dict[str, Any]:
        prompt = body["prompt"]
        requested[prompt] = requested.get(prompt, 0) + 1
        match prompt:
            case "refused":
                raise RequestError("no such thing")
            case "busy" if requested[prompt] < 3 * MAX_TRIES:
                raise OverloadedError("later", 1)
            case "fails" if requested[prompt] < 4:
                raise PipelineError("a stage died")
            case "hopeless":
                raise PipelineError("a stage died again")
            case "defect":
                raise KeyError("x")
        return {"said": prompt}

    names = ["refused", "busy", "fails", "hopeless", "defect", "fine"]
    job, reported = asyncio.run(
        _whole(harness, b"".join(request(name, name) for name in names), answer=answer)
    )
    assert requested == {
        "refused": 1,
        "busy": 3 * MAX_TRIES,
        "fails": 4,
        "hopeless": MAX_TRIES,
        "defect": MAX_TRIES,
        "fine": 1,
    }
    assert {name for _, name, is_error, _ in reported if not is_error} == {"busy", "fails", "fine"}
    assert {
        name: body["message"]
        for _, name, is_error, body in reported
        if is_error and name != "defect"
    } == {"refused": "no such thing", "hopeless": "a stage died again"}
    assert (job.state, job.num_done, job.num_failed) == (JobState.COMPLETED, 3, 3)
    logged = [str(record.exc_info[1]) for record in caplog.records if record.exc_info]
    assert logged == ["'x'"] * MAX_TRIES, "only defects are logged with where they come from"


@pytest.mark.parametrize(
    ("error", "waits"),
    [
        (OverloadedError("later", 7), [7.0, 7.0, 7.0, 7.0, 8.0]),
        (OverloadedError("later", 1000), [MAX_WAIT_S] * 5),
        (PipelineUnavailableError("it restarts"), [0.5, 1.0, 2.0, 4.0, 8.0]),
        (PipelineError("a stage died"), [0.5, 1.0, 2.0, 4.0, 8.0]),
    ],
)
def test_a_line_waits_as_long_as_it_is_asked_to(
    harness: BatchHarness, error: Exception, waits: list[float]
) -> None:
    """Longer each time, and never longer than half a minute."""
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        if seconds != POLL_S:
            slept.append(seconds)
        await asyncio.sleep(0.001)

    async def answer(_endpoint: str, _body: dict[str, Any], _tenant: str = "") -> dict[str, Any]:
        if len(slept) < 5:
            raise error
        return {}

    async def scenario() -> None:
        service = harness.service()
        job = await service.submit(pieces(GOOD), JobOptions())
        runner = BatchRunner(
            harness.claims(), JobStorage(harness.storage), answer, 1, poll_s=POLL_S, sleep=sleep
        )
        async with harness.running(runner):
            assert len(await all_results(service, job.job_id)) == 1

    asyncio.run(scenario())
    assert slept == waits


@in_event_loop
async def test_outcomes_are_written_although_one_of_them_is_waited_for_no_longer(
    harness: BatchHarness,
) -> None:
    """Its line was cancelled, or its job lost, while the outcome was on its way to the disk."""
    service, claims, threads = harness.service(), harness.claims(), JobThreadPool(1)
    job = await service.submit(pieces(requests(3)), JobOptions())
    (claim,) = claims.claim(1)
    there, go_on, real = threading.Event(), threading.Event(), claims.finish

    def finish(claim: Claim, outcomes: Sequence[Outcome]) -> None:
        there.set()
        go_on.wait()
        real(claim, outcomes)

    claims.finish = finish  # type: ignore[method-assign]
    writer = OutcomeWriter(claims, asyncio.sleep, threads)
    running = asyncio.create_task(writer.run())
    waiting = [
        asyncio.create_task(writer.write(claim, Outcome(place, False, 200, "{}")))
        for place in range(2)
    ]
    await asyncio.to_thread(there.wait)
    waiting[0].cancel()
    await asyncio.wait([waiting[0]])
    go_on.set()
    waiting.append(asyncio.create_task(writer.write(claim, Outcome(2, False, 200, "{}"))))
    for task in waiting[1:]:
        await asyncio.wait([task, running], return_when=asyncio.FIRST_COMPLETED)
        assert not running.done(), running.exception()
    running.cancel()
    threads.close()
    assert (await service.get(job.job_id)).num_done == 3


def test_the_order_of_results_is_the_inputs_or_that_of_answers(harness: BatchHarness) -> None:
    """Answers come backwards."""

    async def orders(keeps_order: bool) -> list[int]:
        gates = [asyncio.Event() for _ in range(6)]
        gates[-1].set()

        async def answer(_endpoint: str, body: dict[str, Any], _tenant: str = "") -> dict[str, Any]:
            await gates[body["prompt"]].wait()
            return {}

        service = harness.service()
        job = await service.submit(pieces(requests(6)), JobOptions(keeps_order=keeps_order))
        reported = []
        async with harness.running(harness.runner(answer)):
            for number in reversed(range(6)):
                gates[number].set()
                if not keeps_order:
                    reported.append(await _result(service.results(job.job_id, len(reported))))
            if keeps_order:
                reported = [line.line async for line in service.results(job.job_id)]
            again = [line.line async for line in service.results(job.job_id, 2)]
        assert again == reported[2:], "offsets stay"
        return reported

    assert asyncio.run(orders(True)) == [1, 2, 3, 4, 5, 6]
    assert asyncio.run(orders(False)) == [6, 5, 4, 3, 2, 1]


async def _result(results: AsyncIterator[Any]) -> int:
    async for line in results:
        return int(line.line)
    raise AssertionError("the job has ended")


def test_a_full_disk_is_not_filled_further(
    harness: BatchHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full three times, in the middle of the second file."""
    real, num_full = StorageFile.close, 0

    def close(file: StorageFile) -> int:
        nonlocal num_full
        num_bytes = real(file)
        if b"invalid_line" in Path(file._file.name).read_bytes() and num_full < 3:
            num_full += 1
            raise JobStoreError("no space left on device")
        return num_bytes

    monkeypatch.setattr(StorageFile, "close", close)
    job, _ = asyncio.run(_whole(harness, requests(3) + b"{\n"))
    assert (job.state, num_full) == (JobState.COMPLETED, 3)
    assert len(list(Path(harness.storage).rglob("*.jsonl"))) == 2
    with harness.service()._database.reading() as connection:
        assert connection.exec_driver_sql("SELECT count(*) FROM tramontane_files").scalar() == 2


def test_a_small_job_does_not_wait_for_a_large_one(harness: BatchHarness) -> None:
    """Lines of both are begun in turns, the large one's in no greater number than slots were given
    in that time.
    """
    begun: list[str] = []

    async def answer(_endpoint: str, body: dict[str, Any], _tenant: str = "") -> dict[str, Any]:
        begun.append(body["prompt"])
        await asyncio.sleep(0)
        return {}

    async def scenario() -> None:
        service = harness.service()
        large = await service.submit(
            pieces(b"".join(request(f"l{i}", "large") for i in range(200))), JobOptions()
        )
        small = await service.submit(
            pieces(b"".join(request(f"s{i}", "small") for i in range(10))), JobOptions()
        )
        async with harness.running(harness.runner(answer, concurrency=4)):
            await all_results(service, small.job_id)
            await all_results(service, large.job_id)

    asyncio.run(scenario())
    last = max(i for i, which in enumerate(begun) if which == "small")
    assert len(begun) == 210
    assert last < 50


def test_no_more_lines_are_in_progress_than_were_allowed(harness: BatchHarness) -> None:
    now = most = 0

    async def answer(_endpoint: str, _body: dict[str, Any], _tenant: str = "") -> dict[str, Any]:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(0)
        now -= 1
        return {}

    job, _ = asyncio.run(_whole(harness, requests(300), answer=answer, concurrency=7))
    assert (job.num_done, most) == (300, 7)


@in_event_loop
async def test_lines_that_wait_to_be_tried_again_lend_their_slots(harness: BatchHarness) -> None:
    """Those of one job are refused until another job is done; no more of them wait than may be in
    progress.
    """
    refused: set[int] = set()
    is_room = asyncio.Event()

    async def answer(_endpoint: str, body: dict[str, Any], _tenant: str = "") -> dict[str, Any]:
        if isinstance(body["prompt"], int) and not is_room.is_set():
            refused.add(body["prompt"])
            raise OverloadedError("later", 1)
        return {}

    service = harness.service()
    waits = await service.submit(pieces(requests(40)), JobOptions())
    runner = harness.runner(answer, concurrency=3)
    async with harness.running(runner):
        while len(refused) < 3:
            await asyncio.sleep(0)
        fine = await service.submit(
            pieces(b"".join(request(f"f{i}", "fine") for i in range(9))), JobOptions()
        )
        assert len(await asyncio.wait_for(all_results(service, fine.job_id), 20)) == 9
        assert refused == {0, 1, 2}
        is_room.set()
        assert len(await all_results(service, waits.job_id)) == 40
    assert runner._slots.num_free == 3


TEXTS = {name: name * 2 * COMPARED_CHARACTERS for name in "abc"}


def _lines(*bodies: object) -> list[PendingLine]:
    texts = (
        json.dumps({"custom_id": f"r{place}", "body": body}) for place, body in enumerate(bodies)
    )
    return [PendingLine(place, text) for place, text in enumerate(texts)]


def _places(lines: Sequence[PendingLine]) -> list[int]:
    return [line.place for line in by_prefix(lines)]


def test_lines_that_begin_alike_come_together_in_the_order_of_the_first() -> None:
    prompts = [{"prompt": TEXTS[name] + str(number)} for number, name in enumerate("abacb")]
    assert _places(_lines(*prompts)) == [0, 2, 1, 4, 3]
    chats = [
        {"model": f"m{number}", "messages": [{"role": "system", "content": prompt["prompt"]}]}
        for number, prompt in enumerate(prompts)
    ]
    assert _places(_lines(*chats)) == [0, 2, 1, 4, 3], "whatever comes before the messages"
    short = [{"prompt": TEXTS[name][:30] + str(number)} for number, name in enumerate("abacb")]
    assert _places(_lines(*short)) == [0, 1, 2, 3, 4], "they have too little in common"
    assert _places(_lines({}, {"prompt": "x"}, {})) == [0, 1, 2]
    behind = [
        {"suffix": str(number) * (SEARCHED_CHARACTERS - 99), "prompt": TEXTS[name]}
        for number, name in enumerate("abacb")
    ]
    assert _places(_lines(*behind)) == [0, 2, 1, 4, 3]
    far_behind = [{"suffix": each["suffix"] * 2, "prompt": each["prompt"]} for each in behind]
    assert _places(_lines(*far_behind)) == [0, 1, 2, 3, 4], (
        "so long a line is not searched to its end"
    )
    assert by_prefix(_lines()) == []


@given(st.lists(st.sampled_from("abc"), max_size=20), st.integers(0, 3))
@settings(max_examples=examples(100), deadline=None, derandomize=True)
def test_every_line_is_there_once_whatever_they_have_in_common(
    names: list[str], num_others: int
) -> None:
    bodies = [{"prompt": TEXTS[name]} for name in names] + [
        {"prompt": number} for number in range(num_others)
    ]
    places = _places(_lines(*bodies))
    assert sorted(places) == list(range(len(bodies)))
    of = [(*names, *range(num_others))[place] for place in places]
    assert sum(one != other for one, other in pairwise(of)) == max(len(set(of)) - 1, 0), (
        "each group is together"
    )
    assert all(one < other for one, other in pairwise(places) if bodies[one] == bodies[other]), (
        "and in its own order"
    )


def test_lines_of_a_job_are_started_after_those_that_begin_alike(harness: BatchHarness) -> None:
    """Within the lines that a runner has in memory. Results keep the order of the input."""
    begun: list[str] = []

    async def answer(_endpoint: str, body: dict[str, Any], _tenant: str = "") -> dict[str, Any]:
        begun.append(body["prompt"])
        return {}

    async def order(prompts: Sequence[str]) -> list[str]:
        begun.clear()
        service = harness.service()
        text = b"".join(request(f"r{number}", prompt) for number, prompt in enumerate(prompts))
        job = await service.submit(pieces(text), JobOptions())
        async with harness.running(harness.runner(answer, concurrency=1)):
            results = await all_results(service, job.job_id)
        assert [line.custom_id for line in results] == [
            f"r{number}" for number in range(len(prompts))
        ]
        return list(begun)

    alike = [TEXTS["abc"[number % 3]] + str(number) for number in range(PAGE_SIZE + 9)]
    pages = alike[:PAGE_SIZE], alike[PAGE_SIZE:]
    assert asyncio.run(order(alike)) == [
        prompt for page in pages for first in range(3) for prompt in page[first::3]
    ]
    different = [f"{number} {TEXTS['a']}" for number in range(40)]
    assert asyncio.run(order(different)) == different


def test_an_answer_is_for_the_tenant_of_the_job(harness: BatchHarness) -> None:
    """Its pages are shared with this tenant's requests only."""
    tenants: list[str] = []

    async def answer(_endpoint: str, _body: dict[str, Any], tenant: str) -> dict[str, Any]:
        tenants.append(tenant)
        return {}

    async def scenario() -> None:
        service = harness.service()
        own = service.for_tenant("own")
        made = [(each, await each.submit(pieces(GOOD), JobOptions())) for each in (service, own)]
        async with harness.running(harness.runner(answer, concurrency=1)):
            for each, job in made:
                await all_results(each, job.job_id)

    asyncio.run(scenario())
    assert sorted(tenants) == sorted([KEYLESS, "own"])


@in_event_loop
async def test_a_job_that_is_lost_gives_its_slots_back(harness: BatchHarness) -> None:
    """Lines of it end together, and others take their slots in the turn in which their job turns
    out to be another runner's.
    """
    claims, go_on = harness.claims(), asyncio.Event()
    begun = 0

    async def answer(_endpoint: str, _body: dict[str, Any], _tenant: str = "") -> dict[str, Any]:
        nonlocal begun
        begun += 1
        await go_on.wait()
        return {}

    service = harness.service()
    runner = harness.runner(answer, concurrency=16, claims=claims)
    lost = await service.submit(pieces(requests(600)), JobOptions())
    async with harness.running(runner):
        while begun < 16:
            await asyncio.sleep(0)
        elsewhere = harness.claims()
        elsewhere.clock = lambda: harness.clock.now + 2 * JOB_LEASE_S
        assert [claim.job_id for claim in elsewhere.claim(1)] == [lost.job_id]
        go_on.set()
        while runner._runs:
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert runner._slots.num_free == 16
        another = await service.submit(pieces(requests(40)), JobOptions())
        assert len(await all_results(service, another.job_id)) == 40


@pytest.mark.parametrize("keeps_order", [True, False])
@in_event_loop
async def test_a_cancelled_job_ends_each_of_its_lines(
    harness: BatchHarness, keeps_order: bool
) -> None:
    """Two have begun and end well; one that is overloaded has not begun, and is not tried again."""
    go_on, has_begun = asyncio.Event(), asyncio.Event()

    async def answer(_endpoint: str, body: dict[str, Any], _tenant: str = "") -> dict[str, Any]:
        if body["prompt"] == 2:
            has_begun.set()
            raise OverloadedError("later", 1)
        await go_on.wait()
        return {}

    service = harness.service()
    job = await service.submit(pieces(requests(40)), JobOptions(keeps_order=keeps_order))
    runner = harness.runner(answer, concurrency=3)
    async with harness.running(runner):
        await has_begun.wait()
        assert (await service.cancel(job.job_id)).state == JobState.CANCELLING
        while not all(run.is_cancelled for run in runner._runs.values()):
            await asyncio.sleep(0)
        go_on.set()
        states = [each.state async for each in service.watch(job.job_id)]
        results = await all_results(service, job.job_id)
    assert states[-1] == JobState.CANCELLED
    assert sorted(line.line for line in results) == list(range(1, 41))
    assert sorted(line.line for line in results if not line.is_error) == [1, 2]
    ended = await service.cancel(job.job_id)
    assert (ended.state, ended.num_done, ended.num_failed) == (JobState.CANCELLED, 2, 38)


@in_event_loop
async def test_a_job_that_has_not_begun_can_be_cancelled(harness: BatchHarness) -> None:
    service = harness.service()
    job = await service.submit(pieces(requests(3)), JobOptions())
    await service.cancel(job.job_id)
    async with harness.running(harness.runner(echo)):
        results = await all_results(service, job.job_id)
    assert [line.is_error for line in results] == [True] * 3
    assert [json.loads(line.body)["code"] for line in results] == ["batch_cancelled"] * 3
    stored = service._jobs.get(job.job_id)
    assert [result.http_status for result in service._jobs.results(stored, 0, 9)] == [None] * 3


@in_event_loop
async def test_nothing_but_jobs_waits_for_a_database_that_is_locked(harness: BatchHarness) -> None:
    """Neither what others do in threads, nor a runner's lease for its lines."""
    service, go_on, has_renewed = harness.service(), threading.Event(), asyncio.Event()
    job = await service.submit(pieces(requests(3)), JobOptions())
    real, loop = harness.claims(), asyncio.get_running_loop()
    claims = harness.claims()
    claims.next_lines = lambda *arguments: go_on.wait() and real.next_lines(*arguments)  # type: ignore[method-assign]
    held = claims.claimed

    def renewed(running: Collection[int], renew: bool) -> dict[int, tuple[int, JobState]]:
        found = held(running, renew)
        if len(found) > 2 * THREADS:
            loop.call_soon_threadsafe(has_renewed.set)
        return found

    claims.claimed = renewed  # type: ignore[method-assign]
    service._jobs.cancel = lambda job_id: go_on.wait() and service._jobs.get(job_id)  # type: ignore[assignment, method-assign]
    try:
        waiting = [asyncio.create_task(service.cancel(job.job_id)) for _ in range(100)]
        await asyncio.sleep(0)
        assert await asyncio.wait_for(asyncio.to_thread(lambda: "tokens"), 20) == "tokens"
        others = harness.service()
        for _ in range(2 * THREADS):
            await others.submit(pieces(GOOD), JobOptions())
        async with harness.running(harness.runner(claims=claims)):
            await asyncio.wait_for(has_renewed.wait(), 20)
            go_on.set()
            await all_results(others, job.job_id)
    finally:
        go_on.set()
    await asyncio.gather(*waiting)


@in_event_loop
async def test_a_server_has_so_many_connections_to_the_database_as_it_has_threads_for_jobs(
    harness: BatchHarness,
) -> None:
    """The documentation says how many an ingress replica and the Batch replica have: 12 and 18."""
    service, runner, go_on = harness.service(), harness.runner(), threading.Event()
    pools = (
        service._threads,
        service._writes,
        runner._threads,
        runner._lease_thread,
        runner._file_thread,
    )
    tenants = itertools.cycle("abcd")
    counts, waiting = list[int](), list[asyncio.Task[bool]]()
    for pool in pools:
        before = set(threading.enumerate())
        if isinstance(pool, StorageThreads):
            waiting += [asyncio.create_task(pool.run(next(tenants), go_on.wait)) for _ in range(20)]
        else:
            waiting += [asyncio.create_task(pool.run(go_on.wait)) for _ in range(20)]
        await asyncio.sleep(0)
        counts.append(len(set(threading.enumerate()) - before))
    go_on.set()
    await asyncio.gather(*waiting)
    for pool in pools:
        pool.close()
    assert counts == [8, 4, 4, 1, 1]


@in_event_loop
async def test_calls_that_have_not_begun_are_dropped_when_their_threads_end() -> None:
    pool, begun, go_on, made = (JobThreadPool(1), threading.Event(), threading.Event(), list[str]())

    def first() -> None:
        begun.set()
        go_on.wait()
        made.append("first")

    calls = [
        asyncio.create_task(pool.run(first)),
        asyncio.create_task(pool.run(made.append, "second")),
    ]
    await asyncio.to_thread(begun.wait)
    closing = asyncio.create_task(asyncio.to_thread(pool.close))
    await asyncio.wait([calls[1]], timeout=20)
    go_on.set()
    await closing
    await calls[0]
    assert calls[1].cancelled()
    assert made == ["first"]


def test_512_streams_are_open_at_most(harness: BatchHarness) -> None:
    """Of them an API key has half."""
    with ExitStack() as streams:
        service = harness.service()
        for tenant, most in (("own", 256), (KEYLESS, 256)):
            for _ in range(most):
                streams.enter_context(service.for_tenant(tenant).streaming())
            with pytest.raises(OverloadedError, match=f"^{most} of your streams"):
                streams.enter_context(service.for_tenant(tenant).streaming())


@in_event_loop
async def test_metadata_has_16_keys_of_64_characters_with_values_of_512(
    harness: BatchHarness,
) -> None:
    service = harness.service()
    most = {f"{number:064}": "v" * 512 for number in range(16)}
    assert (await service.submit(pieces(GOOD), JobOptions(metadata=most))).options.metadata == most
    for metadata in ({"k" * 65: ""}, {"k": "v" * 513}, most | {"k": ""}):
        with pytest.raises(JobRefusedError, match="16 keys of 64 characters, with texts of 512"):
            await service.submit(pieces(GOOD), JobOptions(metadata=metadata))


def test_a_list_has_100_jobs_at_most(harness: BatchHarness) -> None:
    service = harness.service(limits=replace(LIMITS, max_open_jobs=101))
    made = [service._submissions.create(JobOptions()) for _ in range(101)]
    with service._database.writing() as connection:
        connection.exec_driver_sql("UPDATE tramontane_jobs SET state = 'queued'")
    newest = [job.job.job_id for job in made[::-1]]
    for limit, count in ((99, 99), (100, 100), (101, 100)):
        assert [job.job_id for job in asyncio.run(service.list(limit))] == newest[:count]


@in_event_loop
async def test_streams_are_bounded(harness: BatchHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_service, "MAX_STREAMS", 2)

    service = harness.service()
    job = await service.submit(pieces(GOOD), JobOptions())
    watch = service.watch(job.job_id)
    await anext(watch)
    async with harness.running(harness.runner()):
        results = service.results(job.job_id)
        await anext(results)
        for late in (service.watch(job.job_id), service.results(job.job_id)):
            with pytest.raises(OverloadedError):
                await anext(late)
        await results.aclose()  # type: ignore[attr-defined]
        assert len(await all_results(service, job.job_id)) == 1


@in_event_loop
async def test_queues_do_not_see_each_other(harness: BatchHarness) -> None:
    job = await harness.service("mixtral").submit(pieces(GOOD), JobOptions())
    assert harness.claims("tiny").claim(5) == []
    assert await harness.service("tiny").list(5) == []
    with pytest.raises(UnknownJobError):
        await harness.service("tiny").cancel(job.job_id)
    assert len(harness.claims("mixtral").claim(5)) == 1
