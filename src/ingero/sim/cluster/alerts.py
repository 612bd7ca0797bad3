"""Episodes that the agents' local readers receive, as one real ``ingero-sink`` shows them to Prometheus."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx
from prometheus_client.parser import text_string_to_metric_families

from ingero.errors import RetryableError
from ingero.sim.launcher import launch

EVENTS: Final = "ingero_sink_events_total"
ACTIVE: Final = "ingero_sink_active_stragglers"


@dataclass(slots=True)
class Alerts:
    """What the sink has counted.

    Attributes:
        events: Events by type.
        active: Hosts in an episode now.
        alerted: Hosts that were ever in one, with the time since the injection; None before it.
    """

    events: dict[str, int] = field(default_factory=dict)
    active: tuple[str, ...] = ()
    alerted: dict[str, int | None] = field(default_factory=dict)

    def take(self, page: str, since_fault_ns: int | None) -> None:
        """Read the sink's page of now."""
        samples = [s for family in text_string_to_metric_families(page) for s in family.samples]
        self.events = {s.labels["type"]: int(s.value) for s in samples if s.name == EVENTS}
        self.active = tuple(sorted(s.labels["node_id"] for s in samples if s.name == ACTIVE))
        for node in self.active:
            self.alerted.setdefault(node, since_fault_ns)

    def as_json(self) -> dict[str, Any]:
        """JSON-able values."""
        return {
            "events": dict(sorted(self.events.items())),
            "active": list(self.active),
            "after_s": {
                node: None if at_ns is None else round(at_ns / 1e9, 1)
                for node, at_ns in sorted(self.alerted.items())
            },
        }


class SinkView:
    """A running sink. Make one with `run_sink`."""

    def __init__(self, url: str, client: httpx.Client) -> None:
        self._url = url
        self._client = client

    def update(self, alerts: Alerts, since_fault_ns: int | None) -> None:
        """Ask for its page.

        Raises:
            RetryableError: It does not answer.
        """
        try:
            page = self._client.get(self._url).raise_for_status().text
        except httpx.HTTPError as error:
            raise RetryableError(f"the sink at {self._url} does not answer: {error}") from error
        alerts.take(page, since_fault_ns)


@contextmanager
def run_sink(sockets: Sequence[Path], client: httpx.Client) -> Iterator[SinkView]:
    """Start ``ingero-sink`` on these agents' sockets, and stop it at the end.

    Raises:
        IngeroError: It did not start; the message holds what it said.
    """
    arguments = ["--listen", "127.0.0.1:0"]
    for path in sockets:
        arguments += ["--socket-path", str(path)]
    with launch("ingero.cli.programs.sink", arguments) as sink:
        yield SinkView(sink.url("metrics", "/metrics"), client)
