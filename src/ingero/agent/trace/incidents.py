"""Searches for incidents while a trace goes on: in the newest rows, in a thread of its own, for about 2 % of a core.

The pause after a search is so long that the share is kept; a search takes so few rows that it lasts a second at most.
What may be concluded without the other rows is decided by the causal engine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

from ingero.agent.capture.discover.identity import ProcessIdentity
from ingero.agent.capture.stacks.resolver import Stack
from ingero.agent.capture.totals import Totals
from ingero.agent.metrics.series import Kind, Labels, Series
from ingero.agent.trace.recent_recording import MAX_ROWS, RecentRecording, RecentSnapshot
from ingero.closing import Closing
from ingero.model.arrays import Records
from ingero.model.events import Events
from ingero.model.incidents import Explanation, Incident, Severity
from ingero.recording.causal.engine import explain
from ingero.units import NS_PER_S

MIN_PAUSE_NS: Final = 5 * NS_PER_S
MAX_COST_SHARE: Final = 0.02
MAX_COST_NS: Final = NS_PER_S
"""CPU time of one search, so that the end of a trace waits no longer."""
_FEW_ROWS: Final = 10_000
"""A search of fewer shows little about the cost of a row."""
_NS_PER_ROW: Final = 20_000
"""Before the first search: cost of a row of a collective; any other costs a tenth of it."""
MAX_REPORTED: Final = 1024
"""Incidents that are remembered as reported; those that were not found for longest are forgotten first."""
_ORDER: Final = {Severity.LOW: 0, Severity.MEDIUM: 1, Severity.HIGH: 2}

Identified = tuple[str, str, int, str]
"""Rule, node, process and operation: what makes an incident the same one."""


@dataclass(frozen=True, slots=True)
class IncidentSummary:
    """What a trace found.

    Attributes:
        incidents: Each once, worst first; those of the last search and, where that had a part only, also those
            reported before, the last `MAX_REPORTED` of them.
        unknown: Rules that could not judge, in the last search.
        judged: Rules that had what they need.
        part_ns: How long the part was that the last search had; 0 for all of the trace.
        failure: Why there was no search, or no further one; empty otherwise.
    """

    incidents: tuple[Incident, ...] = ()
    unknown: tuple[str, ...] = ()
    judged: tuple[str, ...] = ()
    part_ns: int = 0
    failure: str = ""

    def count(self, severity: Severity) -> int:
        """Incidents of one severity."""
        return sum(incident.severity is severity for incident in self.incidents)


@dataclass(frozen=True, slots=True)
class _Search:
    """One search: what was found, in how many rows, and what it cost."""

    explanation: Explanation
    n_rows: int
    cost_ns: int
    is_part: bool


ReportIncident = Callable[[Incident, int], None]
"""Called with an incident, and with the first moment of what was searched (Unix time)."""


class IncidentWatch(Closing):
    """An observer that reports incidents; after the selection that feeds `recent`, before the observers that show them.

    Args:
        recent: What is kept of the trace.
        report: Called with an incident that is new or got worse, in the tracing thread.
        judge: Finds incidents in a recording.
        cpu_ns: CPU time of the calling thread.
        pool: Where searches run; a thread of its own unless given.

    Attributes:
        verdict: What was found; empty until the end.
    """

    def __init__(
        self,
        recent: RecentRecording,
        report: ReportIncident,
        judge: Callable[[Any], Explanation] = explain,
        cpu_ns: Callable[[], int] = time.thread_time_ns,
        pool: Executor | None = None,
    ) -> None:
        self.verdict = IncidentSummary()
        self._recent = recent
        self._report = report
        self._judge = judge
        self._cpu_ns = cpu_ns
        self._reported: dict[Identified, Incident] = {}
        self._counts: dict[tuple[str, Severity], int] = {}
        self._ns_per_row = float(_NS_PER_ROW)
        self._next_ns: int | None = None
        self._pool = pool or ThreadPoolExecutor(1, "ingero-incidents")
        self._running: Future[_Search] | None = None

    def on_process(self, identity: ProcessIdentity) -> None:
        """Nothing: the selection names it."""

    def on_events(self, ring: str, records: Records, events: Events) -> None:
        """Nothing: the selection hands on what it keeps."""

    def on_stacks(self, stacks: Mapping[int, Stack]) -> None:
        """Keep them for the rows that follow."""
        self._recent.put_stacks(stacks)

    def on_totals(self, totals: Totals) -> None:
        """Report what the last search found, and begin the next when it is due; at the end search once more."""
        self._recent.unprobed = totals.unprobed
        if totals.is_last:
            self._finish(totals)
            return
        if self._next_ns is None:
            self._next_ns = totals.mono_ns + MIN_PAUSE_NS
        if self._running is not None and self._running.done():
            search = self._take(self._running)
            self._running = None
            if search is not None:
                self._next_ns = totals.mono_ns + choose_pause_ns(search.cost_ns)
                self._report_new(search)
        is_due = self._running is None and totals.mono_ns >= self._next_ns
        if is_due and not self.verdict.failure:
            self._running = self._pool.submit(
                self._search, self._recent.freeze(), self._row_limit()
            )

    def _row_limit(self) -> int:
        """Rows that a search can judge within its cost."""
        return min(MAX_ROWS, int(MAX_COST_NS / max(self._ns_per_row, 1)))

    def _search(self, frozen: RecentSnapshot, max_rows: int) -> _Search:
        started_ns = self._cpu_ns()
        recording = frozen.build(max_rows)
        explanation = self._judge(recording)
        cost_ns = self._cpu_ns() - started_ns
        return _Search(explanation, len(recording.events), cost_ns, recording.is_truncated)

    def _take(self, running: Future[_Search]) -> _Search | None:
        """What a search found; None when it failed, and then none follows."""
        try:
            search = running.result()
        except Exception as error:  # noqa: BLE001 - a rule that fails must not end the trace
            self.verdict = IncidentSummary(failure=f"{type(error).__name__}: {error}")
            return None
        self._ns_per_row = search.cost_ns / max(search.n_rows, _FEW_ROWS)
        return search

    def _report_new(self, search: _Search) -> None:
        """Report each incident that was not reported before, or not as this bad."""
        for incident in search.explanation.incidents:
            key = identify(incident)
            before = self._reported.pop(key, None)
            if before is not None and _ORDER[incident.severity] <= _ORDER[before.severity]:
                self._reported[key] = before
                continue
            self._reported[key] = incident
            counted = incident.rule, incident.severity
            self._counts[counted] = self._counts.get(counted, 0) + 1
            self._report(incident, search.explanation.start_ns)
        for key in list(self._reported)[:-MAX_REPORTED]:
            del self._reported[key]

    def _finish(self, totals: Totals) -> None:
        """Search all that is kept, within the cost of one search."""
        if self._running is not None and (search := self._take(self._running)) is not None:
            self._report_new(search)
        self._running = None
        if self.verdict.failure:
            return
        frozen = self._recent.freeze(totals.wall_ns)
        last = self._take(self._pool.submit(self._search, frozen, self._row_limit()))
        if last is None:
            return
        self._report_new(last)
        found = list(last.explanation.incidents)
        if last.is_part:
            seen = {identify(incident) for incident in found}
            found += [one for key, one in self._reported.items() if key not in seen]
            found.sort(key=lambda one: (-_ORDER[one.severity], -one.lost_ns))
        self.verdict = IncidentSummary(
            incidents=tuple(found),
            unknown=tuple(sorted({rule for one in last.explanation.unknown for rule in one.rules})),
            judged=last.explanation.judged,
            part_ns=last.explanation.end_ns - last.explanation.start_ns if last.is_part else 0,
        )  # fmt: skip

    def iter_series(self) -> Iterator[Series]:
        """Incidents that were reported, by rule and severity; one that got worse counts under both."""
        points: list[tuple[Labels, float]] = [
            ((("rule", rule), ("severity", severity.value)), float(n))
            for (rule, severity), n in sorted(self._counts.items())
        ]
        yield Series(
            "ingero.incidents", Kind.SUM, "1", "Incidents found in this trace, by rule and severity.",
            tuple(points), "ingero_incidents_total",
        )  # fmt: skip

    def close(self) -> None:
        """Wait for a search that runs, and begin none."""
        self._pool.shutdown(cancel_futures=True)


def identify(incident: Incident) -> Identified:
    """What makes an incident the same one."""
    return incident.rule, incident.node, incident.pid, incident.op


def choose_pause_ns(cost_ns: int) -> int:
    """How long to wait after a search that cost so much CPU time."""
    return max(MIN_PAUSE_NS, round(cost_ns / MAX_COST_SHARE))
