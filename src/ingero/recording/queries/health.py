"""``get_check`` and ``get_test_report``: what the recording can answer, and what a test run said of it."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import numpy as np

from ingero.errors import BadDataError
from ingero.model.events import Source, source_name
from ingero.model.recording import Recording
from ingero.recording.queries.explanation_answers import wanted_part
from ingero.recording.queries.paging import PageArgs, Tsc
from ingero.recording.queries.recording_file import RecordingFile
from ingero.serving.query import Query


class NoArgs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Nothing to choose."""


class ReportArgs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Nothing to choose."""

    tsc: Tsc = True


class CheckLine(msgspec.Struct, frozen=True):
    """One fact about the recording: PASS, INFO or FAIL."""

    state: str
    name: str
    value: str
    detail: str = ""


class CheckAnswer(msgspec.Struct, frozen=True):
    """What this recording can answer."""

    all_passed: bool
    checks: list[CheckLine]


_NEEDED = {
    Source.CUDA: "GPU calls: starvation, copies, launches, cold starts",
    Source.HOST: "thread switches: preemption, waiting, and who computes while no GPU call is made",
    Source.IO: "disk requests: blocking reads",
    Source.NCCL: "collectives: late ranks",
    Source.GPU: "driver facts: throttling, Xid, ECC",
}


def _check(context: RecordingFile, args: NoArgs) -> CheckAnswer:
    del args
    recording = context.load(wanted_part(PageArgs()))
    first, last = recording.window_ns
    lines = [
        CheckLine(
            "PASS" if len(recording.events) else "FAIL", "events", str(recording.n_events_stored)
        ),
        CheckLine("INFO", "duration", f"{(last - first) / 1e9:.3f} s"),
        CheckLine("INFO", "nodes", ", ".join(name or "(unnamed)" for name in recording.nodes)),
        *_source_lines(recording),
        _coverage_line(recording),
    ]
    if recording.has_unread:
        lines.insert(1, CheckLine("INFO", "events read", f"the newest {len(recording.events)}"))
    return CheckAnswer(all(line.state != "FAIL" for line in lines), lines)


def _source_lines(recording: Recording) -> list[CheckLine]:
    present = set(np.unique(recording.events["source"]).tolist())
    return [
        CheckLine(
            "PASS" if source in present else "INFO",
            f"source {source_name(source)}",
            "recorded" if source in present else "not in this recording",
            use,
        )
        for source, use in _NEEDED.items()
    ]


def _coverage_line(recording: Recording) -> CheckLine:
    if len(recording.coverage):
        lost = int(recording.coverage["lost"].sum())
        return CheckLine("FAIL" if lost else "PASS", "lost records", str(lost))
    if len(recording.aggregates):
        counted = int(recording.aggregates["count"].sum())
        return CheckLine(
            "INFO", "coverage", f"{counted} calls counted", "rows are a sample of them"
        )
    return CheckLine("INFO", "coverage", "unknown", "the recording keeps no counts")


CHECK = Query(
    name="get_check",
    title="What this recording can answer",
    description="Which kinds of events the recording holds, how much was lost, and which questions that allows.",
    args=NoArgs,
    result=CheckAnswer,
    run=_check,
)


class ReportAnswer(msgspec.Struct, frozen=True):
    """The report as it was written."""

    path: str
    report: dict[str, Any]


def _report(context: RecordingFile, args: ReportArgs) -> ReportAnswer:
    del args
    path = context.path.parent / "logs" / "test-report.json"
    try:
        report: Any = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise BadDataError(
            f"{path}: no test report", hint="a test run of the agent leaves it there"
        ) from error
    except (OSError, ValueError) as error:
        raise BadDataError(f"{path}: {error}") from error
    if not isinstance(report, dict):
        raise BadDataError(f"{path}: not a JSON object")
    return ReportAnswer(str(path), report)


REPORT = Query(
    name="get_test_report",
    title="Test report",
    description="The report of an integration test run, when one lies beside the recording (logs/test-report.json).",
    args=ReportArgs,
    result=ReportAnswer,
    run=_report,
)
