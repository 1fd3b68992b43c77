"""What ``/openapi.json`` says of the doors of batch jobs."""

from types import MappingProxyType

from tramontane.cluster.http.openapi import JsonSchema, Operation, Operations
from tramontane.router.batch import batch_answer_schema as shapes
from tramontane.router.batch.schema import MAX_FILE_LIST, MAX_LIST, BatchRequest

JSONL = "application/jsonl"
TEXT: JsonSchema = {"type": "string"}
ORDER: JsonSchema = {"enum": ["asc", "desc"]}
LISTED: JsonSchema = {"type": "integer", "minimum": 1, "maximum": MAX_FILE_LIST}
FILE_QUERY = {"limit": LISTED, "after": TEXT, "order": ORDER, "purpose": TEXT}
BATCH_QUERY = {"limit": {"type": "integer", "minimum": 1, "maximum": MAX_LIST}, "after": TEXT}
RESULTS_QUERY = {"offset": {"type": "integer", "minimum": 0, "maximum": 10**15 - 1}}
BATCH_EXAMPLE = {"input_file_id": "file-1", "endpoint": "/v1/completions"}

BATCH_OPERATIONS: Operations = MappingProxyType(
    {
        ("POST", "/v1/files"): Operation(
            "Store a file of requests", shapes.StoredFile, (400, 408, 413, 503), shapes.Upload, body_type="multipart/form-data"
        ),
        ("GET", "/v1/files"): Operation("The files", shapes.FileList, (400, 404, 503), query=FILE_QUERY),
        ("GET", "/v1/files/{file_id}"): Operation("A file", shapes.StoredFile, (404, 503)),
        ("DELETE", "/v1/files/{file_id}"): Operation("Delete a file", shapes.DeletedFile, (404, 503)),
        ("GET", "/v1/files/{file_id}/content"): Operation("What is in a file", errors=(404, 503), answer_type=JSONL),
        ("POST", "/v1/batches"): Operation(
            "Start a batch job", shapes.Batch, (400, 404, 408, 413, 429, 503), BatchRequest, BATCH_EXAMPLE
        ),
        ("GET", "/v1/batches"): Operation("The batch jobs", shapes.BatchList, (400, 404, 503), query=BATCH_QUERY),
        ("GET", "/v1/batches/{job_id}"): Operation("A batch job", shapes.Batch, (404, 503)),
        ("POST", "/v1/batches/{job_id}/cancel"): Operation("Cancel a batch job", shapes.Batch, (404, 503)),
        ("GET", "/v1/batches/{job_id}/results"): Operation(
            "Results of a batch job, while it runs", errors=(400, 404, 429, 503), answer_type=JSONL, query=RESULTS_QUERY
        ),
    }
)
