"""`Listeners`: OTLP in, MCP and the API out, health; opened in order, drained and closed."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, cast

from ingero.config import Endpoint
from ingero.config.tls import TlsServerConfig, check_key_mode
from ingero.echo.ingest.handler import IngestHandler
from ingero.echo.service.config import EchoConfig
from ingero.echo.service.health import HealthApp
from ingero.echo.service.middleware import App, RequestMiddleware
from ingero.echo.service.telemetry import watch_connections
from ingero.errors import IngeroError
from ingero.serving.asgi import AsgiServer, AsgiSettings
from ingero.serving.connections import ConnectionLimits
from ingero.serving.otlp.grpc_calls import OtlpGrpcSettings
from ingero.serving.otlp.grpc_server import OtlpGrpcServer
from ingero.serving.otlp.http_head import OtlpHttpSettings
from ingero.serving.otlp.http_server import OtlpHttpServer
from ingero.serving.tls import CertificateReloader, build_server_context
from ingero.telemetry.clock import Clock
from ingero.telemetry.metrics import MeterRegistry
from ingero.units import NS_PER_S

if TYPE_CHECKING:
    from uvicorn._types import ASGIApplication

FLEET_PORTS: Final = frozenset({4317, 4318, 8080, 8081})
"""Where a Fleet on the same host listens by default."""


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where a started service listens, with the ports that the kernel chose."""

    otlp_grpc: Endpoint
    otlp_http: Endpoint
    mcp: Endpoint
    health: Endpoint


class Listeners:
    """The four listeners of one Echo.

    Args:
        config: Their addresses, limits and certificate.
        clock: Time.
        meter: Where their connections are counted.
        resources: Closes the HTTP listeners.
    """

    def __init__(
        self, config: EchoConfig, clock: Clock, meter: MeterRegistry, resources: AsyncExitStack
    ) -> None:
        self._config = config
        self._clock = clock
        self._meter = meter
        self._resources = resources
        self._drain_until_ns = 0
        self._grpc: OtlpGrpcServer | None = None
        self._reloaders: list[CertificateReloader] = []
        self.api: RequestMiddleware | None = None

    async def start(
        self, api: RequestMiddleware, health: HealthApp, ingest: IngestHandler
    ) -> Addresses:
        """Listen.

        Raises:
            IngeroError: An address cannot be bound, or the certificate cannot be used.
        """
        config, tls = self._config, self._build_tls(None)
        self.api = api
        settings = ingest.settings
        grpc_settings = OtlpGrpcSettings(
            max_message_bytes=settings.max_body_bytes,
            max_in_flight=settings.max_in_flight,
            read_timeout_ns=settings.read_timeout_ns,
            connections=self._connection_limits,
        )
        grpc_tls = self._build_tls(
            config.otlp_client_ca_file
        )  # of its own: it offers another protocol
        self._grpc = OtlpGrpcServer(config.otlp_addr, grpc_settings, ingest, grpc_tls)
        http_settings = OtlpHttpSettings(
            max_body_bytes=settings.max_body_bytes,
            read_timeout_ns=settings.read_timeout_ns,
            connections=self._connection_limits,
        )
        otlp_tls = self._build_tls(config.otlp_client_ca_file)
        http = OtlpHttpServer(config.otlp_http_addr, http_settings, ingest, self._clock, otlp_tls)
        with name_setting("health_addr", config):
            at_health = await self._listen("health", self._build(health, config.health_addr))
        with name_setting("otlp_addr", config):
            await self._grpc.start()
            watch_connections(self._meter, self._grpc.counters, "otlp_grpc")
        with name_setting("otlp_http_addr", config):
            otlp_http = await self._listen("otlp_http", http)
        with name_setting("mcp_addr", config):
            mcp = await self._listen("mcp", self._build(api, config.mcp_addr, tls))
        return Addresses(otlp_grpc=self._grpc.bound, otlp_http=otlp_http, mcp=mcp, health=at_health)

    def reload_certificate(self) -> None:
        """Read the certificate again.

        Raises:
            IngeroError: It cannot be used; the old one stays.
        """
        for reloader in self._reloaders:
            reloader.reload_if_changed()

    async def drain(self) -> None:
        """Answer 503 to what is new and finish what is in flight, as far as the time for it goes."""
        self._drain_until_ns = self._clock.mono_ns() + self._config.drain
        if self.api is not None:
            await self.api.drain(self._drain_left_ns())
        if self._grpc is not None:
            await self._grpc.stop(self._drain_left_ns() / NS_PER_S)

    @property
    def _connection_limits(self) -> ConnectionLimits:
        config = self._config
        return ConnectionLimits(
            head_s=config.head_timeout / NS_PER_S,
            stall_s=config.stall_timeout / NS_PER_S,
            max_connections=config.max_connections,
            max_per_peer=0 if config.trust_proxy_headers else config.max_connections_per_peer,
        )

    def _build(self, app: App, endpoint: Endpoint, tls: ssl.SSLContext | None = None) -> AsgiServer:
        settings = AsgiSettings(
            drain_s=self._config.drain / NS_PER_S, limits=self._connection_limits
        )
        return AsgiServer(cast("ASGIApplication", app), endpoint, tls=tls, settings=settings)

    async def _listen(self, name: str, server: AsgiServer | OtlpHttpServer) -> Endpoint:
        await server.start()
        watch_connections(self._meter, server.counters, name)

        async def stop() -> None:
            await server.stop(self._drain_left_ns() / NS_PER_S)

        self._resources.push_async_callback(stop)
        return server.bound

    def _drain_left_ns(self) -> int:
        return max(0, self._drain_until_ns - self._clock.mono_ns())

    def _build_tls(self, client_ca_file: str | None) -> ssl.SSLContext | None:
        files = self._find_files(client_ca_file)
        if files is None:
            return None
        context = build_server_context(files)
        self._reloaders.append(CertificateReloader(context, files))
        return context

    def _find_files(self, client_ca_file: str | None) -> TlsServerConfig | None:
        config = self._config
        if config.tls_cert is None or config.tls_key is None:
            return None
        check_key_mode(config.tls_key)
        return TlsServerConfig(
            cert_file=config.tls_cert, key_file=config.tls_key, client_ca_file=client_ca_file
        )


@contextmanager
def name_setting(key: str, config: EchoConfig) -> Iterator[None]:
    """Say which setting moves a listener whose address cannot be had, and what else has that port by default."""
    try:
        yield
    except IngeroError as error:
        port, flag = getattr(config, key).port, f"--{key.replace('_', '-')}"
        hint = f"{flag} moves it"
        if port in FLEET_PORTS:
            other = f"127.0.0.1:{port + 10_000}"
            hint = f"ingero-fleet listens on {port} by default: beside it, give {flag} {other}"
        raise IngeroError(
            error.message, hint="; ".join(filter(None, (error.hint, hint)))
        ) from error
