"""The ``otlp`` receiver's life: both servers, their certificates, and the order in which they start and stop."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Final

from ingero.config import Endpoint
from ingero.errors import IngeroError
from ingero.fleet.component import (
    Authenticator,
    CapabilityT,
    ComponentId,
    Host,
    PushAnswerer,
    parse_id,
)
from ingero.fleet.consumer import Consumer
from ingero.fleet.helpers.certificates import (
    open_server_context,
    report_bad_certificates,
    watch_certificate,
)
from ingero.fleet.receivers.otlp.config import (
    GrpcConfig,
    HttpConfig,
    OtlpReceiverConfig,
    ServerConfig,
    build_grpc_settings,
    build_http_settings,
)
from ingero.fleet.receivers.otlp.intake import PushIntake
from ingero.fleet.receivers.otlp.telemetry import Tally, TransportLabel
from ingero.otlp.names import Signal
from ingero.serving.asgi import bind
from ingero.serving.grpc_tls import RenewedCredentials
from ingero.serving.otlp.grpc_server import OtlpGrpcServer
from ingero.serving.otlp.http_server import OtlpHttpServer
from ingero.serving.tls import CertificateReloader
from ingero.units import NS_PER_S

_DRAIN_S: Final = 10
_RELOAD_INTERVAL_NS: Final = 60 * NS_PER_S
"""How often certificates are looked at when ``tls.reload_interval`` does not say."""


class OtlpReceiver:
    """Takes OTLP over gRPC and HTTP, and answers each push with its threshold.

    Args:
        component: Its id.
        config: Settings.
        outputs: A consumer for each signal that a pipeline wants.

    Attributes:
        grpc_bound: Where gRPC listens, with the kernel's port; None when it does not.
    """

    def __init__(
        self,
        component: ComponentId,
        config: OtlpReceiverConfig,
        outputs: Mapping[Signal, Consumer],
    ) -> None:
        self._id = component
        self._config = config
        self._outputs = outputs
        self._http: OtlpHttpServer | None = None
        self._grpc: OtlpGrpcServer | None = None
        self.grpc_bound: Endpoint | None = None

    @property
    def http_bound(self) -> Endpoint | None:
        """Where HTTP listens, with the kernel's port; None when it does not."""
        return None if self._http is None else self._http.bound

    async def start(self, host: Host) -> None:
        """Bind both ports.

        Raises:
            IngeroError: An address, a certificate or a named extension is not there.
        """
        protocols = self._config.protocols
        if protocols.http is not None:
            await self._start_http(protocols.http, host)
        if protocols.grpc is not None:
            await self._start_grpc(protocols.grpc, host)

    async def stop(self) -> None:
        """Close both ports; requests in flight may finish."""
        grpc_server, self._grpc = self._grpc, None
        http_server, self._http = self._http, None
        if grpc_server is not None:
            await asyncio.to_thread(grpc_server.stop, _DRAIN_S)
        if http_server is not None:
            await http_server.stop(_DRAIN_S)

    async def _start_http(self, config: HttpConfig, host: Host) -> None:
        tally = Tally(host.meter, self._id, TransportLabel.HTTP)
        intake = self._build_intake(config, host, tally, config.max_request_body_size)
        context = open_server_context(config.tls, host, f"receivers.{self._id}", config.endpoint)
        server = OtlpHttpServer(
            config.endpoint, build_http_settings(config), intake, host.clock, context
        )
        await server.start()
        self._http = server
        host.announce(server.bound, "http")
        if context is not None:
            assert config.tls is not None
            interval_ns = config.tls.reload_interval or _RELOAD_INTERVAL_NS
            reloader = CertificateReloader(context, config.tls)
            name = f"receivers.{self._id}"
            watch_certificate(reloader, host, name, interval_ns, tally.count_bad_certificate)

    async def _start_grpc(self, config: GrpcConfig, host: Host) -> None:
        tally = Tally(host.meter, self._id, TransportLabel.GRPC)
        settings = build_grpc_settings(config)
        credentials = None
        if config.tls is not None:
            name = f"receivers.{self._id}"
            report = report_bad_certificates(host, name, tally.count_bad_certificate)
            credentials = RenewedCredentials(config.tls, report).build()
        (await bind(config.endpoint)).close()  # grpcio would not say what is wrong with an address
        intake = self._build_intake(config, host, tally, settings.max_message_bytes)
        server = OtlpGrpcServer(settings, intake)
        self.grpc_bound = await asyncio.to_thread(server.start, config.endpoint, credentials)
        self._grpc = server
        host.announce(self.grpc_bound, "grpc")

    def _build_intake(
        self, config: ServerConfig, host: Host, tally: Tally, max_body_bytes: int
    ) -> PushIntake:
        authenticator: Authenticator | None = None
        if config.auth is not None:
            authenticator = _get_one(host, Authenticator, config.auth.authenticator)
        if config.middlewares is None:
            answerers = host.find(PushAnswerer)
        else:
            answerers = [_get_one(host, PushAnswerer, one.id) for one in config.middlewares]
        return PushIntake(host, self._outputs, tally, authenticator, answerers, max_body_bytes)


def _get_one(host: Host, capability: type[CapabilityT], name: str) -> CapabilityT:
    component = parse_id(name)
    found = host.find(capability, component) if component is not None else ()
    if not found:
        raise IngeroError(
            f"no extension {name!r} that can do this", hint="list it under service.extensions"
        )
    return found[0]
