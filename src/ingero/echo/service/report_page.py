"""The page of the week: files of the package, open to everybody. What it shows it asks of the API, with a bearer."""

from __future__ import annotations

from importlib.resources import files
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

_OWN: Final = "ingero.echo.service"
_SHARED: Final = "ingero.recording.queries"
"""Has the page of a node's dashboard, whose style and elements are the same."""
_FILES: Final = {
    "/report": (_OWN, "index.html", "text/html"),
    "/report/base.css": (_SHARED, "app.css", "text/css"),
    "/report/report.css": (_OWN, "report.css", "text/css"),
    "/report/report.js": (_OWN, "report.js", "text/javascript"),
    "/report/parts.js": (_SHARED, "parts.js", "text/javascript"),
}
REPORT_PATHS: Final = frozenset(_FILES)
_HEADERS: Final = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "referrer-policy": "no-referrer",
}


def build_report_routes() -> list[Route]:
    """The page's files; GET and HEAD."""
    return [Route(path, _send_file) for path in _FILES]


async def _send_file(request: Request) -> Response:
    package, name, media_type = _FILES[request.url.path]
    body = files(package).joinpath("page", name).read_bytes()
    return Response(body, media_type=media_type, headers=_HEADERS)
