"""The extension: two listening sockets, and the answer to each push."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from ingero.fleet.component import (
    AdminRoute,
    AdminRoutes,
    ComponentId,
    Host,
    PushAnswer,
    PushAnswerer,
    PushContext,
    RankLevels,
    Stability,
    ThresholdSource,
)
from ingero.fleet.extensions.ingero_threshold.admin import answer_admin
from ingero.fleet.extensions.ingero_threshold.agent import answer_agent
from ingero.fleet.extensions.ingero_threshold.config import IngeroThresholdConfig
from ingero.fleet.extensions.ingero_threshold.heat import HeatHistory
from ingero.fleet.extensions.ingero_threshold.live import LivePage
from ingero.fleet.factory import ExtensionFactory
from ingero.fleet.helpers.admin_pages import ADMIN_ROOT
from ingero.fleet.helpers.certificates import HANDSHAKES_REFUSED, open_renewing_context
from ingero.fleet.helpers.served_pages import Page, ServedPages
from ingero.fleet.views import (
    ServiceView,
)
from ingero.telemetry.declare import counter

if TYPE_CHECKING:
    from uvicorn._types import HTTPScope

REQUESTS: Final = counter(
    "ingero_fleet_threshold_requests_total",
    "Answers of GET /api/v1/threshold by status.",
    "status",
)


class IngeroThresholdExtension:
    """Answers pushes (`PushAnswerer`), agents that ask, and operators."""

    def __init__(self, component: ComponentId, config: IngeroThresholdConfig) -> None:
        self._id = component
        self._config = config
        self._host: Host | None = None
        self._sources: Sequence[ThresholdSource] = ()
        self._served: list[ServedPages] = []

    async def start(self, host: Host) -> None:
        """Listen on both endpoints and offer to answer pushes."""
        self._host = host
        host.offer(PushAnswerer, self)
        heat = HeatHistory(host.clock, self._config.live_interval)
        live = LivePage(host, heat, self._config.dashboard_url)
        host.offer(AdminRoutes, _ServicePages(host, live))
        host.every(self._config.live_interval, lambda: heat.take(host.find(RankLevels)))
        requests = host.meter.counter(REQUESTS)
        counts = {code: requests.bound(status=str(code)) for code in (200, 400, 404, 405)}
        config = self._config
        endpoint = config.agent_endpoint
        context = open_renewing_context(config.tls, host, f"extensions.{self._id}", endpoint)

        def answer_agents(scope: HTTPScope) -> Page:
            page = answer_agent(self.find_answer, scope)
            counts[page.status](1)
            return page

        def answer_operators(scope: HTTPScope) -> Page:
            find_pages = partial(host.find, AdminRoutes)
            return answer_admin(find_pages, scope, live, allow_remote=config.admin_allow_remote)

        for pages in (
            ServedPages(endpoint, lambda _: answer_agents, context, "agents"),
            ServedPages(config.admin_endpoint, lambda _: answer_operators, None, "admin"),
        ):
            await pages.start(host)
            self._served.append(pages)

    async def stop(self) -> None:
        """Close both endpoints."""
        while self._served:
            await self._served.pop().stop()

    def answer(self, push: PushContext) -> PushAnswer | None:
        """The threshold for who just pushed; a hint counts only where nothing could be read from the body."""
        cluster_id = push.cluster_hint if push.cluster_id is None else push.cluster_id
        if not cluster_id:
            return None
        if not self._sources:  # pushes come when every processor has started
            assert self._host is not None
            self._sources = tuple(self._host.find(ThresholdSource))
        return _find_first(self._sources, cluster_id, push.cohort, push.node_id)

    def find_answer(
        self, cluster_id: str, cohort_hash: str = "", node_id: str | None = None
    ) -> PushAnswer | None:
        """The threshold for who asks."""
        assert self._host is not None
        return _find_first(self._host.find(ThresholdSource), cluster_id, cohort_hash, node_id)


def _find_first(
    sources: Sequence[ThresholdSource], cluster_id: str, cohort_hash: str, node_id: str | None
) -> PushAnswer | None:
    for source in sources:
        answer = source.find_answer(cluster_id, cohort_hash, node_id)
        if answer is not None:
            return answer
    return None


class _ServicePages:
    """Pages about the service itself."""

    def __init__(self, host: Host, live: LivePage) -> None:
        self._host = host
        self._live = live

    def admin_routes(self) -> Sequence[AdminRoute]:
        """The configuration that runs, and what the live page needs beside what processors offer."""
        pages = (
            ("config", "The configuration that runs, secrets hidden.", self._config),
            (
                "exporters",
                "Exporters with a queue: what waits, and how long the destination is away.",
                self._live.show_exporters,
            ),
            ("live", "What the live page can show.", self._live.show_setup),
        )
        return [
            AdminRoute(f"{ADMIN_ROOT}/{name}", description, read)
            for name, description, read in pages
        ]

    def _config(self, query: Mapping[str, str]) -> dict[str, Any]:
        del query
        services = self._host.find(ServiceView)
        if not services:
            raise KeyError("config")
        return {"source": services[0].config_source, "settings": services[0].settings()}


FACTORY = ExtensionFactory(
    type="ingero_threshold",
    config=IngeroThresholdConfig,
    description="Tells agents their threshold, on answers to pushes and on request, and shows admin pages.",
    stability=Stability.BETA,
    metrics=(REQUESTS, HANDSHAKES_REFUSED),
    create=IngeroThresholdExtension,
)
