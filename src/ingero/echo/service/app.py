"""`EchoService`: every part of a running Echo, started, reloaded and drained in order."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AsyncExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import grpc
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp.server.transport_security import TransportSecuritySettings

from ingero import __version__
from ingero.config import Endpoint
from ingero.config.acl import AclEntry
from ingero.config.environment import allows_loose_keys
from ingero.config.tls import TlsServerConfig
from ingero.echo.db.backup_socket import BackupServer
from ingero.echo.db.cancellation import Cancellation
from ingero.echo.db.clickhouse.settings import ClickHouseSettings
from ingero.echo.db.encryption import build_encryption
from ingero.echo.db.engine import DatabaseSettings
from ingero.echo.db.retention import Retention
from ingero.echo.db.sandbox.runner import Sandbox
from ingero.echo.db.store import Store, StoreSettings
from ingero.echo.db.writer import DatabaseWriterSettings
from ingero.echo.ingest.grpc import EchoGrpcServer
from ingero.echo.ingest.http import OtlpHttpApp
from ingero.echo.ingest.intake import Intake
from ingero.echo.ingest.limits import RecordLimits, RefusalReason
from ingero.echo.ingest.reception import Reception
from ingero.echo.ingest.settings import IngestCounters, IngestSettings
from ingero.echo.queries.catalog import QUERIES
from ingero.echo.queries.context import SqlAnswer, TimeSpan
from ingero.echo.queries.prompts import PROMPTS
from ingero.echo.schema import TENANT_TABLES
from ingero.echo.service import telemetry
from ingero.echo.service.api import Api, ApiSettings
from ingero.echo.service.config import EchoConfig, parse_store
from ingero.echo.service.executor import ClientGoneError, ConcurrencySettings, QueryExecutor
from ingero.echo.service.health import HealthApp
from ingero.echo.service.middleware import (
    GONE,
    PRINCIPAL,
    App,
    RequestLimitSettings,
    RequestMiddleware,
)
from ingero.echo.service.origins import build_rules
from ingero.echo.service.rows import RowStreams
from ingero.echo.service.stream import StreamSettings
from ingero.echo.service.tenant_sql import Statement, run_statement, sandbox_settings
from ingero.errors import ConfigError, IngeroError, RetryableError, StoreError
from ingero.serving.asgi import AsgiServer, AsgiSettings
from ingero.serving.audit import write_audit
from ingero.serving.bearer import Bearers, Principal
from ingero.serving.connections import ConnectionLimits
from ingero.serving.mcp import McpFacts, build_mcp_server
from ingero.serving.tls import CertificateReloader, build_server_context
from ingero.telemetry.clock import Clock, SystemClock
from ingero.telemetry.metrics import MeterRegistry
from ingero.units import NS_PER_S

if TYPE_CHECKING:
    from uvicorn._types import ASGIApplication

_LOG: Final = logging.getLogger("ingero.echo")
INSTRUCTIONS: Final = (
    "The memory of GPU clusters: which node is slow, whom it makes wait, what that costs. Begin with "
    "fleet.cluster.summary, or ask for the investigate prompt. Each answer says its window and coverage: no rows "
    "without coverage means unknown. The cause of a slow node is on the node: ask its own `ingero mcp`."
)

FLEET_PORTS: Final = frozenset({4317, 4318, 8080, 8081})
"""Where a Fleet on the same host listens by default."""

_GIVE_UP_S: Final = 8.0
"""Longest life of a process that cannot write any more."""

LoadTokens = Callable[[], tuple[AclEntry, ...]]


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where a started service listens, with the ports that the kernel chose."""

    otlp_grpc: Endpoint
    otlp_http: Endpoint
    mcp: Endpoint
    health: Endpoint


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
        self._load_tokens = load_tokens
        self._clock = clock or SystemClock()
        self.meter = MeterRegistry()
        self.store = build_store(config, self._clock)
        self.bearers = Bearers(load_tokens(), self._clock, config.token_grace)
        self.sandbox = Sandbox(sandbox_settings(config), TENANT_TABLES, self._clock)
        self.answers = QueryExecutor(
            self.store,
            self._clock,
            config.query_timeout + config.sql_timeout,
            ConcurrencySettings(config.readers, config.sql_workers, config.queue_timeout),
            self._run_sql,
        )
        self.streams = RowStreams(
            self.store, self._clock, config.query_timeout, _stream_settings(config)
        )
        self.counters = IngestCounters()
        self._ingest = _ingest_settings(config)
        self.intake = Intake(self.store, self._clock, self._ingest.records)
        self._server = build_mcp_server(
            McpFacts("ingero-echo", __version__, INSTRUCTIONS), QUERIES, PROMPTS, self._call
        )
        self._exit = AsyncExitStack()
        self._stopping: asyncio.Event | None = None
        self._drain_until_ns = 0
        self._gate: RequestMiddleware | None = None
        self._grpc: EchoGrpcServer | None = None
        self._reloader: CertificateReloader | None = None

    @property
    def mcp_server(self) -> Any:  # noqa: ANN401 - generic over a lifespan that is not used
        """The MCP server, for stdio."""
        return self._server

    async def start(self) -> Addresses:
        """Open the store and listen.

        Raises:
            IngeroError: Something cannot be opened; what was opened is closed again.
        """
        try:
            return await self._start()
        except IngeroError:
            await self._exit.aclose()
            raise

    async def _start(self) -> Addresses:
        config = self._config
        self.store.open()
        self._exit.callback(self.store.close)
        self._warn_of_loose_modes()
        backups = BackupServer(self.store)
        backups.open()
        self._exit.callback(backups.close)
        self._exit.callback(self.answers.close)
        self._exit.callback(self.streams.close)
        self.sandbox.start()
        self._exit.callback(self.sandbox.close)
        self._watch_counters()
        tls = self._build_tls()
        manager = StreamableHTTPSessionManager(
            self._server,
            json_response=True,
            stateless=True,
            security_settings=TransportSecuritySettings(enable_dns_rebinding_protection=False),
            max_request_body_size=config.max_body,
        )
        await self._run_manager(manager)
        rules = build_rules(config.mcp_addr, config.allowed_hosts, config.allowed_origins)
        settings = ApiSettings(rules, config.max_body, config.body_timeout)
        api = Api(self.answers, self.streams, manager, self.meter, settings)
        self._gate = RequestMiddleware(
            api, self.bearers, _gate_settings(config), self._clock, self.meter
        )
        authenticate = self.bearers.authenticate
        reception = Reception(self.intake, authenticate, self._ingest, self.counters, self._clock)
        otlp = OtlpHttpApp(reception)
        self._grpc = EchoGrpcServer(reception)
        with _naming("health_addr", config):
            health = await self._listen("health", HealthApp(self.store), config.health_addr)
        with _naming("otlp_addr", config):
            otlp_grpc = await self._grpc.start(config.otlp_addr, self._grpc_credentials())
        with _naming("otlp_http_addr", config):
            otlp_http = await self._listen("otlp_http", otlp, config.otlp_http_addr, tls)
        with _naming("mcp_addr", config):
            mcp = await self._listen("mcp", self._gate, config.mcp_addr, tls)
        return Addresses(otlp_grpc=otlp_grpc, otlp_http=otlp_http, mcp=mcp, health=health)

    async def run(self, on_started: Callable[[Addresses], None]) -> int:
        """Serve until SIGTERM or SIGINT; SIGHUP reads tokens and certificates again."""
        loop = asyncio.get_running_loop()
        self._stopping = asyncio.Event()
        addresses = await self.start()
        loop.add_signal_handler(signal.SIGTERM, self._stopping.set)
        loop.add_signal_handler(signal.SIGINT, self._stopping.set)
        loop.add_signal_handler(signal.SIGHUP, self.reload)
        on_started(addresses)
        self.store.on_death(partial(loop.call_soon_threadsafe, self._stopping.set))
        if self.store.is_dead:
            self._stopping.set()
        await self._stopping.wait()
        if self.store.is_dead:
            return await self._give_up()
        _LOG.info("draining for up to %g s", self._config.drain / NS_PER_S)
        await self.stop()
        return 0

    async def _give_up(self) -> int:
        """End soon, whatever hangs, so that a supervisor starts a process that writes."""
        _LOG.critical("ending because nothing is written any more")
        last = threading.Timer(_GIVE_UP_S, os._exit, (StoreError.exit_code,))
        last.daemon = True
        last.start()
        with suppress(TimeoutError):
            await asyncio.wait_for(self.stop(), _GIVE_UP_S / 2)
        return StoreError.exit_code

    def reload(self) -> None:
        """Read tokens and certificates again; what is bad leaves the old in place."""
        try:
            live = self.bearers.replace(self._load_tokens())
        except IngeroError as error:
            _LOG.error("bearers not replaced, the old ones stay: %s", error.message)
        else:
            for digest in live:
                write_audit({"event": "bearer_rotation_applied", "live_hash": digest})
        if self._reloader is not None:
            try:
                self._reloader.reload_if_changed()
            except IngeroError as error:
                _LOG.error("certificate not replaced, the old one stays: %s", error.message)

    async def stop(self) -> None:
        """Answer 503 to what is new, finish what is in flight, commit, close."""
        self._drain_until_ns = self._clock.mono_ns() + self._config.drain
        self.counters.draining = True
        if self._gate is not None:
            await self._gate.drain(self._drain_left_ns())
        if self._grpc is not None:
            await self._grpc.stop(self._drain_left_ns())
        await self._exit.aclose()

    def _warn_of_loose_modes(self) -> None:
        if self.store.is_file and Path(self.store.path).stat().st_mode & 0o077:
            _LOG.warning(
                "%s holds every tenant's rows and others may open it; chmod 600 it", self.store.path
            )

    async def _run_manager(self, manager: StreamableHTTPSessionManager) -> None:
        """Hold the manager open in a task of its own: its task group must be left where it was entered."""
        is_open, is_over = asyncio.Event(), asyncio.Event()

        async def hold() -> None:
            async with manager.run():
                is_open.set()
                await is_over.wait()

        task = asyncio.create_task(hold())

        async def end() -> None:
            is_over.set()
            await task

        self._exit.push_async_callback(end)
        await is_open.wait()

    async def _listen(
        self, name: str, app: App, endpoint: Endpoint, tls: ssl.SSLContext | None = None
    ) -> Endpoint:
        config = self._config
        limits = ConnectionLimits(
            head_s=config.head_timeout / NS_PER_S,
            stall_s=config.stall_timeout / NS_PER_S,
            max_connections=config.max_connections,
            max_per_peer=0 if config.trust_proxy_headers else config.max_connections_per_peer,
        )
        settings = AsgiSettings(drain_s=config.drain / NS_PER_S, limits=limits)
        server = AsgiServer(cast("ASGIApplication", app), endpoint, tls=tls, settings=settings)
        await server.start()
        ended = self.meter.gauge(telemetry.CONNECTIONS)
        for outcome in ("refused", "slow_heads", "large_heads", "stalled"):
            ended.watch(_reading(server.counters, outcome), listener=name, outcome=outcome)

        async def stop() -> None:
            await server.stop(self._drain_left_ns() / NS_PER_S)

        self._exit.push_async_callback(stop)
        return server.bound

    def _drain_left_ns(self) -> int:
        return max(0, self._drain_until_ns - self._clock.mono_ns())

    def _build_tls(self) -> ssl.SSLContext | None:
        config = self._config
        if config.tls_cert is None or config.tls_key is None:
            return None
        check_key_mode(config.tls_key)
        files = TlsServerConfig(cert_file=config.tls_cert, key_file=config.tls_key)
        context = build_server_context(files)
        self._reloader = CertificateReloader(context, files)
        return context

    def _grpc_credentials(self) -> grpc.ServerCredentials | None:
        config = self._config
        if config.tls_cert is None or config.tls_key is None:
            return None
        cert, key = Path(config.tls_cert), Path(config.tls_key)

        def fetch() -> grpc.ServerCertificateConfiguration:
            return grpc.ssl_server_certificate_configuration([
                (key.read_bytes(), cert.read_bytes())
            ])

        return grpc.dynamic_ssl_server_credentials(fetch(), fetch)

    async def _call(self, name: str, arguments: Any) -> bytes:  # noqa: ANN401 - a JSON object
        try:
            return await self.answers.ask(PRINCIPAL.get(), name, arguments, GONE.get())
        except ClientGoneError:
            raise RetryableError("the client went away") from None  # the SDK wants an answer

    def _run_sql(
        self, principal: Principal, sql: str, span: TimeSpan, limit: int, stop: Cancellation
    ) -> SqlAnswer:
        del principal  # the span's condition is its filter already
        statement = Statement(sql, span, limit)
        return run_statement(self.store, self.sandbox, self._config, statement, stop)

    def _watch_counters(self) -> None:
        rows, commits = self.meter.gauge(telemetry.ROWS), self.meter.gauge(telemetry.COMMITS)
        ingest = self.meter.gauge(telemetry.INGEST_REQUESTS)
        written = self.store.counters
        for outcome in (
            *("written", "duplicates", "conflicts", "refused_rows", "aged_out", "sized_out"),
        ):
            rows.watch(_reading(written, outcome), outcome=outcome)
        for outcome in ("refused_full", "refused_disk"):
            rows.watch(_reading(self.store, outcome), outcome=outcome)
        for name, outcome in (
            ("commits", "done"),
            ("failed_commits", "failed"),
            ("reopened", "reopened"),
        ):
            commits.watch(_reading(written, name), outcome=outcome)
        for outcome in (
            "taken",
            "refused_auth",
            "refused_acl",
            "refused_pace",
            "refused_load",
            "refused_body",
            "failed",
        ):
            ingest.watch(_reading(self.counters, outcome), outcome=outcome)
        places = self.meter.gauge(telemetry.QUESTIONS_WAITING)
        for place, turns in self.answers.turns.items():
            places.watch(_reading(turns, "n_waiting"), place=place)
        self.meter.gauge(telemetry.WAITING).watch(lambda: self.store.n_waiting)
        self.meter.gauge(telemetry.STORE_UP).watch(lambda: 0.0 if self.store.trouble else 1.0)
        batches = _counted(self.counters.records, RefusalReason.BATCH)
        self.meter.gauge(telemetry.BATCHES_REFUSED).watch(batches)
        refused = self.meter.gauge(telemetry.RECORDS_REFUSED)
        for reason in RefusalReason:
            refused.watch(_counted(self.counters.records, reason), reason=reason.value)


def build_store(config: EchoConfig, clock: Clock) -> Store:
    """The store that these settings describe, not yet open.

    Raises:
        ConfigError: The password's file cannot be read.
    """
    settings = StoreSettings(
        engine=DatabaseSettings(
            memory_limit_bytes=config.memory_limit,
            threads=config.threads,
            encryption=build_encryption(config.db_key_file, config.httpfs_extension),
        ),
        clickhouse=build_clickhouse(config),
        writer=DatabaseWriterSettings(
            group_ns=_group_ns(config),
            window_ns=config.dedupe_window,
            retention=Retention(config.retention or None, config.max_db_size or None),
        ),
        min_free_bytes=config.min_free_space,
    )
    path = config.store or str(Path(config.db).expanduser())
    return Store(path, settings, clock)


def _group_ns(config: EchoConfig) -> int:
    """A server makes a part of each insert and merges parts later: unless told otherwise, one insert a second."""
    if config.store is None or "group_commit" in config.model_fields_set:
        return config.group_commit
    return NS_PER_S


def build_clickhouse(config: EchoConfig) -> ClickHouseSettings | None:
    """What is needed to reach the server, or None where a file is the store.

    Raises:
        ConfigError: The password's file cannot be read.
    """
    if config.store is None:
        return None
    password = ""
    if config.store_password_file is not None:
        try:
            password = Path(config.store_password_file).read_text(encoding="utf-8").strip()
        except OSError as error:
            raise ConfigError(f"{config.store_password_file}: {error.strerror}") from error
        except UnicodeDecodeError:
            raise ConfigError(f"{config.store_password_file}: is not UTF-8") from None
    return replace(parse_store(config.store), password=password, ca_file=config.store_ca_file)


def check_key_mode(key: str) -> None:
    """Refuse a private key that others may read.

    Raises:
        ConfigError: Its mode has a bit for group or others.
    """
    try:
        mode = Path(key).stat().st_mode
    except OSError as error:
        raise ConfigError(f"{key}: {error.strerror}") from error
    if mode & 0o077 and not allows_loose_keys():
        raise ConfigError(
            f"{key} may be read by others (mode {mode & 0o777:o})", hint=f"chmod 600 {key}"
        )


@contextmanager
def _naming(key: str, config: EchoConfig) -> Iterator[None]:
    """Say which setting moves a listener whose address cannot be had, and who else has that port by default."""
    try:
        yield
    except IngeroError as error:
        port = getattr(config, key).port
        flag = f"--{key.replace('_', '-')}"
        hints = [error.hint] if error.hint else []
        if port in FLEET_PORTS:
            hints.append(
                f"ingero-fleet listens on {port} by default: beside it, give {flag} 127.0.0.1:{port + 10_000}"
            )
        else:
            hints.append(f"{flag} moves it")
        raise IngeroError(error.message, hint="; ".join(hints)) from error


def _reading(source: object, name: str) -> Callable[[], float]:
    return lambda: float(getattr(source, name))


def _counted(counts: Mapping[RefusalReason, int], reason: RefusalReason) -> Callable[[], float]:
    return lambda: float(counts[reason])


def _ingest_settings(config: EchoConfig) -> IngestSettings:
    return IngestSettings(
        max_body_bytes=config.max_otlp_body,
        max_in_flight_bytes=config.otlp_memory,
        per_second=config.otlp_rate_per_second,
        burst=config.otlp_rate_burst,
        max_in_flight_bearer=config.otlp_max_in_flight,
        trust_proxy=config.trust_proxy_headers,
        records=RecordLimits(
            n_attributes=config.max_attributes,
            value_chars=config.max_attribute_length,
            attributes_bytes=config.max_attributes_size,
            record_bytes=config.max_log_record,
        ),
    )


def _gate_settings(config: EchoConfig) -> RequestLimitSettings:
    return RequestLimitSettings(
        config.rate_per_second, config.rate_burst, config.max_in_flight, config.trust_proxy_headers
    )


def _stream_settings(config: EchoConfig) -> StreamSettings:
    return StreamSettings(timeout_ns=6 * config.query_timeout, n_streams=config.readers)
