"""``explain``: what went wrong, with causes and shares."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from ingero.model.recording import Recording, describe_unprobed
from ingero.model.untrusted import clean
from ingero.recording.causal.engine import explain
from ingero.recording.queries.explanation_answers import (
    AnnotationAnswer,
    IncidentAnswer,
    SearchedAnswer,
    UnknownAnswer,
    WindowAnswer,
    incident_answer,
    searched_answer,
    unknown_answers,
    window_answer,
)
from ingero.recording.queries.transfer import join_parts
from ingero.recording.queries.window import Wanted, describe_outside, load_part
from ingero.recording.store.annotations import StoredAnnotation, read_annotations

if TYPE_CHECKING:
    from ingero.recording.queries.fanout import NodeAnswer  # imports an HTTP client, 0.25 s


_MAX_ANNOTATIONS: Final = 20


class ExplainAnswer(msgspec.Struct, frozen=True):
    """Incidents, worst first; what could not be decided, what was looked at, libraries whose calls are missing."""

    incidents: list[IncidentAnswer]
    unknown: list[UnknownAnswer]
    looked: SearchedAnswer
    window: WindowAnswer
    not_probed: list[str] = []


def explain_recording(recording: Recording) -> ExplainAnswer:
    """Explain a loaded recording."""
    explained = explain(recording)
    return ExplainAnswer(
        [incident_answer(incident, explained.start_ns) for incident in explained.incidents],
        unknown_answers(explained),
        searched_answer(explained),
        window_answer(explained, recording),
        describe_unprobed(recording.unprobed),
    )


def explain_file(path: Path, wanted: Wanted, *, has_annotations: bool = False) -> ExplainAnswer:
    """Explain part of a file; `has_annotations` adds to each incident what the workload said while it lasted.

    Raises:
        StoreError: The file cannot be read as a recording.
        BadDataError: The part is not one.
    """
    answer = explain_recording(load_part(path, wanted))
    if not answer.window.events:
        window = msgspec.structs.replace(answer.window, outside=describe_outside(path, wanted))
        answer = msgspec.structs.replace(answer, window=window)
    if not has_annotations:
        return answer
    annotations = read_annotations(path)
    start_ns = answer.window.start
    annotated = [_annotate(incident, annotations, start_ns) for incident in answer.incidents]
    return msgspec.structs.replace(answer, incidents=annotated)


def _annotate(
    incident: IncidentAnswer, annotations: Sequence[StoredAnnotation], start_ns: int
) -> IncidentAnswer:
    found = [
        AnnotationAnswer(
            round((one.start_ns - start_ns) / 1e9, 6),
            round((one.end_ns - start_ns) / 1e9, 6),
            one.pid,
            one.labels,
        )
        for one in annotations
        if one.start_ns <= incident.end
        and one.end_ns >= incident.start
        and one.is_about(incident.node, incident.pid)
    ]
    return msgspec.structs.replace(incident, annotations=found[-_MAX_ANNOTATIONS:])


class AskedNode(msgspec.Struct, frozen=True):
    """One node that was asked: what it sent, or why it sent nothing.

    Attributes:
        address: Where it was asked.
        error: Why there is no answer; empty when there is one.
        names: Nodes that its recording names, as incidents call them.
        events: Events that it sent; None without an answer.
        events_stored: Events in its recording; None without an answer.
        truncated: It sent only the newest.
        missing: What is not in its recording though it should be; empty for nothing.
        clock_offset_ms: Its wall clock minus this machine's; None without an answer.
        round_trip_ms: The offset is no better than half of it.
    """

    address: str
    error: str
    names: list[str]
    events: int | None
    events_stored: int | None
    truncated: bool
    missing: str
    clock_offset_ms: float | None
    round_trip_ms: float | None


class NodesAnswer(msgspec.Struct, frozen=True):
    """Incidents of several nodes, worst first, the nodes they are from, and libraries whose calls are missing."""

    incidents: list[IncidentAnswer]
    unknown: list[UnknownAnswer]
    looked: SearchedAnswer
    window: WindowAnswer
    nodes: list[AskedNode]
    not_probed: list[str] = []


def explain_nodes(answers: Sequence[NodeAnswer]) -> NodesAnswer:
    """Explain what several nodes sent, as one recording; each node keeps its own clock.

    Args:
        answers: Bodies are recordings, as `decode_part` makes them; answers with an error have none.
    """
    parts = [(answer.node, answer.body) for answer in answers if not answer.error]
    joined = join_parts(parts)
    explained = explain_recording(joined)
    names = iter(joined.nodes)
    asked = [
        _asked_node(answer, [next(names) for _ in answer.body.nodes] if not answer.error else [])
        for answer in answers
    ]
    return NodesAnswer(
        explained.incidents,
        explained.unknown,
        explained.looked,
        explained.window,
        asked,
        explained.not_probed,
    )


def _asked_node(answer: NodeAnswer, names: list[str]) -> AskedNode:
    sent: Recording | None = answer.body
    return AskedNode(
        address=answer.node,
        error=clean(answer.error, 512),
        names=[clean(name) for name in names],
        events=len(sent.events) if sent else None,
        events_stored=sent.n_events_stored if sent else None,
        truncated=bool(sent and sent.is_truncated),
        missing=clean(sent.describe_missing(), 512) if sent else "",
        clock_offset_ms=answer.clock_offset_ms,
        round_trip_ms=answer.round_trip_ms,
    )
