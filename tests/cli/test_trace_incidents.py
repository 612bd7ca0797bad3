"""What ``ingero trace`` says at its end of what it found."""

from dataclasses import replace
from pathlib import Path

import pytest
from tests.recording.scenarios.faults import FAULTS

from ingero.agent.trace.incidents import IncidentSummary
from ingero.cli.commands.trace.incidents import (
    build_command,
    build_incident_line,
    build_verdict_line,
    describe_incident,
    describe_verdict,
)
from ingero.model.incidents import Severity
from ingero.recording.causal.engine import explain

COMMAND = "ingero explain --db d.db"
(FOUND, *_) = explain(FAULTS["gpu_xid"]().build()).incidents
HIGH, LOW = (replace(FOUND, severity=severity) for severity in (Severity.HIGH, Severity.LOW))


@pytest.mark.parametrize(
    ("verdict", "command", "said"),
    [
        (IncidentSummary((HIGH, LOW), judged=("a",)), COMMAND, f"2 incidents (1 HIGH, 1 LOW): {COMMAND}"),
        (IncidentSummary((HIGH,)), "", "1 incident (1 HIGH); nothing was recorded to ask"),
        (IncidentSummary(judged=("a",)), COMMAND, f"no incident: {COMMAND}"),
        (IncidentSummary(unknown=("a", "b"), judged=("c",)), COMMAND, f"no incident; 2 rules could not judge: {COMMAND}"),
        (IncidentSummary(judged=("a",), part_ns=90 * 10**9), COMMAND, f"no incident in the last 1.5 m: {COMMAND}"),
        (IncidentSummary(), COMMAND, f"no incident; nothing was seen that a rule could judge: {COMMAND}"),
        (IncidentSummary(failure="E: x"), "", "incidents were not looked for to the end: E: x; nothing was recorded to ask"),
    ],
)  # fmt: skip
def test_the_last_line(verdict, command, said):
    assert describe_verdict(verdict, command) == said


def test_the_last_line_of_json():
    line = build_verdict_line(IncidentSummary((HIGH, LOW), unknown=("b",), judged=("a",)), COMMAND)
    assert line == {
        "type": "incidents", "count": 2, "high": 1, "medium": 0, "low": 1, "unknown": ["b"], "judged": ["a"],
        "explain": COMMAND,
    }  # fmt: skip
    assert build_verdict_line(IncidentSummary(), "")["explain"] is None


def test_an_incident_is_told_as_explain_tells_it():
    line = build_incident_line(HIGH, HIGH.start_ns)
    assert (line["type"], line["severity"], line["start_s"]) == ("incident", "HIGH", 0.0)
    assert describe_incident(HIGH).startswith(f"[HIGH] {HIGH.title}")


def test_the_command_can_be_pasted():
    assert build_command(Path("/a b/d.db"), has_rolled=False) == "ingero explain --db '/a b/d.db'"
    assert build_command(Path("d.db"), has_rolled=True).endswith(" --include-rolled")
    assert build_command(None, has_rolled=True) == ""
