"""``/openapi.json``: requests and responses of the API server, built from its routes and the models
that parse requests.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from types import MappingProxyType
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.routing import Route

from tramontane.router.chat_apis.messages_answer import AnthropicError, MessagesAnswer, TokenCount
from tramontane.router.chat_apis.messages_request import CountTokensRequest, MessagesRequest
from tramontane.router.chat_apis.responses_answer import ResponsesAnswer
from tramontane.router.chat_apis.responses_request import ResponsesRequest
from tramontane.router.openai import response_models as responses
from tramontane.router.openai.chat_request import ChatRequest
from tramontane.router.openai.completion_request import CompletionRequest
from tramontane.router.openai.fim import FimRequest
from tramontane.router.openai.served_model import Model, ModelList
from tramontane.router.openai.tokenize import (
    Detokenized,
    DetokenizeRequest,
    TokenizeRequest,
    Tokens,
)

REF_TEMPLATE = "#/components/schemas/{model}"

# JSON, and at the end [DONE]
EVENT = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}
JSON = "application/json"

JsonSchema = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of one path. ``body`` and ``answer`` are JSON unless their types say otherwise.

    ``streams``: it may answer with server-sent events. ``example``: a valid body. ``query``:
    schemas of query parameters.
    """

    summary: str
    answer: type[BaseModel] | None = None
    errors: tuple[int, ...] = ()
    body: type[BaseModel] | None = None
    example: Mapping[str, Any] | None = None
    streams: bool = False
    body_type: str = JSON
    answer_type: str = JSON
    query: Mapping[str, JsonSchema] = field(default_factory=dict)
    error: type[BaseModel] = responses.Error


Operations = Mapping[tuple[str, str], Operation]  # by method and path

ERRORS_OF_BODY = (400, 408, 413, 429)
ERRORS_OF_MODEL = (*ERRORS_OF_BODY, 404)
ERRORS_OF_TOKENS = (*ERRORS_OF_MODEL, 503, 504)
CHAT_EXAMPLE = {"messages": [{"role": "user", "content": "What news?"}], "max_tokens": 16}
FIM_EXAMPLE = {
    "prompt": "def add(a, b):\n    return",
    "suffix": "\n\nprint(add(1, 2))",
    "max_tokens": 16,
}
LOAD_EXAMPLE = {"tokens_per_expert": [[1, 2], [3, 0]]}
OPERATIONS: Operations = MappingProxyType(
    {
        ("POST", "/v1/completions"): Operation(
            "Continue prompts",
            responses.CompletionAnswer,
            ERRORS_OF_TOKENS,
            CompletionRequest,
            {"prompt": "ROMEO:", "max_tokens": 16},
            streams=True,
        ),
        ("POST", "/v1/chat/completions"): Operation(
            "Answer in a conversation",
            responses.ChatAnswer,
            ERRORS_OF_TOKENS,
            ChatRequest,
            CHAT_EXAMPLE,
            streams=True,
        ),
        ("POST", "/v1/fim/completions"): Operation(
            "Fill in the text between a prompt and a suffix",
            responses.ChatAnswer,
            ERRORS_OF_TOKENS,
            FimRequest,
            FIM_EXAMPLE,
            streams=True,
        ),
        ("POST", "/v1/responses"): Operation(
            "Answer in a conversation, as OpenAI's Responses API",
            ResponsesAnswer,
            ERRORS_OF_TOKENS,
            ResponsesRequest,
            {"input": "What news?", "max_output_tokens": 16},
            streams=True,
        ),
        ("POST", "/v1/messages"): Operation(
            "Answer in a conversation, as Anthropic's Messages API",
            MessagesAnswer,
            ERRORS_OF_TOKENS,
            MessagesRequest,
            CHAT_EXAMPLE,
            streams=True,
            error=AnthropicError,
        ),
        ("POST", "/v1/messages/count_tokens"): Operation(
            "Number of tokens of a conversation",
            TokenCount,
            ERRORS_OF_MODEL,
            CountTokensRequest,
            {"messages": CHAT_EXAMPLE["messages"]},
            error=AnthropicError,
        ),
        ("GET", "/v1/models"): Operation(
            "The model that is served, once for each of its names", ModelList
        ),
        ("GET", "/v1/models/{name}"): Operation("The model that is served", Model, (404,)),
        ("POST", "/tokenize"): Operation(
            "Token ids of a text or a conversation",
            Tokens,
            ERRORS_OF_MODEL,
            TokenizeRequest,
            {"prompt": "What news?"},
        ),
        ("POST", "/detokenize"): Operation(
            "The text of token ids",
            Detokenized,
            ERRORS_OF_MODEL,
            DetokenizeRequest,
            {"tokens": [1, 300]},
        ),
        ("GET", "/health"): Operation("Whether tokens can be made now", responses.Health, (503,)),
        ("GET", "/ping"): Operation("The same as /health", responses.Health, (503,)),
        ("POST", "/ping"): Operation("The same as /health", responses.Health, (503,)),
        ("GET", "/version"): Operation("Version of Tramontane", responses.Version),
        ("GET", "/experts"): Operation(
            "Tokens that were routed to each expert", responses.ExpertTokens, (404, 503)
        ),
        ("POST", "/experts"): Operation(
            "Spread the experts by another load",
            responses.MoveExpertsResponse,
            (*ERRORS_OF_BODY, 503),
            responses.MoveExpertsRequest,
            LOAD_EXAMPLE,
        ),
    }
)


def openapi(
    routes: Sequence[Route],
    operations: Operations,
    model: str,
    version: str,
    public_paths: frozenset[str] | None,
) -> dict[str, Any]:
    """Build the OpenAPI 3.1 page of all routes that are in the schema; routes without an operation
    are only listed.

    ``model``: the name that requests may give as ``model``. ``public_paths``: paths that need no
    API key; None: no path needs one.
    """
    described = [
        (method, path, operations.get((method, path), Operation(path)))
        for method, path in _route_methods(routes)
    ]
    paths: dict[str, dict[str, Any]] = {}
    for method, path, operation in described:
        needs_key = public_paths is not None and path not in public_paths
        operation_object = _operation_object(
            operation, path, sorted((*operation.errors, *((401,) if needs_key else ())))
        )
        if public_paths is not None and not needs_key:
            operation_object["security"] = []
        paths.setdefault(path, {})[method.lower()] = operation_object
    components: dict[str, Any] = {
        "schemas": _schemas([operation for _, _, operation in described], model)
    }
    page: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "Tramontane", "version": version},
        "paths": paths,
    }
    if public_paths is not None:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        page["security"] = [{"key": []}]
    return page | {"components": components}


def _route_methods(routes: Sequence[Route]) -> Iterator[tuple[str, str]]:
    for route in routes:
        for method in (
            sorted((route.methods or set()) - {"HEAD"}) if route.include_in_schema else ()
        ):
            yield method, route.path_format


def _operation_object(operation: Operation, path: str, errors: Sequence[int]) -> dict[str, Any]:
    content = {
        operation.answer_type: {"schema": _ref(operation.answer) if operation.answer else {}}
    }
    if operation.streams:
        content["text/event-stream"] = {"schema": EVENT}
    statuses: dict[str, Any] = {"200": {"description": "OK", "content": content}}
    for status in errors:
        error = {JSON: {"schema": _ref(operation.error)}}
        statuses[str(status)] = {"description": HTTPStatus(status).phrase, "content": error}
    described: dict[str, Any] = {"summary": operation.summary, "responses": statuses}
    if operation.body is not None:
        example = {"example": dict(operation.example)} if operation.example else {}
        body = {operation.body_type: {"schema": _ref(operation.body)} | example}
        described["requestBody"] = {"required": True, "content": body}
    names = [part[1:-1] for part in path.split("/") if part.startswith("{")]
    in_path = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for name in names
    ]
    in_query = [
        {"name": name, "in": "query", "schema": schema} for name, schema in operation.query.items()
    ]
    if in_path or in_query:
        described["parameters"] = in_path + in_query
    return described


def _ref(model: type[BaseModel]) -> JsonSchema:
    return {"$ref": REF_TEMPLATE.format(model=model.__name__)}


def _schemas(operations: Sequence[Operation], model: str) -> JsonSchema:
    """Build the schemas of requests as they are read, and of responses as they are written."""
    bodies = {operation.body for operation in operations if operation.body}
    returned = {operation.answer for operation in operations if operation.answer} | {
        each.error for each in operations
    }
    kinds = sorted(bodies | returned, key=lambda kind: kind.__name__)
    _, page = models_json_schema(
        [(kind, "validation") for kind in kinds], ref_template=REF_TEMPLATE
    )
    schemas: dict[str, JsonSchema] = page["$defs"]
    for name in _reachable_names(schemas, [kind.__name__ for kind in bodies]):
        _make_nullable(schemas[name])
        if "model" in schemas[name].get("properties", {}):
            schemas[name]["properties"]["model"]["anyOf"] = [{"const": model}, {"type": "null"}]
    return schemas


def _reachable_names(schemas: Mapping[str, JsonSchema], names: Sequence[str]) -> set[str]:
    found: set[str] = set()
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += [ref.rpartition("/")[2] for ref in _refs(schemas[name])]
    return found


def _refs(schema: Any) -> Iterator[str]:  # any JSON
    if isinstance(schema, dict):
        if "$ref" in schema:
            yield schema["$ref"]
        schema = list(schema.values())
    for part in schema if isinstance(schema, list) else ():
        yield from _refs(part)


def _make_nullable(schema: JsonSchema) -> None:
    """Allow null for fields with a default: clients send null for parameters that they do not
    set.
    """
    for name, written in schema.get("properties", {}).items():
        if "default" in written and {"type": "null"} not in written.get("anyOf", ()):
            kept = {key: written.pop(key) for key in ("title", "description") if key in written}
            default = written.pop("default")
            shown = {} if default in (None, [], ()) else {"default": default}
            schema["properties"][name] = kept | shown | {"anyOf": [written, {"type": "null"}]}
