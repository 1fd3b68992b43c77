"""Results as OpenAI writes them: one line each, answers in one file and errors in another."""

import json
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain

from tramontane.proto.errors import JobStoreError
from tramontane.router.batch.claims import Claim, JobClaimStore
from tramontane.router.batch.files import FileRecord
from tramontane.router.batch.storage import JobStorage
from tramontane.router.batch.store import StoredResult

PAGE = 1000


def result_line(job_id: str, result: StoredResult) -> bytes:
    """A line that never ran has an error and no response; one that was refused or failed has a response that says so."""
    line = result.line
    answered = result.http_status is not None
    name = f"{job_id.removeprefix('batch_')}_{line.line}"  # the same whenever and however often it is written
    head = json.dumps({"id": f"batch_req_{name}", "custom_id": line.custom_id or None})[:-1]
    body = f'{{"error": {line.body}}}' if line.is_error else line.body
    response = f'{{"status_code": {result.http_status}, "request_id": "req_{name}", "body": {body}}}' if answered else "null"
    error = "null" if answered else _short_error(line.body, line.line)
    return f'{head}, "response": {response}, "error": {error}}}\n'.encode()


def _short_error(body: str, line: int) -> str:
    error = json.loads(body)
    return json.dumps({"code": error["code"], "message": error["message"], "line": line})


def write_result_files(claims: JobClaimStore, storage: JobStorage, claim: Claim) -> tuple[FileRecord | None, FileRecord | None]:
    """Of a job whose lines are all done: the file of answers and that of errors, None for one that would be empty.

    Clients see them once the job's end is written. Raises JobStoreError, and then nothing is left behind that can be deleted.
    """
    begun: list[FileRecord] = []
    try:
        return _write(claims, storage, claim, False, begun), _write(claims, storage, claim, True, begun)
    except BaseException:
        for file in begun:
            with suppress(JobStoreError):  # what is announced is found when it is old
                storage.delete(file.path)
                claims.withdraw_file(file)
        raise


def _write(
    claims: JobClaimStore, storage: JobStorage, claim: Claim, is_error: bool, begun: list[FileRecord]
) -> FileRecord | None:
    mine = _lines(claims, claim, is_error)
    if (first := next(mine, None)) is None:
        return None
    name = f"{claim.job_id}_{'error' if is_error else 'output'}.jsonl"
    file = FileRecord.new(name, "batch_output", claims.clock())
    begun.append(file)
    claims.announce_file(file)
    return file.of_size(storage.write(file.path, chain([first], mine)))


def _lines(claims: JobClaimStore, claim: Claim, is_error: bool) -> Iterator[bytes]:
    offset = 0
    while page := claims.results(claim, offset, PAGE):
        offset += len(page)
        mine = [result_line(claim.job_id, result) for result in page if result.line.is_error == is_error]
        if mine:
            yield b"".join(mine)
