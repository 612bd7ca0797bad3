"""Episodes as log records, when they begin and when they end. Specification: docs/specs/episode.md."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from ingero.fleet.processors.ingero.episodes import Episode
from ingero.wire.names import Attribute, Signal
from ingero.wire.otlp import Export, build_attributes, structs

EPISODE_EVENT: Final = "ingero.episode"
_INFO, _ERROR = 9, 17  # OTLP severity numbers


def build_episodes(episodes: Iterable[Episode]) -> Export:
    """One record per beginning or end, a resource per cluster."""
    by_cluster: dict[str, list[structs.LogRecord]] = {}
    for episode in episodes:
        by_cluster.setdefault(episode.cluster_id, []).append(_build_record(episode))
    entries = [
        structs.ResourceLogs(
            resource=structs.Resource(
                build_attributes({
                    str(Attribute.SERVICE_NAME): "ingero-fleet",
                    str(Attribute.CLUSTER_ID): cluster_id,
                })
            ),
            scope_logs=[
                structs.ScopeLogs(
                    scope=structs.InstrumentationScope("ingero.fleet", ""), log_records=records
                )
            ],
        )
        for cluster_id, records in by_cluster.items()
    ]
    return Export.from_tree(Signal.LOGS, structs.LogsRequest(entries))


def _build_record(episode: Episode) -> structs.LogRecord:
    is_open = episode.outcome is None
    state = "open" if episode.outcome is None else episode.outcome.value
    last = episode.last
    attributes: dict[str, Any] = {
        Attribute.NODE_ID: episode.node_id,
        "ingero.episode.incident_id": episode.first.event_id
        or f"{episode.node_id}@{episode.opened_wall_ns}",
        "ingero.episode.kind": "straggler",
        "ingero.episode.state": state,
        "ingero.episode.start_ns": episode.opened_wall_ns,
        "ingero.episode.n_events": episode.n_events,
        "ingero.episode.in_panic": episode.in_panic,
    }
    named = {
        "ingero.episode.score": last.score,
        "ingero.episode.threshold": last.threshold,
        "ingero.episode.dominant_signal": last.dominant_signal or None,
        "ingero.episode.end_ns": episode.closed_wall_ns,
    }
    attributes |= {name: value for name, value in named.items() if value is not None}
    at_ns = episode.opened_wall_ns if episode.closed_wall_ns is None else episode.closed_wall_ns
    return structs.LogRecord(
        time_unix_nano=at_ns,
        observed_time_unix_nano=at_ns,
        severity_number=_ERROR if is_open else _INFO,
        severity_text="ERROR" if is_open else "INFO",
        event_name=EPISODE_EVENT,
        body=structs.AnyValue(string_value=_describe(episode)),
        attributes=build_attributes(attributes),
    )


def _describe(episode: Episode) -> str:
    last = episode.last
    if episode.outcome is not None:
        return f"{episode.node_id} is no straggler any more: {episode.outcome.value}"
    says = [f"{episode.node_id} is a straggler"]
    if last.score is not None and last.threshold is not None:
        says.append(f"score {last.score:.3f} under {last.threshold:.3f}")
    if last.dominant_signal:
        says.append(last.dominant_signal)
    return ", ".join(says)
