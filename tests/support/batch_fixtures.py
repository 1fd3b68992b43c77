"""Fixtures of batch jobs; a ``conftest.py`` imports them for the tests of its folder."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from batch_jobs import BatchHarness, new_batch_harness
from postgres import new_database, postgres


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[str]:
    with postgres() as url:
        yield url


@pytest.fixture
def sqlite_harness(tmp_path: Path) -> Iterator[BatchHarness]:
    harness = new_batch_harness(tmp_path)
    yield harness
    harness.close()


@pytest.fixture(params=["sqlite", "postgresql"])
def harness(request: pytest.FixtureRequest, sqlite_harness: BatchHarness) -> BatchHarness:
    """A harness on each kind of database."""
    if request.param == "postgresql":
        sqlite_harness.database = new_database(request.getfixturevalue("postgres_url"))
    return sqlite_harness
