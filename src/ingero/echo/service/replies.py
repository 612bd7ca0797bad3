"""`ErrorReply`: an error as a client sees it, and what an error of ours is to one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

import msgspec
from starlette.responses import Response

from ingero.echo.db.errors import DeadlineError, MemoryLimitError
from ingero.echo.db.sandbox.runner import SqlRefusedError
from ingero.echo.queries.context import ClusterRefusedError
from ingero.echo.service.fair_queue import QueueFullError
from ingero.errors import BadDataError, IngeroError, RetryableError, StoreError

JSON: Final = "application/json"


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """An error as a client sees it.

    Attributes:
        status: HTTP status.
        code: For machines.
        message: For people; never another tenant's data.
        retry_after_s: 0 for never.
    """

    status: int
    code: str
    message: str
    retry_after_s: int = 0

    @property
    def body(self) -> dict[str, str]:
        """As an object."""
        return {"error": self.message, "code": self.code}

    def build_response(self, headers: Mapping[str, str] | None = None) -> Response:
        """The HTTP answer, with further headers."""
        given = dict(headers or {})
        if self.retry_after_s:
            given["retry-after"] = str(self.retry_after_s)
        return build_json(self.body, self.status, given)


def build_json(
    body: object, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """An HTTP answer with a JSON body."""
    return Response(msgspec.json.encode(body), status, headers, JSON)


UNKNOWN_TOOL: Final = ErrorReply(404, "tool_not_found", "no such tool")

_REPLIES: Final[tuple[tuple[type[IngeroError], ErrorReply], ...]] = (
    (ClusterRefusedError, ErrorReply(403, "tenant_scoped_bearer_refused", "")),
    (BadDataError, ErrorReply(400, "invalid_arguments", "")),
    (
        DeadlineError,
        ErrorReply(504, "query_timeout", "it did not finish in time; narrow its window"),
    ),
    (QueueFullError, ErrorReply(429, "queue_full", "", 1)),
    (RetryableError, ErrorReply(503, "busy", "", 1)),
    (
        MemoryLimitError,
        ErrorReply(503, "query_memory", "it needs more memory than there is; narrow its window", 5),
    ),
    (StoreError, ErrorReply(503, "store_unavailable", "the store cannot answer now", 5)),
)
"""First match wins; an empty message is filled with the error's own."""


def build_error_reply(error: IngeroError) -> ErrorReply:
    """What an error is to a client."""
    if isinstance(error, SqlRefusedError):
        return ErrorReply(400, error.code, error.message)
    for kind, reply in _REPLIES:
        if isinstance(error, kind):
            return reply if reply.message else replace(reply, message=error.message)
    return ErrorReply(500, "internal", "the answer could not be built; the log has the reason")
