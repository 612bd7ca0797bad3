"""When a node, or in a panic a whole cluster, became a straggler and when it ceased: one OTLP log record each.

``docs/specs/episode.md`` is the specification. This module is the only place that knows the names on the wire: Fleet
builds with it and Echo reads with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ingero.otlp.codec import Export, LogRow, structs
from ingero.wire.log_records import LogFacts, LogSeverity, build_fleet_logs, build_record, last_word
from ingero.wire.names import Attribute
from ingero.wire.record_uids import RECORD_UID, build_record_uid
from ingero.wire.typed import (
    read_flag,
    read_large,
    read_moment,
    read_number,
    read_text,
)

EPISODE_EVENT: Final = "ingero.episode"
_INCIDENT_ID: Final = "ingero.episode.incident_id"
_KIND: Final = "ingero.episode.kind"
_STATE: Final = "ingero.episode.state"
_START_NS: Final = "ingero.episode.start_ns"
_END_NS: Final = "ingero.episode.end_ns"
_N_EVENTS: Final = "ingero.episode.n_events"
_IN_PANIC: Final = "ingero.episode.in_panic"
_ACTIVE_NODES: Final = "ingero.episode.active_nodes"
_UNDER_THRESHOLD: Final = "ingero.episode.under_threshold"
_SCORE: Final = "ingero.episode.score"
_THRESHOLD: Final = "ingero.episode.threshold"
_DOMINANT_SIGNAL: Final = "ingero.episode.dominant_signal"
STRAGGLER: Final = "straggler"
PANIC: Final = "panic"
OPEN: Final = "open"
RESOLVED: Final = "resolved"
_ENDED: Final = "ended"
"""Of whatever outcome: an episode ends once."""
_WORDS: Final = frozenset({last_word(EPISODE_EVENT), "incident"})
"""Last words of event names; the second is other senders'."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeRecord:
    """What one record says. Its cluster is the resource's.

    A record of another sender may leave out anything; empty and None are "not known".

    Attributes:
        incident_id: The same at beginning and end.
        kind: `STRAGGLER` or `PANIC`; other senders have their own.
        state: `OPEN`; then `RESOLVED`, ``state_change`` or ``lost``.
        node_id: The node; empty for a panic.
        start_ns: Beginning, wall clock.
        end_ns: End, wall clock; None while open.
        n_events: Events of the agent so far.
        in_panic: Most of the cluster moved at once when it began.
        active_nodes: Of a panic: nodes that were active.
        under_threshold: Of a panic: how many of them fell.
        score: The node's score, or with a panic the median.
        threshold: What it was compared with.
        dominant_signal: The signal that fell most.
        severity: As other senders name it in an attribute; Fleet's is the record's own, by ``state``.
        summary: The body: one line for a person.
    """

    incident_id: str = ""
    kind: str = ""
    state: str = ""
    node_id: str = ""
    start_ns: int | None = None
    end_ns: int | None = None
    n_events: int | None = None
    in_panic: bool | None = None
    active_nodes: int | None = None
    under_threshold: int | None = None
    score: float | None = None
    threshold: float | None = None
    dominant_signal: str = ""
    severity: str = ""
    summary: str = ""


def build_episode_records(by_cluster: Mapping[str, Sequence[EpisodeRecord]]) -> Export:
    """Records by cluster as one logs export; the time of each is its end, else its beginning."""
    return build_fleet_logs({
        cluster_id: [_build_record(cluster_id, episode) for episode in episodes]
        for cluster_id, episodes in by_cluster.items()
    })


def _build_record(cluster_id: str, episode: EpisodeRecord) -> structs.LogRecord:
    named: dict[str, Any] = {
        Attribute.NODE_ID: episode.node_id or None,
        _INCIDENT_ID: episode.incident_id,
        _KIND: episode.kind,
        _STATE: episode.state,
        _START_NS: episode.start_ns,
        _N_EVENTS: episode.n_events,
        _IN_PANIC: episode.in_panic,
        _ACTIVE_NODES: episode.active_nodes,
        _UNDER_THRESHOLD: episode.under_threshold,
        _SCORE: episode.score,
        _THRESHOLD: episode.threshold,
        _DOMINANT_SIGNAL: episode.dominant_signal or None,
        _END_NS: episode.end_ns,
    }
    attributes = {name: value for name, value in named.items() if value is not None}
    attributes[RECORD_UID] = build_record_uid(
        EPISODE_EVENT, cluster_id, episode.kind, episode.node_id, episode.incident_id, episode.start_ns,
        OPEN if episode.state == OPEN else _ENDED,
    )  # fmt: skip
    severity = LogSeverity.ERROR if episode.state == OPEN else LogSeverity.INFO
    at_ns = episode.start_ns if episode.end_ns is None else episode.end_ns
    return build_record(EPISODE_EVENT, attributes, severity, episode.summary, at_ns or 0)


def is_episode(event_name: str) -> bool:
    """Whether a record of this event name is an episode or another sender's incident."""
    return last_word(event_name) in _WORDS


def read_episode(record: LogRow) -> EpisodeRecord:
    """Read a record of which `is_episode` is true; what is missing or of another type is left out, nothing raises.

    Of other senders the last words ``start_ts``, ``start_wall_ns``, ``end_ts`` and ``end_wall_ns`` are understood too,
    all in nanoseconds.
    """
    facts = LogFacts(record.attributes)
    return EpisodeRecord(
        incident_id=read_text(facts.find(_INCIDENT_ID)) or "",
        kind=read_text(facts.find(_KIND)) or "",
        state=read_text(facts.find(_STATE)) or "",
        node_id=read_text(facts.find(Attribute.NODE_ID, "node_id")) or "",
        start_ns=read_moment(facts.find(_START_NS, "start_ts", "start_ns", "start_wall_ns")),
        end_ns=read_moment(facts.find(_END_NS, "end_ts", "end_ns", "end_wall_ns")),
        n_events=read_large(facts.find(_N_EVENTS)),
        in_panic=read_flag(facts.find(_IN_PANIC)),
        active_nodes=read_large(facts.find(_ACTIVE_NODES)),
        under_threshold=read_large(facts.find(_UNDER_THRESHOLD)),
        score=read_number(facts.find(_SCORE)),
        threshold=read_number(facts.find(_THRESHOLD)),
        dominant_signal=read_text(facts.find(_DOMINANT_SIGNAL)) or "",
        severity=read_text(facts.find("severity")) or "",
        summary=read_text(facts.find("summary")) or read_text(record.body) or "",
    )
