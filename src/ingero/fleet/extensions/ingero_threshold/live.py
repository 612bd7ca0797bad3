"""The live page: files of the package, and the bytes of its heat map. Everything else it asks of the JSON pages."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.resources import files
from typing import Any, Final

from ingero.errors import BadDataError
from ingero.fleet.component import (
    Host,
    RankLevels,
)
from ingero.fleet.extensions.ingero_threshold.heat import HeatHistory
from ingero.fleet.helpers.admin_pages import get_cluster_id
from ingero.fleet.helpers.served_pages import Page
from ingero.fleet.views import (
    DeliveryView,
)

LEVELS_PATH: Final = "/live/levels"
_OWN: Final = "ingero.fleet.extensions.ingero_threshold"
_SHARED: Final = "ingero.recording.queries"
"""Has the page of a node's dashboard, whose style and elements are the same."""
_HTML: Final = "text/html; charset=utf-8"
_CSS: Final = "text/css; charset=utf-8"
_SCRIPT: Final = "text/javascript; charset=utf-8"
_FILES: Final = {
    "/live": (_OWN, "index.html", _HTML),
    "/live/base.css": (_SHARED, "app.css", _CSS),
    "/live/page.css": (_OWN, "page.css", _CSS),
    "/live/page.js": (_OWN, "page.js", _SCRIPT),
    "/live/heat.js": (_OWN, "heat.js", _SCRIPT),
    "/live/parts.js": (_SHARED, "parts.js", _SCRIPT),
}
_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
_HEADERS: Final = (
    (b"content-security-policy", _POLICY.encode()),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-store"),
)
_NUMBER: Final = re.compile(r"\d{1,15}")


class LivePage:
    """Files and levels.

    Args:
        host: Of the extension; asked for the components that measure ranks.
        heat: What they measured.
        dashboard_url: Where a node's own dashboard is, with ``{node_id}`` in it; empty for nowhere.
    """

    def __init__(self, host: Host, heat: HeatHistory, dashboard_url: str) -> None:
        self._host = host
        self._heat = heat
        self._dashboard_url = dashboard_url

    def find_file(self, path: str) -> Page | None:
        """A file of the page; None where this path is none."""
        found = _FILES.get(path.rstrip("/"))
        if found is None:
            return None
        package, name, content_type = found
        body = files(package).joinpath("page", name).read_bytes()
        return Page(200, body, content_type, _HEADERS)

    def read_levels(self, query: Mapping[str, str]) -> Page:
        """The columns of one measure that a client has not.

        Raises:
            BadDataError: The query is wrong.
            KeyError: There is no such measure or cluster.
        """
        cluster_id = get_cluster_id(query)
        after, version = (_parse_number(query, name) for name in ("after", "version"))
        source = self._find_source(query.get("measure", ""))
        body = self._heat.encode(source, cluster_id, after, version)
        return Page(200, body, "application/octet-stream", _HEADERS)

    def show_setup(self, query: Mapping[str, str]) -> dict[str, Any]:
        """What the page needs to know once."""
        del query
        measures = [source.measure for source in self._host.find(RankLevels)]
        unique = {measure.name: measure for measure in measures}
        return {
            "measures": [asdict(measure) for measure in unique.values()],
            "dashboard_url": self._dashboard_url,
        }

    def show_exporters(self, query: Mapping[str, str]) -> dict[str, Any]:
        """Whether what is sent on arrives."""
        del query
        states = [view.read_state() for view in self._host.find(DeliveryView)]
        return {"exporters": [asdict(one) | {"trouble": one.trouble} for one in states]}

    def _find_source(self, name: str) -> RankLevels:
        sources: Sequence[RankLevels] = self._host.find(RankLevels)
        for source in sources:
            if source.measure.name == name:
                return source
        raise KeyError(name)


def _parse_number(query: Mapping[str, str], name: str) -> int:
    text = query.get(name, "0")
    if not (text.isascii() and _NUMBER.fullmatch(text)):
        raise BadDataError(f"{name} is {text[:40]!r}; it must be a number")
    return int(text)
