"""What a user writes under ``service.storage``."""

from __future__ import annotations

from typing import Final

from pydantic import Field

from ingero.config import Duration, Secret, Size, StrictModel
from ingero.config.tls import TlsClientConfig
from ingero.units import parse_duration

_NAME: Final = r"^[A-Za-z0-9_-]{1,64}$"


class NatsConfig(StrictModel):
    """Where the Fleets of a site meet."""

    servers: tuple[str, ...] = Field(
        ("nats://127.0.0.1:4222",), min_length=1, description="URLs of the site's NATS servers."
    )
    token: Secret | None = Field(None, description="What the servers ask for; needs tls elsewhere.")
    tls: TlsClientConfig | None = Field(None, description="TLS to the servers.")
    name: str = Field(
        "ingero",
        pattern=_NAME,
        description="What the stream and the buckets begin with; Fleets of one name share clusters.",
    )
    judge: bool = Field(
        default=True,
        description="Whether this Fleet may judge clusters; one that may not only receives.",
    )
    standby: bool = Field(
        default=True,
        description="Whether this Fleet follows clusters that another judges, one follower each, so that it takes over"
        " within seconds; costs what judging them costs.",
    )
    window: Duration = Field(
        parse_duration("15m"),
        description="How long the stream keeps pushes: what a judge that takes over knows.",
    )
    max_size: Size = Field(
        4 << 30, description="Bytes of pushes that the stream keeps; beyond, the oldest go first."
    )
    replicas: int = Field(
        1, ge=1, le=5, description="Servers that have each push before it is acknowledged."
    )
    lease: Duration = Field(
        parse_duration("2s"),
        ge=parse_duration("500ms"),
        description="A judge that is silent this long is replaced.",
    )
    timeout: Duration = Field(
        parse_duration("2s"),
        description="How long a push waits for the stream; then it is asked to come again.",
    )


class StorageConfig(StrictModel):
    """Where what must outlive this process is kept; empty is nowhere."""

    nats: NatsConfig | None = Field(
        None, description="A stream of NATS JetStream, for several Fleets that act as one."
    )
