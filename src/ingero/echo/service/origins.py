"""Which names MCP answers to, and to which web pages: what keeps a page in an assistant's browser from asking for it.

A page whose own name is rebound to 127.0.0.1 reaches a server on loopback; its Host and Origin headers still say whose
page it is. Source: Model Context Protocol 2025-11-25 and later, "Streamable HTTP", security warning.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from ingero.config import Endpoint
from ingero.echo.service.replies import ErrorReply

_LOOPBACK: Final = ("127.0.0.1", "localhost", "[::1]")
_BAD_HOST: Final = ErrorReply(
    421, "host_not_allowed", "MCP does not answer to that Host; see allowed_hosts"
)
_BAD_ORIGIN: Final = ErrorReply(
    403, "origin_not_allowed", "MCP does not answer pages of that Origin; see allowed_origins"
)


@dataclass(frozen=True, slots=True)
class OriginRules:
    """What MCP answers to; ``:*`` at the end is any port, or none.

    Attributes:
        hosts: Host headers; None is any.
        origins: Origin headers; a request without one comes from no page and is let through.
    """

    hosts: frozenset[str] | None
    origins: frozenset[str]

    def check(self, headers: Mapping[bytes, bytes]) -> ErrorReply | None:
        """Why a request is refused, or None."""
        host = headers.get(b"host", b"").decode("latin-1").lower()
        if self.hosts is not None and not _matches(host, self.hosts):
            return _BAD_HOST
        origin = headers.get(b"origin")
        if origin is not None and not _matches(origin.decode("latin-1").lower(), self.origins):
            return _BAD_ORIGIN
        return None


def build_rules(listener: Endpoint, hosts: Iterable[str], origins: Iterable[str]) -> OriginRules:
    """Rules from settings; a listener on loopback has loopback's names beside them."""
    named, pages = {one.lower() for one in hosts}, {one.lower() for one in origins}
    if listener.is_loopback:
        named |= {f"{name}:*" for name in _LOOPBACK}
        pages |= {f"{scheme}://{name}:*" for scheme in ("http", "https") for name in _LOOPBACK}
    return OriginRules(frozenset(named) if named else None, frozenset(pages))


def _matches(given: str, allowed: frozenset[str]) -> bool:
    if given in allowed or "*" in allowed:
        return True
    head, colon, port = given.rpartition(":")
    if colon and port.isdigit():
        return f"{head}:*" in allowed
    return f"{given}:*" in allowed
