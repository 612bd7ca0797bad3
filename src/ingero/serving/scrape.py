"""The page that Prometheus scrapes: ``GET /metrics`` as a bare ASGI application."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from ingero.telemetry.metrics import MeterRegistry

if TYPE_CHECKING:
    from uvicorn._types import ASGIApplication, ASGIReceiveCallable, ASGISendCallable, Scope


def scrape_app(meter: MeterRegistry) -> ASGIApplication:
    """An application that shows every instrument of ``meter`` at ``/metrics``."""

    async def app(scope: Scope, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        del receive
        assert scope["type"] == "http"
        if scope["path"] != "/metrics":
            await send_text(send, 404, "the metrics are at /metrics\n")
            return
        if scope["method"] not in {"GET", "HEAD"}:
            await send_text(send, 405, "GET only\n")
            return
        try:
            from ingero.telemetry.exposition import (  # noqa: PLC0415 -- 2 MB that nobody needs who is not scraped
                encode_metrics,
            )
        except (ImportError, OSError) as error:  # no descriptor is left to read the module with
            await send_text(send, 503, f"cannot show the metrics now: {error}\n")
            return

        accept = b",".join(value for name, value in scope["headers"] if name == b"accept")
        body, content_type = encode_metrics(meter, accept.decode("latin-1"))
        await send_bytes(send, 200, body, content_type)

    return app


async def send_text(send: ASGISendCallable, status: int, text: str) -> None:
    """Answer with plain text."""
    await send_bytes(send, status, text.encode(), "text/plain; charset=utf-8")


async def send_bytes(
    send: ASGISendCallable,
    status: int,
    body: bytes,
    content_type: str,
    more_headers: Iterable[tuple[bytes, bytes]] = (),
) -> None:
    """Answer with a body of this type."""
    headers = [
        (b"content-type", content_type.encode("latin-1")),
        (b"content-length", str(len(body)).encode()),
        (b"x-content-type-options", b"nosniff"),
        *more_headers,
    ]
    await send({
        "type": "http.response.start",
        "status": status,
        "headers": headers,
        "trailers": False,
    })
    await send({"type": "http.response.body", "body": body, "more_body": False})
