"""What the doors of batch jobs take and answer, for their description: tests hold answers against these models."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from tramontane.router.batch.jobs import Endpoint


class _Shape(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Upload(_Shape):
    """A form."""

    purpose: Literal["batch"]
    file: Annotated[str, Field(json_schema_extra={"format": "binary"})]


class StoredFile(_Shape):
    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    filename: str
    purpose: str
    status: Literal["processed"]
    expires_at: int | None


class _Page(_Shape):
    object: Literal["list"]
    first_id: str | None
    last_id: str | None
    has_more: bool


class FileList(_Page):
    data: list[StoredFile]


class DeletedFile(_Shape):
    id: str
    object: Literal["file"]
    deleted: bool


class JobProblem(_Shape):
    code: str
    message: str
    line: int | None
    param: str | None


class JobProblems(_Shape):
    object: Literal["list"]
    data: list[JobProblem]


class LineCounts(_Shape):
    total: int
    completed: int
    failed: int


class Batch(_Shape):
    """Times are seconds since 1970."""

    id: str
    object: Literal["batch"]
    endpoint: Endpoint
    errors: JobProblems | None
    input_file_id: str
    completion_window: Literal["24h"]
    status: Literal["validating", "in_progress", "cancelling", "completed", "cancelled", "failed"]
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int | None
    finalizing_at: None
    expired_at: None
    cancelling_at: int | None
    completed_at: int | None
    cancelled_at: int | None
    failed_at: int | None
    request_counts: LineCounts
    metadata: dict[str, str] | None


class BatchList(_Page):
    data: list[Batch]
