"""``tramontane batch`` against a real HTTP server in this process, with a connection that is lost
again and again.
"""

import asyncio
import io
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import httpx
import pytest
import uvicorn
from batch_jobs import LIMITS, BatchHarness, new_batch_harness, requests
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tramontane.cluster.cli import batch as batch_command
from tramontane.cluster.cli import main as cli
from tramontane.cluster.cli.batch import watch
from tramontane.cluster.console import batch_client
from tramontane.cluster.console.batch_client import StdoutSink
from tramontane.cluster.http.batch_endpoints import BatchEndpoints
from tramontane.cluster.http.errors import ERROR_HANDLERS
from tramontane.proto.errors import ConnectionLostError, PipelineError
from tramontane.proto.units import format_bytes
from tramontane.router.batch.input_lines import JobLimits


@dataclass
class Unreliable:
    """Answers, but tears the connection where ``tears`` says so: path, and after how many pieces of
    the answer.
    """

    app: Starlette
    tears: list[tuple[str, int]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    key: str | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.key and (b"authorization", f"Bearer {self.key}".encode()) not in scope["headers"]:
            await Response(status_code=401)(scope, receive, send)
            return
        path = f"{scope['method']} {scope['path']}"
        self.paths.append(path)
        tear = next((tear for tear in self.tears if path.endswith(tear[0])), None)
        if tear is not None:
            self.tears.remove(tear)
        left = tear[1] if tear else sys.maxsize

        async def torn(message: Any) -> None:
            nonlocal left
            if left == 0:
                raise ConnectionResetError("torn on purpose")
            left -= 1
            await send(message)

        await self.app(scope, receive, torn)


@contextmanager
def _server(
    harness: BatchHarness, runs: bool, key: str | None = None, limits: JobLimits = LIMITS
) -> Iterator[tuple[str, Unreliable]]:
    """Its URL. In a thread with an event loop of its own, where a runner works too."""
    service = harness.service(limits=limits)
    app = Unreliable(
        Starlette(routes=BatchEndpoints(service).routes(), exception_handlers=ERROR_HANDLERS),
        key=key,
    )
    server = uvicorn.Server(
        uvicorn.Config(app, port=0, log_level="critical", lifespan="off", ws="none")
    )
    ready = threading.Event()

    async def serve() -> None:
        serving = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.001)
        ready.set()
        if runs:
            async with harness.running(harness.runner()):
                await serving
        await serving

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    ready.wait()
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}", app
    finally:
        server.should_exit = True
        thread.join()
        harness.close()


@pytest.fixture
def tramontane(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """Runs the command in this process, with short waits; returns its standard output."""
    monkeypatch.setattr(batch_client, "JOB_MIN_WAIT_S", 0.01)
    monkeypatch.setattr(batch_client, "WATCH_INTERVAL_S", 0.01)

    def run(*arguments: object) -> str:
        monkeypatch.setattr(sys, "argv", ["tramontane", "batch", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit_:
            cli.main()
        out, err = capsys.readouterr()
        assert exit_.value.code == 0, err
        return out

    return run


def test_a_job_from_its_file_to_its_results_over_a_bad_line(
    tmp_path: Path, tramontane: Callable[..., str]
) -> None:
    (tmp_path / "in.jsonl").write_bytes(requests(1200))
    output = tmp_path / "out.jsonl"
    with _server(new_batch_harness(tmp_path), runs=True) as (url, server):
        server.tears += [("POST /v1/files", 0), ("POST /v1/batches", 0), ("GET /v1/batches", 1)]
        job_id = tramontane("submit", tmp_path / "in.jsonl", "--url", url).strip()
        assert json.loads(tramontane("list", "--url", url, "--json"))[0]["id"] == job_id
        assert len(json.loads(tramontane("list", "--url", url, "--json"))) == 1, (
            "what was sent twice is one job"
        )
        server.tears += [(f"GET /v1/batches/{job_id}", 0)] * 2
        assert "completed: 1200 lines, 1200 answered" in tramontane("watch", job_id, "--url", url)
        server.tears += [("/results", 0), ("/results", 300), ("/results", 500)]
        output.touch()  # as mktemp does
        assert tramontane("results", job_id, "-o", output, "--url", url).startswith("1200 lines")
        answers = [json.loads(line) for line in output.read_bytes().splitlines()]
        assert [answer["response"]["body"]["said"] for answer in answers] == list(range(1200))
        assert server.tears == []
        assert sum(path.endswith("/results") for path in server.paths) == 4
    assert not list(tmp_path.glob("*.part"))


def test_without_a_terminal_watch_prints_what_has_changed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A line of words for each state and each tenth of the job, and the last one on standard
    output.
    """

    def job(status: str, completed: int, failed: int = 0) -> dict[str, Any]:
        counts = {"total": 20, "completed": completed, "failed": failed}
        return {"id": "batch_1", "status": status, "request_counts": counts, "errors": None}

    jobs = [
        job("validating", 0),
        job("in_progress", 0),
        job("in_progress", 1),
        job("in_progress", 3, 1),
        job("completed", 19, 1),
    ]
    monkeypatch.setattr(batch_client.BatchClient, "watch", lambda _self, _id: iter(jobs))
    watch("batch_1", "http://127.0.0.1:1")
    out, err = capsys.readouterr()
    assert err.splitlines() == [
        "batch_1 validating: 20 lines, 0 answered, 0 with an error",
        "batch_1 in_progress: 20 lines, 0 answered, 0 with an error",
        "batch_1 in_progress: 20 lines, 3 answered, 1 with an error",
    ]
    assert out == "batch_1 completed: 20 lines, 19 answered, 1 with an error\n"


def test_a_file_that_is_not_there_is_named(tmp_path: Path, refused: Callable[..., str]) -> None:
    for file, why in ((tmp_path / "none.jsonl", "does not exist"), (tmp_path, "is a folder")):
        complaint = refused("batch", "submit", file, "--url", "http://127.0.0.1:1")
        assert complaint == f"{file} {why}; give a file with a request on each line"


def test_what_an_earlier_command_got_is_kept(
    tmp_path: Path, tramontane: Callable[..., str]
) -> None:
    (tmp_path / "in.jsonl").write_bytes(requests(20))
    with _server(new_batch_harness(tmp_path), runs=True) as (url, _):
        job_id = tramontane("submit", tmp_path / "in.jsonl", "--url", url).strip()
        states = [
            json.loads(line)
            for line in tramontane("watch", job_id, "--url", url, "--json").splitlines()
        ]
        assert states[-1]["request_counts"]["completed"] == 20
        (tmp_path / f"out.{job_id}.part").write_bytes(b'"kept"\n"kept"\n{"cut')
        tramontane("results", job_id, "-o", tmp_path / "out", "--url", url)
    lines = [json.loads(line) for line in (tmp_path / "out").read_bytes().splitlines()]
    assert lines[:2] == ["kept", "kept"]
    assert [line["custom_id"] for line in lines[2:]] == [f"r{i}" for i in range(2, 20)]


def test_cancel_and_status(
    tmp_path: Path, tramontane: Callable[..., str], refused: Callable[..., str]
) -> None:
    (tmp_path / "in.jsonl").write_bytes(requests(3))
    with _server(new_batch_harness(tmp_path), runs=False) as (url, _):
        job_id = tramontane("submit", tmp_path / "in.jsonl", "--url", url, "--any-order").strip()
        assert "validating: 3 lines" in tramontane("status", job_id, "--url", url)
        assert "cancelling: 3 lines, 0 answered, 0 cancelled or with an error" in tramontane(
            "cancel", job_id, "--url", url
        )
        assert (
            json.loads(tramontane("cancel", job_id, "--url", url, "--json"))["status"]
            == "cancelling"
        )
        assert (
            json.loads(tramontane("status", job_id, "--url", url, "--json"))["status"]
            == "cancelling"
        )
        assert "there is no batch job" in refused("batch", "status", "batch_x", "--url", url)
        assert "endpoint" in refused(
            "batch", "submit", tmp_path / "in.jsonl", "--endpoint", "/x", "--url", url
        )


@pytest.mark.parametrize("as_json", [False, True])
def test_cancelling_a_job_that_has_ended_says_so(
    tmp_path: Path, tramontane: Callable[..., str], as_json: bool
) -> None:
    (tmp_path / "in.jsonl").write_bytes(requests(3))
    notes: list[str] = []
    with (
        _server(new_batch_harness(tmp_path), runs=True) as (url, _),
        pytest.MonkeyPatch.context() as patch,
    ):
        job_id = tramontane("submit", tmp_path / "in.jsonl", "--url", url).strip()
        tramontane("watch", job_id, "--url", url)
        patch.setattr(batch_command.console, "print", lambda text, **_: notes.append(text))
        shown = tramontane("cancel", job_id, "--url", url, *(["--json"] if as_json else []))
    assert notes == ["nothing was cancelled: the job had already ended, as completed"]
    if as_json:
        assert json.loads(shown)["status"] == "completed"
    else:
        assert shown == f"{job_id} completed: 3 lines, 3 answered, 0 with an error\n"


def test_a_file_of_bad_lines_only_is_reported_at_once(
    tmp_path: Path, tramontane: Callable[..., str], refused: Callable[..., str]
) -> None:
    (tmp_path / "in.jsonl").write_bytes(requests(3).replace(b"completions", b"embeddings"))
    with _server(new_batch_harness(tmp_path), runs=False) as (url, _):
        why = "none of the 3 lines is a request: line 1: url is"
        complaint = refused("batch", "submit", tmp_path / "in.jsonl", "--url", url)
        assert why in complaint
        assert complaint.count("--endpoint") == 1
        job = json.loads(tramontane("list", "--url", url, "--json"))[0]
        assert complaint.endswith(
            f"and 2 more; all errors: tramontane batch results {job['id']} --url {url}"
        )
        assert why in tramontane("status", job["id"], "--url", url)
        with pytest.raises(PipelineError, match=why):
            watch(job["id"], url)
        assert tramontane("results", job["id"], "-o", tmp_path / "out", "--url", url).startswith(
            "3 lines"
        )


@pytest.mark.parametrize("text", [b"", b"\n\r\n \t\n"])
def test_a_file_without_lines_is_named_and_not_uploaded(
    tmp_path: Path, refused: Callable[..., str], text: bytes
) -> None:
    (file := tmp_path / "in.jsonl").write_bytes(text)
    assert (
        refused("batch", "submit", file, "--url", "http://127.0.0.1:1")
        == f"{file} has no lines; give one request per line"
    )


def test_results_come_on_standard_output_line_by_line_over_lost_connections(
    tmp_path: Path, tramontane: Callable[..., str]
) -> None:
    (tmp_path / "in.jsonl").write_bytes(requests(1200))
    with _server(new_batch_harness(tmp_path), runs=True) as (url, server):
        job_id = tramontane("submit", tmp_path / "in.jsonl", "--url", url).strip()
        tramontane("watch", job_id, "--url", url)
        server.tears += [("/results", 300), ("/results", 0), ("/results", 500)]
        shown = [
            json.loads(line) for line in tramontane("results", job_id, "--url", url).splitlines()
        ]
        assert [line["custom_id"] for line in shown] == [f"r{i}" for i in range(1200)]
        assert server.tears == []
        tramontane("results", job_id, "-o", tmp_path / "out", "--url", url)
        assert (
            tramontane("results", job_id, "-o", "-", "--url", url) == (tmp_path / "out").read_text()
        )


def test_a_line_that_was_cut_is_written_once() -> None:
    stream = io.BytesIO()
    lines = StdoutSink(stream)
    for pieces, num_lines in [((b"one\ntw", b"o\nth", b"r"), 2), ((b"three\n",), 3)]:
        with lines.appending() as write:
            for piece in pieces:
                write(piece)
        assert lines.count_lines() == num_lines
    assert stream.getvalue() == b"one\ntwo\nthree\n"


def test_results_survive_a_server_that_is_down_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where nothing but results has been requested before."""
    monkeypatch.setattr(
        batch_client, "time", SimpleNamespace(sleep=lambda _seconds: None, monotonic=lambda: 0.0)
    )
    notices: list[str] = []
    stream = io.BytesIO()

    def half() -> Iterator[bytes]:
        yield b'"a"\n"b'
        raise httpx.ReadError("lost")

    answers: Iterator[Any] = iter(
        [
            half(),
            None,
            None,
            None,
            {"status": "in_progress"},
            [b'"b"\n'],
            {"request_counts": {"total": 2}},
        ]
    )

    def answer(request: httpx.Request) -> httpx.Response:
        given = next(answers)
        if given is None:
            raise httpx.ConnectError("refused")
        return (
            httpx.Response(200, json=given)
            if isinstance(given, dict)
            else httpx.Response(200, content=iter(given))
        )

    with batch_client.BatchClient("http://127.0.0.1:1", {}, notices.append) as client:
        client._http = httpx.Client(
            transport=httpx.MockTransport(answer), base_url="http://127.0.0.1:1"
        )
        assert client.results("batch_x", StdoutSink(stream)) == 2
    assert stream.getvalue() == b'"a"\n"b"\n'
    assert any("trying again for up to 10 minutes" in notice for notice in notices)


def test_a_url_at_which_nothing_answers_is_reported_with_what_to_do(
    refused: Callable[..., str],
) -> None:
    complaint = refused("batch", "results", "batch_x", "--url", "http://127.0.0.1:1", code=1)
    assert complaint.startswith("--url http://127.0.0.1:1 does not answer: ")
    assert "is tramontane serve running there?" in complaint


CLIENT_COMMANDS = [
    *(
        "batch list",
        "batch status ID",
        "batch watch ID",
        "batch cancel ID",
        "batch results ID",
        "batch submit JOBS",
    ),
    *(
        "top",
        "top --once --json",
        "experts",
        "experts --watch",
        "experts --json",
        "trace --output TRACE",
        "bench",
    ),
]


@pytest.mark.parametrize("command", CLIENT_COMMANDS)
def test_a_wrong_port_is_reported_at_once(
    refused: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """A closed port, at which a server may be soon, and one that speaks gRPC; no command waits in
    between, or tries again.
    """
    monkeypatch.setattr(time, "sleep", lambda _s: pytest.fail("it waits"))
    monkeypatch.setattr("signal.signal", lambda *_: None)  # of this process, which continues
    (jobs := tmp_path / "jobs.jsonl").write_text("{}\n")
    places = {"JOBS": str(jobs), "TRACE": str(tmp_path / "trace.json")}
    words = [places.get(word, word) for word in command.split()]
    said = refused(*words, "--url", "http://127.0.0.1:1", code=1)
    assert said.startswith("--url http://127.0.0.1:1 does not answer: ")
    assert said.endswith("; is tramontane serve running there?")
    server = grpc.server(ThreadPoolExecutor(1))
    url = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        said = refused(*words, "--url", url, code=2)
    finally:
        server.stop(None)
    assert said.startswith(f"--url {url} does not answer: ")
    assert said.endswith(
        "; the port does not speak HTTP/1: give the --port of tramontane serve, not its --grpc-port"
    )


@pytest.mark.parametrize(
    ("below", "message"),
    [("", " is a folder; give a file"), ("/none/out", ": there is no folder {}/none")],
)
def test_an_output_that_cannot_be_written_is_refused_before_the_server_is_called(
    tmp_path: Path, refused: Callable[..., str], below: str, message: str
) -> None:
    output = f"{tmp_path}{below}"
    complaint = refused("batch", "results", "batch_x", "-o", output, "--url", "http://127.0.0.1:1")
    assert complaint == f"--output {output}{message.format(tmp_path)}"


def test_a_file_that_holds_no_results_is_not_replaced(
    tmp_path: Path, tramontane: Callable[..., str], refused: Callable[..., str]
) -> None:
    lines = tmp_path / "in.jsonl"
    lines.write_bytes(requests(2))
    with _server(new_batch_harness(tmp_path), runs=True) as (url, _):
        job_id = tramontane("submit", lines, "--url", url).strip()
        complaint = refused("batch", "results", job_id, "-o", lines, "--url", url)
        assert complaint == f"{lines} was not written by this command; choose another --output"
        assert lines.read_bytes() == requests(2)
        for _ in range(2):  # results may be replaced
            assert tramontane("results", job_id, "-o", tmp_path / "out", "--url", url).startswith(
                "2 lines"
            )


def test_a_list_of_no_jobs_is_refused(refused: Callable[..., str]) -> None:
    assert "--limit" in refused("batch", "list", "--limit", "0")


def test_results_of_another_number_than_the_lines_are_refused_and_nothing_is_left(
    tmp_path: Path, tramontane: Callable[..., str], refused: Callable[..., str]
) -> None:
    (tmp_path / "in.jsonl").write_bytes(requests(3))
    with _server(new_batch_harness(tmp_path), runs=True) as (url, _):
        job_id = tramontane("submit", tmp_path / "in.jsonl", "--url", url).strip()
        (tmp_path / f"out.{job_id}.part").write_bytes(b"{}\n" * 4)
        complaint = refused(
            "batch", "results", job_id, "-o", tmp_path / "out", "--url", url, code=1
        )
        assert "the server sent 4 results of a job of 3 lines" in complaint
        assert "there is no batch job" in refused(
            "batch", "results", "batch_x", "-o", tmp_path / "out", "--url", url
        )
        assert not list(tmp_path.glob("out*"))
        assert tramontane("results", job_id, "-o", tmp_path / "out", "--url", url).startswith(
            "3 lines"
        )


def test_a_list_is_not_cut(
    tmp_path: Path, tramontane: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    (tmp_path / "in.jsonl").write_bytes(requests(3))
    with _server(new_batch_harness(tmp_path), runs=False) as (url, _):
        job_id = tramontane("submit", tmp_path / "in.jsonl", "--url", url).strip()
        tramontane("cancel", job_id, "--url", url)
        rows = [row.split() for row in tramontane("list", "--url", url).splitlines()]
    # as the place's clock has it
    created = datetime.fromtimestamp(1000).strftime("%Y-%m-%d %H:%M").split()
    assert rows == [
        ["ID", "status", "created", "lines", "answered", "errors"],
        [job_id, "cancelling", *created, "3", "0", "0"],
    ]


def test_a_key_is_sent_and_a_wrong_one_is_reported_at_once(
    tmp_path: Path, tramontane: Callable[..., str], refused: Callable[..., str]
) -> None:
    (tmp_path / "keys").write_text("# ours\nsesame-and-more-of-it\n")
    with _server(new_batch_harness(tmp_path), runs=False, key="sesame-and-more-of-it") as (url, _):
        assert (
            json.loads(
                tramontane("list", "--url", url, "--json", "--api-key-file", tmp_path / "keys")
            )
            == []
        )
        complaint = refused("batch", "list", "--url", url, "--api-key", "open-please-open-please")
        assert "requires another API key than this; give --api-key-file or --api-key" in complaint
        assert "requires an API key; give --api-key-file or --api-key" in refused(
            "batch", "list", "--url", url
        )


def test_full_storage_is_not_waited_for(
    tmp_path: Path, tramontane: Callable[..., str], refused: Callable[..., str]
) -> None:
    """Only the user can make room, so the command ends with what the server says."""
    (tmp_path / "in.jsonl").write_bytes(requests(100))
    size = len(requests(100))
    limits = replace(LIMITS, max_stored_bytes=int(2.5 * size))
    with _server(new_batch_harness(tmp_path), runs=False, limits=limits) as (url, server):
        tramontane("submit", tmp_path / "in.jsonl", "--url", url)
        before = len(server.paths)
        complaint = refused("batch", "submit", tmp_path / "in.jsonl", "--url", url)
        assert (
            f"and at most {format_bytes(int(2.5 * size))} may be stored (--jobs-max-bytes); delete"
            " files" in complaint
        )
        assert len(server.paths) == before + 1


@pytest.mark.parametrize(
    ("statuses", "is_waited_for"), [([429] * 200 + [200], True), ([503] * 200 + [200], False)]
)
def test_a_server_at_work_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, statuses: list[int], is_waited_for: bool
) -> None:
    """Longer than a server that cannot answer."""
    now, answers = 0.0, iter(statuses)

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(batch_client, "time", SimpleNamespace(sleep=sleep, monotonic=lambda: now))
    with batch_client.BatchClient("http://127.0.0.1:1", {}, lambda _notice: None) as client:
        mock = httpx.MockTransport(
            lambda _request: httpx.Response(next(answers), json={"id": "batch_x"})
        )
        client._http = httpx.Client(transport=mock, base_url="http://127.0.0.1:1")
        with (
            nullcontext()
            if is_waited_for
            else pytest.raises(ConnectionLostError, match="does not answer")
        ):
            assert client.get("batch_x")["id"] == "batch_x"
    assert now > batch_client.JOB_RETRY_TIMEOUT_S
