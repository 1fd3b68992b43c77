"""The description of the API server is true: whatever it allows is answered as it says, and nothing
breaks the server.
"""

import asyncio
import json
import math
import re
from collections.abc import Mapping
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import pytest
import schemathesis
from activity_records import pipeline_activity
from examples import examples
from http_fuzz import check_error
from hypothesis import HealthCheck, Phase, settings
from jsonschema import Draft202012Validator
from pydantic import BaseModel, SecretStr
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)
from scripted_token_source import ScriptedSource, client_for, http_app_for
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from tramontane.cluster.config.api_keys import ApiKeys
from tramontane.cluster.config.measurements import ExpertLoad
from tramontane.cluster.http.batch_endpoints import BATCH_OPERATIONS, BatchEndpoints
from tramontane.cluster.http.metrics_endpoint import METRICS_OPERATIONS, MetricsEndpoint
from tramontane.cluster.http.openapi import Operation
from tramontane.cluster.http.static_pages import docs_routes, root_route, ui_routes
from tramontane.cluster.http.status_endpoints import ACTIVITY_OPERATIONS, ActivityEndpoint
from tramontane.proto.errors import ConfigError
from tramontane.router.batch.service import BatchService, JobSettings
from tramontane.router.chat_apis.messages_request import MessagesRequest
from tramontane.router.chat_apis.responses_request import ResponsesRequest
from tramontane.router.engine.activity_log import PipelineActivity
from tramontane.router.openai.chat_request import ChatRequest, parse_chat
from tramontane.router.openai.completion_request import (
    CompletionRequest,
    parse_body,
    parse_completion,
)
from tramontane.router.openai.request_context import RequestStats
from tramontane.router.openai.tokenize import Detokenized

USER = {"role": "user", "content": "Hello!"}


async def _move(load: ExpertLoad) -> tuple[int, int]:
    if [len(layer) for layer in load] != [2, 2]:
        raise ConfigError("the measured load is not of this model")
    return 1, 2


PLACE = TemporaryDirectory()
BATCHES = BatchService(
    JobSettings(f"sqlite:///{PLACE.name}/jobs.sqlite", f"{PLACE.name}/storage", "tiny")
)


async def _activity(_after: Mapping[str, int]) -> list[PipelineActivity]:
    return [pipeline_activity()]


EVERYTHING = {
    "move_experts": _move,
    "extra_routes": [
        *BatchEndpoints(BATCHES).routes(),
        *ActivityEndpoint(_activity).routes(),
        *MetricsEndpoint(_activity, "tiny", RequestStats()).routes(),
    ],
    "extra_operations": {**BATCH_OPERATIONS, **ACTIVITY_OPERATIONS, **METRICS_OPERATIONS},
}
APP = http_app_for(ScriptedSource(), **EVERYTHING).app()


def _get(path: str, **settings: object) -> httpx.Response:
    async def scenario() -> httpx.Response:
        async with client_for(http_app_for(ScriptedSource(), **settings).app()) as client:
            client.headers["authorization"] = "Bearer secret"
            return await client.get(path)

    return asyncio.run(scenario())


schema = schemathesis.openapi.from_asgi("/openapi.json", APP)
# else every call fails that takes 10 s, on a machine that is busy
schema.config.update(request_timeout=math.inf)


def refuses_what_it_forbids(context: Any, response: Any, case: Any) -> bool | None:
    """Larger bodies than the API server reads are refused as such. Of a message's two roles of one
    kind schemathesis takes the second for forbidden, so another validator has to agree.
    """
    if response.status_code == 413 or _is_allowed(case):
        return None
    return negative_data_rejection(context, response, case)


def _is_allowed(case: Any) -> bool:
    described = schema.raw_schema["paths"][case.operation.path][case.operation.method.lower()]
    content = described.get("requestBody", {}).get("content", {}).get("application/json")
    if content is None or case.query or not isinstance(case.body, dict):
        return False
    whole = content["schema"] | {"components": schema.raw_schema["components"]}
    return bool(Draft202012Validator(whole).is_valid(case.body))


@pytest.mark.parametrize(
    ("message", "is_allowed"),
    [
        ({"role": "developer"}, True),
        ({"role": "system", "content": "a", "size": 1}, True),
        ({"role": "narrator"}, False),
        ({"role": "user", "content": 5}, False),
        ({"content": "a"}, False),
    ],
)
def test_the_other_validator_knows_what_is_forbidden(
    message: dict[str, Any], is_allowed: bool
) -> None:
    case = schema["/tokenize"]["POST"].Case(
        body={"messages": [message]}, media_type="application/json"
    )
    assert _is_allowed(case) is is_allowed


CHECKS = [
    refuses_what_it_forbids,
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]


@schema.parametrize()
@settings(
    derandomize=True,
    max_examples=examples(60),  # next to the coverage phase, which tries the bounds of every field
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
    database=None,
)
def test_whatever_it_allows_is_answered_as_it_says(case: Any) -> None:
    case.call_and_validate(checks=CHECKS)


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
FUNCTION = {"type": "function", "name": "f", "parameters": {"type": "object"}}
RICH: list[tuple[str, dict[str, Any]]] = [
    (
        "/v1/completions",
        {"prompt": ["a", "b"], "n": 2, "logprobs": 2, "echo": True, "return_token_ids": True},
    ),
    (
        "/v1/completions",
        {"prompt": "a", "prompt_logprobs": 1, "stop": "my", "logit_bias": {"7": 1}},
    ),
    (
        "/v1/completions",
        {"prompt": [1, 300], "stream": True, "stream_options": {"include_usage": True}},
    ),
    (
        "/v1/chat/completions",
        {"messages": [USER], "n": 2, "logprobs": True, "top_logprobs": 2, "return_token_ids": True},
    ),
    (
        "/v1/chat/completions",
        {"messages": [USER], "tools": [TOOL], "tool_choice": "none", "max_tokens": 1},
    ),
    ("/v1/chat/completions", {"messages": [USER], "response_format": {"type": "json_object"}}),
    (
        "/v1/chat/completions",
        {"messages": [USER | {"content": [{"type": "text", "text": "a"}]}], "stream": True},
    ),
    (
        "/v1/chat/completions",
        {"messages": [USER], "stream": True, "stream_options": {"continuous_usage_stats": True}},
    ),
    (
        "/v1/chat/completions",
        {"messages": [USER], "guided_choice": ["a"], "stop_token_ids": [5], "metadata": {"a": 1}},
    ),
    ("/v1/completions", {"prompt": "a", "structured_outputs": {"regex": "a+"}, "random_seed": 1}),
    (
        "/v1/responses",
        {
            "input": "a",
            "include": ["message.output_text.logprobs"],
            "top_logprobs": 2,
            "max_output_tokens": 2,
        },
    ),
    (
        "/v1/responses",
        {
            "input": [USER],
            "instructions": "b",
            "metadata": {"a": "b"},
            "text": {"format": {"type": "text"}},
        },
    ),
    ("/v1/responses", {"input": "a", "tools": [FUNCTION], "tool_choice": "none", "stream": True}),
    (
        "/v1/messages",
        {"messages": [USER], "max_tokens": 5, "system": "b", "stop_sequences": ["my"], "top_k": 3},
    ),
    (
        "/v1/messages",
        {
            "messages": [USER | {"content": [{"type": "text", "text": "a"}]}],
            "max_tokens": 5,
            "stream": True,
        },
    ),
    ("/v1/messages/count_tokens", {"messages": [USER], "system": [{"type": "text", "text": "a"}]}),
    ("/tokenize", {"messages": [USER]}),
]


@pytest.mark.parametrize(("path", "body"), RICH)
def test_answers_with_everything_are_as_it_says(path: str, body: dict[str, Any]) -> None:
    case = schema[path]["POST"].Case(body=body, media_type="application/json")
    assert case.call_and_validate(checks=CHECKS).status_code == 200


PATTERNS = [
    {"type": "string", "pattern": f"^[a-z]{{0,{i}}}x[a-z]{{0,{97 - i}}}$"} for i in range(28)
]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize(
    "hostile",
    [
        {"multipleOf": 10**400},
        {"allOf": PATTERNS},
        {"$ref": "file:///etc/passwd"},
        {"enum": ["x" * 70_000]},
    ],
    ids=lambda hostile: next(iter(hostile)),
)
def test_hostile_schemas_are_refused(path: str, hostile: dict[str, Any]) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": hostile}}
    given = {"prompt": "a"} if path == "/v1/completions" else {"messages": [USER]}
    case = schema[path]["POST"].Case(
        body=given | {"response_format": form}, media_type="application/json"
    )
    assert case.call_and_validate(checks=CHECKS[1:]).status_code in (400, 413)


PART = 'Content-Disposition: form-data; name="file"; filename="a"'


@pytest.mark.parametrize(
    ("content_type", "head"),
    [
        ("multipart/form-data", PART),
        ("multipart/form-data; boundary=", PART),
        ("multipart/form-data; boundary=" + "x" * 5000, PART),
        ("multipart/form-data; boundary=other", PART),
        ("multipart/form-data; boundary=x; charset=nothing", PART),
        ("multipart/form-data; boundary=x", "Content-Disposition: form-data"),
        ("multipart/form-data; boundary=x", "Content-Disposition: form-data; name*=nothing'en'%ff"),
        ("multipart/form-data; boundary=x", PART + "\r\nContent-Type: text/plain; charset=nothing"),
        ("multipart/form-data; boundary=x", PART + "\r\nContent-Transfer-Encoding: base64"),
        ("multipart/form-data; boundary=x", "\r\n".join(f"X-{i}: {'x' * 100}" for i in range(500))),
        ("multipart/form-data; boundary=x", "Content-Type: text/plain"),
        ("multipart/form-data; boundary=x", 'Content-Disposition: form-data; name="\xff"'),
        ("multipart/form-data; boundary=x", "no header"),
        ("multipart/form-data; boundary=x", "\0: \0"),
    ],
)
def test_hostile_headers_of_an_upload_are_refused(content_type: str, head: str) -> None:
    """None of them says its purpose, so none is a file."""

    async def scenario() -> httpx.Response:
        async with client_for(APP) as client:
            body = f"--x\r\n{head}\r\n\r\na\r\n--x--\r\n"
            return await client.post(
                "/v1/files", content=body.encode("latin-1"), headers={"content-type": content_type}
            )

    response = asyncio.run(scenario())
    assert response.status_code == 400, response.text
    check_error(response.content)


def test_a_file_and_its_job_are_as_it_says() -> None:
    line = json.dumps({"custom_id": "a", "body": {"prompt": "a"}}).encode()
    upload = {"body": {"purpose": "batch", "file": line}, "media_type": "multipart/form-data"}
    file = schema["/v1/files"]["POST"].Case(**upload).call_and_validate(checks=CHECKS).json()
    name = {"path_parameters": {"file_id": file["id"]}}
    content = (
        schema["/v1/files/{file_id}/content"]["GET"].Case(**name).call_and_validate(checks=CHECKS)
    )
    assert content.content == line
    body = {"input_file_id": file["id"], "endpoint": "/v1/completions", "metadata": {"who": "me"}}
    made = (
        schema["/v1/batches"]["POST"]
        .Case(body=body, media_type="application/json")
        .call_and_validate(checks=CHECKS)
        .json()
    )
    name = {"path_parameters": {"job_id": made["id"]}}
    assert (
        schema["/v1/batches/{job_id}/cancel"]["POST"]
        .Case(**name)
        .call_and_validate(checks=CHECKS)
        .json()["id"]
        == made["id"]
    )
    for path in ("/v1/files", "/v1/batches"):
        assert (
            schema[path]["GET"]
            .Case(query={"limit": 1})
            .call_and_validate(checks=CHECKS)
            .json()["data"]
        )


def test_every_route_is_described() -> None:
    page = _get("/openapi.json", **EVERYTHING).json()
    there = {
        (method.upper(), path) for path, methods in page["paths"].items() for method in methods
    }
    routes = [
        route
        for route in http_app_for(ScriptedSource(), **EVERYTHING).app().routes
        if isinstance(route, Route)
    ]
    taken = {
        (method, route.path_format)
        for route in routes
        for method in (route.methods or set()) - {"HEAD"}
    }
    of_the_page = {
        ("GET", "/openapi.json"),
        *(("GET", route.path) for route in [root_route(), *docs_routes(), *ui_routes()]),
    }
    assert taken - of_the_page == there
    assert all(
        described["summary"] != path
        for path, methods in page["paths"].items()
        for described in methods.values()
    )
    assert "post" not in _get("/openapi.json").json()["paths"]["/experts"]


def test_keys_are_in_the_description_where_they_are_needed() -> None:
    open_page, page = (
        _get("/openapi.json").json(),
        _get("/openapi.json", keys=ApiKeys([SecretStr("secret")])).json(),
    )
    assert "security" not in open_page
    assert (
        page["components"]["securitySchemes"][next(iter(page["security"][0]))]["scheme"] == "bearer"
    )
    without = [
        path
        for path, methods in page["paths"].items()
        if any("401" not in each["responses"] for each in methods.values())
    ]
    assert without == ["/health", "/ping"]
    assert [
        path
        for path, methods in page["paths"].items()
        if methods.get("get", {}).get("security") == []
    ] == without


def test_extra_routes_describe_themselves() -> None:
    async def files(_request: Request) -> JSONResponse:
        return JSONResponse({})

    routes = [Route("/v1/files", files), Route("/v1/other/{id}", files)]
    page = _get(
        "/openapi.json",
        extra_routes=routes,
        extra_operations={("GET", "/v1/files"): Operation("Files", Detokenized)},
    )
    assert page.json()["paths"]["/v1/files"]["get"]["summary"] == "Files"
    assert page.json()["paths"]["/v1/other/{id}"]["get"]["parameters"][0]["name"] == "id"


@pytest.mark.parametrize(
    ("model", "parse", "needed"),
    [
        (CompletionRequest, parse_completion, '"prompt": "a"'),
        (ChatRequest, parse_chat, '"messages": [{"role": "user", "content": "a"}]'),
        (ResponsesRequest, partial(parse_body, ResponsesRequest), '"input": "a"'),
        (
            MessagesRequest,
            partial(parse_body, MessagesRequest),
            '"messages": [{"role": "user", "content": "a"}], "max_tokens": 1',
        ),
    ],
)
def test_what_may_be_left_out_may_be_null(model: type[BaseModel], parse: Any, needed: str) -> None:
    """As the description says of all requests."""
    described = _get("/openapi.json").json()["components"]["schemas"][model.__name__]
    assert described["properties"].keys() == model.model_fields.keys()
    assert described["additionalProperties"] is True, "unknown fields are ignored"
    for name in model.model_fields.keys() - {
        "prompt",
        "messages",
        "input",
        "max_tokens" if model is MessagesRequest else "",
    }:
        assert {"type": "null"} in described["properties"][name]["anyOf"], name
        body = f'{{{needed}, "{name}": null}}'.encode()
        assert parse(body).model_dump(exclude={name}) == parse(f"{{{needed}}}".encode()).model_dump(
            exclude={name}
        )


def test_the_page_loads_nothing_from_elsewhere() -> None:
    page = _get("/docs")
    assert page.headers["content-type"].startswith("text/html")
    used = re.findall(r'(?:src|href)="([^"]*)"', page.text)
    assert len(used) == 3
    assert not any("//" in address for address in used)
    assert "default-src 'self'" in page.headers["content-security-policy"]
    for address in used:
        if not address.startswith("data:"):
            asset = _get(f"/{address}")
            assert asset.status_code == 200
            assert asset.headers["content-type"].startswith(("text/javascript", "text/css"))
            assert len(asset.content) > 100_000
    assert _get("/docs/other.js").status_code == 404
    slash = _get("/docs/")
    assert (slash.status_code, str(slash.url.join(slash.headers["location"]))) == (
        307,
        "http://ingress/docs",
    )
