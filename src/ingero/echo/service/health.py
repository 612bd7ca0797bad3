"""``/healthz`` and ``/readyz`` on a listener of their own, without bearer or TLS: they say whether, never what."""

from __future__ import annotations

from typing import Final

from ingero.echo.db.store import Store
from ingero.echo.service.middleware import Receive, Scope, Send
from ingero.echo.service.replies import build_json

_PATHS: Final = frozenset({"/healthz", "/readyz", "/health"})


class HealthApp:
    """Alive is 200 unless nothing will be written any more; ready is 200 only while the store writes.

    Args:
        store: Asked for its trouble.
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        status, body = 404, {"error": "the paths are /healthz and /readyz", "code": "not_found"}
        if scope["path"] in _PATHS:
            is_writing = not self._store.trouble
            is_dead = self._store.is_dead
            is_down = is_dead or (scope["path"] == "/readyz" and not is_writing)
            status = 503 if is_down else 200
            body = {"status": "ok" if is_writing else "dead" if is_dead else "read_only"}
        await build_json(body, status)(scope, receive, send)
