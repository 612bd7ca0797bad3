"""Three pages for a scraper: ``/metrics``, ``/healthz``, ``/readyz``. Read-only, small, from the standard library."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import Final, Protocol, runtime_checkable

from ingero.config import Endpoint
from ingero.serving.threaded import HttpRequest, HttpResponse, serve_threaded

METRICS_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
TEXT_TYPE: Final = "text/plain; charset=utf-8"


class Scraped(Protocol):
    """What the pages show. Asked in other threads."""

    def render(self) -> str:
        """The metrics, text format 0.0.4."""
        ...

    def readiness(self, window_ns: int, /) -> tuple[bool, str]:
        """Whether it can be relied on, and why."""
        ...


@runtime_checkable
class PageSource(Protocol):
    """Shows other pages too. Asked in other threads."""

    def find_page(self, path: str, /) -> str | None:
        """A page as plain text; None where there is none."""
        ...


def _respond(state: Scraped, window_ns: int, request: HttpRequest) -> HttpResponse:
    status, kind, text = _page(state, window_ns, request)
    return HttpResponse(status, text.encode("utf-8", "surrogateescape"), {"Content-Type": kind})


def _page(state: Scraped, window_ns: int, request: HttpRequest) -> tuple[HTTPStatus, str, str]:
    path = request.path.partition("?")[0]
    if request.method == "POST":
        return HTTPStatus.METHOD_NOT_ALLOWED, TEXT_TYPE, "GET only\n"
    if path == "/metrics":
        return HTTPStatus.OK, METRICS_TYPE, state.render()
    if path == "/healthz":
        return HTTPStatus.OK, TEXT_TYPE, "ok\n"
    if path == "/readyz":
        is_ready, text = state.readiness(window_ns)
        status = HTTPStatus.OK if is_ready else HTTPStatus.SERVICE_UNAVAILABLE
        return status, TEXT_TYPE, f"{text}\n"
    other = state.find_page(path) if isinstance(state, PageSource) else None
    if other is not None:
        return HTTPStatus.OK, TEXT_TYPE, other
    return HTTPStatus.NOT_FOUND, TEXT_TYPE, "pages: /metrics /healthz /readyz\n"


@contextmanager
def serve_sink(
    endpoint: Endpoint, state: Scraped, window_ns: int = 0, option: str = "--listen"
) -> Iterator[Endpoint]:
    """Serve until the end of the block.

    Yields:
        Where it listens, with the real port.

    Raises:
        IngeroError: The address cannot be listened on.
    """
    respond = functools.partial(_respond, state, window_ns)
    with serve_threaded(endpoint, respond, option) as bound:
        yield bound
