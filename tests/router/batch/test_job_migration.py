"""A database that version 0.1 has written: it opens, keeps its jobs and files, and has the schema
of a new one.
"""

import asyncio
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pytest
from batch_jobs import BatchHarness, all_results, new_batch_harness, pieces, requests
from event_loops import in_event_loop
from postgres import new_database
from sqlalchemy import Connection, inspect

from tramontane.proto.errors import JobRefusedError, UnknownFileError, UnknownJobError
from tramontane.proto.jobs import JobOptions, JobState
from tramontane.router.batch.database import Database
from tramontane.router.batch.submissions import ABANDONED_TIMEOUT_S

SUPPORT = Path(__file__).parents[2] / "support"
DONE, QUEUED = "batch_d57de5361d634325af2d89e36fcbcf99", "batch_f68f213b1ba84045ba67ddf03485e10b"
FILES = [
    f"file-{name}"
    for name in ("0282a10a86ff4daeb149d0e43aa32f21", "f79b9d05bf91444d97fdf3c49c500316")
]
UPLOAD = "file-ab9d9bada66648f089a3d089f4ac1704"

OLD_STATEMENTS = (
    """INSERT INTO tramontane_jobs (job_id, queue, state, endpoint, keeps_order, metadata,
        num_lines, num_done, num_failed, num_bad, num_told, epoch, created_at, touched_at)
        SELECT 'batch_old', queue, 'queued', endpoint, keeps_order, metadata,
        1, 0, 0, 0, 0, 0, 1000.0, 1000.0
        FROM tramontane_jobs WHERE number = 1""",
    """INSERT INTO tramontane_lines (job, place, line, custom_id, text, state, told)
        SELECT number, 0, 1, 'a', '{"custom_id": "a", "body": {"prompt": 1}}', 0, 0
        FROM tramontane_jobs WHERE job_id = 'batch_old'""",
)


@pytest.fixture(params=["sqlite", "postgresql"])
def harness(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[BatchHarness]:
    """A store whose database version 0.1 has written: with a job that has ended, one that waits and
    one half submitted.
    """
    harness = new_batch_harness(tmp_path)
    script = (SUPPORT / f"jobs_0_1.{request.param}.sql").read_text()
    if request.param == "sqlite":
        file = Path(harness.database.removeprefix("sqlite:///"))
        file.parent.mkdir()
        with closing(sqlite3.connect(file)) as connection:
            connection.executescript(script)
    else:
        harness.database = new_database(request.getfixturevalue("postgres_url"))
        with psycopg.connect(harness.database) as client:
            client.execute(script.encode())
    yield harness
    harness.close()


@in_event_loop
async def test_its_jobs_are_those_of_clients_without_a_key(harness: BatchHarness) -> None:
    service = harness.service()
    assert [job.job_id for job in await service.list(9)] == [QUEUED, DONE]
    done = await service.get_stored(DONE)
    assert (done.job.state, done.job.num_done, done.job.num_failed) == (JobState.COMPLETED, 2, 2)
    assert [done.error_file, done.output_file, done.input_file] == [*FILES, UPLOAD]
    results = await all_results(service, DONE)
    assert [(line.custom_id, line.is_error) for line in results] == [
        ("r0", False),
        ("r1", False),
        ("", True),
        ("r0", True),
    ]
    assert [file.file_id for file in await service.list_files(9)] == [*FILES, UPLOAD]
    other_key = service.for_tenant("digest")
    assert (await other_key.list(9), await other_key.list_files(9)) == ([], [])
    with pytest.raises(UnknownJobError):
        await other_key.get(DONE)
    with pytest.raises(UnknownFileError):
        await other_key.file(UPLOAD)


@in_event_loop
async def test_its_jobs_go_on_and_its_request_keys_are_known(harness: BatchHarness) -> None:
    service = harness.service()
    unordered = JobOptions(keeps_order=False)
    assert (await service.submit(pieces(requests(2)), unordered, "nightly-2")).job_id == QUEUED
    with pytest.raises(JobRefusedError, match="other options"):
        await service.submit(pieces(requests(2)), JobOptions(), "nightly-2")
    async with harness.running(harness.runner()):
        assert [line.custom_id for line in await all_results(service, QUEUED)] == ["r0", "r1"]
        new = await service.submit(pieces(requests(3)), JobOptions())
        assert len(await all_results(service, new.job_id)) == 3
    harness.clock.now += 2 * ABANDONED_TIMEOUT_S
    await service.collect_garbage()
    assert (await service.submit(pieces(requests(1)), JobOptions(), "half")).num_lines == 1


def test_its_schema_becomes_that_of_a_new_database(
    harness: BatchHarness, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    is_sqlite = harness.database.startswith("sqlite")
    new = (
        f"sqlite:///{tmp_path}/new.sqlite"
        if is_sqlite
        else new_database(request.getfixturevalue("postgres_url"))
    )
    assert _schema(harness.database) == _schema(new)
    assert _schema(harness.database) == _schema(new), "also when it is opened again"


def test_the_columns_that_it_gets_are_those_that_other_versions_expect(
    harness: BatchHarness,
) -> None:
    """Servers of several versions may share a database. A tenant is 64 digits, a digest of a URL 68
    characters.
    """
    columns = {table: found[0] for table, found in _schema(harness.database).items()}
    for table in ("tramontane_files", "tramontane_jobs"):
        kind, is_nullable, default = columns[table]["tenant"]
        assert (kind, is_nullable, default.startswith("''")) == ("VARCHAR(64)", False, True)
    kind, is_nullable, default = columns["tramontane_jobs"]["num_bytes"]
    assert (kind, is_nullable, default.strip("'")[0]) in (
        ("INTEGER", False, "0"),
        ("BIGINT", False, "0"),
    )
    assert columns["tramontane_jobs"]["input_digest"] == ("VARCHAR(80)", True, None)


def _schema(url: str) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    database = Database(url)
    with database.writing() as connection:
        found = {
            table: _table(connection, table) for table in inspect(connection).get_table_names()
        }
    database.close()
    return found


def _table(connection: Connection, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    inspector = inspect(connection)
    columns = {
        each["name"]: (str(each["type"]), each["nullable"], each["default"])
        for each in inspector.get_columns(name)
    }
    indexes = {
        str(each["name"]): (
            each["column_names"],
            each["unique"],
            sorted(map(str, each.get("dialect_options", {}).values())),
        )
        for each in inspector.get_indexes(name)
    }
    return columns, indexes


def test_a_process_of_the_former_version_may_still_write(harness: BatchHarness) -> None:
    """Its rows have no tenant; they belong to clients without a key."""
    service = harness.service()
    assert len(asyncio.run(service.list(9))) == 2
    with service._database.writing() as connection:
        for statement in OLD_STATEMENTS:
            connection.exec_driver_sql(statement)

    async def scenario() -> None:
        async with harness.running(harness.runner()):
            assert [line.body for line in await all_results(service, "batch_old")] == [
                '{"said": 1}'
            ]

    asyncio.run(scenario())
