"""Batch jobs of a running server, over HTTP: what ``tramontane batch`` asks, again and again where the connection is lost.

Where ``tramontane batch results`` writes: whole lines, each once, however often the connection is lost.
"""

import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import httpx

from tramontane.cluster.console.server_client import base_url, raise_if_unauthorized
from tramontane.proto.errors import ConfigError, PipelineError


class ResultSink(Protocol):
    """Lines come in pieces, cut anywhere."""

    def count_lines(self) -> int:
        """How many there are, after what follows the last of them was cut off."""
        ...

    def appending(self) -> AbstractContextManager[Callable[[bytes], object]]:
        """Gives what takes a piece."""
        ...

    def finish(self) -> None:
        """All lines have come."""
        ...

    def discard(self) -> None:
        """They are not what was asked for."""
        ...


class ResumableFile:
    """A file that has another name until it is whole, and stays when the command is interrupted: the next one goes on with it."""

    def __init__(self, file: Path, job_id: str) -> None:
        self._file, self._part = file, file.with_name(f"{file.name}.{job_id}.part")

    def count_lines(self) -> int:
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
        with self._part.open("ab") as part:
            yield part.write

    def finish(self) -> None:
        self._part.replace(self._file)

    def discard(self) -> None:
        self._part.unlink()


class StdoutSink:
    """Standard output, most likely. What was written cannot be taken back, so a line is written when it is whole."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream, self._begun, self._num_lines = stream, bytearray(), 0

    def count_lines(self) -> int:
        self._begun.clear()
        return self._num_lines

    @contextmanager
    def appending(self) -> Iterator[Callable[[bytes], object]]:
        yield self._write

    def _write(self, piece: bytes) -> None:
        self._begun += piece
        if (end := piece.rfind(b"\n") + 1) > 0:
            end += len(self._begun) - len(piece)
            self._stream.write(self._begun[:end])
            self._stream.flush()
            self._num_lines += piece.count(b"\n")
            del self._begun[:end]

    def finish(self) -> None:
        """There is nothing behind the last whole line."""

    def discard(self) -> None:
        """It was read already, perhaps."""


TIMEOUT = httpx.Timeout(30.0, read=600.0)  # a job of a million lines is stored before the server answers
PATIENCE_S = 600.0  # from the first failure on, or the last time that the server asked to come back
FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 10.0
WATCH_EVERY_S = 1.0
ENDED = ("completed", "cancelled", "failed", "expired")
LATER = (429, 500, 502, 503, 504)
Job = dict[str, Any]


class BatchClient:
    """``notice`` is told when a connection is lost. Errors of the server are ConfigError, a server that is gone PipelineError."""

    def __init__(self, url: str, headers: dict[str, str], notice: Callable[[str], None]) -> None:
        self._http = httpx.Client(base_url=base_url(url), timeout=TIMEOUT, headers=headers)
        self._notice = notice
        self._has_answered = False

    def __enter__(self) -> "BatchClient":
        return self

    def __exit__(self, *_error: object) -> None:
        self._http.close()

    def submit(self, file: Path, keeps_order: bool, endpoint: str) -> Job:
        key = uuid.uuid4().hex  # the server knows by it what it has heard before

        def upload() -> httpx.Response:
            with file.open("rb") as opened:
                return self._http.post("/v1/files", data={"purpose": "batch"}, files={"file": (file.name, opened)})

        try:
            file_id = self._with_retries(upload)["id"]
        except OSError as error:
            raise ConfigError(f"{file} cannot be read: {error.strerror}") from error
        body = {"input_file_id": file_id, "endpoint": endpoint, "completion_window": "24h", "keeps_order": keeps_order}
        return self._with_retries(lambda: self._http.post("/v1/batches", json=body, headers={"idempotency-key": key}))

    def get(self, job_id: str) -> Job:
        return self._with_retries(lambda: self._http.get(f"/v1/batches/{job_id}"))

    def cancel(self, job_id: str) -> Job:
        return self._with_retries(lambda: self._http.post(f"/v1/batches/{job_id}/cancel"))

    def list(self, limit: int) -> list[Job]:
        """The newest first."""
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
        """Until it has ended."""
        while True:
            job = self.get(job_id)
            yield job
            if job["status"] in ENDED:
                return
            time.sleep(WATCH_EVERY_S)

    def results(self, job_id: str, output: ResultSink) -> int:
        """Waits for the job's end. What was lost with a connection, or an earlier command, is not asked for again."""
        num_lines = output.count_lines()
        while True:
            before = num_lines
            try:
                num_lines += self._append(job_id, output, num_lines)
                break
            except (httpx.HTTPError, _RetryLater) as error:
                num_lines = output.count_lines()
                if num_lines == before:
                    self.get(job_id)  # waits for the server, or gives up
                self._notice(f"the connection was lost after {num_lines} results ({error or type(error).__name__}); going on")
                time.sleep(FIRST_WAIT_S)
        total = self.get(job_id)["request_counts"]["total"]
        if num_lines != total:
            output.discard()
            raise PipelineError(f"{num_lines} results came of a job of {total} lines; ask for them again")
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

    def _with_retries(self, ask: Callable[[], httpx.Response]) -> Job:
        wait, failing_since = FIRST_WAIT_S, None
        while True:
            try:
                answer = ask()
                self._has_answered = True
                if answer.status_code == httpx.codes.OK:
                    return _parsed(answer)
                self._raise_for_status(answer)
            except (httpx.TransportError, _RetryLater) as error:
                why = str(error) or type(error).__name__
                is_slip = (
                    isinstance(error, httpx.ConnectError) and not self._has_answered
                )  # rather than a server that starts again
                if is_slip:
                    raise PipelineError(
                        f"nothing answers at --url {self._http.base_url}: {why}; is tramontane serve running there? "
                        "If it is elsewhere, give its --url"
                    ) from error
                is_at_work = isinstance(error, _RetryLater) and error.is_at_work
                failing_since = time.monotonic() if failing_since is None or is_at_work else failing_since
                if time.monotonic() - failing_since > PATIENCE_S:
                    raise PipelineError(f"--url {self._http.base_url} does not answer: {why}") from error
                if wait == FIRST_WAIT_S:
                    self._notice(f"no answer ({why}); trying again for up to {PATIENCE_S / 60:.0f} minutes")
            time.sleep(wait)
            wait = min(2 * wait, LONGEST_WAIT_S)

    def _raise_for_status(self, answer: httpx.Response) -> None:
        raise_if_unauthorized(self._http, answer)
        try:
            message = str(answer.json()["error"]["message"])
        except (ValueError, LookupError, TypeError, RecursionError):
            message = f"{answer.status_code} {answer.reason_phrase}"
        if answer.status_code in LATER:
            raise _RetryLater(message, answer.status_code == httpx.codes.TOO_MANY_REQUESTS)
        raise ConfigError(f"--url {self._http.base_url}: {message}")


class _RetryLater(Exception):
    """The server cannot do it now. ``is_at_work``: it says so itself, and that it will be able to."""

    def __init__(self, message: str, is_at_work: bool) -> None:
        super().__init__(message)
        self.is_at_work = is_at_work


def _parsed(answer: httpx.Response) -> Job:
    try:
        parsed = answer.json()
    except (ValueError, RecursionError):
        parsed = None
    if not isinstance(parsed, dict):
        raise ConfigError(f"{answer.url} is no Tramontane server: its answer is not a JSON object")
    return parsed
