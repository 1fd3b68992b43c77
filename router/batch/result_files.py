"""Result files in OpenAI's format: one line per result, answers in one file and errors in another."""

import json
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain

from tramontane.proto.errors import JobStoreError
from tramontane.router.batch.claims import Claim, JobClaimStore
from tramontane.router.batch.files import FileRecord
from tramontane.router.batch.storage import JobStorage
from tramontane.router.batch.store import StoredResult

PAGE_SIZE = 1000  # results


def result_line(job_id: str, result: StoredResult) -> bytes:
    """Format a result. A line that never ran has an error and no response; one that failed has a response with the error."""
    line = result.line
    answered = result.http_status is not None
    name = f"{job_id.removeprefix('batch_')}_{line.line}"  # the same each time it is written
    head = json.dumps({"id": f"batch_req_{name}", "custom_id": line.custom_id or None})[:-1]
    body = f'{{"error": {line.body}}}' if line.is_error else line.body
    response = f'{{"status_code": {result.http_status}, "request_id": "req_{name}", "body": {body}}}' if answered else "null"
    error = "null" if answered else _short_error(line.body, line.line)
    return f'{head}, "response": {response}, "error": {error}}}\n'.encode()


def _short_error(body: str, line: int) -> str:
    error = json.loads(body)
    return json.dumps({"code": error["code"], "message": error["message"], "line": line})


def write_result_files(claims: JobClaimStore, storage: JobStorage, claim: Claim) -> tuple[FileRecord | None, FileRecord | None]:
    """Write the answers and the errors of a job whose lines are all done; None stands for a file that would be empty.

    Clients see the files once the job's end is written. Raises JobStoreError; then what can be deleted is deleted.
    """
    announced: list[FileRecord] = []
    try:
        return _write(claims, storage, claim, False, announced), _write(claims, storage, claim, True, announced)
    except BaseException:
        for file in announced:
            with suppress(JobStoreError):  # an announced file is deleted later, by ``FileStore.delete_abandoned``
                storage.delete(file.path)
                claims.withdraw_file(file)
        raise


def _write(
    claims: JobClaimStore, storage: JobStorage, claim: Claim, is_error: bool, announced: list[FileRecord]
) -> FileRecord | None:
    lines = _lines(claims, claim, is_error)
    if (first := next(lines, None)) is None:
        return None
    name = f"{claim.job_id}_{'error' if is_error else 'output'}.jsonl"
    file = FileRecord.new(name, "batch_output", claims.clock())
    announced.append(file)
    claims.announce_file(file)
    return file.with_size(storage.write(file.path, chain([first], lines)))


def _lines(claims: JobClaimStore, claim: Claim, is_error: bool) -> Iterator[bytes]:
    offset = 0
    while page := claims.results(claim, offset, PAGE_SIZE):
        offset += len(page)
        lines = [result_line(claim.job_id, result) for result in page if result.line.is_error == is_error]
        if lines:
            yield b"".join(lines)
