"""The client of batch jobs, which retries, and the outputs of results: whole lines, each once,
across lost connections.
"""

import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import httpx

from tramontane.cluster.console.server_client import (
    base_url,
    is_other_protocol,
    no_answer,
    raise_if_unauthorized,
)
from tramontane.proto.errors import ConfigError, ConnectionLostError, PipelineError
from tramontane.proto.timing import JOB_MAX_WAIT_S, JOB_MIN_WAIT_S, JOB_RETRY_TIMEOUT_S
from tramontane.proto.units import backoff_delays

# the server stores a job of a million lines before it answers
TIMEOUT = httpx.Timeout(30.0, read=600.0)
WATCH_INTERVAL_S = 1.0
BLOCK_BYTES = 2**16  # of a file, read at once; its lines may be long
ENDED = ("completed", "cancelled", "failed", "expired")
RETRY_STATUSES = (429, 500, 502, 503, 504)
QUOTA_EXCEEDED = "quota_exceeded"  # the code of a 429 after which only the user can make room
Job = dict[str, Any]


class ResumableFile:
    """A file with another name until it is complete; an interrupted command leaves it, and the next
    one continues it.

    Lines arrive in pieces, cut anywhere.
    """

    def __init__(self, file: Path, job_id: str) -> None:
        self._file, self._part = file, file.with_name(f"{file.name}.{job_id}.part")

    def count_lines(self) -> int:
        """Count the whole lines, and truncate the file behind them."""
        if not self._part.exists():
            return 0
        num_lines = end = position = 0
        with self._part.open("rb+") as part:
            while piece := part.read(2**20):
                num_lines += piece.count(b"\n")
                if (last := piece.rfind(b"\n")) >= 0:
                    end = position + last + 1
                position += len(piece)
            part.truncate(end)
        return num_lines

    @contextmanager
    def appending(self) -> Iterator[Callable[[bytes], object]]:
        """Open the file."""
        with self._part.open("ab") as part:
            yield part.write

    def finish(self) -> None:
        """Give the file its name."""
        self._part.replace(self._file)

    def discard(self) -> None:
        """Delete the file."""
        self._part.unlink()


class StdoutSink:
    """Standard output. Nothing can be removed from it, so a line is written once it is complete."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream, self._incomplete, self._num_lines = stream, bytearray(), 0

    def count_lines(self) -> int:
        """Return the number of lines written."""
        self._incomplete.clear()
        return self._num_lines

    @contextmanager
    def appending(self) -> Iterator[Callable[[bytes], object]]:
        """Return the function that appends a piece."""
        yield self._write

    def _write(self, piece: bytes) -> None:
        self._incomplete += piece
        if (end := piece.rfind(b"\n") + 1) > 0:
            end += len(self._incomplete) - len(piece)
            self._stream.write(self._incomplete[:end])
            self._stream.flush()
            self._num_lines += piece.count(b"\n")
            del self._incomplete[:end]

    def finish(self) -> None:
        """Do nothing: all lines have been written."""

    def discard(self) -> None:
        """Do nothing: the lines may have been read."""


ResultSink = ResumableFile | StdoutSink


class BatchClient:
    """A client that retries, and calls ``notice`` when a connection is lost.

    Methods raise ConfigError for errors that the server reports, ConnectionLostError if the server
    does not answer.
    """

    def __init__(self, url: str, headers: dict[str, str], notice: Callable[[str], None]) -> None:
        self._http = httpx.Client(base_url=base_url(url), timeout=TIMEOUT, headers=headers)
        self._notice = notice
        self._has_answered = False

    def __enter__(self) -> "BatchClient":
        return self

    def __exit__(self, *_error: object) -> None:
        self._http.close()

    def submit(self, file: Path, keeps_order: bool, endpoint: str) -> Job:
        """Upload the file, which must have a nonblank line, and create a job from it."""
        key = uuid.uuid4().hex  # the server recognizes a retry by it

        def upload() -> httpx.Response:
            with file.open("rb") as opened:
                return self._http.post(
                    "/v1/files", data={"purpose": "batch"}, files={"file": (file.name, opened)}
                )

        try:
            with file.open("rb") as opened:
                if not any(block.strip() for block in iter(partial(opened.read, BLOCK_BYTES), b"")):
                    raise ConfigError(f"{file} has no lines; give one request per line")
            file_id = self._with_retries(upload)["id"]
        except OSError as error:
            raise ConfigError(f"{file} cannot be read: {error.strerror}") from error
        body = {
            "input_file_id": file_id,
            "endpoint": endpoint,
            "completion_window": "24h",
            "keeps_order": keeps_order,
        }
        return self._with_retries(
            lambda: self._http.post("/v1/batches", json=body, headers={"idempotency-key": key})
        )

    def get(self, job_id: str) -> Job:
        """Return the job."""
        return self._with_retries(lambda: self._http.get(f"/v1/batches/{job_id}"))

    def cancel(self, job_id: str) -> Job:
        """Cancel the job."""
        return self._with_retries(lambda: self._http.post(f"/v1/batches/{job_id}/cancel"))

    def list(self, limit: int) -> list[Job]:
        """Return at most ``limit`` jobs, the newest first."""
        jobs: list[Job] = []
        while len(jobs) < limit:
            query: dict[str, Any] = {"limit": min(100, limit - len(jobs))}
            query |= {"after": jobs[-1]["id"]} if jobs else {}
            page = self._with_retries(partial(self._http.get, "/v1/batches", params=query))
            jobs += page["data"]
            if not page["has_more"]:
                break
        return jobs

    def watch(self, job_id: str) -> Iterator[Job]:
        """Yield the job at intervals until it has ended."""
        while True:
            job = self.get(job_id)
            yield job
            if job["status"] in ENDED:
                return
            time.sleep(WATCH_INTERVAL_S)

    def results(self, job_id: str, output: ResultSink) -> int:
        """Write all results, as they are ready, and return their number. Results that the output
        already has are not sent again.
        """
        num_lines = output.count_lines()
        while True:
            before = num_lines
            try:
                num_lines += self._append(job_id, output, num_lines)
                break
            except (httpx.HTTPError, _RetryLater) as error:
                num_lines = output.count_lines()
                if num_lines == before:
                    self.get(job_id)  # retries until the server answers, or raises
                self._notice(
                    f"the connection was lost after {num_lines} results"
                    f" ({error or type(error).__name__}); reconnecting"
                )
                time.sleep(JOB_MIN_WAIT_S)
        total = self.get(job_id)["request_counts"]["total"]
        if num_lines != total:
            output.discard()
            raise PipelineError(
                f"the server sent {num_lines} results of a job of {total} lines; run the command"
                " again"
            )
        output.finish()
        return num_lines

    def _append(self, job_id: str, output: ResultSink, offset: int) -> int:
        num_lines = 0
        url = f"/v1/batches/{job_id}/results"
        with self._http.stream("GET", url, params={"offset": offset}) as answer:
            self._has_answered = True
            if answer.status_code != httpx.codes.OK:
                answer.read()
                self._raise_for_status(answer)
            with output.appending() as write:
                for piece in answer.iter_bytes():
                    write(piece)
                    num_lines += piece.count(b"\n")
        return num_lines

    def _with_retries(self, send: Callable[[], httpx.Response]) -> Job:
        delays, failing_since = backoff_delays(JOB_MIN_WAIT_S, JOB_MAX_WAIT_S), None
        while True:
            try:
                answer = send()
                self._has_answered = True
                if answer.status_code == httpx.codes.OK:
                    return _parse(answer)
                self._raise_for_status(answer)
            except (httpx.TransportError, _RetryLater) as error:
                why = str(error) or type(error).__name__
                is_wrong_url = isinstance(error, httpx.ConnectError) or is_other_protocol(error)
                if is_wrong_url and not self._has_answered:  # else it is a server that restarts
                    raise no_answer(self._http, error) from error
                if failing_since is None:
                    self._notice(
                        f"no answer ({why}); trying again for up to {JOB_RETRY_TIMEOUT_S / 60:.0f}"
                        " minutes"
                    )
                is_busy = isinstance(error, _RetryLater) and error.is_busy
                failing_since = (
                    time.monotonic() if failing_since is None or is_busy else failing_since
                )
                if time.monotonic() - failing_since > JOB_RETRY_TIMEOUT_S:
                    raise ConnectionLostError(
                        f"--url {self._http.base_url} does not answer: {why}"
                    ) from error
            time.sleep(next(delays))

    def _raise_for_status(self, answer: httpx.Response) -> None:
        raise_if_unauthorized(self._http, answer)
        try:
            error = answer.json()["error"]
            message, is_final = str(error["message"]), error.get("code") == QUOTA_EXCEEDED
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            message, is_final = f"{answer.status_code} {answer.reason_phrase}", False
        if answer.status_code in RETRY_STATUSES and not is_final:
            raise _RetryLater(message, answer.status_code == httpx.codes.TOO_MANY_REQUESTS)
        raise ConfigError(f"--url {self._http.base_url}: {message}")


class _RetryLater(Exception):
    """The server cannot answer now. ``is_busy``: it reported so itself, and that a retry can
    succeed.
    """

    def __init__(self, message: str, is_busy: bool) -> None:
        super().__init__(message)
        self.is_busy = is_busy


def _parse(answer: httpx.Response) -> Job:
    try:
        parsed = answer.json()
    except (ValueError, RecursionError):
        parsed = None
    if not isinstance(parsed, dict):
        raise ConfigError(
            f"{answer.url} is not a Tramontane server: its answer is not a JSON object"
        )
    return parsed
