"""One store for ingresses and runner, wherever they are: by the same paths, and not on the disk of
one machine among others.
"""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
from batch_jobs import pieces, requests
from event_loops import in_event_loop
from http_fuzz import check_error
from starlette.applications import Starlette

from tramontane.cluster.config.engine_config import EngineConfig
from tramontane.cluster.http.batch_endpoints import BatchEndpoints
from tramontane.cluster.http.errors import ERROR_HANDLERS
from tramontane.cluster.serving.batch_replica import (
    NODE_CHECK_INTERVAL_S,
    BatchReplica,
    SingleNodeBatchService,
    batch_service,
    job_settings,
    repeat_forever,
)
from tramontane.proto.errors import JobStoreError, PipelineError
from tramontane.proto.jobs import JobOptions

POSTGRES = "postgresql://somewhere/jobs"


@pytest.mark.parametrize(
    ("settings", "on_one"),
    [
        ({}, True),
        ({"jobs_database": "sqlite:////shared/jobs.sqlite", "jobs_storage": "/shared/jobs"}, True),
        ({"jobs_database": POSTGRES}, True),
        ({"jobs_database": POSTGRES, "jobs_storage": "/shared/jobs"}, False),
        ({"jobs_database": POSTGRES, "jobs_storage": "memory://jobs"}, False),
    ],
)
def test_what_is_given_as_shared_is_for_any_number_of_machines(
    settings: dict[str, str], on_one: bool
) -> None:
    service = batch_service(EngineConfig.build(None, settings))
    service.close()
    assert isinstance(service, SingleNodeBatchService) is on_one


@pytest.mark.parametrize(
    ("given", "keep_s"),
    [({}, 30 * 86_400), ({"jobs_retention": 1}, 86_400), ({"jobs_retention": 0}, None)],
)
def test_how_long_jobs_are_kept_is_in_days(given: dict[str, int], keep_s: int | None) -> None:
    assert job_settings(EngineConfig.build(None, given)).limits.keep_s == keep_s


def test_no_job_may_be_larger_than_what_a_key_may_have() -> None:
    limits = job_settings(EngineConfig.build(None, {})).limits
    assert (limits.max_open_jobs, limits.max_open_lines, limits.max_stored_bytes) == (
        1000,
        2**24,
        2**36,
    )
    assert (limits.max_lines, limits.max_bytes) == (2**22, 2**32)
    given = {"jobs_max_open": 3, "jobs_max_lines": 1000, "jobs_max_bytes": "1MiB"}
    limits = job_settings(EngineConfig.build(None, given)).limits
    assert (limits.max_open_jobs, limits.max_open_lines, limits.max_stored_bytes) == (
        3,
        1000,
        2**20,
    )
    assert (limits.max_lines, limits.max_bytes) == (1000, 2**20)


@in_event_loop
async def test_with_a_second_machine_new_jobs_are_refused_and_old_ones_can_be_read(
    tmp_path: Path,
) -> None:
    num_machines, requested, now = 1, [], 0.0

    def machines() -> int:
        requested.append(now)
        return num_machines

    config = EngineConfig.build(
        None, {"jobs_database": f"sqlite:///{tmp_path}/jobs.sqlite", "jobs_storage": str(tmp_path)}
    )
    service = SingleNodeBatchService(job_settings(config), machines, lambda: now)
    app = Starlette(routes=BatchEndpoints(service).routes(), exception_handlers=ERROR_HANDLERS)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://ingress") as client:
        form = {"files": {"file": ("in.jsonl", requests(2))}, "data": {"purpose": "batch"}}
        file = (await client.post("/v1/files", **form)).json()["id"]  # type: ignore[arg-type]
        order = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
        batch = (await client.post("/v1/batches", json=order)).json()["id"]
        assert requested == [0.0], "once for both"
        num_machines, now = 2, NODE_CHECK_INTERVAL_S
        for refused in (
            await client.post("/v1/batches", json=order),
            await client.post("/v1/files", **form),
        ):  # type: ignore[arg-type]
            assert refused.status_code == 503
            assert (
                "--jobs-database postgresql://HOST/NAME" in check_error(refused.content)["message"]
            )
        options = JobOptions(endpoint="/v1/completions")
        for over_grpc in (
            service.submit(pieces(requests(2)), options),
            service.submit_url("file:///in", options),
        ):
            with pytest.raises(PipelineError, match="this cluster has 2 machines"):
                await over_grpc
        assert (await client.get("/v1/batches")).json()["data"][0]["id"] == batch
        assert (await client.post(f"/v1/batches/{batch}/cancel")).json()["status"] == "cancelling"
        num_machines, now = 1, 2 * NODE_CHECK_INTERVAL_S
        assert (await client.post("/v1/batches", json=order)).status_code == 200
    service.close()


@pytest.mark.parametrize(
    ("database", "absolute"),
    [
        ("sqlite:///jobs.sqlite", "sqlite:///{here}/jobs.sqlite"),
        ("sqlite+pysqlite:///a/b?timeout=1", "sqlite+pysqlite:///{here}/a/b?timeout=1"),
        *[
            (url, url)
            for url in (
                "sqlite:////a/b",
                "sqlite:///:memory:",
                "sqlite://",
                POSTGRES,
                "postgresql:///jobs",
                "nonsense",
            )
        ],
    ],
)
def test_a_database_is_the_same_from_other_directories(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, database: str, absolute: str
) -> None:
    monkeypatch.chdir(tmp_path)
    config = EngineConfig.build(None, {"jobs_database": database}).with_absolute_paths()
    assert job_settings(config).database == absolute.format(here=tmp_path)


@pytest.mark.parametrize(
    ("storage", "absolute"),
    [
        *[(url, "{here}/jobs") for url in ("jobs", "file:jobs", "file://jobs")],
        *[(url, "/a/jobs") for url in ("/a/jobs", "file:///a/jobs")],
        *[(url, url) for url in ("s3://bucket/jobs", "memory://jobs", "simplecache::s3://bucket")],
        ("~/jobs", f"{Path.home()}/jobs"),
    ],
)
def test_a_storage_is_the_same_from_other_directories(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, storage: str, absolute: str
) -> None:
    monkeypatch.chdir(tmp_path)
    config = EngineConfig.build(None, {"jobs_storage": storage}).with_absolute_paths()
    assert job_settings(config).storage == absolute.format(here=tmp_path)


# ---- the collector of old jobs and files


class Interrupt(BaseException):
    """Ends what never ends."""


def test_the_collector_continues_after_every_error(caplog: pytest.LogCaptureFixture) -> None:
    """It logs each kind once, waits longer from one to the next, and begins anew after it has
    succeeded.
    """
    results: list[Exception | None] = [
        *(ValueError("a"), ValueError("b"), OSError("c"), JobStoreError("d"), ValueError("e")),
        *(None, ValueError("f"), *[OSError("g")] * 5, None),
    ]
    pauses: list[float] = []

    async def work() -> None:
        if not results:
            raise Interrupt
        if (error := results.pop(0)) is not None:
            raise error

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    with pytest.raises(Interrupt):
        asyncio.run(repeat_forever(work, "nothing was deleted", sleep))
    assert pauses == [120, 240, 480, 960, 1920, 60, 120, 240, 480, 960, 1920, 3600, 60]
    assert [record.getMessage()[-1] for record in caplog.records] == ["a", "c", "d", "f", "g"]
    assert [bool(record.exc_info) for record in caplog.records] == [
        *(True, True, False, True, True)
    ]
    assert caplog.records[0].getMessage() == "nothing was deleted; the next attempt is in 120 s: a"


@pytest.mark.parametrize("ended", [None, 0, 1])
@pytest.mark.parametrize("how", ["returns", "fails", "is cancelled"])
@in_event_loop
async def test_a_replica_of_which_a_task_has_ended_is_not_healthy(
    ended: int | None, how: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delattr(BatchReplica, "__del__")  # which needs all of it

    async def end() -> None:
        if how == "fails":
            raise KeyError("a defect")
        if how == "is cancelled":
            raise asyncio.CancelledError

    replica = object.__new__(BatchReplica)
    forever = asyncio.Event()
    tasks: list[asyncio.Task[Any]] = [
        asyncio.create_task(end() if number == ended else forever.wait()) for number in range(2)
    ]
    replica._tasks = tasks
    await asyncio.sleep(0)
    if ended is None:
        await replica.check_health()
    else:
        name = ("runner of batch jobs", "collector of old jobs and files")[ended]
        with pytest.raises(PipelineError, match=f"the {name} has ended"):
            await replica.check_health()
        assert ("a defect" in caplog.text) is (how == "fails")
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
