"""OpenAI's format of jobs, files and results, and the query parameters of their lists."""

import json
from dataclasses import replace
from typing import Any

import pytest

from tramontane.proto.errors import ParameterError
from tramontane.proto.jobs import Job, JobOptions, JobState, ResultLine
from tramontane.router.batch import schema
from tramontane.router.batch.files import FileRecord
from tramontane.router.batch.input_lines import JobLimits
from tramontane.router.batch.store import BatchError, StoredJob, StoredResult

RUNNING = Job(
    "batch_a", JobState.RUNNING, JobOptions(), 9, 4, 2, 1, created_at=1000.7, started_at=1001.9
)
FAILED = replace(RUNNING, state=JobState.FAILED, ended_at=1002.9)


def _stored(job: Job, **more: Any) -> StoredJob:
    return StoredJob(job, 1, "file-in", "file-out", "file-errors", None, **more)


def test_a_job_that_runs_has_no_end_and_no_errors() -> None:
    batch = schema.batch_answer(_stored(RUNNING), keep_s=500.0).as_json()
    times = {name: time for name, time in batch.items() if name.endswith("_at")}
    assert {name: time for name, time in times.items() if time is not None} == {
        "created_at": 1000,
        "in_progress_at": 1001,
    }
    assert (batch["status"], batch["errors"], batch["metadata"]) == ("in_progress", None, None)
    assert batch["request_counts"] == {"total": 9, "completed": 4, "failed": 2}
    assert [batch[f"{name}_file_id"] for name in ("input", "output", "error")] == [
        "file-in",
        "file-out",
        "file-errors",
    ]
    of_text = schema.batch_answer(replace(_stored(RUNNING), input_file=None), None).as_json()
    assert of_text["input_file_id"] == "", "its lines came without a file"


@pytest.mark.parametrize(("keep_s", "expires_at"), [(500.0, 1502), (None, None)])
def test_a_job_that_failed_has_its_errors_and_the_time_at_which_it_expires(
    keep_s: float | None, expires_at: int | None
) -> None:
    problem = BatchError(
        line=2, code="invalid_request", message="line 2: it is not JSON", param=None
    )
    batch = schema.batch_answer(
        replace(_stored(FAILED, problems=[problem]), cancelling_at=1002.1), keep_s
    ).as_json()
    assert (batch["failed_at"], batch["completed_at"], batch["cancelled_at"]) == (1002, None, None)
    assert (batch["cancelling_at"], batch["expires_at"]) == (1002, expires_at)
    assert batch["errors"]["data"] == [
        {"code": problem.code, "message": problem.message, "line": 2, "param": None}
    ]


@pytest.mark.parametrize(("keep_s", "expires_at"), [(500.0, 1500), (None, None)])
def test_a_file_expires_some_time_after_its_creation(
    keep_s: float | None, expires_at: int | None
) -> None:
    file = schema.file_answer(
        FileRecord.new("in.jsonl", "batch", 1000.7, num_bytes=3), keep_s
    ).as_json()
    assert (file["created_at"], file["expires_at"], file["bytes"]) == (1000, expires_at, 3)


@pytest.mark.parametrize(
    ("is_error", "http_status", "body", "response", "error"),
    [
        (
            False,
            200,
            '{"said": 1}',
            {"status_code": 200, "request_id": "req_a_7", "body": {"said": 1}},
            None,
        ),
        (
            True,
            400,
            '{"code": "c"}',
            {"status_code": 400, "request_id": "req_a_7", "body": {"error": {"code": "c"}}},
            None,
        ),
        (
            True,
            None,
            '{"code": "c", "message": "m", "type": "t"}',
            None,
            {"code": "c", "message": "m", "line": 7},
        ),
    ],
)
def test_a_result_is_a_response_or_an_error(
    is_error: bool,
    http_status: int | None,
    body: str,
    response: dict[str, Any] | None,
    error: dict[str, Any] | None,
) -> None:
    text = schema.result_line(
        "batch_a", StoredResult(ResultLine(3, 7, "mine", is_error, body), http_status)
    )
    assert text.endswith(b"}\n")
    assert json.loads(text) == {
        "id": "batch_req_a_7",
        "custom_id": "mine",
        "response": response,
        "error": error,
    }


def test_a_page_says_whether_there_are_more() -> None:
    files = [
        schema.file_answer(FileRecord.new(name, "batch", 1000.7, num_bytes=3), None)
        for name in "abc"
    ]
    page = {"object": "list", "first_id": files[0].id, "has_more": False}
    for given, limit, shown, has_more in (
        (files, 2, 2, True),
        (files[:2], 2, 2, False),
        (files, 3, 3, False),
    ):
        data = [file.as_json() for file in files[:shown]]
        expected = page | {"data": data, "last_id": files[shown - 1].id, "has_more": has_more}
        assert schema.FileList.of(given, limit).as_json() == expected
    assert schema.FileList.of([], 3).as_json() == page | {
        "data": [],
        "first_id": None,
        "last_id": None,
    }


def test_query_parameters_are_in_their_ranges() -> None:
    assert [
        schema.parse_limit(query, 20, 100) for query in ({}, {"limit": "1"}, {"limit": "100"})
    ] == [20, 1, 100]
    assert [
        schema.parse_choice(query, "order", "asc", "desc") for query in ({}, {"order": "desc"})
    ] == [None, "desc"]
    assert schema.parse_limit({"limit": "7".zfill(9)}, 20, 100) == 7
    for limit in ("0", "101", "-1", "1.5", "", "٣", "7".zfill(10)):
        with pytest.raises(ParameterError, match="from 1 to 100"):
            schema.parse_limit({"limit": limit}, 20, 100)
    with pytest.raises(ParameterError, match="asc or desc"):
        schema.parse_choice({"order": "up"}, "order", "asc", "desc")


def test_the_limits_are_those_of_the_documentation() -> None:
    """Without options, as ``docs/batch-jobs.md`` gives them."""
    assert JobLimits() == JobLimits(
        2**20, 4_194_304, 4 * 2**30, 1000, 16_777_216, 64 * 2**30, keep_s=None
    )
    assert (schema.MAX_LIST, schema.MAX_FILE_LIST) == (100, 10_000)


def test_a_batch_keeps_the_order_of_its_input_unless_it_is_asked_not_to() -> None:
    least = {"input_file_id": "file-a", "endpoint": "/v1/completions"}
    for body in (least, least | {"keeps_order": None, "metadata": None, "completion_window": None}):
        batch = schema.parse_batch(json.dumps(body).encode())
        assert (batch.options, batch.completion_window) == (
            JobOptions("/v1/completions", True, {}),
            "24h",
        )
    assert not schema.parse_batch(
        json.dumps(least | {"keeps_order": False}).encode()
    ).options.keeps_order
