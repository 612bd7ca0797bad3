"""``zpages``: what runs and how it does, as pages for a person with a browser or curl.

Source: opentelemetry-collector ``extension/zpagesextension`` (port 55679, paths). ``tracez`` shows time per batch and the
latest refusals per pipeline; we keep no spans of our own.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

from pydantic import Field

from ingero import __version__
from ingero.config import Endpoint, StrictModel
from ingero.config.tls import TlsServerConfig
from ingero.fleet.component import ComponentId, Host, ServiceView, Stability
from ingero.fleet.factory import ExtensionFactory
from ingero.serving.asgi import AsgiServer
from ingero.serving.scrape import send_bytes, send_text
from ingero.serving.tls import build_server_context
from ingero.units import NS_PER_S, format_duration

if TYPE_CHECKING:
    from uvicorn._types import ASGIReceiveCallable, ASGISendCallable, Scope

_STYLE: Final = "body{font:14px sans-serif;margin:2em}td,th{padding:2px 12px;text-align:left}tr:nth-child(even){background:#eee}"


class ZpagesConfig(StrictModel):
    """Where the pages are."""

    endpoint: Endpoint = Field(Endpoint("localhost", 55679), description="Where to listen.")
    tls: TlsServerConfig | None = Field(None, description="TLS of the pages.")


class Zpages:
    """Serves the pages."""

    def __init__(self, component: ComponentId, config: ZpagesConfig) -> None:
        del component
        self._config = config
        self._server: AsgiServer | None = None
        self._pages = {
            "/debug/servicez": self._service,
            "/debug/pipelinez": self._pipelines,
            "/debug/tracez": self._traces,
        }

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
        page = self._pages.get(scope["path"])
        if page is None:
            await send_text(send, 404, "pages: " + " ".join(self._pages) + "\n")
            return
        links = " · ".join(
            f'<a href="{path}">{path.rpartition("/")[2]}</a>' for path in self._pages
        )
        body = f"<!doctype html><title>ingero-fleet</title><style>{_STYLE}</style><p>{links}</p>{page()}\n"
        await send_bytes(send, 200, body.encode(), "text/html; charset=utf-8")

    def _service(self) -> str:
        view, clock = self._view, self._host.clock
        facts = [
            ("version", __version__),
            ("status", view.status),
            ("started", _show_time(view.started_wall_ns)),
            ("uptime", format_duration(clock.wall_ns() - view.started_wall_ns)),
            ("configuration", view.config_source),
        ]
        components = [(kind.value, str(component)) for kind, component in view.components()]
        return _table("Service", ("", ""), facts) + _table(
            "Components in start order", ("kind", "id"), components
        )

    def _pipelines(self) -> str:
        rows = [
            (
                one.name,
                *(", ".join(names) for names in (one.receivers, one.processors, one.exporters)),
                one.n_batches,
            )
            for one in self._view.pipelines()
        ]
        return _table(
            "Pipelines", ("pipeline", "receivers", "processors", "exporters", "batches"), rows
        )

    def _traces(self) -> str:
        text = ""
        for one in self._view.pipelines():
            bounds = [f"≤ {format_duration(bound * NS_PER_S)}" for bound in one.duration_bounds_s]
            text += _table(f"{one.name}: time per batch", (*bounds, "longer"), [one.durations])
            errors = [(_show_time(wall_ns), message) for wall_ns, message in one.errors]
            text += _table(f"{one.name}: latest refusals", ("when", "what"), errors)
        return text


def _table(title: str, head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    def line(tag: str, cells: Sequence[object]) -> str:
        return (
            "<tr>" + "".join(f"<{tag}>{html.escape(str(cell))}</{tag}>" for cell in cells) + "</tr>"
        )

    body = "".join(line("td", row) for row in rows)
    return f"<h2>{html.escape(title)}</h2><table>{line('th', head)}{body}</table>"


def _show_time(wall_ns: int) -> str:
    return datetime.fromtimestamp(wall_ns / NS_PER_S, UTC).isoformat(timespec="seconds")


FACTORY: Final = ExtensionFactory(
    type="zpages",
    config=ZpagesConfig,
    says="Pages that show what runs and how it does.",
    stability=Stability.BETA,
    create=Zpages,
)
