"""A PostgreSQL server for tests, if its binaries are installed. It listens only on a socket in a
temporary folder.
"""

import os
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest

FOLDERS = sorted(Path("/usr/lib/postgresql").glob("*/bin"))[::-1]
NOT_ROOT = "nobody"  # PostgreSQL refuses to run as root
START_S = 240  # in which it answers, on cores that other lanes use too


def _program(name: str) -> str:
    found = next(
        (str(folder / name) for folder in FOLDERS if (folder / name).exists()), shutil.which(name)
    )
    if found is None:
        pytest.skip(f"PostgreSQL's {name} is not installed")
    return found


@contextmanager
def postgres() -> Iterator[str]:
    """Start a server and yield its URL, without a database name."""
    initdb, control = _program("initdb"), _program("pg_ctl")
    user = NOT_ROOT if os.geteuid() == 0 else ""
    change = [*("runuser", "-u", user, "--")] if user else []
    if user and shutil.which("runuser") is None:
        pytest.skip("PostgreSQL does not run as root, and there is no runuser")
    # a socket's path must be short
    with tempfile.TemporaryDirectory(prefix="pg-", dir="/tmp") as folder:
        if user:
            shutil.chown(folder, user)
        data, log = f"{folder}/data", Path(folder) / "log"
        made = [
            *change,
            initdb,
            "--pgdata",
            data,
            "--username",
            "postgres",
            "--auth",
            "trust",
            "--no-sync",
        ]
        subprocess.run(made, cwd=folder, check=True, capture_output=True)
        # Its log is a file: a pipe that is not read holds up whatever logs more than 64 KiB.
        run = [*change, control, "--pgdata", data, "--silent", "--wait", "--timeout", str(START_S)]
        options = f"-k {folder} -c listen_addresses= -c fsync=off"
        started = subprocess.run(
            [*run, "--log", log, "--options", options, "start"], cwd=folder, check=False
        )
        if started.returncode:
            raise RuntimeError(
                f"PostgreSQL did not start: {log.read_text() if log.exists() else ''}"
            )
        try:
            yield f"postgresql://postgres@/postgres?host={folder}"
        finally:
            subprocess.run([*run, "--mode", "fast", "stop"], cwd=folder, check=True)


def new_database(url: str) -> str:
    """Create an empty database and return its URL."""
    name = f"d{uuid.uuid4().hex}"
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}".encode())
    return url.replace("/postgres?", f"/{name}?")
