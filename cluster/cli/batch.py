"""``tramontane batch``."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column, Table

from tramontane.cluster.console.batch_client import ResumableFile, StdoutSink
from tramontane.cluster.console.options import flag, option
from tramontane.cluster.console.server_client import Key, KeyFile, auth_headers
from tramontane.proto.errors import ConfigError, PipelineError
from tramontane.router.batch.store import LineError, summarize_line_errors

if TYPE_CHECKING:
    from tramontane.cluster.console.batch_client import BatchClient

RATE_OVER_S = 60.0
MAX_TABLE = 100  # characters that the longest row of a list may need

Url = Annotated[str, option("--url", help="A server that tramontane serve started.")]
Json = Annotated[bool, flag("--json", help="Machine-readable output on standard output.")]
JobId = Annotated[str, typer.Argument(metavar="ID", help="As submit and list say it.")]
HERE = "http://127.0.0.1:8000"
STANDARD_OUTPUT = "-"

batch = typer.Typer(name="batch", add_completion=False)
console = Console(stderr=True, highlight=False)


@contextmanager
def _client(url: str, key: str | None, key_file: Path | None) -> "Iterator[BatchClient]":
    from tramontane.cluster.console.batch_client import BatchClient  # brings an HTTP client

    with BatchClient(url, auth_headers(key, key_file), lambda text: console.print(text, style="yellow", markup=False)) as client:
        yield client


@batch.command()
def submit(
    file: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="JSONL as OpenAI's batches have it.")],
    endpoint: Annotated[str, option("--endpoint", help="What the lines are requests to.")] = "/v1/completions",
    any_order: Annotated[bool, flag("--any-order", help="Results as they are ready, not in the order of input.")] = False,
    url: Url = HERE,
    key: Key = None,
    key_file: KeyFile = None,
    as_json: Json = False,
) -> None:
    """Submit a file of requests, one a line; prints the job's ID."""
    with _client(url, key, key_file) as client:
        job = client.submit(file, not any_order, endpoint)
    if as_json:
        print(json.dumps(job))
    if job["status"] == "failed":
        rest = f"all of them: tramontane batch results {job['id']}"
        raise ConfigError(f"{file} cannot be run: {_why_failed(job)}; {rest}")
    if not as_json:
        print(job["id"])


@batch.command()
def status(job_id: JobId, url: Url = HERE, key: Key = None, key_file: KeyFile = None, as_json: Json = False) -> None:
    """How far a job is."""
    with _client(url, key, key_file) as client:
        job = client.get(job_id)
    print(json.dumps(job) if as_json else _line(job))


@batch.command()
def watch(job_id: JobId, url: Url = HERE, key: Key = None, key_file: KeyFile = None, as_json: Json = False) -> None:
    """A job's progress, until it has ended. Interrupting this does not harm the job."""
    with _client(url, key, key_file) as client:
        job = _watched_json(client, job_id) if as_json else _watched(client, job_id)
    if job["status"] == "failed":
        raise PipelineError(f"the job {job_id} has failed: {_why_failed(job)}")
    if not as_json:
        print(_line(job))


def _watched_json(client: "BatchClient", job_id: str) -> dict[str, Any]:
    last: dict[str, Any] = {}
    for job in client.watch(job_id):
        if job != last:
            print(json.dumps(job), flush=True)
        last = job
    return last


def _watched(client: "BatchClient", job_id: str) -> dict[str, Any]:
    rate = TextColumn("{task.fields[rate]}")
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        rate,
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    job: dict[str, Any] = {}
    with Progress(*columns, console=console, speed_estimate_period=RATE_OVER_S) as progress:
        task = progress.add_task(job_id, total=None, rate="")
        for job in client.watch(job_id):
            counts = job["request_counts"]
            progress.update(
                task, description=job["status"], total=counts["total"], completed=counts["completed"] + counts["failed"]
            )
            speed = progress.tasks[0].speed
            progress.update(task, rate=f"{speed:.3g} lines/s" if speed else "")
    return job


@batch.command()
def results(
    job_id: JobId,
    output: Annotated[
        str,
        option(
            "-o",
            "--output",
            help="A file; until it is whole it is called FILE.ID.part, with which an interrupted command goes on. "
            "- : standard output.",
        ),
    ] = STANDARD_OUTPUT,
    url: Url = HERE,
    key: Key = None,
    key_file: KeyFile = None,
    as_json: Json = False,
) -> None:
    """Every line's answer or error, as the job goes on; ends with the job."""
    is_shown = output == STANDARD_OUTPUT
    try:
        with _client(url, key, key_file) as client:
            num_lines = client.results(job_id, StdoutSink(sys.stdout.buffer) if is_shown else ResumableFile(Path(output), job_id))
    except BrokenPipeError:
        raise
    except OSError as error:
        where = "standard output" if is_shown else output
        raise ConfigError(f"{where} cannot be written: {error.strerror}") from error
    if is_shown:
        console.print(f"{num_lines} line{'s' * (num_lines != 1)}", markup=False)
    else:
        said = {"id": job_id, "output": output, "lines": num_lines}
        print(json.dumps(said) if as_json else f"{num_lines} line{'s' * (num_lines != 1)} in {output}")


@batch.command(name="list")
def list_jobs(
    limit: Annotated[int, option("--limit", help="The newest so many.")] = 20,
    url: Url = HERE,
    key: Key = None,
    key_file: KeyFile = None,
    as_json: Json = False,
) -> None:
    """The newest jobs."""
    with _client(url, key, key_file) as client:
        jobs = client.list(limit)
    if as_json:
        print(json.dumps(jobs))
        return
    columns = [Column(name, no_wrap=True) for name in ("ID", "status", "created", "lines", "answered", "errors")]
    table = Table(*columns, box=None, pad_edge=False)
    for job in jobs:
        counts = job["request_counts"]
        created = datetime.fromtimestamp(job["created_at"]).strftime("%Y-%m-%d %H:%M")
        table.add_row(job["id"], job["status"], created, *(str(counts[name]) for name in ("total", "completed", "failed")))
    shown = Console(highlight=False, file=sys.stdout)
    shown.width = max(shown.width, MAX_TABLE)  # rather wrapped by the terminal than cut
    shown.print(table)


@batch.command()
def cancel(job_id: JobId, url: Url = HERE, key: Key = None, key_file: KeyFile = None, as_json: Json = False) -> None:
    """Begin no more lines of a job; each of the rest ends with an error that says so."""
    with _client(url, key, key_file) as client:
        job = client.cancel(job_id)
    print(json.dumps(job) if as_json else _line(job))


def _line(job: dict[str, Any]) -> str:
    counts, status = job["request_counts"], job["status"]
    not_answered = "cancelled or with an error" if status in ("cancelling", "cancelled") else "with an error"
    how_far = f"{counts['total']} lines, {counts['completed']} answered, {counts['failed']} {not_answered}"
    return f"{job['id']} {status}: {how_far}{f'; {_why_failed(job)}' * (status == 'failed')}"


def _why_failed(job: dict[str, Any]) -> str:
    told = (job["errors"] or {"data": []})["data"]
    problems = [LineError(each["line"], each["code"], each["message"]) for each in told]
    return summarize_line_errors(problems, job["request_counts"]["total"])
