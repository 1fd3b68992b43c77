"""``/openapi.json``: what the door takes and answers, from the models that read requests and the routes that there are."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from types import MappingProxyType
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.routing import Route

from tramontane.router.openai import responses as answers
from tramontane.router.openai.chat_request import ChatRequest
from tramontane.router.openai.completion_request import CompletionRequest
from tramontane.router.openai.tokenize import DetokenizeRequest, TokenizeRequest

REF_TEMPLATE = "#/components/schemas/{model}"

EVENT = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}  # JSON, and at the end [DONE]

JSON = "application/json"

JsonSchema = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of one path. ``body`` and ``answer`` are JSON, or of the types given; ``streams``: it may answer in events.

    ``example``: a body that is answered. ``query``: what may come behind a question mark.
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


Operations = Mapping[tuple[str, str], Operation]  # by method and path

ERRORS_OF_BODY = (400, 408, 413, 429)
ERRORS_OF_MODEL = (*ERRORS_OF_BODY, 404)
ERRORS_OF_TOKENS = (*ERRORS_OF_MODEL, 503, 504)
CHAT_EXAMPLE = {"messages": [{"role": "user", "content": "What news?"}], "max_tokens": 16}
LOAD_EXAMPLE = {"tokens_per_expert": [[1, 2], [3, 0]]}
OPERATIONS: Operations = MappingProxyType(
    {
        ("POST", "/v1/completions"): Operation(
            "Continue prompts",
            answers.CompletionAnswer,
            ERRORS_OF_TOKENS,
            CompletionRequest,
            {"prompt": "ROMEO:", "max_tokens": 16},
            streams=True,
        ),
        ("POST", "/v1/chat/completions"): Operation(
            "Answer in a conversation", answers.ChatAnswer, ERRORS_OF_TOKENS, ChatRequest, CHAT_EXAMPLE, streams=True
        ),
        ("GET", "/v1/models"): Operation("The model that is served, as a list", answers.ModelList),
        ("GET", "/v1/models/{name}"): Operation("The model that is served", answers.Model, (404,)),
        ("POST", "/tokenize"): Operation(
            "Token ids of a text or a conversation", answers.Tokens, ERRORS_OF_MODEL, TokenizeRequest, {"prompt": "What news?"}
        ),
        ("POST", "/detokenize"): Operation(
            "The text of token ids", answers.Detokenized, ERRORS_OF_MODEL, DetokenizeRequest, {"tokens": [1, 300]}
        ),
        ("GET", "/health"): Operation("Whether tokens can be made now", answers.Health, (503,)),
        ("GET", "/experts"): Operation("Tokens that each expert was given", answers.ExpertTokens, (404, 503)),
        ("POST", "/experts"): Operation(
            "Spread the experts by another load",
            answers.MoveExpertsResponse,
            (*ERRORS_OF_BODY, 503),
            answers.MoveExpertsRequest,
            LOAD_EXAMPLE,
        ),
    }
)


def openapi(routes: Sequence[Route], operations: Operations, model: str, version: str, *, needs_key: bool) -> dict[str, Any]:
    """OpenAPI 3.1, of every route that is in the schema; routes without an operation are named and no more.

    ``model``: the name by which requests may call it.
    """
    described = [(method, path, operations.get((method, path), Operation(path))) for method, path in _operations_of(routes)]
    paths: dict[str, dict[str, Any]] = {}
    for method, path, operation in described:
        errors = (*operation.errors, *((401,) if needs_key and path != "/health" else ()))
        paths.setdefault(path, {})[method.lower()] = _operation_object(operation, path, sorted(errors))
    components: dict[str, Any] = {"schemas": _schemas([operation for _, _, operation in described], model)}
    page: dict[str, Any] = {"openapi": "3.1.0", "info": {"title": "Tramontane", "version": version}, "paths": paths}
    if needs_key:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        page["security"] = [{"key": []}]
    return page | {"components": components}


def _operations_of(routes: Sequence[Route]) -> Iterator[tuple[str, str]]:
    for route in routes:
        for method in sorted((route.methods or set()) - {"HEAD"}) if route.include_in_schema else ():
            yield method, route.path_format


def _operation_object(operation: Operation, path: str, errors: Sequence[int]) -> dict[str, Any]:
    content = {operation.answer_type: {"schema": _ref(operation.answer) if operation.answer else {}}}
    if operation.streams:
        content["text/event-stream"] = {"schema": EVENT}
    responses: dict[str, Any] = {"200": {"description": "OK", "content": content}}
    for status in errors:
        error = {JSON: {"schema": _ref(answers.Error)}}
        responses[str(status)] = {"description": HTTPStatus(status).phrase, "content": error}
    described: dict[str, Any] = {"summary": operation.summary, "responses": responses}
    if operation.body is not None:
        example = {"example": dict(operation.example)} if operation.example else {}
        body = {operation.body_type: {"schema": _ref(operation.body)} | example}
        described["requestBody"] = {"required": True, "content": body}
    names = [part[1:-1] for part in path.split("/") if part.startswith("{")]
    named = [{"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}} for name in names]
    asked = [{"name": name, "in": "query", "schema": schema} for name, schema in operation.query.items()]
    if named or asked:
        described["parameters"] = named + asked
    return described


def _ref(model: type[BaseModel]) -> JsonSchema:
    return {"$ref": REF_TEMPLATE.format(model=model.__name__)}


def _schemas(operations: Sequence[Operation], model: str) -> JsonSchema:
    """Requests as they are read, answers as they are written."""
    bodies = {operation.body for operation in operations if operation.body}
    told = {operation.answer for operation in operations if operation.answer} | {answers.Error}
    kinds = sorted(bodies | told, key=lambda kind: kind.__name__)
    _, page = models_json_schema([(kind, "validation") for kind in kinds], ref_template=REF_TEMPLATE)
    schemas: dict[str, JsonSchema] = page["$defs"]
    for name in _names_below(schemas, [kind.__name__ for kind in bodies]):
        _make_nullable(schemas[name])
        if "model" in schemas[name].get("properties", {}):
            schemas[name]["properties"]["model"]["anyOf"] = [{"const": model}, {"type": "null"}]
    return schemas


def _names_below(schemas: Mapping[str, JsonSchema], names: Sequence[str]) -> set[str]:
    """These schemas, and those that they refer to."""
    found: set[str] = set()
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += [ref.rpartition("/")[2] for ref in _refs(schemas[name])]
    return found


def _refs(schema: Any) -> Iterator[str]:  # noqa: ANN401 - any JSON
    if isinstance(schema, dict):
        if "$ref" in schema:
            yield schema["$ref"]
        schema = list(schema.values())
    for part in schema if isinstance(schema, list) else ():
        yield from _refs(part)


def _make_nullable(schema: JsonSchema) -> None:
    """What may be left out of a request may also be null: clients send it for what they were not given."""
    for name, written in schema.get("properties", {}).items():
        if "default" in written and {"type": "null"} not in written.get("anyOf", ()):
            kept = {key: written.pop(key) for key in ("title", "description") if key in written}
            default = written.pop("default")
            shown = {} if default in (None, [], ()) else {"default": default}
            schema["properties"][name] = kept | shown | {"anyOf": [written, {"type": "null"}]}
