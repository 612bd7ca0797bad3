"""The audit log: a line for each request, with the digest of its bearer and never the token.

Logger ``ingero.echo.audit``. As ``json`` the values are keys of the log line; as ``console`` they follow the name of
the event as ``key=value``.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from ingero.serving.bearer import Principal
from ingero.units import NS_PER_MS

_LOG: Final = logging.getLogger("ingero.echo.audit")
_MAX_PATH: Final = 256


@dataclass(frozen=True, slots=True)
class Answered:
    """One request that was answered, or that nobody waited for any more.

    Attributes:
        request_id: As its answer's X-Request-Id; empty where the transport has none.
        source_ip: Who sent it.
        method: HTTP's, or gRPC's name of the call.
        path: Without the query.
        status: HTTP's, or the name of gRPC's; 499 where the client was gone.
        latency_ns: From its first byte to its answer.
    """

    request_id: str
    source_ip: str
    method: str
    path: str
    status: int | str
    latency_ns: int


def write_request(principal: Principal | None, answered: Answered) -> None:
    """Write the line of one request; None is nobody that is known."""
    write_audit({
        "event": "request",
        "request_id": answered.request_id,
        "bearer_hash": principal.digest if principal else "",
        "bearer_key_name": principal.key_name if principal else "",
        "source_ip": answered.source_ip,
        "method": answered.method,
        "path": answered.path[:_MAX_PATH],
        "status": answered.status,
        "latency_ms": round(answered.latency_ns / NS_PER_MS, 3),
    })


def write_audit(line: Mapping[str, Any]) -> None:
    """Write one event."""
    if _LOG.isEnabledFor(logging.INFO):
        _LOG.info("%s", line["event"], extra={"fields": line})
