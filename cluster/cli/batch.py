"""``tramontane batch``: submit and follow batch jobs of a running server."""

import json
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, get_args

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column, Table

from tramontane.cluster.console.batch_client import ENDED, BatchClient, ResumableFile, StdoutSink
from tramontane.cluster.console.options import Json, flag, option
from tramontane.cluster.console.server_client import DEFAULT_URL, Key, KeyFile, Url, auth_headers
from tramontane.cluster.console.terminal import PlainCommand, PlainGroup, check_replaceable
from tramontane.proto.errors import ConfigError, PipelineError
from tramontane.proto.jobs import Endpoint
from tramontane.router.batch.store import BatchError, summarize_line_errors

RATE_WINDOW_S = 60.0
MIN_TABLE_WIDTH = 100  # characters: the longest row of a list

JobId = Annotated[
    str, typer.Argument(metavar="ID", help="ID of the job, as submit and list print it.")
]
*_OTHERS, _LAST = get_args(Endpoint)
ENDPOINT_HELP = f"Endpoint of the requests: {', '.join(_OTHERS)} or {_LAST}."
STANDARD_OUTPUT = "-"
RESULTS_MARK = '{"id": "batch_req_'  # the first bytes of a file of results

batch = typer.Typer(name="batch", cls=PlainGroup, add_completion=False)
console = Console(stderr=True, highlight=False)


@contextmanager
def _client(url: str, key: str | None, key_file: Path | None) -> Iterator[BatchClient]:
    with BatchClient(
        url,
        auth_headers(key, key_file),
        lambda text: console.print(text, style="yellow", markup=False),
    ) as client:
        yield client


@batch.command(cls=PlainCommand)
def submit(
    file: Annotated[Path, typer.Argument(help="JSONL file, in the format of OpenAI's batches.")],
    endpoint: Annotated[
        Endpoint, option("--endpoint", help=ENDPOINT_HELP, metavar="PATH")
    ] = "/v1/completions",
    any_order: Annotated[
        bool,
        flag("--any-order", help="Write results as they are ready, not in the order of input."),
    ] = False,
    url: Url = DEFAULT_URL,
    key: Key = None,
    key_file: KeyFile = None,
    as_json: Json = False,
) -> None:
    """Submit a file of requests, one per line, and print the job's ID."""
    if not file.exists():
        raise ConfigError(f"{file} does not exist; give a file with a request on each line")
    if file.is_dir():
        raise ConfigError(f"{file} is a folder; give a file with a request on each line")
    with _client(url, key, key_file) as client:
        job = client.submit(file, not any_order, endpoint)
    if as_json:
        print(json.dumps(job))
    if job["status"] == "failed":
        elsewhere = "" if url == DEFAULT_URL else f" --url {url}"
        all_errors = f"all errors: tramontane batch results {job['id']}{elsewhere}"
        raise ConfigError(f"{file} cannot be run: {_why_failed(job)}; {all_errors}")
    if not as_json:
        print(job["id"])


@batch.command(cls=PlainCommand)
def status(
    job_id: JobId,
    url: Url = DEFAULT_URL,
    key: Key = None,
    key_file: KeyFile = None,
    as_json: Json = False,
) -> None:
    """Print the progress of a job."""
    with _client(url, key, key_file) as client:
        job = client.get(job_id)
    print(json.dumps(job) if as_json else _line(job))


@batch.command(cls=PlainCommand)
def watch(
    job_id: JobId,
    url: Url = DEFAULT_URL,
    key: Key = None,
    key_file: KeyFile = None,
    as_json: Json = False,
) -> None:
    """Show the progress of a job until it has ended. An interrupt does not affect the job."""
    with _client(url, key, key_file) as client:
        job = _watch_json(client, job_id) if as_json else _watch(client, job_id)
    if job["status"] == "failed":
        raise PipelineError(f"the job {job_id} has failed: {_why_failed(job)}")
    if not as_json:
        print(_line(job))


def _watch_json(client: BatchClient, job_id: str) -> dict[str, Any]:
    last: dict[str, Any] = {}
    for job in client.watch(job_id):
        if job != last:
            print(json.dumps(job), flush=True)
        last = job
    return last


def _watch_lines(jobs: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Print a line when the job's status has changed or another tenth of its lines has ended. The
    caller prints the last one.
    """
    job: dict[str, Any] = {}
    last: tuple[str, int] | None = None
    for job in jobs:
        counts = job["request_counts"]
        now = (
            job["status"],
            10 * (counts["completed"] + counts["failed"]) // max(counts["total"], 1),
        )
        if now != last and job["status"] not in ENDED:
            console.print(_line(job), markup=False, soft_wrap=True)
        last = now
    return job


def _watch(client: BatchClient, job_id: str) -> dict[str, Any]:
    rate = TextColumn("{task.fields[rate]}")
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        rate,
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    jobs = client.watch(job_id)
    job = first = next(jobs)  # raises if the server does not answer, before any output
    if not console.is_terminal:
        return _watch_lines(chain([first], jobs))
    with Progress(*columns, console=console, speed_estimate_period=RATE_WINDOW_S) as progress:
        task = progress.add_task(job_id, total=None, rate="")
        for job in chain([first], jobs):
            counts = job["request_counts"]
            progress.update(
                task,
                description=job["status"],
                total=counts["total"],
                completed=counts["completed"] + counts["failed"],
            )
            speed = progress.tasks[0].speed
            progress.update(task, rate=f"{speed:.3g} lines/s" if speed else "")
    return job


@batch.command(cls=PlainCommand)
def results(
    job_id: JobId,
    output: Annotated[
        str,
        option(
            "-o",
            "--output",
            help="File. Until it is complete it is named FILE.ID.part, which a command after an "
            "interrupt continues. -: standard output.",
        ),
    ] = STANDARD_OUTPUT,
    url: Url = DEFAULT_URL,
    key: Key = None,
    key_file: KeyFile = None,
    as_json: Json = False,
) -> None:
    """Write the answer or error of every line, as they are ready, until the job has ended."""
    to_stdout = output == STANDARD_OUTPUT
    if not to_stdout and Path(output).is_dir():
        raise ConfigError(f"--output {output} is a folder; give a file")
    # other outputs are /dev/null or a pipe
    if not to_stdout and (Path(output).is_file() or not Path(output).exists()):
        check_replaceable(Path(output), RESULTS_MARK, "--output")
    try:
        with _client(url, key, key_file) as client:
            num_lines = client.results(
                job_id,
                StdoutSink(sys.stdout.buffer) if to_stdout else ResumableFile(Path(output), job_id),
            )
    except BrokenPipeError:
        raise
    except OSError as error:
        where = "standard output" if to_stdout else output
        raise ConfigError(f"{where} cannot be written: {error.strerror}") from error
    if to_stdout:
        console.print(f"{num_lines} line{'s' * (num_lines != 1)}", markup=False)
    else:
        summary = {"id": job_id, "output": output, "lines": num_lines}
        print(
            json.dumps(summary)
            if as_json
            else f"{num_lines} line{'s' * (num_lines != 1)} in {output}"
        )


@batch.command(name="list", cls=PlainCommand)
def list_jobs(
    limit: Annotated[int, option("--limit", min=1, help="Number of jobs.")] = 20,
    url: Url = DEFAULT_URL,
    key: Key = None,
    key_file: KeyFile = None,
    as_json: Json = False,
) -> None:
    """List the newest jobs."""
    with _client(url, key, key_file) as client:
        jobs = client.list(limit)
    if as_json:
        print(json.dumps(jobs))
        return
    columns = [
        Column(name, no_wrap=True)
        for name in ("ID", "status", "created", "lines", "answered", "errors")
    ]
    table = Table(*columns, box=None, pad_edge=False)
    for job in jobs:
        counts = job["request_counts"]
        created = datetime.fromtimestamp(job["created_at"]).strftime("%Y-%m-%d %H:%M")
        table.add_row(
            job["id"],
            job["status"],
            created,
            *(str(counts[name]) for name in ("total", "completed", "failed")),
        )
    stdout = Console(highlight=False, file=sys.stdout)
    # the terminal wraps rows instead of rich cutting them
    stdout.width = max(stdout.width, MIN_TABLE_WIDTH)
    stdout.print(table)


@batch.command(cls=PlainCommand)
def cancel(
    job_id: JobId,
    url: Url = DEFAULT_URL,
    key: Key = None,
    key_file: KeyFile = None,
    as_json: Json = False,
) -> None:
    """Start no more lines of a job; the remaining ones end with an error that reports it."""
    with _client(url, key, key_file) as client:
        job = client.cancel(job_id)
    print(json.dumps(job) if as_json else _line(job))
    if job["status"] in ENDED:
        console.print(
            f"nothing was cancelled: the job had already ended, as {job['status']}",
            markup=False,
            soft_wrap=True,
        )


def _line(job: dict[str, Any]) -> str:
    counts, status = job["request_counts"], job["status"]
    not_answered = (
        "cancelled or with an error" if status in ("cancelling", "cancelled") else "with an error"
    )
    lines = f"{counts['total']} lines, {counts['completed']} answered"
    progress = f"{lines}, {counts['failed']} {not_answered}"
    return f"{job['id']} {status}: {progress}{f'; {_why_failed(job)}' * (status == 'failed')}"


def _why_failed(job: dict[str, Any]) -> str:
    errors = (job["errors"] or {"data": []})["data"]
    problems = [
        BatchError(code=each["code"], message=each["message"], line=each["line"], param=None)
        for each in errors
    ]
    return summarize_line_errors(problems, job["request_counts"]["total"])
