"""The database of batch jobs (an SQLite file or PostgreSQL), and the threads in which calls of it
block.
"""

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from sqlalchemy import (
    Connection,
    Engine,
    Executable,
    Result,
    Row,
    Select,
    create_engine,
    event,
    make_url,
    text,
)
from sqlalchemy.exc import (
    ArgumentError,
    DataError,
    InterfaceError,
    OperationalError,
    SQLAlchemyError,
    TimeoutError,
)

from tramontane.proto.errors import ConfigError, JobRefusedError, JobStoreError
from tramontane.router.batch.tables import create_or_migrate

P = ParamSpec("P")
T = TypeVar("T")

SQLITE_BUSY_TIMEOUT_S = 60.0  # while another process writes
TEMPORARY_ERRORS = (OperationalError, InterfaceError, TimeoutError)  # all others are defects
IN_MEMORY = (None, "", ":memory:")  # belongs to one connection and vanishes with it
SCHEMA_LOCK = 7_408_224  # an arbitrary unique number: one process at a time creates the tables


class Database:
    """A connection pool, opened at first use. Raises ConfigError for an unsuitable URL.

    Methods block: call them in a thread.
    """

    def __init__(self, url: str) -> None:
        try:
            parsed = make_url(url)
        except ArgumentError as error:
            raise ConfigError(
                "the jobs' database must be a URL such as sqlite:////var/lib/jobs.sqlite"
            ) from error
        kind = parsed.get_backend_name()
        if kind not in ("sqlite", "postgresql", "postgres") or (
            kind == "sqlite" and parsed.database in IN_MEMORY
        ):
            raise ConfigError(
                f"the jobs' database is of kind {kind}; it must be sqlite:///FILE or"
                " postgresql://HOST/NAME"
            )
        self.is_sqlite = kind == "sqlite"
        self._url = parsed.set(drivername="sqlite" if self.is_sqlite else "postgresql+psycopg")
        self.file = Path(parsed.database) if self.is_sqlite and parsed.database else None
        self._lock = threading.Lock()
        self._engine: Engine | None = None

    @property
    def is_created(self) -> bool:
        """Whether it may hold anything. An SQLite file is created by the first write."""
        return self.file is None or self._engine is not None or self.file.exists()

    @contextmanager
    def writing(self) -> Iterator[Connection]:
        """Open a transaction for writing. SQLite admits one writer at a time, from the begin of its
        transaction.

        Raises JobStoreError, or JobRefusedError for a value that no column can hold; then nothing
        is written.
        """
        with _translate_errors(), self._get_engine().begin() as connection:
            yield connection

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """Open a connection on which each statement sees the latest data. Raises the same errors as
        ``writing``.
        """
        with _translate_errors(), self._get_engine().connect() as connection:
            # PostgreSQL streams results only within a transaction, where readers block no writer
            if self.is_sqlite:
                connection.execution_options(isolation_level="AUTOCOMMIT")
            yield connection

    def read(self, wanted: Select[Any]) -> Sequence[Row[Any]]:
        """Return the rows of a query, none if the database is not created. Raises the same errors
        as ``writing``.
        """
        if not self.is_created:
            return []
        with self.reading() as connection:
            return connection.execute(wanted).all()

    def write(self, change: Executable) -> int:
        """Execute a statement in a transaction of its own; return how many rows it changed. Raises
        the errors of ``writing``.
        """
        with self.writing() as connection:
            return connection.execute(change).rowcount

    @contextmanager
    def stream_rows(self, wanted: Select[Any]) -> Iterator[Result[Any]]:
        """Open a result of which not all rows have to be fetched. Raises JobStoreError.

        The result is always closed here: otherwise the connection's next user would see SQLite's
        database as it is now.
        """
        with self.reading() as connection:
            connection = connection.execution_options(stream_results=True, max_row_buffer=64)
            with connection.execute(wanted) as rows:
                yield rows

    def close(self) -> None:
        """Close all connections."""
        with self._lock:
            if self._engine is not None:
                self._engine.dispose()

    def _get_engine(self) -> Engine:
        with self._lock:
            if self._engine is None:
                self._engine = self._open()
            return self._engine

    def _open(self) -> Engine:
        if self.file is None:
            engine = create_engine(self._url, pool_pre_ping=True, hide_parameters=True)
        else:
            try:
                # prompts are private
                self.file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            except OSError as error:
                raise JobStoreError(f"the jobs' database cannot be created: {error}") from error
            engine = create_engine(
                self._url, connect_args={"timeout": SQLITE_BUSY_TIMEOUT_S}, hide_parameters=True
            )
            event.listen(engine, "connect", _prepare_sqlite)
            event.listen(engine, "begin", _begin_sqlite)
        with engine.begin() as connection:
            if not self.is_sqlite:
                connection.execute(
                    text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": SCHEMA_LOCK}
                )
            create_or_migrate(connection)
        return engine


# sqlite3.Connection, of whichever driver
def _prepare_sqlite(connection: Any, _record: object) -> None:
    connection.isolation_level = None  # transactions begin explicitly, not where the driver guesses
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=FULL")  # what was accepted survives a loss of power
    connection.execute("PRAGMA journal_size_limit=67108864")


def _begin_sqlite(connection: Connection) -> None:
    """Begin as a writer: SQLite may refuse to upgrade a transaction that has only read so far."""
    if connection.get_execution_options().get("isolation_level") != "AUTOCOMMIT":
        connection.exec_driver_sql("BEGIN IMMEDIATE")


@contextmanager
def _translate_errors() -> Iterator[None]:
    try:
        yield
    except TEMPORARY_ERRORS as error:
        raise JobStoreError(f"the jobs' database cannot be used now: {_reason(error)}") from error
    except DataError as error:  # a NUL, or a text that is too long
        raise JobRefusedError(
            f"the job has a value that the database cannot hold: {_reason(error)}"
        ) from error


def _reason(error: SQLAlchemyError) -> str:
    """Return the message without SQL and its values, which may hold prompts."""
    reason = str(getattr(error, "orig", None) or type(error).__name__).strip()
    return f"{reason.splitlines()[0]:.200}"


class JobThreadPool:
    """``count`` threads for calls of the database and the storage, so that tokenizing prompts does
    not wait for them.

    A call waits while all are busy; only jobs are delayed by that.
    """

    def __init__(self, count: int) -> None:
        self._pool = ThreadPoolExecutor(count, thread_name_prefix="jobs")

    async def run(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a blocking call in a thread."""
        return await asyncio.get_running_loop().run_in_executor(
            self._pool, lambda: call(*args, **kwargs)
        )

    def close(self) -> None:
        """Wait for running calls, so that no connection stays open, and drop the others."""
        self._pool.shutdown(cancel_futures=True)
