"""The tables of batch jobs: whose rows they hold, and how a database of an earlier version gets
their columns and indexes.
"""

from dataclasses import dataclass

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    ColumnElement,
    Connection,
    Float,
    Index,
    Integer,
    MetaData,
    SmallInteger,
    String,
    Table,
    Text,
    inspect,
    text,
)
from sqlalchemy.schema import CreateColumn

# the tenant of all clients of a server without API keys, and of rows that were written before there
# were tenants
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
    # of one served model; runners and ingresses of others do not see it
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
    # of its lines and their results
    Column("num_bytes", Number, nullable=False, server_default="0"),
    # of the text or the URL that was submitted; NULL where it is not known
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

# Which of a job's lines have a custom_id first. Invalid lines are not in it, so they cost nothing
# to the lines that follow.
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
    """The rows that a client may see: those of one served model (``queue``) and one API key
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
    """Create tables, and what tables of version 0.1 lack; their rows belong to the tenant
    ``KEYLESS``.
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
