"""The tables of batch jobs, and the database that holds them: an SQLite file or PostgreSQL."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Connection,
    Engine,
    Float,
    Index,
    Integer,
    MetaData,
    Result,
    Select,
    SmallInteger,
    String,
    Table,
    Text,
    create_engine,
    event,
    make_url,
    text,
)
from sqlalchemy.exc import ArgumentError, DataError, InterfaceError, OperationalError, SQLAlchemyError, TimeoutError

from tramontane.proto.errors import ConfigError, JobRefusedError, JobStoreError

SQLITE_BUSY_TIMEOUT_S = 60.0  # while another process writes
TEMPORARY_ERRORS = (OperationalError, InterfaceError, TimeoutError)  # all others are defects
IN_MEMORY = (None, "", ":memory:")  # belongs to one connection and vanishes with it
SCHEMA_LOCK = 7_408_224  # an arbitrary unique number: one process at a time creates the tables
Number = BigInteger().with_variant(Integer, "sqlite")

metadata = MetaData()

files = Table(
    "tramontane_files",
    metadata,
    Column("number", Number, primary_key=True, autoincrement=True),
    Column("file_id", String(64), nullable=False, unique=True),
    Column("queue", Text, nullable=False),
    Column("filename", Text, nullable=False),
    Column("purpose", String(32), nullable=False),
    Column("num_bytes", Number, nullable=False),
    Column("path", Text, nullable=False),  # in the storage
    Column("is_whole", Boolean, nullable=False),  # False while it is being written
    Column("created_at", Float, nullable=False),
    Column("touched_at", Float, nullable=False),
)

jobs = Table(
    "tramontane_jobs",
    metadata,
    Column("number", Number, primary_key=True, autoincrement=True),  # a higher one is younger
    Column("job_id", String(64), nullable=False, unique=True),
    Column("queue", Text, nullable=False),  # of one served model; runners and ingresses of others do not see it
    Column("state", String(16), nullable=False),
    Column("endpoint", String(64), nullable=False),
    Column("keeps_order", Boolean, nullable=False),
    Column("metadata", Text, nullable=False),  # JSON
    Column("num_lines", Number, nullable=False, default=0),
    Column("num_done", Number, nullable=False, default=0),
    Column("num_failed", Number, nullable=False, default=0),
    Column("num_bad", Number, nullable=False, default=0),
    Column("num_told", Number, nullable=False, default=0),  # results that have an offset, if order is not kept
    Column("created_at", Float, nullable=False),
    Column("started_at", Float),
    Column("cancelling_at", Float),
    Column("ended_at", Float),
    Column("touched_at", Float, nullable=False),  # while it is being submitted
    Column("error", Text),
    Column("input_file", String(64)),
    Column("output_file", String(64)),
    Column("error_file", String(64)),
    Column("request_key", String(256)),  # a request that is repeated with its key is the same job
    Column("owner", String(64)),  # the runner that holds the lease
    Column("epoch", Number, nullable=False, default=0),  # counts the owners, and fences all but the last
    Column("leased_until", Float),
    Index("tramontane_jobs_by_state", "queue", "state", "number"),
    Index("tramontane_jobs_by_request", "queue", "request_key", unique=True),
    sqlite_autoincrement=True,  # numbers are never reused: a process may still be adding lines to a deleted job
)

lines = Table(
    "tramontane_lines",
    metadata,
    Column("job", Number, primary_key=True, autoincrement=False),
    Column("place", Number, primary_key=True, autoincrement=False),  # from 0, blank lines left out
    Column("line", Number, nullable=False),  # its number in the input, from 1
    Column("custom_id", Text),
    Column("text", Text),  # NULL for an invalid line
    Column("state", SmallInteger, nullable=False),
    Column("told", Number),  # offset among the results; without keeps_order NULL until the line is done
    Column("http_status", SmallInteger),  # NULL if the line never ran
    Column("result", Text),  # JSON
    Index("tramontane_lines_by_custom_id", "job", "custom_id"),
    Index("tramontane_lines_by_offset", "job", "told"),
)

PENDING, DONE, FAILED = 0, 1, 2  # of a line


class Database:
    """A connection pool, opened at first use. Raises ConfigError for an unsuitable URL.

    Methods block: call them in a thread.
    """

    def __init__(self, url: str) -> None:
        try:
            parsed = make_url(url)
        except ArgumentError as error:
            raise ConfigError("the jobs' database must be a URL such as sqlite:////var/lib/jobs.sqlite") from error
        kind = parsed.get_backend_name()
        if kind not in ("sqlite", "postgresql", "postgres") or (kind == "sqlite" and parsed.database in IN_MEMORY):
            raise ConfigError(f"the jobs' database is of kind {kind}; it must be sqlite:///FILE or postgresql://HOST/NAME")
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
        """Open a transaction for writing. SQLite admits one writer at a time, from the begin of its transaction.

        Raises JobStoreError, or JobRefusedError for a value that no column can hold; then nothing is written.
        """
        with _translate_errors(), self._get_engine().begin() as connection:
            yield connection

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """Open a connection on which each statement sees the latest data. Raises the same errors as ``writing``."""
        with _translate_errors(), self._get_engine().connect() as connection:
            if self.is_sqlite:  # PostgreSQL streams results only within a transaction, where readers block no writer
                connection.execution_options(isolation_level="AUTOCOMMIT")
            yield connection

    @contextmanager
    def stream_rows(self, wanted: Select[Any]) -> Iterator[Result[Any]]:
        """Open a result of which not all rows have to be fetched. Raises JobStoreError.

        The result is always closed here: otherwise the connection's next user would see SQLite's database as it is now.
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
                self._engine = None

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
                self.file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)  # prompts are private
            except OSError as error:
                raise JobStoreError(f"the jobs' database cannot be created: {error}") from error
            engine = create_engine(self._url, connect_args={"timeout": SQLITE_BUSY_TIMEOUT_S}, hide_parameters=True)
            event.listen(engine, "connect", _prepare_sqlite)
            event.listen(engine, "begin", _begin_sqlite)
        with engine.begin() as connection:
            if not self.is_sqlite:
                connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": SCHEMA_LOCK})
            metadata.create_all(connection)
        return engine


def _prepare_sqlite(connection: Any, _record: object) -> None:  # noqa: ANN401 - sqlite3.Connection, of whichever driver
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
        raise JobRefusedError(f"the job has a value that the database cannot hold: {_reason(error)}") from error


def _reason(error: SQLAlchemyError) -> str:
    """Return the message without SQL and its values, which may hold prompts."""
    reason = str(getattr(error, "orig", None) or type(error).__name__).strip()
    return f"{reason.splitlines()[0]:.200}"
