"""A PostgreSQL server for tests, if its binaries are installed. It listens only on a socket in a temporary folder."""

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


def _program(name: str) -> str:
    found = next((str(folder / name) for folder in FOLDERS if (folder / name).exists()), shutil.which(name))
    if found is None:
        pytest.skip(f"PostgreSQL's {name} is not installed")
    return found


@contextmanager
def postgres() -> Iterator[str]:
    """Start a server and yield its URL, without a database name."""
    initdb, server = _program("initdb"), _program("postgres")
    user = NOT_ROOT if os.geteuid() == 0 else ""
    change = [*("runuser", "-u", user, "--")] if user else []
    if user and shutil.which("runuser") is None:
        pytest.skip("PostgreSQL does not run as root, and there is no runuser")
    with tempfile.TemporaryDirectory(prefix="pg-", dir="/tmp") as folder:  # a socket's path must be short
        if user:
            shutil.chown(folder, user)
        data = f"{folder}/data"
        made = [*change, initdb, "--pgdata", data, "--username", "postgres", "--auth", "trust", "--no-sync"]
        subprocess.run(made, cwd=folder, check=True, capture_output=True)
        command = [*change, server, "-D", data, "-k", folder, "-c", "listen_addresses=", "-c", "fsync=off"]
        with subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True) as process:
            assert process.stderr is not None
            lines = list[str]()
            for line in process.stderr:
                lines.append(line)
                if "ready to accept connections" in line:
                    break
            else:
                raise RuntimeError(f"PostgreSQL did not start: {''.join(lines)}")
            try:
                yield f"postgresql://postgres@/postgres?host={folder}"
            finally:
                process.terminate()  # runuser passes it on
                process.stderr.read()


def new_database(url: str) -> str:
    """Create an empty database and return its URL."""
    name = f"d{uuid.uuid4().hex}"
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}".encode())
    return url.replace("/postgres?", f"/{name}?")
