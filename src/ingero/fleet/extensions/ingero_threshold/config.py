"""Settings of the ``ingero_threshold`` extension."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from ingero.config import Endpoint, StrictModel
from ingero.config.tls import TlsServerConfig
from ingero.config.types import Duration
from ingero.units import parse_duration


class IngeroThresholdConfig(StrictModel):
    """The ``ingero_threshold`` extension."""

    agent_endpoint: Endpoint = Field(
        Endpoint("0.0.0.0", 8080),  # noqa: S104 - the documented default; agents come from other machines
        description="host:port of GET /api/v1/threshold.",
    )
    tls: TlsServerConfig | None = Field(
        None, description="Serve agents HTTPS; with client_ca_file they must show a certificate."
    )
    admin_endpoint: Endpoint = Field(
        Endpoint("127.0.0.1", 8081),
        description="host:port of the admin pages, which have no authentication.",
    )
    admin_allow_remote: bool = Field(
        default=False, description="Let admin_endpoint be reached from other machines."
    )

    live_interval: Duration = Field(
        parse_duration("5s"),
        ge=parse_duration("100ms"),
        description="How often the live page keeps what ranks measured; it keeps 600 times.",
    )
    dashboard_url: str = Field(
        "",
        description="Where a node's own `ingero dashboard` is, such as https://{node_id}:8443/, for links.",
    )

    @model_validator(mode="after")
    def _check_dashboard_url(self) -> Self:
        url = self.dashboard_url
        if url and not url.startswith(("https://", "http://")):
            raise ValueError(f"dashboard_url {url!r} is no http or https URL")
        return self

    @model_validator(mode="after")
    def _check_admin(self) -> Self:
        if not self.admin_endpoint.is_loopback and not self.admin_allow_remote:
            raise ValueError(
                f"admin_endpoint {self.admin_endpoint} is reachable from other machines and has no"
                " authentication; use 127.0.0.1, or set admin_allow_remote: true behind your own"
            )
        return self
