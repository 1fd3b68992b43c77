"""Two API keys at a server on a Ray cluster: batch jobs and files of one are not there for the
other, over HTTP and gRPC.
"""

import json
import random
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from batch_jobs import request, requests
from prometheus_client.parser import text_string_to_metric_families
from serve_cluster import GRPC, URL, running_application, wait_until_idle

from tramontane.client import Client
from tramontane.cluster.pipeline.ray_cluster import local_ray_cluster
from tramontane.proto.errors import AuthenticationError, RequestError, UnknownJobError
from tramontane.proto.jobs import JobState

pytestmark = [
    pytest.mark.ray,
    pytest.mark.serve,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning"),
]

ANNA, BERT = "sk-the-key-of-anna", "sk-the-key-of-bert"
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "stages": 1,
    "max_num_seqs": 8,
    "threads_per_stage": 1,
}
PAGE = "https://chat.example.com"
SETTINGS |= {"api_key": (ANNA, BERT), "public_metrics": True, "allowed_origins": (PAGE,)}


@pytest.fixture(scope="module", autouse=True)
def _app() -> Iterator[None]:
    with local_ray_cluster(num_cpus=4), running_application(**SETTINGS):
        yield


def _http(key: str) -> httpx.Client:
    return httpx.Client(base_url=URL, headers={"authorization": f"Bearer {key}"}, timeout=60)


def test_metrics_alone_are_public() -> None:
    statuses = {
        path: httpx.get(f"{URL}{path}", timeout=60).status_code
        for path in ("/metrics", "/activity", "/v1/models")
    }
    assert statuses == {"/metrics": 200, "/activity": 401, "/v1/models": 401}


def test_metrics_have_the_requests_by_vllms_names() -> None:
    """Of the only ingress replica, through Ray Serve's proxy."""

    def number_of_requests() -> float:
        families = text_string_to_metric_families(httpx.get(f"{URL}/metrics", timeout=60).text)
        return next(
            sample.value
            for family in families
            for sample in family.samples
            if sample.name == "vllm:e2e_request_latency_seconds_count"
        )

    before = number_of_requests()
    with _http(ANNA) as http:
        answer = http.post("/v1/completions", json={"prompt": "ROMEO:", "max_tokens": 2})
        assert answer.status_code == 200
        assert number_of_requests() == before + 1
        assert http.get("/load").json() == {"server_load": 0}


def test_a_page_of_an_allowed_origin_reads_answers_through_ray_serves_proxy() -> None:
    asks = {"origin": PAGE, "access-control-request-method": "POST"}
    url = f"{URL}/v1/completions"
    assert httpx.options(url, headers=asks, timeout=60).status_code == 200
    with _http(ANNA) as http:
        body = {"prompt": "ROMEO:", "max_tokens": 2}
        answer = http.post("/v1/completions", json=body, headers={"origin": PAGE})
    assert answer.headers.get_list("access-control-allow-origin") == [PAGE]
    assert "x-request-id" in answer.headers["access-control-expose-headers"]
    assert httpx.post(f"{URL}/ping", timeout=60).json() == {"status": "ready"}


def _upload(http: httpx.Client, text: bytes) -> str:
    answer = http.post("/v1/files", data={"purpose": "batch"}, files={"file": ("in.jsonl", text)})
    assert answer.status_code == 200, answer.text
    return str(answer.json()["id"])


def _create(http: httpx.Client, file: str) -> httpx.Response:
    body = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
    return http.post("/v1/batches", json=body, headers={"idempotency-key": "nightly-1"})


def _ids(http: httpx.Client, path: str) -> set[str]:
    return {each["id"] for each in http.get(path).json()["data"]}


def _check_unknown(http: httpx.Client, jobs: set[str], files: set[str]) -> None:
    for job in jobs:
        for method, path in (("GET", ""), ("GET", "/results"), ("POST", "/cancel")):
            assert http.request(method, f"/v1/batches/{job}{path}").status_code == 404
        assert http.get(f"/v1/batches?after={job}").status_code == 404
    for file in files:
        for method, path in (("GET", ""), ("GET", "/content"), ("DELETE", "")):
            assert http.request(method, f"/v1/files/{file}{path}").status_code == 404
        assert http.get(f"/v1/files?after={file}").status_code == 404
        assert _create(http, file).status_code == 404
    assert _ids(http, "/v1/batches") == _ids(http, "/v1/files") == set()


def _check_unknown_over_grpc(client: Client, jobs: set[str]) -> None:
    for job in jobs:
        for call in (
            lambda job=job: client.get_job(job),
            lambda job=job: list(client.watch_job(job)),
            lambda job=job: list(client.results(job)),
            lambda job=job: client.cancel(job),
            lambda job=job: client.list_jobs(after=job),
        ):
            with pytest.raises(UnknownJobError):
                call()
    assert list(client.list_jobs()) == []


def test_nothing_of_one_key_is_there_for_another() -> None:
    with (
        _http(ANNA) as anna,
        _http(BERT) as bert,
        Client(GRPC, ANNA) as grpc_anna,
        Client(GRPC, BERT) as grpc_bert,
    ):
        file = _upload(anna, requests(3))
        over_http = _create(anna, file).json()["id"]
        over_grpc = grpc_anna.submit_job(requests(4), request_key="nightly-2").job_id
        jobs = {over_http, over_grpc}
        assert {[seen.state for seen in grpc_anna.watch_job(job)][-1] for job in jobs} == {
            JobState.COMPLETED
        }
        files = _ids(anna, "/v1/files")
        assert len(files) == 3, "the input and the errors of two: a prompt is no number"
        _check_unknown(bert, jobs, files)
        _check_unknown_over_grpc(grpc_bert, jobs)
        for path in (
            "/activity",
            "/experts",
            "/openapi.json",
            "/v1/models",
            "/ui",
            "/health",
            "/",
            "/version",
        ):
            text = bert.get(path, follow_redirects=True).text
            assert not [name for name in jobs | files if name in text]
        own = {_create(bert, _upload(bert, requests(3))).json()["id"]}
        own.add(grpc_bert.submit_job(requests(5), request_key="nightly-2").job_id)
        assert {[seen.state for seen in grpc_bert.watch_job(job)][-1] for job in own} == {
            JobState.COMPLETED
        }
        assert not own & jobs
        with pytest.raises(RequestError, match="other lines"):
            grpc_anna.submit_job(requests(5), request_key="nightly-2")
        assert grpc_anna.submit_job(requests(4), request_key="nightly-2").job_id == over_grpc
        assert (_ids(anna, "/v1/batches"), _ids(bert, "/v1/batches")) == (jobs, own)
        assert _ids(anna, "/v1/files") == files
        assert anna.get(f"/v1/files/{file}/content").content == requests(3)
        assert len(list(grpc_anna.results(over_http))) == 3
        with Client(GRPC) as other_key, pytest.raises(AuthenticationError):
            other_key.list_jobs()
    wait_until_idle()


def test_no_client_starts_sooner_because_of_the_text_of_another_one() -> None:
    """Whichever way the text comes first; each client's own requests share it, lines of batch jobs
    included.
    """
    rng = random.Random(5)
    with (
        _http(ANNA) as anna,
        _http(BERT) as bert,
        Client(GRPC, ANNA) as grpc_anna,
        Client(GRPC, BERT) as grpc_bert,
    ):
        for first in WAYS:
            text = " ".join(
                rng.choices(
                    ("ROMEO:", "speak,", "my", "lord;", "what", "news", "from", "Rome"), k=60
                )
            )
            for http, client in ((anna, grpc_anna), (bert, grpc_bert)):
                assert first(http, client, text) == 0
                assert [way(http, client, text) > 64 for way in WAYS] == [True] * len(WAYS)
    wait_until_idle()


def _over_http(http: httpx.Client, _: Client, text: str) -> int:
    """Return how many tokens of the prompt were cached."""
    answer = http.post("/v1/completions", json={"prompt": text, "max_tokens": 2})
    assert answer.status_code == 200, answer.text
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def _over_grpc(_: httpx.Client, client: Client, text: str) -> int:
    usage = list(client.generate(text, max_tokens=2))[-1].usage
    assert usage is not None
    return usage.prompt_tokens_details.cached_tokens


def _by_job(_: httpx.Client, client: Client, text: str) -> int:
    job = client.submit_job(request("r", text)).job_id
    assert [seen.state for seen in client.watch_job(job)][-1] == JobState.COMPLETED
    (line,) = client.results(job)
    return int(json.loads(line.body)["usage"]["prompt_tokens_details"]["cached_tokens"])


WAYS = (_over_http, _over_grpc, _by_job)
