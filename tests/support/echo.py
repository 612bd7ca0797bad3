"""A real Echo inside a test: its own loop on a thread, every port chosen by the kernel."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Mapping
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from ingero.config.acl import AclEntry
from ingero.config.model import parse_model
from ingero.echo.service.app import EchoService
from ingero.echo.service.config import EchoConfig
from ingero.echo.service.listeners import Addresses

ResultT = TypeVar("ResultT")

_ANY_PORT = "127.0.0.1:0"


class RunningEcho:
    """A started `EchoService`; a context manager.

    Args:
        db: The database file.
        bearers: Who may ask; changing the list and calling `reload` rotates.
        settings: Further keys of `EchoConfig`.
    """

    def __init__(
        self, db: Path, bearers: list[AclEntry], settings: Mapping[str, Any] | None = None
    ) -> None:
        addresses = dict.fromkeys(
            ("otlp_addr", "otlp_http_addr", "mcp_addr", "health_addr"), _ANY_PORT
        )
        given = {
            "db": str(db),
            "insecure_no_tls": True,
            "min_free_space": "1MiB",
            "group_commit": "5ms",
            **addresses,
            **(settings or {}),
        }
        self.bearers = bearers
        self._config = parse_model(EchoConfig, given)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self.service: EchoService
        self.at: Addresses

    @property
    def url(self) -> str:
        """Of MCP and the API."""
        scheme = "http" if self._config.tls_cert is None else "https"
        return f"{scheme}://127.0.0.1:{self.at.mcp.port}"

    def call(self, work: Coroutine[Any, Any, ResultT]) -> ResultT:
        """Run something on the service's loop and wait."""
        future: Future[ResultT] = asyncio.run_coroutine_threadsafe(work, self._loop)
        return future.result()

    def reload(self) -> None:
        """What SIGHUP does."""

        async def reload() -> None:
            self.service.reload()

        self.call(reload())

    def __enter__(self) -> Self:
        """Start."""
        self._thread.start()

        async def start() -> Addresses:
            self.service = EchoService(self._config, lambda: tuple(self.bearers))
            return await self.service.start()

        self.at = self.call(start())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Drain and stop."""
        self.call(self.service.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
