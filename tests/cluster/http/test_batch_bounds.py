"""Batch jobs over HTTP at their bounds: long lists, files that are lost, invalid names, keys used
twice, jobs removed.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import batch_jobs as jobs_in_tests
import httpx
import openai
import pytest
from batch_fixtures import sqlite_harness
from batch_jobs import BatchHarness, all_results, pieces, request, requests
from event_loops import in_event_loop
from http_fuzz import check_error
from starlette.applications import Starlette

from tramontane.cluster.http.batch_endpoints import BatchEndpoints
from tramontane.cluster.http.errors import ERROR_HANDLERS
from tramontane.proto.errors import JobRefusedError, UnknownJobError
from tramontane.proto.jobs import JobOptions
from tramontane.router.batch import service as batch_service
from tramontane.router.batch.service import MAX_RESULT_CHARS, BatchService
from tramontane.router.batch.store import StoredResult

harness = sqlite_harness


def _http(service: BatchService) -> httpx.AsyncClient:
    app = Starlette(routes=BatchEndpoints(service).routes(), exception_handlers=ERROR_HANDLERS)
    return httpx.AsyncClient(
        transport=httpx.ASGITransport(app, raise_app_exceptions=False), base_url="http://ingress"
    )


async def _uploaded(http: httpx.AsyncClient, text: bytes) -> str:
    form: Any = {"data": {"purpose": "batch"}, "files": {"file": ("f", text)}}
    file_id: str = (await http.post("/v1/files", **form)).json()["id"]
    return file_id


@in_event_loop
async def test_the_official_client_lists_more_batches_than_a_page_has(
    harness: BatchHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs_in_tests, "LIMITS", replace(jobs_in_tests.LIMITS, max_open_jobs=200))

    service = harness.service()
    made = [
        (await service.submit(pieces(request("a", 1)), JobOptions())).job_id for _ in range(102)
    ]
    async with _http(service) as http:
        client = openai.AsyncOpenAI(
            base_url="http://ingress/v1", api_key="none", http_client=http, max_retries=0
        )
        assert [each.id async for each in client.batches.list(limit=100)] == made[::-1]
    assert len(await service.list(1000)) == 100, "over gRPC a page has no more"


@pytest.mark.parametrize(
    "charset", ["unicode_escape", "utf-7", "utf-16-le", "rot13", "undefined", "no-such-thing"]
)
@in_event_loop
async def test_a_form_in_another_charset_is_refused(harness: BatchHarness, charset: str) -> None:
    """Some make names of it that cannot be encoded."""

    def form(name: bytes) -> bytes:
        disposition = b'Content-Disposition: form-data; name="'
        parts = [
            b"--b",
            disposition + b'purpose"',
            b"",
            b"batch",
            b"--b",
            disposition + b'file"; filename="' + name + b'"',
            b"",
        ]
        return b"\r\n".join([*parts, b"q", b"--b--", b""])

    async with _http(harness.service()) as http:
        for given in (charset, f'"{charset}"', charset.upper()):
            kind = {"content-type": f"multipart/form-data; boundary=b; charset={given}"}
            refused = await http.post("/v1/files", content=form(b"\\ud800"), headers=kind)
            assert refused.status_code == 400, refused.text
            check_error(refused.content)
        for given in ("utf-8", "UTF-8", '"utf-8"'):
            kind = {"content-type": f"multipart/form-data; charset={given}; boundary=b"}
            stored = await http.post("/v1/files", content=form("\u00e9".encode()), headers=kind)
            assert (stored.status_code, stored.json()["filename"]) == (200, "\u00e9")


@in_event_loop
async def test_a_file_whose_bytes_are_lost_does_not_exist(harness: BatchHarness) -> None:
    async with _http(harness.service()) as http:
        texts = [b"", b"x" * (2**20 - 5000) + b"\n"]
        files = [await _uploaded(http, text) for text in texts]
        assert [(await http.get(f"/v1/files/{file}/content")).content for file in files] == texts
        for path in Path(harness.storage).rglob("*.jsonl"):
            path.unlink()
        for file in files:
            lost = await http.get(f"/v1/files/{file}/content")
            assert lost.status_code == 503
            check_error(lost.content)


@in_event_loop
async def test_a_key_of_another_request_is_refused(harness: BatchHarness) -> None:
    service = harness.service()
    async with _http(service) as http:
        first, second = [await _uploaded(http, requests(2)) for _ in range(2)]
        body = {"input_file_id": first, "endpoint": "/v1/completions", "metadata": {"who": "me"}}
        key = {"idempotency-key": "k"}
        made = (await http.post("/v1/batches", json=body, headers=key)).json()["id"]
        assert (await http.delete(f"/v1/files/{first}")).status_code == 200
        assert (await http.post("/v1/batches", json=body, headers=key)).json()["id"] == made
        for other in (
            {"input_file_id": second},
            {"metadata": {"who": "you"}},
            {"keeps_order": False},
        ):
            refused = await http.post("/v1/batches", json=body | other, headers=key)
            assert (refused.status_code, "another file or other options" in refused.text) == (
                400,
                True,
            )
            check_error(refused.content)
    options = JobOptions(metadata={"who": "me"})
    with pytest.raises(JobRefusedError, match="another file"):
        await service.submit(pieces(requests(2)), options, "k")
    job = await service.submit(pieces(requests(2)), options, "another key")
    assert await service.submit(pieces(requests(2)), options, "another key") == job


@in_event_loop
async def test_results_of_a_job_that_is_removed_at_the_same_time_do_not_end_as_if_whole(
    harness: BatchHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Removed after the job was looked up and before its results are, at the second page."""
    monkeypatch.setattr(batch_service, "MAX_RESULTS", 5)

    service = harness.service(keep_s=1000.0)
    job = await service.submit(pieces(requests(20)), JobOptions())
    async with harness.running(harness.runner()):
        assert len(await all_results(service, job.job_id)) == 20
    assert [line async for line in service.results(job.job_id, 20)] == []
    assert [line async for line in service.results(job.job_id, 30)] == []
    real, requested = service._jobs.results, list[int]()

    def results(*arguments: Any) -> Any:
        requested.append(arguments[1])
        if len(requested) == 2:
            service._submissions.discard_ended(harness.clock.now + 1)
        return real(*arguments)

    service._jobs.results = results  # type: ignore[method-assign]
    with pytest.raises(UnknownJobError, match="removed"):
        await all_results(service, job.job_id)
    assert requested == [0, 5]


@in_event_loop
async def test_a_stream_of_results_keeps_little_in_memory(harness: BatchHarness) -> None:
    """Its reader may be slow, and there are many."""

    async def answer(_endpoint: str, _body: dict[str, Any], _tenant: str = "") -> dict[str, Any]:
        return {"said": "x" * (MAX_RESULT_CHARS // 3)}

    service = harness.service()
    job = await service.submit(pieces(requests(20)), JobOptions())
    real, sizes = service._jobs.results, list[int]()

    def results(*arguments: Any) -> Any:
        page: list[StoredResult] = list(real(*arguments))
        sizes.append(sum(len(result.line.body) for result in page))
        return page

    service._jobs.results = results  # type: ignore[method-assign]
    async with harness.running(harness.runner(answer)):
        assert len(await all_results(service, job.job_id)) == 20
    assert MAX_RESULT_CHARS // 2 < max(sizes) <= MAX_RESULT_CHARS
