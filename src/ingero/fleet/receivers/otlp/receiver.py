"""The ``otlp`` receiver's life: both servers, their certificates, and the order in which they start and stop."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Final

from ingero.config import Endpoint
from ingero.errors import IngeroError
from ingero.fleet.component import Authenticator, CapabilityT, ComponentId, Host, PushAnswerer
from ingero.fleet.consumer import Consumer
from ingero.fleet.helpers.certificates import open_server_context, watch_certificate
from ingero.fleet.receivers.otlp.config import (
    GrpcConfig,
    HttpConfig,
    OtlpReceiverConfig,
    ServerConfig,
)
from ingero.fleet.receivers.otlp.grpc_server import OtlpGrpcServer
from ingero.fleet.receivers.otlp.http_server import OtlpHttpServer
from ingero.fleet.receivers.otlp.intake import PushIntake, get_component
from ingero.fleet.receivers.otlp.telemetry import Tally, TransportLabel
from ingero.otlp.names import Signal
from ingero.serving.asgi import bind
from ingero.serving.tls import CertificateReloader, build_server_context
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

    @property
    def http_bound(self) -> Endpoint | None:
        """Where HTTP listens, with the kernel's port; None when it does not."""
        return None if self._http is None else self._http.bound

    @property
    def grpc_bound(self) -> Endpoint | None:
        """Where gRPC listens, with the kernel's port; None when it does not."""
        return None if self._grpc is None else self._grpc.bound

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
        intake = self._build_intake(config, host, tally)
        context = open_server_context(config.tls, host, f"receivers.{self._id}", config.endpoint)
        server = OtlpHttpServer(config, intake, tally, host, context)
        await server.start()
        self._http = server
        host.announce(server.bound, "http")
        if context is not None:
            assert config.tls is not None
            interval_ns = config.tls.reload_interval or _RELOAD_INTERVAL_NS
            reloader = CertificateReloader(context, config.tls)
            name, count = f"receivers.{self._id}", tally.bad_certificate
            watch_certificate(reloader, host, name, interval_ns, lambda: count(1))

    async def _start_grpc(self, config: GrpcConfig, host: Host) -> None:
        tally = Tally(host.meter, self._id, TransportLabel.GRPC)
        if config.tls is not None:
            build_server_context(config.tls)  # says what is wrong with a file; grpcio would not
        (
            await bind(config.endpoint)
        ).close()  # says what is wrong with an address; grpcio would not
        server = OtlpGrpcServer(config, self._build_intake(config, host, tally), tally)
        await asyncio.to_thread(server.start)
        self._grpc = server
        host.announce(server.bound, "grpc")

    def _build_intake(self, config: ServerConfig, host: Host, tally: Tally) -> PushIntake:
        authenticator: Authenticator | None = None
        if config.auth is not None:
            name = config.auth.authenticator
            authenticator = _get_one(host.find(Authenticator, get_component(name)), name)
        if config.middlewares is None:
            answerers = host.find(PushAnswerer)
        else:
            answerers = [
                _get_one(host.find(PushAnswerer, get_component(one.id)), one.id)
                for one in config.middlewares
            ]
        return PushIntake(host, self._outputs, tally, authenticator, answerers)


def _get_one(found: Sequence[CapabilityT], name: str) -> CapabilityT:
    if not found:
        raise IngeroError(
            f"no extension {name!r} that can do this", hint="list it under service.extensions"
        )
    return found[0]
