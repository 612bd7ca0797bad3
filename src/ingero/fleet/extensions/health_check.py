"""``health_check``: 200 while the collector takes data, 503 while it starts or drains.

Source: opentelemetry-collector-contrib ``extension/healthcheckextension`` (port, keys, body).
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

from pydantic import Field

from ingero.config import Endpoint, StrictModel
from ingero.config.tls import TlsServerConfig
from ingero.fleet.component import (
    ComponentId,
    Host,
    Stability,
)
from ingero.fleet.factory import ExtensionFactory
from ingero.fleet.helpers.served_pages import Page, ServedPages
from ingero.fleet.views import (
    ServiceStatus,
    ServiceView,
)
from ingero.units import format_duration

if TYPE_CHECKING:
    from uvicorn._types import HTTPScope


class ResponseBodyConfig(StrictModel):
    """Fixed bodies instead of the JSON one."""

    healthy: str | None = Field(None, description="Body of a 200.")
    unhealthy: str | None = Field(None, description="Body of a 503.")


class HealthCheckConfig(StrictModel):
    """Where health is asked for."""

    endpoint: Endpoint = Field(Endpoint("localhost", 13133), description="Where to listen.")
    path: str = Field("/", pattern="^/", description="Path of the page.")
    tls: TlsServerConfig | None = Field(None, description="TLS of the page.")
    response_body: ResponseBodyConfig | None = Field(
        None, description="Fixed bodies instead of the JSON one."
    )


class HealthPage:
    """Answers with the service's health."""

    def __init__(self, config: HealthCheckConfig, host: Host) -> None:
        self._config = config
        self._clock = host.clock
        self._view = host.find(ServiceView)[0]

    def answer(self, scope: HTTPScope) -> Page:
        """The page, or where it is."""
        if scope["path"] != self._config.path:
            return Page(404, f"health is at {self._config.path}\n".encode())
        is_healthy = self._view.status is ServiceStatus.RUNNING
        status = 200 if is_healthy else 503
        bodies = self._config.response_body or ResponseBodyConfig()
        fixed = bodies.healthy if is_healthy else bodies.unhealthy
        if fixed is not None:
            return Page(status, fixed.encode())
        body = {
            "status": "Server available" if is_healthy else "Server not available",
            "state": self._view.status,
        }
        if is_healthy:
            body["uptime"] = format_duration(self._clock.wall_ns() - self._view.started_wall_ns)
        return Page(status, json.dumps(body).encode(), "application/json")


def _create(component: ComponentId, config: HealthCheckConfig) -> ServedPages:
    del component
    return ServedPages(config.endpoint, lambda host: HealthPage(config, host).answer, config.tls)


FACTORY: Final = ExtensionFactory(
    type="health_check",
    config=HealthCheckConfig,
    description="Answers 200 while the collector takes data.",
    stability=Stability.BETA,
    create=_create,
)
