"""What the connections of one OTLP/HTTP listener share, and one request as far as it has arrived."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from ingero.serving.otlp.answers import CUT_SHORT, RequestRefusal
from ingero.serving.otlp.handler import OtlpHandler, OtlpRequest
from ingero.serving.otlp.http_head import HttpRouter, OtlpHttpSettings
from ingero.serving.otlp.open_connections import OpenConnections


@dataclass(slots=True)
class ArrivingRequest:
    """One request with its body, as far as it has arrived.

    Attributes:
        request: Its head.
        refusal: Why it is refused; None while it is not.
        parts: The body.
        n_body: Bytes of the body so far, also of one that is refused and not kept.
        n_counted: Bytes that count as buffered.
        expects: Whether its sender asks before it sends the body.
        closes: Whether the connection ends with its answer.
        waiting: What the handler waits for before the body is read.
    """

    request: OtlpRequest
    refusal: RequestRefusal | None = None
    parts: list[bytes] = field(default_factory=list)
    n_body: int = 0
    n_counted: int = 0
    expects: bool = False
    closes: bool = False
    waiting: asyncio.Future[RequestRefusal | None] | None = None


class HttpShared(OpenConnections):
    """What the connections of one OTLP/HTTP listener share, each other's presence included.

    Attributes:
        settings: Limits.
        handler: Who may send, and what becomes of it.
        router: Decides about heads.
        n_in_flight: Requests whose head came and whose body is not complete.
        n_buffered_bytes: Parts of those bodies.
        is_stopping: Every answer ends its connection.
        date_line: The Date header, renewed each second.
    """

    def __init__(self, settings: OtlpHttpSettings, handler: OtlpHandler) -> None:
        super().__init__(settings.connections)
        self.settings = settings
        self.handler = handler
        self.router = HttpRouter(settings, handler)
        self.n_in_flight = 0
        self.n_buffered_bytes = 0
        self.is_stopping = not settings.is_kept_alive
        self.date_line = b""

    @property
    def is_full(self) -> bool:
        """Whether no further request may be received now."""
        return self.n_in_flight >= self.settings.max_in_flight

    def count_buffered(self, incoming: ArrivingRequest) -> bool:
        """Count what an unfinished body holds; False when all of them together are too much."""
        limit = self.settings.max_buffered_bytes
        if limit is None:
            return True
        n_held = 0 if incoming.refusal is not None else incoming.n_body
        self.n_buffered_bytes += n_held - incoming.n_counted
        incoming.n_counted = n_held
        return not n_held or self.n_buffered_bytes <= limit

    def end_body(self, incoming: ArrivingRequest) -> None:
        """A body is complete, or no more of it is wanted."""
        self.n_in_flight -= 1
        self.n_buffered_bytes -= incoming.n_counted

    def drop(self, incoming: ArrivingRequest) -> None:
        """The sender of a request is gone before it was applied."""
        if incoming.waiting is not None:
            incoming.waiting.cancel()
        self.handler.refused(incoming.request, incoming.refusal or CUT_SHORT)
