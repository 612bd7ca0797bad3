"""The dashboard's answers: those of the documented API, under its names, and those that the page adds.

Every answer is a function of the recording and the request's parameters alone, so an unchanged file gives an unchanged
answer and clients ask with ``If-None-Match``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from ingero.errors import BadDataError
from ingero.model.recording import Recording, describe_unprobed
from ingero.model.untrusted import clean
from ingero.recording.queries.capabilities import list_capabilities
from ingero.recording.queries.chains import build_chain
from ingero.recording.queries.collectives import list_collectives
from ingero.recording.queries.explanation_answers import (
    IncidentAnswer,
    incident_answer,
    nothing_found,
    searched_answer,
    unknown_answers,
    window_answer,
)
from ingero.recording.queries.flame import build_flame
from ingero.recording.queries.graphs import list_graph_events, summarise_graphs
from ingero.recording.queries.memory import balance_memory
from ingero.recording.queries.operations import OperationAnswer, list_operations
from ingero.recording.queries.overview import count_part, list_snapshots, read_overview
from ingero.recording.queries.recording_file import RecordingFile
from ingero.recording.queries.stacks import StacksArgs, read_folded_stacks
from ingero.recording.queries.timeline import BINS, View, build_timeline
from ingero.recording.queries.window import Wanted, find_span
from ingero.recording.store.reader import read_unprobed, read_unwritten

MAX_ROWS: Final = 5_000_000

_OF_EVENTS: Final = {"event_count", "first", "last", "duration_s"}


@dataclass(frozen=True, slots=True)
class Asked:
    """What a request asked of.

    Attributes:
        context: The recording.
        wanted: The part.
        parameters: All of the request's parameters as text.
    """

    context: RecordingFile
    wanted: Wanted
    parameters: Mapping[str, str]

    def number(self, name: str) -> float | None:
        """A parameter that is a number; None where it is left out.

        Raises:
            BadDataError: It is not.
        """
        text = self.parameters.get(name, "")
        if not text:
            return None
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not abs(value) < 1e15:
            raise BadDataError(f"{name}: a number is needed")
        return value

    def whole_number(self, name: str, default: int) -> int:
        """A parameter that is a whole number.

        Raises:
            BadDataError: It is not.
        """
        value = self.number(name)
        if value is None:
            return default
        if not value.is_integer():
            raise BadDataError(f"{name}: a whole number is needed")
        return int(value)


Answer = Callable[[Asked], Any]


def parse_asked(context: RecordingFile, parameters: Mapping[str, str]) -> Asked:
    """The part that a request's parameters name: ``since``, ``pid``, ``last``.

    Raises:
        BadDataError: A parameter is not what it must be.
    """
    pid, last = parameters.get("pid", ""), parameters.get("last", "")
    for name, text in (("pid", pid), ("last", last)):
        if text and not (text.isascii() and text.isdecimal() and len(text) < 10):
            raise BadDataError(f"{name}: a number is needed")
    wanted = Wanted(
        since=parameters.get("since", ""),
        pids=(int(pid),) if pid else (),
        last=min(int(last or 0), MAX_ROWS),
        has_extras=True,
    )
    return Asked(context, wanted, parameters)


def _recording(asked: Asked) -> dict[str, Any]:
    """What the recording is, and what is not in it though it should be: the page shows it beside every view."""
    missing = Recording(unwritten=read_unwritten(asked.context.path)).describe_missing()
    unprobed = describe_unprobed(read_unprobed(asked.context.path))
    return read_overview(asked.context.path) | {
        "missing": clean(missing, 512),
        "not_probed": unprobed,
    }


def _overview(asked: Asked) -> dict[str, Any]:
    """What the recording is, the machine's newest state, and events and the worst incident of the part."""
    found = read_overview(asked.context.path)
    if asked.wanted.since or asked.wanted.pids or asked.wanted.last:
        found = {name: found[name] for name in found.keys() - _OF_EVENTS}
        found |= count_part(asked.context.load(asked.wanted))
    incidents = asked.context.explain(asked.wanted).incidents
    found["incident_count"] = found["chain_count"] = len(incidents)
    found |= _reservations(asked)
    if incidents:
        worst = build_chain(incident_answer(incidents[0], 0))
        found["top_chain"] = {
            "severity": worst.severity,
            "summary": worst.summary,
            "root_cause": worst.root_cause,
            "recommendations": worst.recommendations,
        }
    return found


def _incidents(asked: Asked) -> dict[str, Any]:
    explained = asked.context.explain(asked.wanted)
    recording = asked.context.load(asked.wanted)
    return {
        "incidents": [
            incident_answer(incident, explained.start_ns) for incident in explained.incidents
        ],
        "unknown": unknown_answers(explained),
        "looked": searched_answer(explained),
        "none_means": nothing_found(explained),
        "window": window_answer(explained, recording),
        "not_probed": describe_unprobed(recording.unprobed),
    }


def _operations(asked: Asked) -> list[OperationAnswer]:
    return asked.context.remember(asked.wanted, "operations", list_operations)


def _ops(asked: Asked) -> dict[str, Any]:
    operations = _operations(asked)
    recording = asked.context.load(asked.wanted)
    found: dict[str, Any] = {
        "mode": "percentile" if operations else "empty",
        "ops": [{"operation": op.op, **msgspec.to_builtins(op)} for op in operations],
        "missing": clean(recording.describe_missing(), 512),
        "not_probed": describe_unprobed(recording.unprobed),
    }
    shots = list_snapshots(asked.context.path, limit=1)
    return found | ({"system": shots[0]} if shots else {})


def _chains(asked: Asked) -> dict[str, Any]:
    explained = asked.context.explain(asked.wanted)
    operations = _operations(asked)
    shown = [incident_answer(incident, explained.start_ns) for incident in explained.incidents]
    return {"chains": [_chain(one, operations) for one in shown], **_reservations(asked)}


def _reservations(asked: Asked) -> dict[str, Any]:
    """What a list of incidents does not say: rules without an answer, rows that are missing."""
    explained, recording = asked.context.explain(asked.wanted), asked.context.load(asked.wanted)
    return {
        "undecided": searched_answer(explained).unknown,
        "missing": clean(recording.describe_missing(), 512),
        "not_probed": describe_unprobed(recording.unprobed),
    }


def _chain(one: IncidentAnswer, operations: list[OperationAnswer]) -> dict[str, Any]:
    """An incident in the documented shape of a chain; what it does not have is left out."""
    chain: dict[str, Any] = msgspec.structs.asdict(build_chain(one)) | {
        "timeline": [
            {"layer": "CAUSE", "detail": f"{cause.share:.1%} {cause.name}"} for cause in one.causes
        ],
    }
    for op in operations:
        if one.op and (op.op, op.pid, op.node) == (one.op, one.pid, one.node):
            chain |= {
                "cuda_op": op.op,
                "cuda_p99_us": op.p99_us,
                "cuda_p50_us": op.p50_us,
                "tail_ratio": round(op.p99_us / op.p50_us, 2) if op.p50_us else 0.0,
            }
    return chain


def _timeline(asked: Asked) -> Any:  # noqa: ANN401 -- whatever msgspec encodes
    view = View(
        asked.number("from_s") or 0.0, asked.number("to_s"), asked.whole_number("bins", BINS)
    )
    return build_timeline(asked.context.evidence(asked.wanted), view)


def _stacks(asked: Asked) -> Any:  # noqa: ANN401
    recording = asked.context.load(asked.wanted)
    since = asked.wanted.since
    if len(recording.events) and (asked.wanted.last or since):
        back_ns = find_span(asked.context.path)[1] - recording.window_ns[0]
        since = f"{max(back_ns, 1)}ns"
    args = StacksArgs(op=asked.parameters.get("op", ""), since=since, pids=list(asked.wanted.pids))
    return build_flame(read_folded_stacks(asked.context, args))


ANSWERS: Final[dict[str, Answer]] = {
    "recording": _recording,
    "overview": _overview,
    "incidents": _incidents,
    "chains": _chains,
    "ops": _ops,
    "snapshots": lambda asked: {"snapshots": list_snapshots(asked.context.path)},
    "capabilities": lambda asked: list_capabilities(asked.context.load(asked.wanted)),
    "timeline": _timeline,
    "stacks": _stacks,
    "memory": lambda asked: balance_memory(asked.context.evidence(asked.wanted)),
    "collectives": lambda asked: list_collectives(asked.context.evidence(asked.wanted)),
    "graph-metrics": lambda asked: summarise_graphs(asked.context.load(asked.wanted)),
    "graph-events": lambda asked: {"events": list_graph_events(asked.context.load(asked.wanted))},
}
"""Below ``/api/v1/``. Adding one: a line here, a test, a line in the guide."""
