"""Batch jobs over HTTP with the official client, and with whatever else may come; the server is in
this process.
"""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from batch_jobs import LIMITS, BatchHarness, new_batch_harness, pieces, request, requests
from http_fuzz import check_error
from starlette.applications import Starlette
from starlette.middleware import Middleware

from tramontane.cluster.config.api_keys import ApiKeys
from tramontane.cluster.http.batch_endpoints import BatchEndpoints
from tramontane.cluster.http.errors import ERROR_HANDLERS, error_response
from tramontane.cluster.http.request_middleware import AuthMiddleware
from tramontane.proto.errors import (
    ConfigError,
    ParameterError,
    RequestError,
    TramontaneError,
    UnknownModelError,
    UnsatisfiableSchemaError,
)
from tramontane.proto.jobs import JobOptions
from tramontane.router.batch import service as batch_service
from tramontane.router.batch.service import BatchService

NUL_IN_NAME = b"\r\n".join(
    [
        b"--b",
        b'Content-Disposition: form-data; name="purpose"',
        b"",
        b"batch",
        b"--b",
        b'Content-Disposition: form-data; name="file"; filename="a\0b"',
        b"",
        b"q",
        b"--b--",
        b"",
    ]
)


@dataclass
class BatchServer:
    harness: BatchHarness
    service: BatchService
    http: httpx.AsyncClient
    client: openai.AsyncOpenAI


@asynccontextmanager
async def _harness(harness: BatchHarness, keep_s: float | None) -> AsyncIterator[BatchServer]:
    service = harness.service(keep_s=keep_s)
    guard = Middleware(AuthMiddleware, keys=ApiKeys(), sends_id=True)
    app = Starlette(
        routes=BatchEndpoints(service).routes(),
        exception_handlers=ERROR_HANDLERS,
        middleware=[guard],
    )
    http = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://ingress")
    async with (
        http,
        openai.AsyncOpenAI(
            base_url="http://ingress/v1", api_key="none", http_client=http, max_retries=0
        ) as client,
    ):
        yield BatchServer(harness, service, http, client)


def _run_scenario(
    harness: BatchHarness,
    scenario: Callable[[BatchServer], Awaitable[None]],
    keep_s: float | None = None,
) -> None:
    async def run() -> None:
        async with _harness(harness, keep_s) as server:
            await scenario(server)

    asyncio.run(run())


async def _ended(server: BatchServer, batch_id: str) -> Any:
    async with server.harness.running(server.harness.runner()):
        async for _ in server.service.watch(batch_id):
            pass
    return await server.client.batches.retrieve(batch_id)


def test_a_batch_from_upload_to_results(harness: BatchHarness) -> None:
    async def scenario(server: BatchServer) -> None:
        client = server.client
        file = await client.files.create(
            file=("in.jsonl", requests(3) + b"nonsense\n"), purpose="batch"
        )
        assert (file.filename, file.purpose, file.bytes) == (
            "in.jsonl",
            "batch",
            len(requests(3)) + 9,
        )
        assert (await client.files.content(file.id)).content == requests(3) + b"nonsense\n"
        assert await client.files.retrieve(file.id) == file
        batch = await client.batches.create(
            input_file_id=file.id,
            endpoint="/v1/completions",
            completion_window="24h",
            metadata={"who": "me"},
        )
        assert (batch.status, batch.input_file_id, batch.metadata) == (
            "validating",
            file.id,
            {"who": "me"},
        )
        ended = await _ended(server, batch.id)
        assert ended.status == "completed"
        assert ended.completed_at is not None
        assert ended.request_counts.model_dump() == {"total": 4, "completed": 3, "failed": 1}
        lines = [
            json.loads(line)
            for line in (await client.files.content(ended.output_file_id)).text.splitlines()
        ]
        assert [line["custom_id"] for line in lines] == ["r0", "r1", "r2"]
        assert lines[2]["response"]["status_code"] == 200
        assert lines[2]["response"]["body"] == {"said": 2}
        assert lines[2]["error"] is None
        (error,) = [
            json.loads(line)
            for line in (await client.files.content(ended.error_file_id)).text.splitlines()
        ]
        assert error["response"] is None
        assert (error["error"]["line"], error["error"]["code"]) == (4, "invalid_line")
        results = await server.http.get(f"/v1/batches/{batch.id}/results", params={"offset": 2})
        assert [json.loads(line) for line in results.text.splitlines()] == [lines[2], error]
        assert [each.id async for each in client.files.list(purpose="batch_output")] == [
            ended.error_file_id,
            ended.output_file_id,
        ]
        assert (await client.files.delete(file.id)).deleted
        with pytest.raises(openai.NotFoundError):
            await client.files.retrieve(file.id)

    _run_scenario(harness, scenario)


def test_a_batch_without_one_good_line_has_failed(harness: BatchHarness) -> None:
    async def scenario(server: BatchServer) -> None:
        file = await server.client.files.create(
            file=("in.jsonl", b"nonsense\n\n" * 2 + b"{}\n" * 30), purpose="batch"
        )
        batch = await server.client.batches.create(
            input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
        )
        assert (batch.status, batch.output_file_id, batch.error_file_id) == ("failed", None, None)
        assert batch.failed_at == int(server.harness.clock.now)
        assert batch.errors is not None
        assert batch.errors.data is not None
        reported = [(error.line, error.code) for error in batch.errors.data]
        assert reported == [(line, "invalid_line") for line in [1, 3, *range(5, 23)]], (
            "the first twenty, one by one"
        )
        assert (batch.errors.data[1].message or "").startswith("line 3: it is not JSON")
        assert (await server.client.batches.list()).data == [batch]
        assert await server.client.batches.retrieve(batch.id) == batch

    _run_scenario(harness, scenario)


def test_answers_have_every_field_of_openai(tmp_path: Path) -> None:
    """Also those that are null, and none besides."""

    async def scenario(server: BatchServer) -> None:
        now, http = int(server.harness.clock.now), server.http

        async def upload(text: bytes) -> dict[str, Any]:
            made = await http.post(
                "/v1/files", data={"purpose": "batch"}, files={"file": ("in.jsonl", text)}
            )
            return dict(made.json())

        file, bad_file = await upload(requests(2)), await upload(b"nonsense\n")
        assert file == {
            "id": file["id"],
            "object": "file",
            "bytes": len(requests(2)),
            "created_at": now,
            "filename": "in.jsonl",
            "purpose": "batch",
            "status": "processed",
            "expires_at": now + 500,
        }
        assert (await http.get(f"/v1/files/{file['id']}")).json() == file
        page = {
            "object": "list",
            "data": [bad_file, file],
            "first_id": bad_file["id"],
            "last_id": file["id"],
            "has_more": False,
        }
        assert (await http.get("/v1/files")).json() == page
        batch = {"endpoint": "/v1/completions", "metadata": {"who": "me"}}
        created = (
            await http.post("/v1/batches", json=batch | {"input_file_id": file["id"]})
        ).json()
        expected = {
            "id": created["id"],
            "object": "batch",
            "endpoint": "/v1/completions",
            "errors": None,
            "input_file_id": file["id"],
            "completion_window": "24h",
            "status": "validating",
            "output_file_id": None,
            "error_file_id": None,
            "created_at": now,
            **dict.fromkeys(
                ["in_progress_at", "expires_at", "finalizing_at", "expired_at", "cancelling_at"]
            ),
            **dict.fromkeys(["completed_at", "cancelled_at", "failed_at"]),
            "request_counts": {"total": 2, "completed": 0, "failed": 0},
            "metadata": {"who": "me"},
        }
        assert created == expected
        server.harness.clock.now += 100
        cancelled = (await http.post(f"/v1/batches/{created['id']}/cancel")).json()
        assert cancelled == expected | {"status": "cancelling", "cancelling_at": now + 100}
        failed = (
            await http.post(
                "/v1/batches", json={"endpoint": "/v1/completions", "input_file_id": bad_file["id"]}
            )
        ).json()
        message = (
            "line 1: it is not JSON: there is a word that JSON does not have; its words are true,"
            " false and null (column 2)"
        )
        errors = [{"code": "invalid_line", "message": message, "line": 1, "param": None}]
        assert failed == expected | {
            **{
                "id": failed["id"],
                "input_file_id": bad_file["id"],
                "status": "failed",
                "metadata": None,
            },
            "errors": {"object": "list", "data": errors},
            "created_at": now + 100,
            "failed_at": now + 100,
            "expires_at": now + 600,
            "request_counts": {"total": 1, "completed": 0, "failed": 1},
        }
        page = {
            "object": "list",
            "data": [failed],
            "first_id": failed["id"],
            "last_id": failed["id"],
            "has_more": True,
        }
        assert (await http.get("/v1/batches?limit=1")).json() == page
        assert (await http.delete(f"/v1/files/{file['id']}")).json() == {
            "id": file["id"],
            "object": "file",
            "deleted": True,
        }
        empty = {"object": "list", "data": [], "first_id": None, "last_id": None, "has_more": False}
        assert (await http.get("/v1/files?purpose=batch_output")).json() == empty

    _run_scenario(new_batch_harness(tmp_path), scenario, keep_s=500.0)


REFUSALS: tuple[TramontaneError, ...] = (
    UnknownModelError("there is no such model"),
    ParameterError("temprature is not a parameter", "temprature"),
    UnsatisfiableSchemaError("cannot be followed"),
    RequestError("too long"),
    ConfigError("impossible"),
)


def test_a_line_is_refused_as_the_request_would_have_been(tmp_path: Path) -> None:
    async def refuse(_endpoint: str, body: dict[str, Any], _tenant: str = "") -> dict[str, Any]:
        raise REFUSALS[body["prompt"]]

    harness = new_batch_harness(tmp_path)

    async def scenario(server: BatchServer) -> None:
        job = await server.service.submit(pieces(requests(len(REFUSALS))), JobOptions())
        async with harness.running(harness.runner(answer=refuse)):
            results = await server.http.get(f"/v1/batches/{job.job_id}/results")
        for line, error in zip(results.text.splitlines(), REFUSALS, strict=True):
            answer, response = error_response(error), json.loads(line)["response"]
            assert (response["status_code"], response["body"]) == (
                answer.status_code,
                {"error": json.loads(answer.body)["error"]},
            )
        first = json.loads(results.text.splitlines()[0])["response"]
        assert (first["status_code"], first["body"]["error"]["param"]) == (404, "model")
        assert first["body"]["error"]["code"] == "model_not_found"

    _run_scenario(harness, scenario)
    harness.close()


def test_when_files_and_ended_batches_are_removed_is_said(tmp_path: Path) -> None:
    async def scenario(server: BatchServer) -> None:
        now = int(server.harness.clock.now)
        file = await server.client.files.create(file=("in.jsonl", requests(1)), purpose="batch")
        assert file.expires_at == now + 500
        batch = await server.client.batches.create(
            input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
        )
        assert batch.expires_at is None, "it is not removed before it has ended"
        server.harness.clock.now += 100
        assert (await _ended(server, batch.id)).expires_at == now + 600
        assert [each.expires_at async for each in server.client.files.list()] == [
            now + 600,
            now + 500,
        ]

    _run_scenario(new_batch_harness(tmp_path), scenario, keep_s=500.0)


def test_batches_are_listed_in_pages_and_cancelled(harness: BatchHarness) -> None:
    async def scenario(server: BatchServer) -> None:
        client = server.client
        file = await client.files.create(file=("in.jsonl", requests(2)), purpose="batch")
        made = [
            (
                await client.batches.create(
                    input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
                )
            ).id
            for _ in range(5)
        ]
        first = await client.batches.list(limit=2)
        assert [each.id for each in first.data] == made[:2:-1]
        assert first.has_more
        assert [each.id async for each in client.batches.list(limit=2)] == made[::-1]
        assert [each.id async for each in client.files.list(limit=1)] == [file.id]
        assert (await client.batches.cancel(made[0])).status == "cancelling"
        ended = await _ended(server, made[0])
        assert (ended.status, ended.request_counts.failed) == ("cancelled", 2)
        assert ended.output_file_id is None
        assert b"batch_cancelled" in (await client.files.content(ended.error_file_id)).content

    _run_scenario(harness, scenario)


def test_a_request_that_comes_again_is_the_same_batch(harness: BatchHarness) -> None:
    async def scenario(server: BatchServer) -> None:
        file = await server.client.files.create(file=("in.jsonl", requests(2)), purpose="batch")
        body = {"input_file_id": file.id, "endpoint": "/v1/completions"}
        answers = [
            await server.http.post("/v1/batches", json=body, headers={"idempotency-key": key})
            for key in "aab"
        ]
        ids = [answer.json()["id"] for answer in answers]
        assert ids[0] == ids[1] != ids[2]

    _run_scenario(harness, scenario)


def test_what_is_wrong_is_refused_in_openais_shape(harness: BatchHarness) -> None:
    async def scenario(server: BatchServer) -> None:
        good = (
            await server.client.files.create(file=("in.jsonl", request("a", 1)), purpose="batch")
        ).id
        empty = (await server.client.files.create(file=("in.jsonl", b""), purpose="batch")).id
        batch = {"input_file_id": good, "endpoint": "/v1/completions", "completion_window": "24h"}
        post = server.http.post
        form = {"data": {"purpose": "batch"}, "files": {"file": ("f", b"x")}}
        boundary = {"content-type": "multipart/form-data; boundary=b"}
        for status, answer in [
            (400, post("/v1/files", content=b"x")),
            (400, post("/v1/files", content=b"x", headers={"content-type": "multipart/form-data"})),
            (400, post("/v1/files", content=b"--b\r\nnonsense", headers=boundary)),
            (400, post("/v1/files", files={"file": ("f", b"x")})),
            (400, post("/v1/files", **form | {"data": {"purpose": "fine-tune"}})),
            (400, post("/v1/files", **form | {"data": {"purpose": "batch", "fil": "1"}})),
            (400, post("/v1/files", data={"purpose": "batch"}, files={"other": ("f", b"x")})),
            (
                413,
                post(
                    "/v1/files", **form | {"files": {"file": ("f", b"x" * (LIMITS.max_bytes + 1))}}
                ),
            ),
            (404, server.http.get("/v1/files/none")),
            (404, server.http.get("/v1/files/none/content")),
            (404, server.http.delete("/v1/files/none")),
            (404, server.http.get("/v1/files?after=none")),
            (400, server.http.get("/v1/files?limit=0")),
            (400, server.http.get("/v1/files?order=up")),
            (400, post("/v1/batches", content=b"\xff")),
            (400, post("/v1/batches", content=b"[" * 5000)),
            (413, post("/v1/batches", content=b" " * 2**17)),
            (400, post("/v1/batches", json=batch | {"endpoint": "/v1/embeddings"})),
            (400, post("/v1/batches", json=batch | {"endpoint": "/v1/chat/completions"})),
            (400, post("/v1/batches", json=batch | {"completion_window": "1h"})),
            (400, post("/v1/batches", json=batch | {"metadata": {"a": 1}})),
            (400, post("/v1/batches", json=batch | {"metadata": {"a": "x" * 513}})),
            (400, post("/v1/batches", json=batch | {"metadatas": {}})),
            (400, post("/v1/batches", json=batch | {"input_file_id": empty})),
            (404, post("/v1/batches", json=batch | {"input_file_id": "none"})),
            (404, server.http.get("/v1/batches/none")),
            (404, post("/v1/batches/none/cancel")),
            (404, server.http.get("/v1/batches/none/results")),
            (400, server.http.get("/v1/batches?limit=101")),
            (404, server.http.get("/v1/batches?after=none")),
            (400, server.http.get("/v1/batches?limt=1")),
            (404, server.http.get("/v1/files/%00")),
            (404, server.http.get("/v1/files?after=%00")),
            (400, server.http.get("/v1/files?purpose=%00")),
            (400, post("/v1/files", content=NUL_IN_NAME, headers=boundary)),
            (404, server.http.get("/v1/batches/%00")),
            (404, server.http.get("/v1/batches?after=%00")),
            (404, post("/v1/batches/%00/cancel")),
            (404, post("/v1/batches", json=batch | {"input_file_id": "\0"})),
        ]:
            response = await answer
            assert response.status_code == status, (response.request.url, response.text)
            assert check_error(response.content)["param"] != "prompt"
        assert (await server.http.get("/v1/batches")).json()["data"] == []
        assert len([each async for each in server.client.files.list()]) == 2

    _run_scenario(harness, scenario)


def test_a_store_that_fails_is_named_in_the_log(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    async def scenario(server: BatchServer) -> None:
        (tmp_path / "deep").write_text("no folder")
        response = await server.http.get("/v1/batches/batch_x", headers={"x-request-id": "mine"})
        assert response.status_code == 404
        response = await server.http.post(
            "/v1/files",
            data={"purpose": "batch"},
            files={"file": ("f", b"x")},
            headers={"x-request-id": "mine"},
        )
        assert (response.status_code, response.headers["retry-after"]) == (503, "1")

    with caplog.at_level(logging.WARNING):
        _run_scenario(new_batch_harness(tmp_path), scenario)
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith("request mine failed: the jobs' database cannot be created")


def test_a_stream_of_results_too_many_is_refused_before_it_begins(
    harness: BatchHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_service, "MAX_STREAMS", 1)

    async def scenario(server: BatchServer) -> None:
        file = await server.client.files.create(file=("in.jsonl", requests(2)), purpose="batch")
        order = {
            "input_file_id": file.id,
            "endpoint": "/v1/completions",
            "completion_window": "24h",
        }
        job_id = (await server.http.post("/v1/batches", json=order)).json()["id"]
        watch = server.service.watch(job_id)
        await anext(watch)
        refused = await server.http.get(f"/v1/batches/{job_id}/results")
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "30")
        check_error(refused.content, code="rate_limit_exceeded")
        await watch.aclose()
        async with server.harness.running(server.harness.runner()):
            assert (
                len((await server.http.get(f"/v1/batches/{job_id}/results")).text.splitlines()) == 2
            )
        assert (
            len((await server.http.get(f"/v1/batches/{job_id}/results")).text.splitlines()) == 2
        ), "the first gave its room back"

    _run_scenario(harness, scenario)
