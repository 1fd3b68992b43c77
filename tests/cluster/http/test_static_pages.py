"""The files of /ui, as the API server sends them."""

import asyncio
import re
from importlib.metadata import version

import httpx
import pytest
from http_fuzz import check_error
from pydantic import SecretStr
from scripted_token_source import ScriptedSource, client_for, http_app_for

from tramontane.cluster.config.api_keys import ApiKeys
from tramontane.cluster.http.static_pages import UI_ASSETS, UI_FOLDER

LONGEST = 200  # lines of a script


def _get(path: str, **headers: str) -> httpx.Response:
    """Without a key, of a server that requires one."""

    async def scenario() -> httpx.Response:
        async with client_for(
            http_app_for(ScriptedSource(), keys=ApiKeys([SecretStr("secret")])).app()
        ) as client:
            return await client.get(path, headers=headers)

    return asyncio.run(scenario())


@pytest.mark.parametrize("path", ["/ui", *UI_ASSETS])
def test_every_file_is_public_typed_and_revalidated(path: str) -> None:
    answer = _get(path)
    assert answer.status_code == 200
    name = "index.html" if path == "/ui" else path.rpartition("/")[2]
    assert answer.content == (UI_FOLDER / name).read_bytes()
    types = {
        "html": "text/html",
        "css": "text/css",
        "js": "text/javascript",
        "svg": "image/svg+xml",
    }
    assert answer.headers["content-type"].partition(";")[0] == types[name.rpartition(".")[2]]
    assert answer.headers["cache-control"] == "no-cache"
    assert answer.headers["x-content-type-options"] == "nosniff"
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self';")
    assert "unsafe" not in policy
    for known in (answer.headers["etag"], f'"x", W/{answer.headers["etag"]}'):
        again = _get(path, **{"if-none-match": known})
        assert (again.status_code, again.content, again.headers["etag"]) == (
            304,
            b"",
            answer.headers["etag"],
        )
    assert _get(path, **{"if-none-match": '"x"'}).status_code == 200


@pytest.mark.parametrize(
    "path",
    [
        "/ui/other.js",
        "/ui/index.html",
        "/ui/../ui_page.py",
        "/ui//app.js",
        "/ui/%2e%2e/ui_page.py",
        "/uix",
    ],
)
def test_nothing_else_is_open(path: str) -> None:
    answer = _get(path)
    assert answer.status_code == 401
    check_error(answer.content, code="invalid_api_key")


def test_a_slash_leads_to_the_page() -> None:
    slash = _get("/ui/")
    assert (slash.status_code, str(slash.url.join(slash.headers["location"]))) == (
        307,
        "http://ingress/ui",
    )


@pytest.mark.parametrize(
    "accept", ["Text/HTML", "text/html,application/xhtml+xml;q=0.9,*/*;q=0.8", "*/*", ""]
)
def test_the_root_leads_a_browser_to_the_page_and_names_paths_to_others(accept: str) -> None:
    root = _get("/", accept=accept)
    assert root.headers["vary"] == "accept"
    if "html" in accept.lower():
        assert (root.status_code, str(root.url.join(root.headers["location"]))) == (
            307,
            "http://ingress/ui",
        )
    else:
        assert root.status_code == 200
        assert root.json() == {
            "ui": "ui",
            "docs": "docs",
            "openapi": "openapi.json",
            "health": "health",
        }
        answers = {path: _get(f"/{path}").status_code for path in root.json().values()}
        assert answers == {"ui": 200, "health": 200, "docs": 401, "openapi.json": 401}


def test_the_version_needs_a_key_as_all_but_the_pages_do() -> None:
    assert _get("/version").status_code == 401
    answer = _get("/version", authorization="Bearer secret")
    assert answer.json() == {"version": version("tramontane")}


def test_all_that_a_file_names_is_there_and_small() -> None:
    named = set(re.findall(r'(?:src|href)="(ui/[^"]*)"', (UI_FOLDER / "index.html").read_text()))
    scripts = {path: path.read_text() for path in UI_FOLDER.glob("*.js")}
    for text in scripts.values():
        named |= {f"ui/{name}" for name in re.findall(r'from "\./([^"]+)"', text)}
    assert {f"/{name}" for name in named} == set(UI_ASSETS)
    assert all(len(text.splitlines()) <= LONGEST for text in scripts.values())


def test_no_file_has_what_the_policy_forbids_or_is_elsewhere() -> None:
    for path in UI_FOLDER.iterdir():
        text = path.read_text().replace("http://www.w3.org/2000/svg", "")
        assert "//" not in re.sub(r"(?m)(^|\s)// .*$", "", text), path.name
        assert not re.search(r"\bstyle=|\bon[a-z]+=\"|innerHTML|\beval\(|new Function", text), (
            path.name
        )
