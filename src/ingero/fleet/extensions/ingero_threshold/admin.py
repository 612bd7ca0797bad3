"""The admin endpoint: the live page, an index, and the read-only JSON pages that components offer.

Has no authentication and therefore listens on loopback. A browser on that machine could still be led here under
another name (DNS rebinding), so a request whose ``Host`` is not this machine's own is refused unless remote use was
allowed.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

from ingero.errors import BadDataError
from ingero.fleet.component import AdminRoute, AdminRoutes
from ingero.fleet.extensions.ingero_threshold.agent import MAX_QUERY_BYTES
from ingero.fleet.extensions.ingero_threshold.live import LEVELS_PATH, LivePage
from ingero.fleet.helpers.admin_pages import ADMIN_ROOT
from ingero.fleet.helpers.served_pages import Page, build_json_page

if TYPE_CHECKING:
    from uvicorn._types import HTTPScope


def answer_admin(
    find_pages: Callable[[], Sequence[AdminRoutes]],
    scope: HTTPScope,
    live: LivePage,
    *,
    allow_remote: bool,
) -> Page:
    """The page of ``admin_endpoint``."""
    host = next((value for name, value in scope["headers"] if name == b"host"), b"")
    if not allow_remote and not is_own_name(host.decode("latin-1")):
        status, body = 403, _error("ask for this page as localhost or 127.0.0.1")
    elif scope["method"] not in {"GET", "HEAD"}:
        status, body = 405, _error("GET only")
    elif len(scope["query_string"]) > MAX_QUERY_BYTES:
        status, body = 400, _error(f"the query is longer than {MAX_QUERY_BYTES} bytes")
    elif (file := live.find_file(_find_page(scope))) is not None:
        return file
    elif scope["path"] == LEVELS_PATH:
        return _read_levels(live, scope["query_string"])
    else:
        routes = [route for pages in find_pages() for route in pages.admin_routes()]
        status, body = read_page(routes, scope["path"], scope["query_string"])
    return build_json_page(status, body)


def read_page(routes: Sequence[AdminRoute], path: str, query_string: bytes) -> tuple[int, Any]:
    """Status and body of one page."""
    if path.rstrip("/") in {"", ADMIN_ROOT}:
        pages = {route.path: route.description for route in routes}
        return 200, {"pages": dict(sorted(pages.items()))}
    matching = [route for route in routes if route.path == path]
    if not matching:
        return 404, _error(f"no such page; the index is at {ADMIN_ROOT}")
    try:
        query = _parse_query(query_string)
    except BadDataError as error:
        return 400, _error(error.message)
    return _read_first(matching, query)


def _find_page(scope: HTTPScope) -> str:
    """The path, or the live page's where a browser asks for the index."""
    accept = b",".join(value for name, value in scope["headers"] if name == b"accept")
    return "/live" if scope["path"] == "/" and b"text/html" in accept else scope["path"]


def _read_levels(live: LivePage, query_string: bytes) -> Page:
    try:
        return live.read_levels(_parse_query(query_string))
    except BadDataError as error:
        return build_json_page(400, _error(error.message))
    except KeyError as error:
        return build_json_page(404, _error(_describe_unknown(error)))


def _parse_query(query_string: bytes) -> dict[str, str]:
    """Raises BadDataError when there are too many fields."""
    try:
        found = parse_qs(query_string.decode("latin-1"), keep_blank_values=True, max_num_fields=16)
    except ValueError as error:
        raise BadDataError(str(error)) from error
    return {name: values[-1] for name, values in found.items()}


def _read_first(routes: Sequence[AdminRoute], query: Mapping[str, str]) -> tuple[int, Any]:
    """The first page that knows what was asked for: two processors of one type offer the same paths."""
    missing = ""
    for route in routes:
        try:
            return 200, route.read(query)
        except BadDataError as error:
            return 400, _error(error.message)
        except KeyError as error:
            missing = _describe_unknown(error)
    return 404, _error(missing)


def _describe_unknown(error: KeyError) -> str:
    return f"{str(error.args[0] if error.args else '')[:256]!r} is not known"


def is_own_name(host: str) -> bool:
    """Whether a ``Host`` header names this machine from within: loopback, by name or address."""
    name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
    if name.lower() in {"localhost", "localhost."}:
        return True
    try:
        return ipaddress.ip_address(name.strip("[]")).is_loopback
    except ValueError:
        return False


def _error(message: str) -> dict[str, str]:
    return {"error": message}
