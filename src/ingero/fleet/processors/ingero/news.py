"""What turned, told twice: as log records down the pipeline, and as lines of the service's own log.

Records are those of episodes and of panic, the episode of a whole cluster. Specification: docs/specs/episode.md.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any, Final

from ingero.fleet.processors.ingero.desk import ClusterEvent, EventKind, News
from ingero.fleet.processors.ingero.episodes import Episode
from ingero.otlp.codec import Export, build_attributes, structs
from ingero.otlp.names import Signal
from ingero.telemetry.limited import FieldValue, RateLimitedLog
from ingero.units import NS_PER_S
from ingero.wire.names import Attribute

EPISODE_EVENT: Final = "ingero.episode"
_INFO, _ERROR = 9, 17  # OTLP severity numbers


def build_episodes(news: Iterable[News]) -> Export:
    """One record per beginning or end of an episode or a panic, a resource per cluster."""
    by_cluster: dict[str, list[structs.LogRecord]] = {}
    for one in news:
        if isinstance(one, Episode):
            by_cluster.setdefault(one.cluster_id, []).append(_build_record(one))
        elif one.kind is EventKind.PANIC:
            by_cluster.setdefault(one.cluster_id, []).append(_build_panic(one))
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
    return _write_record(at_ns, _describe(episode), attributes, is_open=is_open)


def _build_panic(event: ClusterEvent) -> structs.LogRecord:
    values = event.values
    start_ns = event.wall_ns if event.began_wall_ns is None else event.began_wall_ns
    attributes: dict[str, Any] = {
        "ingero.episode.incident_id": f"panic/{event.cluster_id}@{start_ns}",
        "ingero.episode.kind": "panic",
        "ingero.episode.state": "open" if event.is_on else "resolved",
        "ingero.episode.start_ns": start_ns,
        "ingero.episode.n_events": 1,
        "ingero.episode.in_panic": True,
        "ingero.episode.active_nodes": values.get("active_nodes"),
        "ingero.episode.under_threshold": values.get("under_threshold"),
        "ingero.episode.score": values.get("median"),
        "ingero.episode.threshold": values.get("threshold"),
    }
    if not event.is_on:
        attributes["ingero.episode.end_ns"] = event.wall_ns
    says = (
        f"{values.get('under_threshold')} of {values.get('active_nodes')} nodes fell under the threshold together:"
        " the cluster moved, no node is judged"
        if event.is_on
        else "most nodes are over the threshold again; nodes are judged again"
    )
    known = {name: value for name, value in attributes.items() if value is not None}
    return _write_record(event.wall_ns, says, known, is_open=event.is_on)


def _write_record(
    at_ns: int, says: str, attributes: dict[str, Any], *, is_open: bool
) -> structs.LogRecord:
    return structs.LogRecord(
        time_unix_nano=at_ns,
        observed_time_unix_nano=at_ns,
        severity_number=_ERROR if is_open else _INFO,
        severity_text="ERROR" if is_open else "INFO",
        event_name=EPISODE_EVENT,
        body=structs.AnyValue(string_value=says),
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


_EVENTS: Final = {
    (EventKind.QUORUM, True): (logging.INFO, "quorum gained"),
    (EventKind.QUORUM, False): (logging.WARNING, "quorum lost"),
    (EventKind.PANIC, True): (logging.ERROR, "panic began: most nodes fell under the threshold"),
    (EventKind.PANIC, False): (logging.INFO, "panic ended"),
    (EventKind.NODE_CAP, True): (logging.WARNING, "node cap reached: new nodes are refused"),
    (EventKind.NODE_CAP, False): (logging.INFO, "node cap refuses nobody any more"),
    (EventKind.TOTAL_CAP, True): (logging.WARNING, "total node cap reached: new nodes are refused"),
    (EventKind.TOTAL_CAP, False): (logging.INFO, "total node cap refuses nobody any more"),
    (EventKind.CLUSTER_CAP, True): (
        logging.WARNING,
        "cluster cap reached: new clusters are refused",
    ),
    (EventKind.CLUSTER_CAP, False): (logging.INFO, "cluster cap refuses nobody any more"),
}


def write_lines(log: RateLimitedLog, news: Iterable[News]) -> None:
    """One line for each, as far as the limit allows."""
    for one in news:
        if isinstance(one, ClusterEvent):
            level, says = _EVENTS[one.kind, one.is_on]
            fields: dict[str, FieldValue] = {"cluster": one.cluster_id or None, **one.values}
            if one.began_wall_ns is not None:
                fields["lasted_s"] = _seconds(one.wall_ns - one.began_wall_ns)
            log.write((one.kind, one.cluster_id), level, says, **fields)
        else:
            _write_episode(log, one)


def _write_episode(log: RateLimitedLog, episode: Episode) -> None:
    last, closed_ns = episode.last, episode.closed_wall_ns
    fields: dict[str, FieldValue] = {
        "cluster": episode.cluster_id,
        "node": episode.node_id,
        "score": last.score,
        "threshold": last.threshold,
        "mode": last.mode or None,
        "signal": last.dominant_signal or None,
    }
    level, says = logging.WARNING, "straggler episode began"
    if episode.outcome is not None and closed_ns is not None:
        level, says = logging.INFO, "straggler episode ended"
        fields["outcome"] = episode.outcome.value
        fields["lasted_s"] = _seconds(closed_ns - episode.opened_wall_ns)
    log.write(("episode", episode.cluster_id, episode.node_id), level, says, **fields)


def _seconds(duration_ns: int) -> float:
    return round(duration_ns / NS_PER_S, 3)
