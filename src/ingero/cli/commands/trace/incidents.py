"""What ``ingero trace`` says of incidents: a line for each while it traces, and one at the end."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ingero.cli.render import plural
from ingero.model.incidents import Incident, Severity
from ingero.model.untrusted import clean
from ingero.units import format_duration

if TYPE_CHECKING:
    from ingero.agent.trace.incidents import IncidentSummary

STYLES: Final = {Severity.HIGH: "bold red", Severity.MEDIUM: "yellow", Severity.LOW: "cyan"}
_TITLE: Final = 512


def build_incident_line(incident: Incident, start_ns: int) -> dict[str, Any]:
    """A line of type ``incident`` with the fields of ``ingero explain --json``.

    Args:
        incident: What was found.
        start_ns: First moment of what was searched, Unix time.
    """
    import msgspec

    from ingero.recording.queries.explanation_answers import incident_answer

    answer: dict[str, Any] = msgspec.to_builtins(incident_answer(incident, start_ns))
    return {"type": "incident", **answer}


def describe_incident(incident: Incident) -> str:
    """Severity, title and whose, in a line."""
    who = f" ({clean(incident.process)}, pid {incident.pid})" if incident.pid else ""
    return f"[{incident.severity}] {clean(incident.title, _TITLE)}{who}"


def build_command(path: Path | None, *, has_rolled: bool) -> str:
    """The command that shows everything; empty without a recording."""
    if path is None:
        return ""
    rolled = " --include-rolled" if has_rolled else ""
    return f"ingero explain --db {shlex.quote(str(path))}{rolled}"


def build_verdict_line(verdict: IncidentSummary, command: str) -> dict[str, Any]:
    """The line of type ``incidents`` that ends the output."""
    line: dict[str, Any] = {"type": "incidents", "count": len(verdict.incidents)}
    line |= {severity.value.lower(): verdict.count(severity) for severity in Severity}
    line |= {"unknown": list(verdict.unknown), "judged": list(verdict.judged)}
    if verdict.part_ns:
        line["part_ns"] = verdict.part_ns
    if verdict.failure:
        line["failure"] = verdict.failure
    return line | {"explain": command or None}


def describe_verdict(verdict: IncidentSummary, command: str) -> str:
    """The same in a line for people."""
    then = f": {command}" if command else "; nothing was recorded to ask"
    if verdict.failure:
        return f"incidents were not looked for to the end: {verdict.failure}{then}"
    part = f" in the last {format_duration(verdict.part_ns)}" if verdict.part_ns else ""
    if verdict.incidents:
        counts = ((verdict.count(severity), severity.value) for severity in Severity)
        by_severity = ", ".join(f"{n} {name}" for n, name in counts if n)
        return f"{plural(len(verdict.incidents), 'incident')} ({by_severity}){then}"
    if verdict.unknown:
        return f"no incident{part}; {plural(len(verdict.unknown), 'rule')} could not judge{then}"
    if not verdict.judged:
        return f"no incident{part}; nothing was seen that a rule could judge{then}"
    return f"no incident{part}{then}"
