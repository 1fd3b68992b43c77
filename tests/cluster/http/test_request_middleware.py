"""What every endpoint of the API server has: the request's id, extra routes, and errors that name
what exists.
"""

import asyncio
import logging

import httpx
import pytest
from event_loops import in_event_loop
from http_fuzz import check_error
from scripted_token_source import (
    CONTEXT,
    TOKENIZER,
    VOCAB_SIZE,
    ScriptedSource,
    client_for,
    http_app_for,
)
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from tramontane.cluster.config.api_keys import ApiKeys
from tramontane.cluster.http.errors import error_response
from tramontane.cluster.http.request_middleware import AuthMiddleware
from tramontane.cluster.serve_patches.proxy import StripControlHeaders, proxy_middlewares
from tramontane.proto.errors import OverloadedError, PipelineError, UnsatisfiableSchemaError
from tramontane.proto.grpc_messages import DETAILS, error_from_status, status_for
from tramontane.proto.request import FinishReason, TokenEvent
from tramontane.router.openai.detokenizer import ChoiceDetokenizer
from tramontane.router.openai.served_model import ServedModel

BODY = {"model": "tiny", "prompt": "What news?", "max_tokens": 4}


def _get(
    path: str, id_of_client: bytes | None, source: ScriptedSource | None = None
) -> httpx.Response:
    async def scenario() -> httpx.Response:
        async with client_for(http_app_for(source or ScriptedSource()).app()) as client:
            headers = {} if id_of_client is None else {b"x-request-id": id_of_client}
            return await client.get(path, headers=headers)

    return asyncio.run(scenario())


@pytest.mark.parametrize(
    "path", ["/health", "/v1/models", "/v1/models/none", "/nothing", "/v1/completions"]
)
def test_the_clients_id_comes_back_whatever_happens(path: str) -> None:
    assert _get(path, b"job-7/line 3".replace(b" ", b":")).headers.get_list("x-request-id") == [
        "job-7/line:3"
    ]


@pytest.mark.parametrize(
    "given", [None, b"", b"a b", b"a\tb", b"\xff", "\u2028".encode(), b"x" * 129]
)
def test_an_id_that_is_none_is_replaced_by_one_of_our_own(given: bytes | None) -> None:
    first, second = (_get("/health", given).headers["x-request-id"] for _ in range(2))
    assert len(first) == 32
    assert first != second


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_fails_is_named_in_the_log(
    caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    source = ScriptedSource(failure=PipelineError("stage 1 died"), fails_at=2)

    async def scenario() -> None:
        async with client_for(http_app_for(source).app()) as client:
            response = await client.post(
                "/v1/completions", json=BODY | {"stream": stream}, headers={"x-request-id": "mine"}
            )
            assert response.headers["x-request-id"] == "mine"
            assert response.status_code == (200 if stream else 503)

    with caplog.at_level(logging.WARNING):
        asyncio.run(scenario())
    assert [record.getMessage() for record in caplog.records] == [
        "request mine failed: stage 1 died"
    ]


def test_what_is_no_failure_of_ours_is_not_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with client_for(
            http_app_for(ScriptedSource(failure=OverloadedError("too much waits", 3))).app()
        ) as client:
            response = await client.post("/v1/completions", json=BODY)
            assert (response.status_code, response.headers["retry-after"]) == (429, "3")
            assert (await client.post("/v1/completions", json={})).status_code == 400

    asyncio.run(scenario())
    assert caplog.records == []


@pytest.mark.parametrize("sends_id", [True, False])
def test_a_defect_is_named_too_and_once(caplog: pytest.LogCaptureFixture, sends_id: bool) -> None:
    """Ray Serve's proxies write the id themselves, so that there the API server must not."""

    async def defect(_request: Request) -> JSONResponse:
        raise ZeroDivisionError

    async def scenario() -> None:
        server = http_app_for(
            ScriptedSource(), extra_routes=[Route("/defect", defect)], sends_request_id=sends_id
        )
        async with client_for(server.app()) as client:
            for path in ("/defect", "/health"):
                response = await client.get(path, headers={"x-request-id": "mine"})
                assert response.headers.get_list("x-request-id") == ["mine"] * sends_id

    asyncio.run(scenario())
    assert "request mine failed by a defect of the server" in caplog.text


@pytest.mark.parametrize(
    ("given", "kept"), [(b"mine", True), (b"a b", False), (b"x" * 129, False), (b"\xff", False)]
)
@pytest.mark.parametrize("name", [b"x-request-id", b"traceparent"])
def test_ray_serves_proxies_do_not_see_an_id_that_is_none(
    name: bytes, given: bytes, kept: bool
) -> None:
    """They would send it back, whatever it is, or fail where they decode it; without one they make
    their own.
    """
    seen: list[list[tuple[bytes, bytes]]] = []

    async def app(
        scope: dict[str, list[tuple[bytes, bytes]]], _receive: object, _send: object
    ) -> None:
        seen.append(scope["headers"])

    (middleware,) = (each for each in proxy_middlewares() if each.cls is StripControlHeaders)
    scope = {"type": "http", "headers": [(b"host", b"ingress"), (name, given)]}
    asyncio.run(middleware.cls(app)(scope, None, None))  # type: ignore[arg-type]
    assert ((name, given) in seen[0]) is kept


@pytest.mark.parametrize("root", ["", "/below"])
@pytest.mark.parametrize(
    ("path", "passes"),
    [("/-/routes", False), ("/-/x", False), ("/-/healthz", True), ("/health", True)],
)
@in_event_loop
async def test_without_a_key_ray_serve_says_whether_it_is_well_and_no_more(
    root: str, path: str, passes: bool
) -> None:
    async def behind(_request: Request) -> JSONResponse:
        return JSONResponse({})

    (middleware,) = (each for each in proxy_middlewares() if each.cls is StripControlHeaders)
    app = middleware.cls(Starlette(routes=[Route("/{path:path}", behind)]))
    transport = httpx.ASGITransport(app, root_path=root)
    async with httpx.AsyncClient(transport=transport, base_url="http://ingress") as client:
        response = await client.get(root + path)
        assert response.status_code == (200 if passes else 404)
        if not passes:
            check_error(response.content)


@in_event_loop
async def test_extra_routes_are_mounted_and_named() -> None:
    async def files(_request: Request) -> JSONResponse:
        raise OverloadedError("too many files", 2)

    both = [Route("/v1/files", files, methods=[method]) for method in ("GET", "POST")]
    server = http_app_for(ScriptedSource(), extra_routes=both)
    async with client_for(server.app()) as client:
        assert (await client.get("/v1/files")).status_code == 429
        unknown = await client.get("/v1/fields")
        assert (
            check_error(unknown.content)["message"]
            == "'/v1/fields' is not here; there are /v1/chat/completions, /v1/models, /ui and more:"
            " see /docs or /openapi.json"
        )
        wrong = await client.put("/v1/files")
        assert (wrong.status_code, wrong.headers["allow"]) == (405, "GET, HEAD, POST")
        assert (
            check_error(wrong.content)["message"]
            == "'/v1/files' does not take PUT; it takes GET and POST"
        )
        named = await client.delete("/v1/models/demo")
        assert (
            check_error(named.content)["message"]
            == "'/v1/models/demo' does not take DELETE; it takes GET"
        )
        long = await client.get("/" + "x" * 4000)
        assert len(check_error(long.content)["message"]) < 200


# Tokens


def _post(path: str, body: object, model: ServedModel | None = None) -> httpx.Response:
    async def scenario() -> httpx.Response:
        server = http_app_for(ScriptedSource(), **({} if model is None else {"model": model}))
        async with client_for(server.app()) as client:
            return await client.post(path, json=body)

    return asyncio.run(scenario())


@pytest.mark.parametrize(
    "text", ["What news?", "", " two  spaces ", "naïve \U0001f32c", "</s>[INST]", "la " * 30]
)
def test_tokens_are_those_of_prompts_and_give_the_text_back(text: str) -> None:
    reported = _post(
        "/tokenize", {"model": "tiny", "prompt": text, "add_special_tokens": True}
    ).json()
    expected = list(TOKENIZER.encode(text))
    assert reported == {
        "count": len(expected),
        "max_model_len": CONTEXT,
        "tokens": expected,
        "token_strs": None,
    }
    assert _post("/detokenize", {"model": "tiny", "tokens": expected}).json() == {"prompt": text}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": ["a"]}, "prompt"),
        ("/tokenize", {"prompt": "a" * 10_000}, "prompt"),
        ("/tokenize", {"prompt": "a", "add_special_tokens": False}, "add_special_tokens"),
        ("/tokenize", {"prompt": "a", "reasoning_effort": "high"}, "reasoning_effort"),
        ("/tokenize", {"prompt": "a", "chat_template_kwargs": {"a": 1}}, "chat_template_kwargs"),
        ("/detokenize", {"tokens": [1] * (CONTEXT + 1)}, "tokens"),
        ("/detokenize", {"tokens": [VOCAB_SIZE]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {"tokens": ["1"]}, "tokens[0]"),
        ("/detokenize", {"tokens": 1}, "tokens"),
    ],
)
def test_what_cannot_be_tokenized_is_refused(
    path: str, body: dict[str, object], param: str
) -> None:
    response = _post(path, body)
    assert response.status_code == 400
    check_error(response.content, param)


def test_a_lone_surrogate_is_no_text() -> None:
    async def scenario() -> httpx.Response:
        async with client_for(http_app_for(ScriptedSource()).app()) as client:
            return await client.post("/tokenize", content=b'{"prompt": "\\ud800"}')

    assert asyncio.run(scenario()).status_code == 400


def test_a_model_without_a_tokenizer_says_so() -> None:
    bare = ServedModel("tiny", None, CONTEXT, 16, VOCAB_SIZE)
    for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]})):
        response = _post(path, body, bare)
        assert response.status_code == 400
        assert "no tokenizer" in check_error(response.content)["message"]
    unknown = _post("/tokenize", {"model": "gpt", "prompt": "a"})
    assert (unknown.status_code, check_error(unknown.content)["code"]) == (404, "model_not_found")


def test_a_schema_that_no_try_can_follow_is_not_worth_another() -> None:
    text = ChoiceDetokenizer(None, ())
    with pytest.raises(UnsatisfiableSchemaError) as raised:
        text.push(TokenEvent(0, 5, FinishReason.ERROR))
    response, refusal = error_response(raised.value), status_for(raised.value)
    assert (response.status_code, "retry-after" in response.headers) == (400, False)
    assert check_error(bytes(response.body), code="unfollowable")["type"] == "invalid_request_error"
    assert isinstance(
        error_from_status(refusal.code, refusal.message, [(DETAILS, refusal.details)]),
        UnsatisfiableSchemaError,
    )


def test_a_websocket_is_closed_before_any_endpoint_sees_it() -> None:
    """No endpoint takes one, and none asks for its key."""
    sent = []

    async def app(_scope: Scope, _receive: Receive, _send: Send) -> None:
        raise AssertionError("the application must not see it")

    async def receive() -> Message:
        raise AssertionError("nothing of it is read")

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {"type": "websocket", "path": "/v1/completions", "headers": []}
    asyncio.run(AuthMiddleware(app, ApiKeys(), sends_id=True)(scope, receive, send))
    assert sent == [{"type": "websocket.close"}]
