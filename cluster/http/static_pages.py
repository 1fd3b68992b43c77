"""The pages ``/docs`` (Swagger UI over ``/openapi.json``), ``/ui`` (the activity of a server), and
``/``, which lists them.

Browsers load no external resources.

The files of ``/ui`` need no key: they are the same on all servers and contain no data of the
server. The page requests its data with a key, as any client does.
"""

import base64
import hashlib
from collections.abc import Awaitable, Callable
from importlib.util import find_spec
from pathlib import Path

from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, JSONResponse, RedirectResponse, Response
from starlette.routing import Route

Endpoint = Callable[[Request], Awaitable[Response]]

DOCS_PACKAGE = "fastapi_offline"
DOCS_ASSETS = {"swagger-ui-bundle.js": "text/javascript", "swagger-ui.css": "text/css"}
DOCS_SCRIPT = (  # without the badge that sends the page to a validation service
    'SwaggerUIBundle({url: "openapi.json", dom_id: "#docs", deepLinking: true, validatorUrl: null,'
    " persistAuthorization: false})"
)
DOCS_PAGE = f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>Tramontane</title>
<link rel="icon" href="data:,">
<link rel="stylesheet" href="docs/swagger-ui.css">
</head>
<body>
<div id="docs"></div>
<script src="docs/swagger-ui-bundle.js"></script>
<script>{DOCS_SCRIPT}</script>
</body>
</html>
"""
DOCS_SCRIPT_HASH = base64.b64encode(hashlib.sha256(DOCS_SCRIPT.encode()).digest()).decode()
DOCS_POLICY = (
    f"default-src 'self'; script-src 'self' 'sha256-{DOCS_SCRIPT_HASH}'; style-src 'self'"
    " 'unsafe-inline'; img-src 'self' data:"
)

UI_FOLDER = Path(__file__).parent / "ui"
UI_PAGE = "index.html"
UI_MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
UI_ASSETS = {
    f"/ui/{path.name}": path
    for path in sorted(UI_FOLDER.iterdir())
    if path.suffix in UI_MEDIA_TYPES and path.name != UI_PAGE
}
PUBLIC_PATHS = frozenset({"/", "/ui", "/ui/", *UI_ASSETS})
UI_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
UI_HEADERS = {
    # a browser revalidates its copy, which is stale after an upgrade
    "cache-control": "no-cache",
    "content-security-policy": UI_POLICY,
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


def root_route() -> Route:
    """Return the route of ``/``: a browser is redirected to ``/ui``, other clients get a list of
    relative paths.
    """
    return _get("/", _root)


async def _root(request: Request) -> Response:
    headers = {"vary": "accept", "x-content-type-options": "nosniff"}
    if "text/html" in request.headers.get("accept", "").lower():
        return RedirectResponse("ui", headers=headers)
    return JSONResponse(
        {"ui": "ui", "docs": "docs", "openapi": "openapi.json", "health": "health"}, headers=headers
    )


def docs_routes() -> list[Route]:
    """Return the routes of ``/docs`` and its files."""
    return [
        _get("/docs", _docs_page),
        _get("/docs/", _redirect("../docs")),
        *(_get(f"/docs/{name}", _docs_asset) for name in DOCS_ASSETS),
    ]


def _get(path: str, endpoint: Endpoint) -> Route:
    return Route(path, endpoint, methods=["GET"], include_in_schema=False)


def _redirect(page: str, headers: dict[str, str] | None = None) -> Endpoint:
    """Return an endpoint that redirects to the path without a slash, to which the names of a page's
    files are relative.
    """

    async def redirect(_request: Request) -> Response:
        return RedirectResponse(page, headers=headers)

    return redirect


async def _docs_page(_request: Request) -> Response:
    return HTMLResponse(DOCS_PAGE, headers={"content-security-policy": DOCS_POLICY})


async def _docs_asset(request: Request) -> Response:
    """Answer with a file of the package, which is located without importing it: it needs another
    framework.
    """
    name = request.url.path.rpartition("/")[2]
    spec = find_spec(DOCS_PACKAGE)
    assert spec is not None, "pyproject.toml names it"
    assert spec.origin is not None
    return FileResponse(Path(spec.origin).parent / "static" / name, media_type=DOCS_ASSETS[name])


def ui_routes() -> list[Route]:
    """Return the routes of ``/ui`` and its files."""
    return [
        _get("/ui", _ui_page),
        _get("/ui/", _redirect("../ui", UI_HEADERS)),
        *(_get(path, _ui_asset) for path in UI_ASSETS),
    ]


async def _ui_page(request: Request) -> Response:
    return _ui_file(request, UI_FOLDER / UI_PAGE)


async def _ui_asset(request: Request) -> Response:
    return _ui_file(request, UI_FOLDER / request.url.path.rpartition("/")[2])


def _ui_file(request: Request, path: Path) -> Response:
    """Answer with a file, or with 304 if the browser has it. Files are small, so they are read each
    time.
    """
    content = path.read_bytes()
    tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    headers = UI_HEADERS | {"etag": tag}
    known_tags = {
        each.strip().removeprefix("W/")
        for each in request.headers.get("if-none-match", "").split(",")
    }
    if tag in known_tags:
        return Response(status_code=304, headers=headers)
    return Response(content, headers=headers, media_type=UI_MEDIA_TYPES[path.suffix])
