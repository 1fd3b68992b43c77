"""The database of batch jobs (an SQLite file or PostgreSQL), and the threads for its blocking
calls.
"""

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    ColumnElement,
    Connection,
    Engine,
    Executable,
    Float,
    Index,
    Integer,
    MetaData,
    Result,
    Row,
    Select,
    SmallInteger,
    String,
    Table,
    Text,
    create_engine,
    event,
    inspect,
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
from sqlalchemy.schema import CreateColumn

from tramontane.proto.errors import ConfigError, JobRefusedError, JobStoreError

# The tables of batch jobs: the owners of rows, and the migration of columns and indexes from
# earlier versions.

# the tenant of all clients of a server without API keys, and of rows from before tenants existed
KEYLESS = ""
PENDING, DONE, FAILED = 0, 1, 2  # states of a line
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
    Column("tenant", String(64), nullable=False, server_default=KEYLESS),
    Index("tramontane_files_by_tenant", "queue", "tenant", "number"),
)

jobs = Table(
    "tramontane_jobs",
    metadata,
    Column("number", Number, primary_key=True, autoincrement=True),  # a higher one is younger
    Column("job_id", String(64), nullable=False, unique=True),
    # of one served model; runners and ingresses of other models do not see it
    Column("queue", Text, nullable=False),
    Column("state", String(16), nullable=False),
    Column("endpoint", String(64), nullable=False),
    Column("keeps_order", Boolean, nullable=False),
    Column("metadata", Text, nullable=False),  # JSON
    Column("num_lines", Number, nullable=False, default=0),
    Column("num_done", Number, nullable=False, default=0),
    Column("num_failed", Number, nullable=False, default=0),
    Column("num_bad", Number, nullable=False, default=0),
    # results with an offset, if order is not kept
    Column("num_told", Number, key="num_offsets", nullable=False, default=0),
    Column("created_at", Float, nullable=False),
    Column("started_at", Float),
    Column("cancelling_at", Float),
    Column("ended_at", Float),
    Column("touched_at", Float, nullable=False),  # while it is being submitted
    Column("error", Text),
    Column("input_file", String(64)),
    Column("output_file", String(64)),
    Column("error_file", String(64)),
    # a request of this tenant that is repeated with its key is the same job
    Column("request_key", String(256)),
    Column("owner", String(64)),  # the runner that holds the lease
    # counts the owners, and fences all but the last
    Column("epoch", Number, nullable=False, default=0),
    Column("leased_until", Float),
    Column("tenant", String(64), nullable=False, server_default=KEYLESS),
    # total of its lines and their results
    Column("num_bytes", Number, nullable=False, server_default="0"),
    # of the submitted text or URL; NULL if unknown
    Column("input_digest", String(80)),
    Index("tramontane_jobs_by_state", "queue", "state", "number"),
    Index("tramontane_jobs_by_tenant", "queue", "tenant", "number"),
    Index("tramontane_jobs_by_request_key", "queue", "tenant", "request_key", unique=True),
    # numbers are never reused: a process may still be adding lines to a deleted job
    sqlite_autoincrement=True,
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
    # among the results; without keeps_order NULL until the line is done
    Column("told", Number, key="offset"),
    Column("http_status", SmallInteger),  # NULL if the line never ran
    Column("result", Text),  # JSON
    Index("tramontane_lines_by_offset", "job", "offset"),
)

# The lines of a job that are the first with their custom_id. Invalid lines are excluded, so that
# they do not affect the lines that follow.
_is_pending = text(f"state = {PENDING}")
Index(
    "tramontane_lines_pending",
    *(lines.c.job, lines.c.custom_id),
    unique=True,
    sqlite_where=_is_pending,
    postgresql_where=_is_pending,
)
REPLACED_INDEXES = {"tramontane_jobs_by_request", "tramontane_lines_by_custom_id"}  # of version 0.1


@dataclass(frozen=True, slots=True)
class Scope:
    """The rows that a client may see: the rows of one served model (``queue``) and one API key
    (``tenant``: its digest).
    """

    queue: str
    tenant: str = KEYLESS

    def where(self, table: Table) -> ColumnElement[bool]:
        """Return the condition for rows of ``files`` or ``jobs``."""
        return (table.c.queue == self.queue) & (table.c.tenant == self.tenant)

    def as_row(self) -> dict[str, str]:
        """Return the columns of a new row."""
        return {"queue": self.queue, "tenant": self.tenant}


def create_or_migrate(connection: Connection) -> None:
    """Create tables, and add the columns and indexes that tables of version 0.1 lack; their rows
    belong to the tenant ``KEYLESS``.
    """
    metadata.create_all(connection)
    inspector = inspect(connection)
    for table in metadata.sorted_tables:
        columns = {column["name"] for column in inspector.get_columns(table.name)}
        for column in table.columns:
            if column.name not in columns:
                definition = CreateColumn(column).compile(dialect=connection.dialect)
                connection.execute(text(f"ALTER TABLE {table.name} ADD COLUMN {definition}"))
        indexes = {index["name"] for index in inspector.get_indexes(table.name)}
        for name in indexes & REPLACED_INDEXES:
            connection.execute(text(f"DROP INDEX {name}"))
        for index in table.indexes:
            if index.name not in indexes:
                index.create(connection)


P = ParamSpec("P")
T = TypeVar("T")

SQLITE_BUSY_TIMEOUT_S = 60.0  # while another process writes
TEMPORARY_ERRORS = (OperationalError, InterfaceError, TimeoutError)  # all other errors are defects
IN_MEMORY = (None, "", ":memory:")  # belongs to one connection and is deleted with it
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
        """Whether it may contain rows. An SQLite file is created by the first write."""
        return self.file is None or self._engine is not None or self.file.exists()

    @contextmanager
    def writing(self) -> Iterator[Connection]:
        """Open a transaction for writing. SQLite admits one writer at a time, from the begin of its
        transaction.

        Raises JobStoreError, or JobRefusedError for a value that no column can hold; then the
        transaction is rolled back.
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
        """Return the rows of a query, an empty list if the database is not created. Raises the same
        errors as ``writing``.
        """
        if not self.is_created:
            return []
        with self.reading() as connection:
            return connection.execute(wanted).all()

    def write(self, change: Executable) -> int:
        """Execute a statement in its own transaction; return how many rows it changed. Raises the
        errors of ``writing``.
        """
        with self.writing() as connection:
            return connection.execute(change).rowcount

    @contextmanager
    def stream_rows(self, wanted: Select[Any]) -> Iterator[Result[Any]]:
        """Open a result whose rows need not all be fetched. Raises JobStoreError.

        The result is always closed here: otherwise the connection's next user would see the current
        state of SQLite's database.
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


# sqlite3.Connection, of any driver
def _prepare_sqlite(connection: Any, _record: object) -> None:
    connection.isolation_level = None  # transactions begin explicitly, not where the driver guesses
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=FULL")  # accepted data survives a power failure
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
        """Wait for running calls, so that no connection stays open, and cancel the others."""
        self._pool.shutdown(cancel_futures=True)
