"""``/docs``: Swagger UI over ``/openapi.json``. Its files are in a package: a browser loads nothing from elsewhere."""

import base64
import hashlib
from importlib.util import find_spec
from pathlib import Path

from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, RedirectResponse, Response
from starlette.routing import Route

PACKAGE = "fastapi_offline"
ASSETS = {"swagger-ui-bundle.js": "text/javascript", "swagger-ui.css": "text/css"}
SCRIPT = (  # without the badge that asks a service whether the page is valid
    'SwaggerUIBundle({url: "openapi.json", dom_id: "#docs", deepLinking: true, validatorUrl: null, persistAuthorization: false})'
)
PAGE = f"""<!doctype html>
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
<script>{SCRIPT}</script>
</body>
</html>
"""
HASH = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
POLICY = f"default-src 'self'; script-src 'self' 'sha256-{HASH}'; style-src 'self' 'unsafe-inline'; img-src 'self' data:"


def docs_routes() -> list[Route]:
    """The page, and what it is made of."""
    assets = [Route(f"/docs/{name}", _asset, methods=["GET"], include_in_schema=False) for name in ASSETS]
    pages = [Route("/docs", _page, methods=["GET"], include_in_schema=False)]
    return [*pages, Route("/docs/", _to_page, methods=["GET"], include_in_schema=False), *assets]


async def _to_page(_request: Request) -> Response:
    """What it loads is named relative to a path without a slash."""
    return RedirectResponse("../docs")


async def _page(_request: Request) -> Response:
    return HTMLResponse(PAGE, headers={"content-security-policy": POLICY})


async def _asset(request: Request) -> Response:
    """Found without importing the package, which is for another framework."""
    name = request.url.path.rpartition("/")[2]
    spec = find_spec(PACKAGE)
    assert spec is not None, "pyproject.toml names it"
    assert spec.origin is not None
    return FileResponse(Path(spec.origin).parent / "static" / name, media_type=ASSETS[name])
