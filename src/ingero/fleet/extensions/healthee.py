"""``healthee``: an open probe, and behind a bearer everything that an operator's program asks of a Fleet.

Source: Ingero Fleet's README (port 8088, ``/healthz/ee`` open, ``/internal/ee/state`` with a bearer, native TLS). Keys
and bodies are ours, because none are published.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Final

from pydantic import Field

from ingero import __version__
from ingero.config import Endpoint, StrictModel
from ingero.config.tls import TlsServerConfig
from ingero.errors import ConfigError, RetryableError
from ingero.fleet.component import (
    ComponentId,
    Host,
    Stability,
)
from ingero.fleet.factory import ExtensionFactory
from ingero.fleet.helpers.clients import ClientAuthConfig, find_authenticator
from ingero.fleet.helpers.served_pages import Page, ServedPages, build_json_page
from ingero.fleet.views import (
    DeliveryState,
    DeliveryView,
    PipelineView,
    ScrapeState,
    ScrapeView,
    ServiceStatus,
    ServiceView,
)
from ingero.units import NS_PER_S

if TYPE_CHECKING:
    from uvicorn._types import HTTPScope

PROBE_PATH: Final = "/healthz/ee"
STATE_PATH: Final = "/internal/ee/state"
_SCHEMA_VERSION: Final = 1


class HealtheeConfig(StrictModel):
    """Where health is asked for, and who may see all of it."""

    endpoint: Endpoint = Field(Endpoint("localhost", 8088), description="Where to listen.")
    tls: TlsServerConfig | None = Field(None, description="TLS of both pages.")
    auth: ClientAuthConfig | None = Field(
        None,
        description="Extension that checks who asks for /internal/ee/state; without one that page is not served.",
    )


class HealtheePages:
    """Answers with the probe and the state."""

    def __init__(self, config: HealtheeConfig, host: Host) -> None:
        self._config = config
        self._host = host
        self._view = host.find(ServiceView)[0]

    def answer(self, scope: HTTPScope) -> Page:
        """One of the two pages."""
        if scope["path"] == PROBE_PATH:
            is_ready = self._view.status is ServiceStatus.RUNNING
            return build_json_page(200 if is_ready else 503, {"status": self._view.status})
        if scope["path"] != STATE_PATH:
            return build_json_page(404, {"error": f"pages: {PROBE_PATH} {STATE_PATH}"})
        refusal = self._refuse(scope)
        return build_json_page(200, self.build_state()) if refusal is None else refusal

    def _refuse(self, scope: HTTPScope) -> Page | None:
        """Why the state is not shown; None when it may be.

        The extension is looked up at each request, because it may start after this one.
        """
        if self._config.auth is None:
            message = f"{STATE_PATH} is not served without auth; set extensions.healthee.auth"
            return build_json_page(404, {"error": message})
        try:
            authenticator = find_authenticator(self._host, self._config.auth)
        except ConfigError as error:
            return build_json_page(500, {"error": error.message})
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        text = given[0].decode("latin-1") if len(given) == 1 else None
        try:
            if authenticator is not None and authenticator.authenticate(text) is not None:
                return None
        except RetryableError as error:
            return build_json_page(503, {"error": error.message})
        page = build_json_page(401, {"error": "missing or wrong credentials"})
        return dataclasses.replace(page, headers=(*page.headers, (b"www-authenticate", b"Bearer")))

    def build_state(self) -> dict[str, Any]:
        """The whole body."""
        view, clock = self._view, self._host.clock
        deliveries = [one.read_state() for one in self._host.find(DeliveryView)]
        scraped = [one.read_state() for one in self._host.find(ScrapeView)]
        states: tuple[DeliveryState | ScrapeState, ...] = (*deliveries, *scraped)
        return {
            "schema_version": _SCHEMA_VERSION,
            "version": __version__,
            "status": view.status,
            "started_unix_s": view.started_wall_ns / NS_PER_S,
            "uptime_s": (clock.wall_ns() - view.started_wall_ns) / NS_PER_S,
            "config_source": view.config_source,
            "components": [
                {"kind": kind.value, "id": str(component)} for kind, component in view.components()
            ],
            "pipelines": [_describe(one) for one in view.pipelines()],
            "exporters": [dataclasses.asdict(one) for one in deliveries],
            "scraped": [dataclasses.asdict(one) for one in scraped],
            "degraded": [
                f"exporters.{one.exporter}: {one.trouble}" for one in states if one.trouble
            ],
        }


def _describe(one: PipelineView) -> dict[str, Any]:
    return {
        "name": one.name,
        "receivers": one.receivers,
        "processors": one.processors,
        "exporters": one.exporters,
        "batches": one.n_batches,
        "refusals": [{"unix_s": wall_ns / NS_PER_S, "error": text} for wall_ns, text in one.errors],
    }


def _create(component: ComponentId, config: HealtheeConfig) -> ServedPages:
    del component
    return ServedPages(config.endpoint, lambda host: HealtheePages(config, host).answer, config.tls)


FACTORY: Final = ExtensionFactory(
    type="healthee",
    config=HealtheeConfig,
    description="An open probe, and the collector's whole state for those with a token.",
    stability=Stability.BETA,
    create=_create,
)
