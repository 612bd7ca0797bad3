"""Settings of the ``otlp`` receiver, under the Collector's key names.

Source: opentelemetry-collector ``receiver/otlpreceiver``, ``config/confighttp`` and ``config/configgrpc`` READMEs. Left
out: ``cors`` (browsers do not push here), ``include_metadata`` (no component reads it), transports other than TCP.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal, Self

from pydantic import Field, StringConstraints, model_validator

from ingero.config import Duration, Endpoint, Size, StrictModel
from ingero.config.tls import TlsServerConfig
from ingero.fleet.component import NamesExtension
from ingero.otlp.names import Signal
from ingero.serving.connections import ConnectionLimits
from ingero.serving.otlp.grpc_calls import OtlpGrpcSettings
from ingero.serving.otlp.http_head import OtlpHttpSettings
from ingero.units import NS_PER_S, parse_duration, parse_size

_MAX_CONNECTIONS: Final = 1 << 30
"""No limit but the descriptors: an agent has one connection, and a cluster may have ten thousand agents."""

_MAX_STREAMS: Final = 128
_MAX_BUFFERED_BYTES: Final = parse_size("128MiB")
"""As `HttpConfig.max_buffered_size`."""
_PING_AFTER_NS: Final = parse_duration("2h")
_PING_TIMEOUT_NS: Final = parse_duration("20s")
"""Source: grpc.io, "Keepalive": defaults of a server."""

Encoding = Literal["gzip", "zstd", "zlib", "deflate", "snappy", "x-snappy-framed", "lz4", ""]
UrlPath = Annotated[str, StringConstraints(pattern=r"^/[^?#]*$")]
ExtensionName = Annotated[str, StringConstraints(min_length=1), NamesExtension()]


class AuthConfig(StrictModel):
    """Who may push."""

    authenticator: ExtensionName = Field(
        description="Extension that checks the Authorization header, such as bearertokenauth."
    )


class MiddlewareConfig(StrictModel):
    """An extension that has a say in each answer."""

    id: ExtensionName = Field(
        description="Extension that knows the threshold of a sender, such as ingero_threshold."
    )


class ServerConfig(StrictModel):
    """What both protocols share."""

    absent_keys = {  # noqa: RUF012 -- declared as ClassVar by StrictModel
        "include_metadata": "no component here reads what it would pass on; leave it out",
        "cors": "browsers do not push here; leave it out",
        "transport": "only tcp is there; leave it out",
    }

    tls: TlsServerConfig | None = Field(
        None, description="Certificates; without it the port speaks plain text."
    )
    auth: AuthConfig | None = Field(None, description="Refuse pushes without valid credentials.")
    middlewares: tuple[MiddlewareConfig, ...] | None = Field(
        None,
        description="Which extensions put the threshold on answers; without it, every one that can.",
    )
    max_in_flight: int = Field(
        1024,
        ge=1,
        description="Requests being received at once; one more is asked to come again later.",
    )


class KeepaliveServerParameters(StrictModel):
    """How long a gRPC connection lives."""

    max_connection_idle: Duration | None = Field(
        None, description="Close a connection without calls after this."
    )
    max_connection_age: Duration | None = Field(
        None, description="Close a connection after this, so that agents spread over new replicas."
    )
    max_connection_age_grace: Duration | None = Field(
        None, description="Time for calls to end after max_connection_age."
    )
    time: Duration | None = Field(None, description="Ping a silent client after this.")
    timeout: Duration | None = Field(
        None, description="Close when a ping has had no answer for this long."
    )


class KeepaliveConfig(StrictModel):
    """gRPC keepalive."""

    server_parameters: KeepaliveServerParameters = Field(
        KeepaliveServerParameters(), description="The server's side."
    )


class GrpcConfig(ServerConfig):
    """OTLP over gRPC."""

    endpoint: Endpoint = Field(Endpoint("localhost", 4317), description="host:port to listen on.")
    max_recv_msg_size_mib: int = Field(
        4, ge=1, le=1024, description="Largest request, uncompressed, in MiB."
    )
    max_concurrent_streams: int | None = Field(
        None, ge=1, description="Calls at once on one connection; empty is 128."
    )
    keepalive: KeepaliveConfig | None = Field(None, description="How long connections live.")


class HttpConfig(ServerConfig):
    """OTLP over HTTP/1.1."""

    endpoint: Endpoint = Field(Endpoint("localhost", 4318), description="host:port to listen on.")
    metrics_url_path: UrlPath = Field("/v1/metrics", description="Where metrics are posted.")
    logs_url_path: UrlPath = Field("/v1/logs", description="Where logs are posted.")
    traces_url_path: UrlPath = Field("/v1/traces", description="Where traces are posted.")
    url_prefixes: tuple[UrlPath, ...] = Field(
        (),
        description="Accept the three paths below each of these too, such as /api; for agents whose endpoint "
        "has a path.",
    )
    max_request_body_size: Size = Field(
        parse_size("20MiB"), ge=1, description="Largest body, before and after decompression."
    )
    max_buffered_size: Size = Field(
        parse_size("128MiB"),
        ge=1,
        description="Unfinished bodies in memory over all connections; one more is asked to come again later.",
    )
    compression_algorithms: tuple[Encoding, ...] = Field(
        ("", "gzip", "zstd", "zlib", "snappy", "deflate", "lz4", "x-snappy-framed"),
        description="Content encodings to accept; the empty one is an uncompressed body.",
    )
    read_timeout: Duration = Field(
        parse_duration("30s"), description="Longest time for one body to arrive."
    )
    idle_timeout: Duration = Field(
        parse_duration("90s"), description="Close a connection without requests after this."
    )
    keep_alives_enabled: bool = Field(
        default=True, description="Answer several requests on one connection."
    )


class ProtocolsConfig(StrictModel):
    """Which protocols to serve; each only when it is named."""

    grpc: GrpcConfig | None = Field(None, description="OTLP over gRPC, usually on 4317.")
    http: HttpConfig | None = Field(None, description="OTLP over HTTP, usually on 4318.")

    @model_validator(mode="after")
    def _check_any(self) -> Self:
        if self.grpc is None and self.http is None:
            raise ValueError("name at least one protocol: grpc or http")
        return self


class OtlpReceiverConfig(StrictModel):
    """Settings of the ``otlp`` receiver."""

    protocols: ProtocolsConfig = Field(description="grpc, http or both.")


def build_http_settings(config: HttpConfig, *, shares_port: bool = False) -> OtlpHttpSettings:
    """What the HTTP server is given."""
    paths = {
        config.metrics_url_path: Signal.METRICS,
        config.logs_url_path: Signal.LOGS,
        config.traces_url_path: Signal.TRACES,
    }
    return OtlpHttpSettings(
        routes={
            prefix.rstrip("/") + path: signal
            for prefix in ("", *config.url_prefixes)
            for path, signal in paths.items()
        },
        encodings=frozenset(config.compression_algorithms),
        max_body_bytes=config.max_request_body_size,
        max_in_flight=config.max_in_flight,
        max_buffered_bytes=config.max_buffered_size,
        read_timeout_ns=config.read_timeout,
        idle_timeout_ns=config.idle_timeout,
        is_kept_alive=config.keep_alives_enabled,
        connections=ConnectionLimits(
            head_s=max(config.read_timeout, config.idle_timeout) / NS_PER_S,
            stall_s=config.idle_timeout / NS_PER_S,
            max_connections=_MAX_CONNECTIONS,
        ),
        shares_port=shares_port,
    )


def build_grpc_settings(config: GrpcConfig, *, shares_port: bool = False) -> OtlpGrpcSettings:
    """What the gRPC server is given."""
    life = KeepaliveConfig() if config.keepalive is None else config.keepalive
    parameters = life.server_parameters
    return OtlpGrpcSettings(
        max_message_bytes=config.max_recv_msg_size_mib << 20,
        max_in_flight=config.max_in_flight,
        max_streams=config.max_concurrent_streams or _MAX_STREAMS,
        max_buffered_bytes=max(_MAX_BUFFERED_BYTES, config.max_recv_msg_size_mib << 20),
        idle_ns=parameters.max_connection_idle,
        age_ns=parameters.max_connection_age,
        age_grace_ns=parameters.max_connection_age_grace,
        ping_after_ns=parameters.time or _PING_AFTER_NS,
        ping_timeout_ns=parameters.timeout or _PING_TIMEOUT_NS,
        connections=ConnectionLimits(max_connections=_MAX_CONNECTIONS),
        shares_port=shares_port,
    )


def get_body_limit(config: ServerConfig) -> int:
    """Largest body after decompression, in bytes."""
    if isinstance(config, HttpConfig):
        return config.max_request_body_size
    assert isinstance(config, GrpcConfig)
    return config.max_recv_msg_size_mib << 20
