"""Episodes and events of clusters: as log records down the pipeline, and as lines of the service's own log.

Records are those of episodes and of panic, the episode of a whole cluster; `ingero.wire.episodes` knows their names.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Final

from ingero.fleet.processors.peer_threshold.episodes import (
    Episode,
    ReportedEpisode,
    find_incident_id,
)
from ingero.fleet.processors.peer_threshold.notifications import (
    ClusterEvent,
    EventKind,
    Notification,
)
from ingero.otlp.codec import Export
from ingero.telemetry.limited import FieldValue, RateLimitedLog
from ingero.units import NS_PER_S
from ingero.wire.episodes import (
    OPEN,
    PANIC,
    RESOLVED,
    STRAGGLER,
    EpisodeRecord,
    build_episode_records,
)
from ingero.wire.typed import read_large, read_number

_OPEN_OF: Final = "straggler "
_PANIC_BEGAN: Final = "panic began"


def build_episodes(notifications: Iterable[Notification]) -> Export:
    """One record per beginning or end of an episode or a panic, a resource per cluster."""
    by_cluster: dict[str, list[EpisodeRecord]] = {}
    for one in notifications:
        if isinstance(one, Episode):
            by_cluster.setdefault(one.cluster_id, []).append(_build_episode(one))
        elif one.kind is EventKind.PANIC:
            by_cluster.setdefault(one.cluster_id, []).append(_build_panic(one))
    return build_episode_records(by_cluster)


def describe_notification(notification: Notification) -> dict[str, str | None]:
    """What its record says, by what it is about, as a `ReportLedger` remembers it; empty where there is none."""
    about, state = _name(notification), _state_of(notification)
    if not about:
        return {}
    if isinstance(notification, Episode):
        incident = [find_incident_id(notification), notification.opened_wall_ns]
        return {about: state, _OPEN_OF + notification.node_id: _if_open(state, incident)}
    return {about: state, _PANIC_BEGAN: _if_open(state, _find_panic_start(notification))}


def read_open_episodes(reported: Mapping[str, str]) -> list[ReportedEpisode]:
    """The episodes among what was said that have not ended; what another release wrote otherwise is left out."""
    found = []
    for about, state in reported.items():
        if about.startswith(_OPEN_OF):
            with suppress(ValueError):
                incident_id, opened_ns = json.loads(state)
                node_id = about.removeprefix(_OPEN_OF)
                found.append(ReportedEpisode(node_id, str(incident_id), int(opened_ns)))
    return found


def read_panic_start(reported: Mapping[str, str]) -> int | None:
    """When the panic began that was said last, if it has not ended; None too where that is not known."""
    if reported.get(PANIC) != OPEN:
        return None
    with suppress(ValueError):
        return int(reported[_PANIC_BEGAN]) if _PANIC_BEGAN in reported else None
    return None


def _if_open(state: str, what: object) -> str | None:
    return json.dumps(what) if state == OPEN else None


def is_reported(notification: Notification, reported: Mapping[str, str]) -> bool:
    """Whether this, or what came after it, is among what was said."""
    if isinstance(notification, ClusterEvent):
        is_panic = notification.kind is EventKind.PANIC
        return is_panic and reported.get(_name(notification), RESOLVED) == _state_of(notification)
    state = reported.get(_name(notification))
    return state is not None and (_state_of(notification) == OPEN or state != OPEN)


def _name(notification: Notification) -> str:
    """What its record is about; empty where there is none."""
    if isinstance(notification, Episode):
        return f"episode {find_incident_id(notification)}"
    return PANIC if notification.kind is EventKind.PANIC else ""


def _state_of(notification: Notification) -> str:
    if isinstance(notification, Episode):
        return OPEN if notification.outcome is None else notification.outcome.value
    return OPEN if notification.is_on else RESOLVED


def _find_panic_start(event: ClusterEvent) -> int:
    return event.wall_ns if event.began_wall_ns is None else event.began_wall_ns


def _build_episode(episode: Episode) -> EpisodeRecord:
    last = episode.last
    return EpisodeRecord(
        incident_id=find_incident_id(episode),
        kind=STRAGGLER,
        state=_state_of(episode),
        node_id=episode.node_id,
        start_ns=episode.opened_wall_ns,
        end_ns=episode.closed_wall_ns,
        n_events=episode.n_events,
        in_panic=episode.in_panic,
        score=last.score,
        threshold=last.threshold,
        dominant_signal=last.dominant_signal,
        summary=_describe(episode),
    )


def _build_panic(event: ClusterEvent) -> EpisodeRecord:
    values = event.values
    start_ns = _find_panic_start(event)
    return EpisodeRecord(
        incident_id=f"panic/{event.cluster_id}@{start_ns}",
        kind=PANIC,
        state=OPEN if event.is_on else RESOLVED,
        start_ns=start_ns,
        end_ns=None if event.is_on else event.wall_ns,
        n_events=1,
        in_panic=True,
        active_nodes=read_large(values.get("active_nodes")),
        under_threshold=read_large(values.get("under_threshold")),
        score=read_number(values.get("median")),
        threshold=read_number(values.get("threshold")),
        summary=f"{values.get('under_threshold')} of {values.get('active_nodes')} nodes fell under the threshold"
        " together: the cluster moved, no node is judged"
        if event.is_on
        else "most nodes are over the threshold again; nodes are judged again",
    )


def _describe(episode: Episode) -> str:
    last = episode.last
    if episode.outcome is not None:
        return f"{episode.node_id} is no straggler any more: {episode.outcome.value}"
    description = [f"{episode.node_id} is a straggler"]
    if last.score is not None and last.threshold is not None:
        description.append(f"score {last.score:.3f} under {last.threshold:.3f}")
    if last.dominant_signal:
        description.append(last.dominant_signal)
    return ", ".join(description)


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


def write_lines(log: RateLimitedLog, notifications: Iterable[Notification]) -> None:
    """One line for each, as far as the limit allows."""
    for one in notifications:
        if isinstance(one, ClusterEvent):
            level, description = _EVENTS[one.kind, one.is_on]
            fields: dict[str, FieldValue] = {"cluster": one.cluster_id or None, **one.values}
            if one.began_wall_ns is not None:
                fields["lasted_s"] = _seconds(one.wall_ns - one.began_wall_ns)
            log.write((one.kind, one.cluster_id), level, description, **fields)
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
    level, description = logging.WARNING, "straggler episode began"
    if episode.outcome is not None and closed_ns is not None:
        level, description = logging.INFO, "straggler episode ended"
        fields["outcome"] = episode.outcome.value
        fields["lasted_s"] = _seconds(closed_ns - episode.opened_wall_ns)
    log.write(("episode", episode.cluster_id, episode.node_id), level, description, **fields)


def _seconds(duration_ns: int) -> float:
    return round(duration_ns / NS_PER_S, 3)
