"""``health_check``: 200 while the collector takes data, 503 while it starts or drains.

Source: opentelemetry-collector-contrib ``extension/healthcheckextension`` (port, keys, body).
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

from pydantic import Field

from ingero.config import Endpoint, StrictModel
from ingero.config.tls import TlsServerConfig
from ingero.fleet.component import ComponentId, Host, ServiceStatus, ServiceView, Stability
from ingero.fleet.factory import ExtensionFactory
from ingero.serving.asgi import AsgiServer
from ingero.serving.scrape import send_bytes, send_text
from ingero.serving.tls import build_server_context
from ingero.units import format_duration

if TYPE_CHECKING:
    from uvicorn._types import ASGIReceiveCallable, ASGISendCallable, Scope


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


class HealthCheck:
    """Serves one page."""

    def __init__(self, component: ComponentId, config: HealthCheckConfig) -> None:
        del component
        self._config = config
        self._server: AsgiServer | None = None

    async def start(self, host: Host) -> None:
        """Listen. Raises IngeroError when the address or a TLS file cannot be used."""
        self._host = host
        self._view = host.find(ServiceView)[0]
        tls = build_server_context(self._config.tls) if self._config.tls else None
        self._server = AsgiServer(self._app, self._config.endpoint, tls=tls)
        await self._server.start()
        host.announce(self._server.bound)

    async def stop(self) -> None:
        """Close."""
        if self._server is not None:
            await self._server.stop()

    async def _app(
        self, scope: Scope, receive: ASGIReceiveCallable, send: ASGISendCallable
    ) -> None:
        del receive
        assert scope["type"] == "http"
        if scope["path"] != self._config.path:
            await send_text(send, 404, f"health is at {self._config.path}\n")
            return
        is_healthy = self._view.status is ServiceStatus.RUNNING
        status = 200 if is_healthy else 503
        bodies = self._config.response_body or ResponseBodyConfig()
        fixed = bodies.healthy if is_healthy else bodies.unhealthy
        if fixed is not None:
            await send_text(send, status, fixed)
            return
        body = {
            "status": "Server available" if is_healthy else "Server not available",
            "state": self._view.status,
        }
        if is_healthy:
            since_ns = self._host.clock.wall_ns() - self._view.started_wall_ns
            body["uptime"] = format_duration(since_ns)
        await send_bytes(send, status, json.dumps(body).encode(), "application/json")


FACTORY: Final = ExtensionFactory(
    type="health_check",
    config=HealthCheckConfig,
    says="Answers 200 while the collector takes data.",
    stability=Stability.BETA,
    create=HealthCheck,
)
