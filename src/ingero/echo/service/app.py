"""`EchoService`: every part of a running Echo, started, reloaded and drained in order."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

from ingero.echo.db.backup_socket import BackupServer
from ingero.echo.db.replica import ReplicaBackend
from ingero.echo.ingest.handler import IngestHandler
from ingero.echo.ingest.intake import Intake
from ingero.echo.ingest.settings import IngestCounters
from ingero.echo.service.access import Access, LoadTokens
from ingero.echo.service.api import Api
from ingero.echo.service.config import EchoConfig
from ingero.echo.service.executor import ClientGoneError, QueryExecutor
from ingero.echo.service.health import HealthApp
from ingero.echo.service.listeners import Addresses, Listeners
from ingero.echo.service.middleware import GONE, PRINCIPAL, RequestMiddleware
from ingero.echo.service.replies import build_error_reply
from ingero.echo.service.settings import build_backups, build_compactor, build_ingest, build_store
from ingero.echo.service.streaming import RowStreams
from ingero.echo.service.telemetry import (
    watch_backups,
    watch_bearers,
    watch_compactor,
    watch_replica,
    watch_service,
)
from ingero.echo.service.tenant_sql import TenantSql
from ingero.errors import IngeroError, RetryableError
from ingero.serving.mcp_http import McpManager, McpOverHttp
from ingero.telemetry.clock import Clock, SystemClock
from ingero.telemetry.metrics import MeterRegistry
from ingero.units import NS_PER_S

_LOG: Final = logging.getLogger("ingero.echo")
_MAX_LAST_S: Final = 8.0
"""Longest life of a process that cannot write any more."""
STATUS_DEAD: Final = os.EX_SOFTWARE
"""How such a process ends: not as one that cannot open its database, which its supervisor does not start again."""


class EchoService:
    """One Echo.

    Args:
        config: Settings.
        load_tokens: Reads the bearers; called at the start and at each reload.
        clock: Time.
    """

    def __init__(
        self, config: EchoConfig, load_tokens: LoadTokens, clock: Clock | None = None
    ) -> None:
        self._config = config
        self._clock = clock or SystemClock()
        self.meter = MeterRegistry()
        self.store = build_store(config, self._clock)
        self.access = Access(load_tokens, config, self._clock)
        self.sql = TenantSql(self.store, config, self._clock)
        timeout_ns = config.query_timeout + config.sql_timeout
        self.executor = QueryExecutor(self.store, self._clock, config, timeout_ns, self.sql.run)
        self.counters = IngestCounters()
        self._resources = AsyncExitStack()
        self.listeners = Listeners(config, self._clock, self.meter, self._resources)

    async def start(self) -> Addresses:
        """Open the store and listen.

        Raises:
            IngeroError: Something cannot be opened; what was opened is closed again.
        """
        try:
            return await self._start()
        except IngeroError:
            await self._resources.aclose()
            raise

    async def _start(self) -> Addresses:
        config, clock, closing = self._config, self._clock, self._resources
        self.store.open()
        closing.callback(self.store.close)
        self._warn_of_loose_modes()
        backups = BackupServer(self.store)
        backups.open()
        closing.callback(backups.close)
        self._start_upkeep(closing)
        closing.callback(self.executor.close)
        streams = RowStreams(self.store, clock, config)
        closing.callback(streams.close)
        self.sql.sandbox.start()
        closing.callback(self.sql.sandbox.close)
        watch_service(self.meter, self.store, self.counters, self.executor.queues)
        mcp = McpOverHttp(self._load_mcp)
        await closing.enter_async_context(mcp.run())
        documents = self.access.documents
        api = Api(self.executor, streams, mcp, self.meter, config, documents)
        admitted = RequestMiddleware(api, self.access, config, clock, self.meter)
        ingest = build_ingest(config)
        intake = Intake(self.store, clock, ingest.records)
        self._show_bearers(intake)
        self.access.on_reload = partial(self._show_bearers, intake)
        following = asyncio.create_task(self.access.follow())
        closing.callback(following.cancel)
        handler = IngestHandler(intake, self.access.bearers.identify, ingest, self.counters, clock)
        return await self.listeners.start(admitted, HealthApp(self.store), handler)

    def _start_upkeep(self, closing: AsyncExitStack) -> None:
        """What looks after the file, each on a thread of its own."""
        config = self._config
        schedule = build_backups(config, self.store, self._clock)
        if schedule is not None:
            watch_backups(self.meter, schedule.counters, config.backup_interval)
            schedule.start()
            closing.callback(schedule.close)
        if isinstance(self.store.backend, ReplicaBackend):
            watch_replica(self.meter, self.store.backend)
        compactor = build_compactor(config, self.store)
        if compactor is not None:
            watch_compactor(self.meter, compactor.counters)
            compactor.start()
            closing.callback(compactor.close)

    async def run(self, on_started: Callable[[Addresses], None]) -> int:
        """Serve until SIGTERM or SIGINT; SIGHUP reads tokens and certificates again."""
        loop, stopping = asyncio.get_running_loop(), asyncio.Event()
        addresses = await self.start()
        loop.add_signal_handler(signal.SIGTERM, stopping.set)
        loop.add_signal_handler(signal.SIGINT, stopping.set)
        loop.add_signal_handler(signal.SIGHUP, self.reload)
        on_started(addresses)
        self.store.on_death(partial(loop.call_soon_threadsafe, stopping.set))
        if self.store.is_dead:
            stopping.set()
        await stopping.wait()
        if self.store.is_dead:
            return await self._give_up()
        _LOG.info("draining for up to %g s", self._config.drain / NS_PER_S)
        await self.stop()
        return 0

    async def _give_up(self) -> int:
        """End soon, whatever hangs, so that a supervisor starts a process that writes."""
        _LOG.critical("ending because nothing is written any more")
        last = threading.Timer(_MAX_LAST_S, os._exit, (STATUS_DEAD,))
        last.daemon = True
        last.start()
        with suppress(TimeoutError):
            await asyncio.wait_for(self.stop(), _MAX_LAST_S / 2)
        return STATUS_DEAD

    def reload(self) -> None:
        """Read tokens and certificates again; what is bad leaves the old in place."""
        self.access.reload()
        try:
            self.listeners.reload_certificate()
        except IngeroError as error:
            _LOG.error("certificate not replaced, the old one stays: %s", error.message)

    def _show_bearers(self, intake: Intake) -> None:
        principals = self.access.bearers.principals
        watch_bearers(self.meter, principals, self.store.usage, self.counters, intake.series)

    async def stop(self) -> None:
        """Answer 503 to what is new, finish what is in flight, commit, close."""
        self.counters.draining = True
        await self.listeners.drain()
        await self._resources.aclose()

    def _warn_of_loose_modes(self) -> None:
        if self.store.is_file and Path(self.store.path).stat().st_mode & 0o077:
            _LOG.warning(
                "%s holds every tenant's rows and others may open it; chmod 600 it", self.store.path
            )

    def _load_mcp(self) -> Callable[[], McpManager]:
        from ingero.echo.service.mcp import build_echo_manager  # noqa: PLC0415 - for the first request

        return partial(build_echo_manager, self._answer_mcp, self._config.max_body)

    async def _answer_mcp(self, name: str, arguments: Mapping[str, Any]) -> bytes:
        try:
            return await self.executor.ask(PRINCIPAL.get(), name, arguments, GONE.get())
        except ClientGoneError:
            raise RetryableError("the client went away") from None  # the SDK wants an answer
        except IngeroError as error:
            shown = build_error_reply(error).message  # as the API shows it
            if shown == error.message:
                raise
            _LOG.warning("%s: %s", name, error.message)
            raise IngeroError(shown) from None
