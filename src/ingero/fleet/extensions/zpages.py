"""``zpages``: what runs and how it does, as pages for a person with a browser or curl.

Source: opentelemetry-collector ``extension/zpagesextension`` (port 55679, paths). ``tracez`` shows time per batch and
the latest refusals per pipeline; we keep no spans of our own.
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
from ingero.fleet.component import (
    ComponentId,
    Host,
    Stability,
)
from ingero.fleet.factory import ExtensionFactory
from ingero.fleet.helpers.served_pages import Page, ServedPages
from ingero.fleet.views import (
    DeliveryView,
    ScrapeView,
    ServiceView,
)
from ingero.units import NS_PER_S, format_duration

if TYPE_CHECKING:
    from uvicorn._types import HTTPScope

_STYLE: Final = (
    "body{font:14px sans-serif;margin:2em}td,th{padding:2px 12px;text-align:left}"
    "tr:nth-child(even){background:#eee}"
)

_SENDING: Final = (
    *("exporter", "batches in its queue", "items sent", "retries", "items dropped"),
    *("destination", "last error", "what it said"),
)
_SCRAPED: Final = ("exporter", "series", "scrapes", "last scrape", "interval", "trouble")


class ZpagesConfig(StrictModel):
    """Where the pages are."""

    endpoint: Endpoint = Field(Endpoint("localhost", 55679), description="Where to listen.")
    tls: TlsServerConfig | None = Field(None, description="TLS of the pages.")


class Zpages:
    """Answers with the pages."""

    def __init__(self, host: Host) -> None:
        self._clock = host.clock
        self._view = host.find(ServiceView)[0]
        self._find = host.find
        self._pages = {
            "/debug/servicez": self._service,
            "/debug/pipelinez": self._pipelines,
            "/debug/exporterz": self._exporters,
            "/debug/tracez": self._traces,
        }

    def answer(self, scope: HTTPScope) -> Page:
        """One of the pages, or their names."""
        page = self._pages.get(scope["path"])
        if page is None:
            return Page(404, f"pages: {' '.join(self._pages)}\n".encode())
        links = " · ".join(
            f'<a href="{path}">{path.rpartition("/")[2]}</a>' for path in self._pages
        )
        body = f"<!doctype html><title>ingero-fleet</title><style>{_STYLE}</style><p>{links}</p>{page()}\n"
        return Page(200, body.encode(), "text/html; charset=utf-8")

    def _service(self) -> str:
        view, clock = self._view, self._clock
        facts = [
            ("version", __version__),
            ("status", view.status),
            ("started", _show_time(view.started_wall_ns / NS_PER_S)),
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

    def _exporters(self) -> str:
        sending = [
            (
                one.exporter,
                f"{one.n_waiting} of {one.capacity}" if one.capacity else "no queue",
                *(one.n_sent, one.n_retries, one.n_dropped, one.trouble or "takes data"),
                "" if one.last_error_unix_s is None else _show_time(one.last_error_unix_s),
                one.last_error,
            )
            for one in (view.read_state() for view in self._find(DeliveryView))
        ]
        scraped = [
            (
                *(one.exporter, one.n_series, one.n_scrapes),
                "never" if one.since_s is None else f"{one.since_s} s ago",
                "" if one.interval_s is None else f"{one.interval_s} s",
                one.trouble,
            )
            for one in (view.read_state() for view in self._find(ScrapeView))
        ]
        return _table("Exporters that send", _SENDING, sending) + _table(
            "Exporters that are scraped", _SCRAPED, scraped
        )

    def _traces(self) -> str:
        text = ""
        for one in self._view.pipelines():
            bounds = [f"≤ {format_duration(bound * NS_PER_S)}" for bound in one.duration_bounds_s]
            text += _table(f"{one.name}: time per batch", (*bounds, "longer"), [one.durations])
            errors = [(_show_time(wall_ns / NS_PER_S), message) for wall_ns, message in one.errors]
            text += _table(f"{one.name}: latest refusals", ("when", "what"), errors)
        return text


def _table(title: str, head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    def line(tag: str, cells: Sequence[object]) -> str:
        return (
            "<tr>" + "".join(f"<{tag}>{html.escape(str(cell))}</{tag}>" for cell in cells) + "</tr>"
        )

    body = "".join(line("td", row) for row in rows)
    return f"<h2>{html.escape(title)}</h2><table>{line('th', head)}{body}</table>"


def _show_time(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).isoformat(timespec="seconds")


def _create(component: ComponentId, config: ZpagesConfig) -> ServedPages:
    del component
    return ServedPages(config.endpoint, lambda host: Zpages(host).answer, config.tls)


FACTORY: Final = ExtensionFactory(
    type="zpages",
    config=ZpagesConfig,
    description="Pages that show what runs and how it does.",
    stability=Stability.BETA,
    create=_create,
)
