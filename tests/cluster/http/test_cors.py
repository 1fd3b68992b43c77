"""Web pages of other origins: which may call the server, and what their scripts can read."""

import httpx
import pytest
from event_loops import in_event_loop
from pydantic import SecretStr
from scripted_token_source import ScriptedSource, client_for, http_app_for

from tramontane.cluster.config.api_keys import ApiKeys

PAGE, OTHER = "https://chat.example.com", "https://evil.example.com"
BODY = {"prompt": "What news?", "max_tokens": 4, "unknown_field": 1}


async def _ask(
    method: str, origin: str, headers: dict[str, str] | None = None, *, allowed: tuple[str, ...]
) -> httpx.Response:
    keys = ApiKeys([SecretStr("secret")])
    app = http_app_for(ScriptedSource(), keys=keys, allowed_origins=allowed).app()
    async with client_for(app) as client:
        body = {"json": BODY} if method == "POST" else {}
        given = {"origin": origin} | (headers or {})
        return await client.request(method, "/v1/completions", headers=given, **body)


PREFLIGHT = {
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type,x-stainless-os",
}
WITH_KEY = {"authorization": "Bearer secret"}


@pytest.mark.parametrize("allowed", [(PAGE,), (OTHER, PAGE), ("*",)])
@in_event_loop
async def test_a_page_of_an_allowed_origin_may_ask_before_it_sends_its_key(
    allowed: tuple[str, ...],
) -> None:
    answer = await _ask("OPTIONS", PAGE, PREFLIGHT, allowed=allowed)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] in (PAGE, "*")
    assert "POST" in answer.headers["access-control-allow-methods"]
    assert "x-stainless-os" in answer.headers["access-control-allow-headers"]


@in_event_loop
async def test_its_script_reads_the_answer_and_the_headers_of_ours() -> None:
    answer = await _ask("POST", PAGE, WITH_KEY, allowed=(PAGE,))
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == PAGE
    exposed = {name.strip() for name in answer.headers["access-control-expose-headers"].split(",")}
    assert exposed == {"x-request-id", "warning", "x-tramontane-fingerprint", "retry-after"}
    assert {"x-request-id", "warning"} <= set(answer.headers)


@in_event_loop
async def test_its_script_reads_that_the_key_is_wrong() -> None:
    answer = await _ask("POST", PAGE, {"authorization": "Bearer wrong"}, allowed=(PAGE,))
    assert answer.status_code == 401
    assert answer.headers["access-control-allow-origin"] == PAGE


@in_event_loop
async def test_a_page_of_another_origin_may_not() -> None:
    asked = await _ask("OPTIONS", OTHER, PREFLIGHT, allowed=(PAGE,))
    assert asked.status_code == 400
    assert "access-control-allow-origin" not in asked.headers
    sent = await _ask("POST", OTHER, WITH_KEY, allowed=(PAGE,))
    assert "access-control-allow-origin" not in sent.headers


@in_event_loop
async def test_without_the_option_no_page_of_another_origin_may() -> None:
    assert (await _ask("OPTIONS", PAGE, PREFLIGHT, allowed=())).status_code == 401
    sent = await _ask("POST", PAGE, WITH_KEY, allowed=())
    assert not any(name.startswith("access-control") for name in sent.headers)
