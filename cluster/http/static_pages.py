"""``/docs``: Swagger UI over ``/openapi.json``. Its files are in a package: a browser loads nothing from elsewhere.

``/ui``: the page that shows a server at work. Its files lie in ``cluster/ui``; a browser loads nothing from elsewhere.

They are the same for everybody and say nothing of the server, so that whoever has no key gets them; what the page shows
it asks for with a key, as any client.
"""

import base64
import hashlib
from importlib.util import find_spec
from pathlib import Path

from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, RedirectResponse, Response
from starlette.routing import Route

DOCS_PACKAGE = "fastapi_offline"
DOCS_ASSETS = {"swagger-ui-bundle.js": "text/javascript", "swagger-ui.css": "text/css"}
DOCS_SCRIPT = (  # without the badge that asks a service whether the page is valid
    'SwaggerUIBundle({url: "openapi.json", dom_id: "#docs", deepLinking: true, validatorUrl: null, persistAuthorization: false})'
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
    f"default-src 'self'; script-src 'self' 'sha256-{DOCS_SCRIPT_HASH}'; style-src 'self' 'unsafe-inline'; img-src 'self' data:"
)


def docs_routes() -> list[Route]:
    """The page, and what it is made of."""
    assets = [Route(f"/docs/{name}", _docs_asset, methods=["GET"], include_in_schema=False) for name in DOCS_ASSETS]
    pages = [Route("/docs", _docs_page, methods=["GET"], include_in_schema=False)]
    return [*pages, Route("/docs/", _redirect_to_docs, methods=["GET"], include_in_schema=False), *assets]


async def _redirect_to_docs(_request: Request) -> Response:
    """What it loads is named relative to a path without a slash."""
    return RedirectResponse("../docs")


async def _docs_page(_request: Request) -> Response:
    return HTMLResponse(DOCS_PAGE, headers={"content-security-policy": DOCS_POLICY})


async def _docs_asset(request: Request) -> Response:
    """Found without importing the package, which is for another framework."""
    name = request.url.path.rpartition("/")[2]
    spec = find_spec(DOCS_PACKAGE)
    assert spec is not None, "pyproject.toml names it"
    assert spec.origin is not None
    return FileResponse(Path(spec.origin).parent / "static" / name, media_type=DOCS_ASSETS[name])


UI_FOLDER = Path(__file__).parent / "ui"
UI_PAGE = "index.html"
UI_MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
UI_ASSETS = {
    f"/ui/{path.name}": path for path in sorted(UI_FOLDER.iterdir()) if path.suffix in UI_MEDIA_TYPES and path.name != UI_PAGE
}
UI_PATHS = frozenset({"/ui", "/ui/", *UI_ASSETS})
UI_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        *(f"{name} 'none'" for name in ("base-uri", "form-action", "frame-ancestors")),
    )
)
UI_HEADERS = {
    "cache-control": "no-cache",  # a browser asks whether its copy is still good: after an upgrade it is not
    "content-security-policy": UI_POLICY,
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


def ui_routes() -> list[Route]:
    """The page, and what it is made of."""
    pages = [Route("/ui", _ui_page, methods=["GET"], include_in_schema=False)]
    pages.append(Route("/ui/", _redirect_to_ui, methods=["GET"], include_in_schema=False))
    return [*pages, *(Route(path, _ui_asset, methods=["GET"], include_in_schema=False) for path in UI_ASSETS)]


async def _redirect_to_ui(_request: Request) -> Response:
    """What it loads is named relative to a path without a slash."""
    return RedirectResponse("../ui", headers=UI_HEADERS)


async def _ui_page(request: Request) -> Response:
    return _ui_file(request, UI_FOLDER / UI_PAGE)


async def _ui_asset(request: Request) -> Response:
    return _ui_file(request, UI_FOLDER / request.url.path.rpartition("/")[2])


def _ui_file(request: Request, path: Path) -> Response:
    """Small, and read whenever it is asked for: what is not sent again is only told to be the same."""
    content = path.read_bytes()
    tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    headers = UI_HEADERS | {"etag": tag}
    known = {each.strip().removeprefix("W/") for each in request.headers.get("if-none-match", "").split(",")}
    if tag in known:
        return Response(status_code=304, headers=headers)
    return Response(content, headers=headers, media_type=UI_MEDIA_TYPES[path.suffix])
