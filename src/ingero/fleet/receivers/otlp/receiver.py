"""The ``otlp`` receiver's life: both servers, their certificates, and the order in which they start and stop."""

from __future__ import annotations

import socket
import ssl
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
    watch_certificate,
)
from ingero.fleet.jetstream.publishing import StreamEndpoint
from ingero.fleet.jetstream.receiving import PushLog
from ingero.fleet.receivers.otlp.config import (
    GrpcConfig,
    HttpConfig,
    OtlpReceiverConfig,
    ServerConfig,
    build_grpc_settings,
    build_http_settings,
    get_body_limit,
)
from ingero.fleet.receivers.otlp.grpc_health import GrpcHealth, PipelineHealth
from ingero.fleet.receivers.otlp.intake import PushIntake
from ingero.fleet.receivers.otlp.logged import LoggedIntake
from ingero.fleet.receivers.otlp.relayed import EndpointInJudge, RelayedIntake
from ingero.fleet.receivers.otlp.telemetry import Tally, TransportLabel
from ingero.fleet.workers.link import PushRelay
from ingero.fleet.workers.pool import JudgedEndpoint, PooledReceiver, ReceiverPool
from ingero.otlp.names import Signal
from ingero.serving.asgi import bind
from ingero.serving.otlp.grpc_server import OtlpGrpcServer
from ingero.serving.otlp.handler import OtlpHandler
from ingero.serving.otlp.http_server import OtlpHttpServer
from ingero.serving.tls import CertificateReloader
from ingero.telemetry.metrics import MeterRegistry
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
        self._health: GrpcHealth | None = None
        self._held: list[socket.socket] = []

    @property
    def grpc_bound(self) -> Endpoint | None:
        """Where gRPC listens, with the kernel's port; None when it does not."""
        return None if self._grpc is None else self._grpc.bound

    @property
    def http_bound(self) -> Endpoint | None:
        """Where HTTP listens, with the kernel's port; None when it does not."""
        return None if self._http is None else self._http.bound

    async def start(self, host: Host) -> None:
        """Bind both ports; where workers receive, only hold them and join.

        Raises:
            IngeroError: An address, a certificate or a named extension is not there.
        """
        pools = host.find(ReceiverPool)
        if pools:
            await self._join(pools[0], host)
            return
        protocols = self._config.protocols
        if protocols.http is not None:
            await self._start_http(protocols.http, host)
        if protocols.grpc is not None:
            await self._start_grpc(protocols.grpc, host)

    async def stop(self) -> None:
        """Close both ports; requests in flight may finish."""
        while self._held:
            self._held.pop().close()
        grpc_server, self._grpc = self._grpc, None
        http_server, self._http = self._http, None
        if self._health is not None:
            self._health.close()
        if grpc_server is not None:
            await grpc_server.stop(_DRAIN_S)
        if http_server is not None:
            await http_server.stop(_DRAIN_S)

    async def _join(self, pool: ReceiverPool, host: Host) -> None:
        """Hold the ports, and have workers listen on them."""
        protocols = self._config.protocols
        endpoints: list[JudgedEndpoint] = []
        held: dict[str, ServerConfig] = {}
        offered = ((TransportLabel.HTTP, protocols.http), (TransportLabel.GRPC, protocols.grpc))
        for transport, config in offered:  # in the order in which a worker starts them
            if config is None:
                continue
            socket_ = await _hold(config.endpoint)
            self._held.append(socket_)
            endpoint = Endpoint(config.endpoint.host, socket_.getsockname()[1])
            held[transport] = config.model_copy(update={"endpoint": endpoint})
            host.announce(endpoint, transport)
            tally = Tally(host.meter, self._id, transport)
            limit_bytes = get_body_limit(config)
            intake = self._build_push_intake(config, host, tally, limit_bytes)
            endpoints.append(EndpointInJudge(transport, intake))
        names = [config.auth.authenticator for config in held.values() if config.auth is not None]
        extensions = [one for name in names if (one := parse_id(name)) is not None]
        settings = self._config.model_copy(
            update={"protocols": protocols.model_copy(update=dict(held))}
        )
        pool.join(
            PooledReceiver(
                self._id,
                OtlpReceiver,
                settings,
                tuple(self._outputs),
                tuple(extensions),
                tuple(endpoints),
            )
        )

    async def _start_http(self, config: HttpConfig, host: Host) -> None:
        tally = Tally(host.meter, self._id, TransportLabel.HTTP)
        intake = self._build_intake(config, host, tally, config.max_request_body_size)
        context = self._open_context(config, host, tally)
        server = OtlpHttpServer(
            config.endpoint,
            build_http_settings(config, shares_port=_shares_port(host)),
            intake,
            host.clock,
            context,
        )
        await server.start()
        self._http = server
        host.announce(server.bound, "http")

    async def _start_grpc(self, config: GrpcConfig, host: Host) -> None:
        tally = Tally(host.meter, self._id, TransportLabel.GRPC)
        settings = build_grpc_settings(config, shares_port=_shares_port(host))
        intake = self._build_intake(config, host, tally, settings.max_message_bytes)
        health = GrpcHealth()
        is_judged_here = not (host.find(PushRelay) or host.find(PushLog))
        PipelineHealth(self._id, host, health).start(self._outputs, is_judged_here=is_judged_here)
        context = self._open_context(config, host, tally)
        server = OtlpGrpcServer(config.endpoint, settings, intake, context, health.methods)
        await server.start()
        self._grpc, self._health = server, health
        host.announce(server.bound, "grpc")

    def _open_context(
        self, config: HttpConfig | GrpcConfig, host: Host, tally: Tally
    ) -> ssl.SSLContext | None:
        """A context whose renewed files are loaded while it serves; None without TLS."""
        name = f"receivers.{self._id}"
        context = open_server_context(config.tls, host, name, config.endpoint)
        if context is not None:
            assert config.tls is not None
            interval_ns = config.tls.reload_interval or _RELOAD_INTERVAL_NS
            reloader = CertificateReloader(context, config.tls)
            watch_certificate(reloader, host, name, interval_ns, tally.count_bad_certificate)
        return context

    def _build_intake(
        self, config: ServerConfig, host: Host, tally: Tally, max_body_bytes: int
    ) -> OtlpHandler:
        """What a push meets here: the pipelines, or in a worker the way to the judge."""
        relays, logs = host.find(PushRelay), host.find(PushLog)
        if logs:
            return self._build_logged_intake(config, host, tally, max_body_bytes)
        if not relays:
            return self._build_push_intake(config, host, tally, max_body_bytes)
        authenticator = _find_authenticator(config, host)
        endpoint_idx = relays[0].add_endpoint()
        table = (relays[0].answerer(endpoint_idx),)
        intake = PushIntake(host, self._outputs, tally, authenticator, table, max_body_bytes)
        return RelayedIntake(intake, relays[0], endpoint_idx, tally, max_body_bytes)

    def _build_logged_intake(
        self, config: ServerConfig, host: Host, tally: Tally, max_body_bytes: int
    ) -> OtlpHandler:
        """The way to the stream; and an endpoint, by which a judge here applies what any Fleet stored from there."""
        (log,) = host.find(PushLog)
        endpoint_idx = len(host.find(StreamEndpoint))
        uncounted = Tally(MeterRegistry(), self._id, TransportLabel.HTTP)  # its receiver counted it
        judged = self._build_push_intake(config, host, uncounted, max_body_bytes)
        host.offer(StreamEndpoint, EndpointInJudge(TransportLabel.HTTP, judged))
        authenticator = _find_authenticator(config, host)
        intake = PushIntake(host, self._outputs, tally, authenticator, (log,), max_body_bytes)
        return LoggedIntake(intake, log, endpoint_idx, tally, max_body_bytes, host.clock)

    def _build_push_intake(
        self, config: ServerConfig, host: Host, tally: Tally, max_body_bytes: int
    ) -> PushIntake:
        authenticator = _find_authenticator(config, host)
        if config.middlewares is None:
            answerers = host.find(PushAnswerer)
        else:
            answerers = [_get_one(host, PushAnswerer, one.id) for one in config.middlewares]
        return PushIntake(host, self._outputs, tally, authenticator, answerers, max_body_bytes)


async def _hold(endpoint: Endpoint) -> socket.socket:
    """Have a port that only workers of ours will listen on."""
    if endpoint.port:
        (await bind(endpoint)).close()  # fails where somebody listens, who may share the port too
    return await bind(endpoint, shares_port=True, listens=False)


def _shares_port(host: Host) -> bool:
    return bool(host.find(PushRelay))


def _find_authenticator(config: ServerConfig, host: Host) -> Authenticator | None:
    return None if config.auth is None else _get_one(host, Authenticator, config.auth.authenticator)


def _get_one(host: Host, capability: type[CapabilityT], name: str) -> CapabilityT:
    component = parse_id(name)
    found = host.find(capability, component) if component is not None else ()
    if not found:
        raise IngeroError(
            f"no extension {name!r} that can do this", hint="list it under service.extensions"
        )
    return found[0]
