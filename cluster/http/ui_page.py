"""``/ui``: the page that shows a server at work. Its files lie in ``cluster/ui``; a browser loads nothing from elsewhere.

They are the same for everybody and say nothing of the server, so that whoever has no key gets them; what the page shows
it asks for with a key, as any client.
"""

import hashlib
from pathlib import Path

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

FOLDER = Path(__file__).parent / "ui"
PAGE = "index.html"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
ASSETS = {f"/ui/{path.name}": path for path in sorted(FOLDER.iterdir()) if path.suffix in TYPES and path.name != PAGE}
PATHS = frozenset({"/ui", "/ui/", *ASSETS})
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        *(f"{name} 'none'" for name in ("base-uri", "form-action", "frame-ancestors")),
    )
)
HEADERS = {
    "cache-control": "no-cache",  # a browser asks whether its copy is still good: after an upgrade it is not
    "content-security-policy": POLICY,
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


def ui_routes() -> list[Route]:
    """The page, and what it is made of."""
    pages = [Route("/ui", _page, methods=["GET"], include_in_schema=False)]
    pages.append(Route("/ui/", _to_page, methods=["GET"], include_in_schema=False))
    return [*pages, *(Route(path, _asset, methods=["GET"], include_in_schema=False) for path in ASSETS)]


async def _to_page(_request: Request) -> Response:
    """What it loads is named relative to a path without a slash."""
    return RedirectResponse("../ui", headers=HEADERS)


async def _page(request: Request) -> Response:
    return _file(request, FOLDER / PAGE)


async def _asset(request: Request) -> Response:
    return _file(request, FOLDER / request.url.path.rpartition("/")[2])


def _file(request: Request, path: Path) -> Response:
    """Small, and read whenever it is asked for: what is not sent again is only told to be the same."""
    content = path.read_bytes()
    tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    headers = HEADERS | {"etag": tag}
    known = {each.strip().removeprefix("W/") for each in request.headers.get("if-none-match", "").split(",")}
    if tag in known:
        return Response(status_code=304, headers=headers)
    return Response(content, headers=headers, media_type=TYPES[path.suffix])
