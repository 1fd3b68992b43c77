"""HTTP for batch jobs: OpenAI's /v1/files and /v1/batches, results while a job runs, and their part
of ``/openapi.json``.
"""

import logging
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing
from types import MappingProxyType
from typing import Annotated, BinaryIO, Literal

from pydantic import BaseModel, ConfigDict, Field
from python_multipart.multipart import parse_options_header
from starlette.datastructures import FormData, QueryParams, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from tramontane.cluster.http.body_reader import BodyLimiter, BodyReader, warning_header
from tramontane.cluster.http.errors import request_identity
from tramontane.cluster.http.openapi import JsonSchema, Operation, Operations
from tramontane.proto.errors import JobRefusedError, ParameterError, TramontaneError
from tramontane.router.batch import schema
from tramontane.router.batch.files import PIECE
from tramontane.router.batch.service import BatchService
from tramontane.router.batch.store import StoredJob
from tramontane.router.openai.request_context import RequestStats
from tramontane.router.openai.response_models import Answer

logger = logging.getLogger(__name__)

MAX_BATCH_BODY = 64 * 2**10
MULTIPART_OVERHEAD = 64 * 2**10  # of boundaries, headers and the other fields
MAX_FIELDS = 8
FORM_FIELDS = ("purpose", "file")
FORM_NEUTRAL = ("expires_after[anchor]", "expires_after[seconds]")  # every file is kept as long
JSONL = "application/jsonl"
TEXT: JsonSchema = {"type": "string"}
ORDER: JsonSchema = {"enum": ["asc", "desc"]}
LIMIT_SCHEMA: JsonSchema = {"type": "integer", "minimum": 1, "maximum": schema.MAX_FILE_LIST}
FILE_QUERY = {"limit": LIMIT_SCHEMA, "after": TEXT, "order": ORDER, "purpose": TEXT}
BATCH_QUERY = {
    "limit": {"type": "integer", "minimum": 1, "maximum": schema.MAX_LIST},
    "after": TEXT,
}
RESULTS_QUERY = {"offset": {"type": "integer", "minimum": 0, "maximum": 10**15 - 1}}
BATCH_EXAMPLE = {"input_file_id": "file-1", "endpoint": "/v1/completions"}


class FileUpload(BaseModel):
    """Form of ``POST /v1/files``."""

    model_config = ConfigDict(extra="allow", strict=True)

    purpose: Literal["batch"]
    file: Annotated[str, Field(json_schema_extra={"format": "binary"})]


class DeletedFile(Answer):
    """Response to the deletion of a file."""

    id: str
    object: Literal["file"]
    deleted: bool


BATCH_OPERATIONS: Operations = MappingProxyType(
    {
        ("POST", "/v1/files"): Operation(
            "Store a file of requests",
            schema.StoredFile,
            (400, 408, 413, 429, 503),
            FileUpload,
            body_type="multipart/form-data",
        ),
        ("GET", "/v1/files"): Operation(
            "The files", schema.FileList, (400, 404, 503), query=FILE_QUERY
        ),
        ("GET", "/v1/files/{file_id}"): Operation("A file", schema.StoredFile, (404, 503)),
        ("DELETE", "/v1/files/{file_id}"): Operation("Delete a file", DeletedFile, (404, 503)),
        ("GET", "/v1/files/{file_id}/content"): Operation(
            "What is in a file", errors=(404, 503), answer_type=JSONL
        ),
        ("POST", "/v1/batches"): Operation(
            "Start a batch job",
            schema.Batch,
            (400, 404, 408, 413, 429, 503),
            schema.BatchRequest,
            BATCH_EXAMPLE,
        ),
        ("GET", "/v1/batches"): Operation(
            "The batch jobs", schema.BatchList, (400, 404, 503), query=BATCH_QUERY
        ),
        ("GET", "/v1/batches/{job_id}"): Operation("A batch job", schema.Batch, (404, 503)),
        ("POST", "/v1/batches/{job_id}/cancel"): Operation(
            "Cancel a batch job", schema.Batch, (404, 503)
        ),
        ("GET", "/v1/batches/{job_id}/results"): Operation(
            "Results of a batch job, while it runs",
            errors=(400, 404, 429, 503),
            answer_type=JSONL,
            query=RESULTS_QUERY,
        ),
    }
)


class BatchEndpoints:
    """The endpoints of batch jobs, whose routes are added to an ``HttpApp``. A client sees the jobs
    of its own API key only.
    """

    def __init__(
        self,
        service: BatchService,
        bodies: BodyReader | None = None,
    ) -> None:
        self._shared_service, self._limits = service, service.limits
        self._bodies = bodies or BodyReader(BodyLimiter(), MAX_BATCH_BODY, RequestStats())
        self._keep_s = service.limits.keep_s

    def _service(self, request: Request) -> BatchService:
        return self._shared_service.for_tenant(request_identity(request).tenant)

    def routes(self) -> list[Route]:
        """Return the routes."""
        return [
            Route("/v1/files", self.upload, methods=["POST"]),
            Route("/v1/files", self.list_files, methods=["GET"]),
            Route("/v1/files/{file_id}", self.file, methods=["GET"]),
            Route("/v1/files/{file_id}", self.delete_file, methods=["DELETE"]),
            Route("/v1/files/{file_id}/content", self.content, methods=["GET"]),
            Route("/v1/batches", self.create, methods=["POST"]),
            Route("/v1/batches", self.list_batches, methods=["GET"]),
            Route("/v1/batches/{job_id}", self.batch, methods=["GET"]),
            Route("/v1/batches/{job_id}/cancel", self.cancel, methods=["POST"]),
            Route("/v1/batches/{job_id}/results", self.results, methods=["GET"]),
        ]

    async def upload(self, request: Request) -> Response:
        """Answer ``POST /v1/files``, a form with ``file`` and ``purpose``. Files above 1 MiB are
        spooled to disk.
        """
        _require_multipart(request.headers.get("content-type", ""))
        service = self._service(request)
        # before the body is read
        await service.check_upload(min(_min_file_size(request), self._limits.max_bytes))
        with service.uploading():
            return await self._store(request, service)

    async def _store(self, request: Request, service: BatchService) -> Response:
        max_body = self._limits.max_bytes + MULTIPART_OVERHEAD
        parser = MultiPartParser(
            request.headers,
            self._bodies.stream(request, max_body),
            max_files=1,
            max_fields=MAX_FIELDS,
        )
        try:
            form = await parser.parse()
        except (MultiPartException, KeyError, UnicodeError) as error:
            raise JobRefusedError(f"the form cannot be read: {error!s:.200}") from error
        try:
            file = _file_of(form)
            ignored = self._unused(form, FORM_FIELDS, FORM_NEUTRAL)
            record = await service.upload(file.filename or "file", "batch", _pieces(file.file))
            return JSONResponse(schema.file_answer(record, self._keep_s).as_json(), headers=ignored)
        finally:
            await form.close()

    async def list_files(self, request: Request) -> Response:
        """Answer ``GET /v1/files``."""
        query = request.query_params
        ignored = self._query(query, FILE_QUERY)
        limit = schema.parse_limit(query, schema.MAX_FILE_LIST, schema.MAX_FILE_LIST)
        newest_first = schema.parse_choice(query, "order", "asc", "desc") != "asc"
        if "\0" in (purpose := query.get("purpose", "")):
            raise ParameterError(f"there is no purpose {purpose!r:.60}", "purpose")
        files = await self._service(request).list_files(
            limit + 1, query.get("after"), purpose or None, newest_first
        )
        return JSONResponse(
            schema.FileList.of(
                [schema.file_answer(file, self._keep_s) for file in files], limit
            ).as_json(),
            headers=ignored,
        )

    async def file(self, request: Request) -> Response:
        """Answer ``GET /v1/files/{file_id}``."""
        record = await self._service(request).file(request.path_params["file_id"])
        return JSONResponse(schema.file_answer(record, self._keep_s).as_json())

    async def delete_file(self, request: Request) -> Response:
        """Answer ``DELETE /v1/files/{file_id}``."""
        file_id = request.path_params["file_id"]
        await self._service(request).delete_file(file_id)
        return JSONResponse(DeletedFile(id=file_id, object="file", deleted=True).as_json())

    async def content(self, request: Request) -> Response:
        """Answer ``GET /v1/files/{file_id}/content``."""
        service = self._service(request)
        record = await service.file(request.path_params["file_id"])
        pieces = await service.content(record.file_id)
        headers = {"content-length": str(record.num_bytes)}
        return StreamingResponse(pieces, media_type=JSONL, headers=headers)

    async def create(self, request: Request) -> Response:
        """Answer ``POST /v1/batches`` once all lines are stored; an ``idempotency-key`` seen before
        returns the same job.
        """
        parsed = await self._bodies.parse(request, schema.parse_batch)
        key = request.headers.get("idempotency-key")
        response = self._batch(
            await self._service(request).submit_file(parsed.input_file_id, parsed.options, key)
        )
        response.headers.update(warning_header(parsed.ignored))
        return response

    async def list_batches(self, request: Request) -> Response:
        """Answer ``GET /v1/batches``."""
        ignored = self._query(request.query_params, BATCH_QUERY)
        limit = schema.parse_limit(request.query_params, 20, schema.MAX_LIST)
        jobs = await self._service(request).list_stored(
            limit + 1, request.query_params.get("after")
        )
        return JSONResponse(
            schema.BatchList.of(
                [schema.batch_answer(job, self._keep_s) for job in jobs], limit
            ).as_json(),
            headers=ignored,
        )

    async def batch(self, request: Request) -> Response:
        """Answer ``GET /v1/batches/{job_id}``."""
        return self._batch(await self._service(request).get_stored(request.path_params["job_id"]))

    async def cancel(self, request: Request) -> Response:
        """Answer ``POST /v1/batches/{job_id}/cancel``."""
        return self._batch(
            await self._service(request).cancel_stored(request.path_params["job_id"])
        )

    async def results(self, request: Request) -> Response:
        """Stream answers and errors as lines of the output file, from ``offset`` on until the job
        has ended.
        """
        ignored = self._query(request.query_params, RESULTS_QUERY)
        offset = request.query_params.get("offset", "0")
        if not (offset.isascii() and offset.isdecimal() and len(offset) < 16):
            raise ParameterError(
                f"offset is {offset!r:.60}; it must be a whole number from 0", "offset"
            )
        service = self._service(request)
        job_id = (await service.get_stored(request.path_params["job_id"])).job.job_id
        lines = _result_lines(service, job_id, int(offset))
        await anext(lines)  # a refusal needs to come before the response has a status
        return StreamingResponse(lines, media_type=JSONL, headers=ignored)

    def _query(self, query: QueryParams, known: Mapping[str, JsonSchema]) -> dict[str, str]:
        """Return the header for the parameters that have no effect. Raises ParameterError for a
        page other than the first: these lists are read on with ``after``.
        """
        if query.get("page", "0") not in ("0", ""):
            raise ParameterError(
                f"page is {query['page']!r:.60}; leave it out, and send the last id as after",
                "page",
            )
        return self._unused(query, tuple(known), ("page",))

    def _unused(
        self, given: Iterable[str], known: Sequence[str], neutral: Sequence[str]
    ) -> dict[str, str]:
        """Return the header for the names that have no effect. Raises ParameterError."""
        unknown, unused = schema.unused_names(given, known, neutral)
        self._bodies.note(unknown, unused)
        return warning_header(unused)

    def _batch(self, job: StoredJob) -> Response:
        return JSONResponse(schema.batch_answer(job, self._keep_s).as_json())


def _min_file_size(request: Request) -> int:
    """Return the minimum size of the form's file, by the request's headers."""
    length = request.headers.get("content-length", "")
    return (
        max(int(length) - MULTIPART_OVERHEAD, 0)
        if length.isascii() and length.isdecimal() and len(length) < 16
        else 0
    )


def _require_multipart(content_type: str) -> None:
    """Raise JobRefusedError for another type, or a charset other than utf-8: some of Python's
    decode any bytes to names.
    """
    kind, parameters = parse_options_header(content_type)
    if kind.lower() != b"multipart/form-data":
        raise JobRefusedError("the body must be multipart/form-data with file and purpose")
    if parameters.get(b"charset", b"utf-8").lower() not in (b"utf-8", b"utf8"):
        raise JobRefusedError("the form's charset must be utf-8")


def _file_of(form: FormData) -> UploadFile:
    """Return the form's file. Raises RequestError if the form is invalid."""
    if form.get("purpose") != "batch":
        raise ParameterError("purpose must be batch", "purpose")
    file = form.get("file")
    if not isinstance(file, UploadFile):
        raise ParameterError("file is missing", "file")
    if "\0" in (file.filename or ""):
        raise ParameterError("the file's name has a character that no name may have", "file")
    return file


def _pieces(file: BinaryIO) -> Iterator[bytes]:
    while piece := file.read(PIECE):
        yield piece


async def _result_lines(
    service: BatchService, job_id: str, offset: int
) -> AsyncGenerator[bytes, None]:
    """Yield an empty piece once one more stream is admitted, then the lines. Raises OverloadedError
    if it is not.
    """
    with service.streaming():
        yield b""
        async with aclosing(service.stored_results(job_id, offset)) as results:
            try:
                async for result in results:
                    yield schema.result_line(job_id, result)
            # the client sees a stream that broke off, and may ask again
            except TramontaneError as error:
                logger.warning("results of %s broke off: %s", job_id, error)
                raise
