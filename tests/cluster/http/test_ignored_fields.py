"""Fields of requests that have no effect: the header that names them, the metric that counts them,
and servers that refuse unknown ones.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from batch_jobs import BatchHarness, new_batch_harness
from event_loops import in_event_loop
from examples import examples
from http_fuzz import check_error
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_token_source import ScriptedSource, client_for, http_app_for
from starlette.applications import Starlette
from tokenizer_files import SENTENCEPIECE

from tramontane.cluster.http.batch_endpoints import MAX_BATCH_BODY, BatchEndpoints
from tramontane.cluster.http.body_reader import (
    MAX_WARNING_CHARS,
    BodyLimiter,
    BodyReader,
    warning_header,
)
from tramontane.cluster.http.errors import ERROR_HANDLERS
from tramontane.router.openai.request_context import RequestStats
from tramontane.router.openai.served_model import ServedModel
from tramontane.router.tokenization.backends import SentencePieceTokenizer
from tramontane.router.tokenization.mistral_chat import MistralChatTemplate

PATH = SENTENCEPIECE["v3"]
TOKENIZER = SentencePieceTokenizer(PATH)
MODEL = ServedModel("demo", TOKENIZER, 512, 16, TOKENIZER.vocab_size)
CHAT = MistralChatTemplate.from_sentencepiece(PATH)
USER = {"role": "user", "content": "a"}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a"},
    "/v1/chat/completions": {"messages": [USER]},
    "/v1/fim/completions": {"prompt": "a"},
    "/v1/responses": {"input": "a"},
    "/v1/messages": {"messages": [USER], "max_tokens": 5},
    "/v1/messages/count_tokens": {"messages": [USER]},
    "/tokenize": {"messages": [USER]},
    "/detokenize": {"tokens": [5]},
}
HEAD, TAIL = '299 - "ignored: ', '"'


@settings(derandomize=True, deadline=None, max_examples=examples(200))
@given(names=st.lists(st.text(max_size=40), min_size=1, max_size=100))
def test_a_warning_is_short_and_printable_whatever_the_names_are(names: list[str]) -> None:
    [(header, value)] = warning_header(names).items()
    assert header == "Warning"
    assert value.isascii()
    assert value.isprintable()
    assert value.startswith(HEAD)
    assert value.endswith(TAIL)
    named = value.removeprefix(HEAD).removesuffix(TAIL)
    assert not set(named) & {'"', "\\"}, "it is one quoted string"
    assert len(named) <= MAX_WARNING_CHARS + len(", ...")


def test_a_warning_has_all_names_that_there_is_room_for() -> None:
    assert warning_header(()) == {}
    assert warning_header(["a", "b[].c"]) == {"Warning": '299 - "ignored: a, b[].c"'}
    assert warning_header(['a"\\\u00e9\r\n']) == {"Warning": '299 - "ignored: a?????"'}
    names = [f"field{number:04}" for number in range(1000)]
    value = warning_header(names)["Warning"]
    assert value.removeprefix(HEAD) == f'{", ".join(names)[:MAX_WARNING_CHARS]}, ..."'


@pytest.mark.parametrize("path", BODIES)
@in_event_loop
async def test_every_endpoint_names_and_counts_what_it_ignores(path: str) -> None:
    model = replace(MODEL, counts=RequestStats())
    app = http_app_for(ScriptedSource(), model, chat=CHAT).app()
    async with client_for(app) as client:
        plain = await client.post(path, json=BODIES[path] | {"tone": None})
        assert (plain.status_code, "warning" in plain.headers) == (200, False)
        assert model.counts.ignored_fields == 0
        more = {"tone": "red", "size": [1], "stream\u00e9\u00e9\u00e9": 1}
        response = await client.post(path, json=BODIES[path] | more)
        assert response.status_code == 200, response.text
        assert response.headers["warning"] == '299 - "ignored: size, stream???, tone"'
        assert model.counts.ignored_fields == 3


@pytest.mark.parametrize("path", BODIES)
@in_event_loop
async def test_a_strict_server_refuses_unknown_fields_and_no_others(path: str) -> None:
    source, model = ScriptedSource(), replace(MODEL, counts=RequestStats())
    app = http_app_for(source, model, chat=CHAT, strict_requests=True).app()
    async with client_for(app) as client:
        refused = await client.post(path, json=BODIES[path] | {"tone": "red"})
        assert refused.status_code == 400
        error = check_error(refused.content, param="tone", path=path)
        assert error["message"] == "tone is not a parameter of this endpoint"
        assert (source.requested, model.counts.ignored_fields) == ([], 0)
        answered = await client.post(path, json=BODIES[path] | {"tone": None})
        assert answered.status_code == 200


WITHIN: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/chat/completions", {"messages": [USER | {"x": 1}]}, "messages[0].x"),
    (
        "/v1/chat/completions",
        {"messages": [USER | {"content": [{"type": "text", "text": "a", "x": 1}]}]},
        "messages[].content[].x",
    ),
    ("/v1/completions", {"stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
    ("/v1/responses", {"reasoning": {"x": 1}}, "reasoning.x"),
    (
        "/v1/messages",
        {"messages": [USER | {"content": [{"type": "text", "text": "a", "x": 1}]}]},
        "messages[0].content[0].x",
    ),
    ("/v1/messages", {"system": [{"type": "text", "text": "a", "x": 1}]}, "system[].x"),
]


@pytest.mark.parametrize(("path", "more", "name"), WITHIN)
@in_event_loop
async def test_a_strict_server_refuses_unknown_fields_at_every_depth(
    path: str, more: dict[str, Any], name: str
) -> None:
    app = http_app_for(ScriptedSource(), MODEL, chat=CHAT, strict_requests=True).app()
    async with client_for(app) as client:
        refused = await client.post(path, json=BODIES[path] | more)
        assert refused.status_code == 400
        error = check_error(refused.content, path=path)
        assert error["message"] == f"{name} is not a parameter of this endpoint"
        known = json.loads(json.dumps(BODIES[path] | more).replace('"x": 1', '"x": null'))
        assert (await client.post(path, json=known)).status_code == 200


@in_event_loop
async def test_a_strict_server_takes_what_is_known_to_have_no_effect() -> None:
    app = http_app_for(ScriptedSource(), MODEL, chat=CHAT, strict_requests=True).app()
    part = {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}
    body = {"messages": [USER | {"content": [part]}], "user": "me", "store": True}
    async with client_for(app) as client:
        response = await client.post("/v1/chat/completions", json=body)
        assert response.status_code == 200, response.text
        names = "messages[].content[].cache_control, store, user"
        assert response.headers["warning"] == f'299 - "ignored: {names}"'


@in_event_loop
async def test_an_effort_is_named_only_where_the_model_knows_none() -> None:
    model = replace(MODEL, counts=RequestStats())
    async with client_for(http_app_for(ScriptedSource(), model, chat=CHAT).app()) as client:
        body = {"messages": [USER], "reasoning_effort": "high"}
        response = await client.post("/v1/chat/completions", json=body)
        assert response.headers["warning"] == '299 - "ignored: reasoning_effort"'
        assert model.counts.ignored_fields == 1


def _batch_app(harness: BatchHarness, *, is_strict: bool = False) -> tuple[Starlette, RequestStats]:
    counts = RequestStats()
    bodies = BodyReader(BodyLimiter(), MAX_BATCH_BODY, counts, refuses_unknown=is_strict)
    routes = BatchEndpoints(harness.service(), bodies).routes()
    return Starlette(routes=routes, exception_handlers=ERROR_HANDLERS), counts


@pytest.mark.parametrize("is_strict", [False, True])
@in_event_loop
async def test_a_file_may_have_unknown_fields_unless_the_server_is_strict(
    tmp_path: Path, is_strict: bool
) -> None:
    harness = new_batch_harness(tmp_path)
    app, counts = _batch_app(harness, is_strict=is_strict)
    line = json.dumps({"custom_id": "a", "body": {"prompt": "a"}}).encode()

    async def upload(client: Any, **fields: str) -> Any:
        data = {"purpose": "batch"} | fields
        return await client.post("/v1/files", data=data, files={"file": ("f", line)})

    async with client_for(app) as client:
        expiry = {"expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"}
        made = await upload(client, **expiry)
        assert made.status_code == 200, made.text
        names = ", ".join(expiry)
        assert made.headers["warning"] == f'299 - "ignored: {names}"'
        assert counts.ignored_fields == 2
        unknown = await upload(client, visibility="workspace")
        misspelt = await upload(client, purpos="batch")
        check_error(misspelt.content, param="purpos")
        assert "did you mean purpose?" in misspelt.text
        if is_strict:
            check_error(unknown.content, param="visibility")
            assert counts.ignored_fields == 2
        else:
            assert unknown.headers["warning"] == '299 - "ignored: visibility"'
            assert counts.ignored_fields == 3
        assert unknown.status_code == (400 if is_strict else 200)
        assert len((await client.get("/v1/files")).json()["data"]) == (1 if is_strict else 2)
    harness.close()


@pytest.mark.parametrize("path", ["/v1/files", "/v1/batches"])
@in_event_loop
async def test_a_list_may_be_asked_for_with_unknown_parameters(tmp_path: Path, path: str) -> None:
    harness = new_batch_harness(tmp_path)
    app, counts = _batch_app(harness)
    async with client_for(app) as client:
        listed = await client.get(path, params={"page": "0", "page_size": "100", "limit": "5"})
        assert listed.status_code == 200, listed.text
        assert listed.headers["warning"] == '299 - "ignored: page, page_size"'
        assert counts.ignored_fields == 2
        # A client that reads page after page until one is empty would never end.
        check_error((await client.get(path, params={"page": "1"})).content, param="page")
        check_error((await client.get(path, params={"limt": "1"})).content, param="limt")
        assert "warning" not in (await client.get(path, params={"limit": "5"})).headers
    harness.close()


@pytest.mark.parametrize("is_strict", [False, True])
@in_event_loop
async def test_a_batch_job_may_have_unknown_fields_unless_the_server_is_strict(
    tmp_path: Path, is_strict: bool
) -> None:
    harness = new_batch_harness(tmp_path)
    app, _ = _batch_app(harness, is_strict=is_strict)
    line = json.dumps({"custom_id": "a", "body": {"prompt": "a"}}).encode()
    async with client_for(app) as client:
        form: Any = {"data": {"purpose": "batch"}, "files": {"file": ("f", line)}}
        file_id = (await client.post("/v1/files", **form)).json()["id"]
        body = {"input_file_id": file_id, "endpoint": "/v1/completions", "tone": None}
        body |= {"output_expires_after": {"anchor": "created_at", "seconds": 3600}}
        made = await client.post("/v1/batches", json=body)
        assert made.status_code == 200, made.text
        assert made.headers["warning"] == '299 - "ignored: output_expires_after"'
        unknown = await client.post("/v1/batches", json=body | {"tone": "red"})
        if is_strict:
            check_error(unknown.content, param="tone")
        else:
            names = "output_expires_after, tone"
            assert unknown.headers["warning"] == f'299 - "ignored: {names}"'
        assert unknown.status_code == (400 if is_strict else 200)
    harness.close()
