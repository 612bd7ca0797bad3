"""Looks for incidents while a trace goes on: in the newest rows, in a thread of its own, for about 2 % of a core.

A look costs what it costs, so the pause to the next is as long as keeps the share; a look takes as few rows as keep it to a
second, and what it may claim of the rows that it was not given is the engine's business.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final, Self

from ingero.agent.capture.discover.identity import ProcessIdentity
from ingero.agent.capture.stacks.resolver import Stack
from ingero.agent.capture.totals import Totals
from ingero.agent.metrics.series import Kind, Labels, Series
from ingero.agent.trace.recent import MOST_ROWS, Frozen, Recent
from ingero.model.arrays import Records
from ingero.model.events import Events
from ingero.model.incidents import Explanation, Incident, Severity
from ingero.recording.causal.engine import explain
from ingero.units import NS_PER_S

LEAST_PAUSE_NS: Final = 5 * NS_PER_S
MOST_SHARE: Final = 0.02
MOST_COST_NS: Final = NS_PER_S
"""CPU time of one look, so that the end of a trace waits no longer."""
_FEW_ROWS: Final = 10_000
"""A look of fewer says little about what a row costs."""
_NS_PER_ROW: Final = 20_000
"""Before the first look: rows of collectives cost so much, all others a tenth of it."""
_ORDER: Final = {Severity.LOW: 0, Severity.MEDIUM: 1, Severity.HIGH: 2}

Identified = tuple[str, str, int, str]
"""Rule, node, process and operation: what makes an incident the same one."""


@dataclass(frozen=True, slots=True)
class IncidentSummary:
    """What a trace found.

    Attributes:
        incidents: Each once, worst first; those of the last look and, where that saw a part only, those told before.
        unknown: Rules that could not judge, in the last look.
        judged: Rules that had what they need.
        part_ns: How long the part was that the last look saw; 0 for all of the trace.
        failure: Why nothing was looked for, or no longer; empty otherwise.
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
class _Look:
    """One look: what was seen, in how many rows, and what it cost."""

    told: Explanation
    n_rows: int
    cost_ns: int
    is_part: bool


Tell = Callable[[Incident, int], None]
"""Told of an incident, and of the first moment of what was looked at (Unix time)."""


class IncidentWatch:
    """An observer that tells of incidents; after the selection that feeds `recent`, before whoever shows what it says.

    Args:
        recent: What is kept of the trace.
        tell: Told of an incident that is new or got worse, in the tracing thread.
        judge: Finds incidents in a recording.
        cpu_ns: CPU time of the calling thread.
        pool: Where looks run; a thread of its own unless given.

    Attributes:
        verdict: What was found; empty until the end.
    """

    def __init__(
        self,
        recent: Recent,
        tell: Tell,
        judge: Callable[[Any], Explanation] = explain,
        cpu_ns: Callable[[], int] = time.thread_time_ns,
        pool: Executor | None = None,
    ) -> None:
        self.verdict = IncidentSummary()
        self._recent = recent
        self._tell = tell
        self._judge = judge
        self._cpu_ns = cpu_ns
        self._told: dict[Identified, Incident] = {}
        self._counts: dict[tuple[str, Severity], int] = {}
        self._ns_per_row = float(_NS_PER_ROW)
        self._next_ns: int | None = None
        self._pool = pool or ThreadPoolExecutor(1, "ingero-incidents")
        self._running: Future[_Look] | None = None

    def on_process(self, identity: ProcessIdentity) -> None:
        """Nothing: the selection names it."""

    def on_events(self, ring: str, records: Records, events: Events) -> None:
        """Nothing: the selection hands on what it keeps."""

    def on_stacks(self, stacks: Mapping[int, Stack]) -> None:
        """Keep them for the rows that follow."""
        self._recent.put_stacks(stacks)

    def on_totals(self, totals: Totals) -> None:
        """Tell what the last look found, and begin the next when its time has come; at the end look once more."""
        self._recent.unprobed = totals.unprobed
        if totals.is_last:
            self._finish(totals)
            return
        if self._next_ns is None:
            self._next_ns = totals.mono_ns + LEAST_PAUSE_NS
        if self._running is not None and self._running.done():
            look = self._take(self._running)
            self._running = None
            if look is not None:
                self._next_ns = totals.mono_ns + choose_pause_ns(look.cost_ns)
                self._tell_new(look)
        is_due = self._running is None and totals.mono_ns >= self._next_ns
        if is_due and not self.verdict.failure:
            self._running = self._pool.submit(self._look, self._recent.freeze(), self._most_rows())

    def _most_rows(self) -> int:
        """Rows that a look can judge within its cost."""
        return min(MOST_ROWS, int(MOST_COST_NS / max(self._ns_per_row, 1)))

    def _look(self, frozen: Frozen, most: int) -> _Look:
        started_ns = self._cpu_ns()
        recording = frozen.build(most)
        told = self._judge(recording)
        cost_ns = self._cpu_ns() - started_ns
        return _Look(told, len(recording.events), cost_ns, recording.is_truncated)

    def _take(self, running: Future[_Look]) -> _Look | None:
        """What a look found; None when it failed, and then none follows."""
        try:
            look = running.result()
        except Exception as error:  # noqa: BLE001 - a rule that fails must not end the trace
            self.verdict = IncidentSummary(failure=f"{type(error).__name__}: {error}")
            return None
        self._ns_per_row = look.cost_ns / max(look.n_rows, _FEW_ROWS)
        return look

    def _tell_new(self, look: _Look) -> None:
        """Tell each incident that was not told before, or not as this bad."""
        for incident in look.told.incidents:
            key = identify(incident)
            before = self._told.get(key)
            if before is None or _ORDER[incident.severity] > _ORDER[before.severity]:
                self._told[key] = incident
                counted = incident.rule, incident.severity
                self._counts[counted] = self._counts.get(counted, 0) + 1
                self._tell(incident, look.told.start_ns)

    def _finish(self, totals: Totals) -> None:
        """Look at all that is kept, as far as a look may cost."""
        if self._running is not None and (look := self._take(self._running)) is not None:
            self._tell_new(look)
        self._running = None
        if self.verdict.failure:
            return
        frozen = self._recent.freeze(totals.wall_ns)
        last = self._take(self._pool.submit(self._look, frozen, self._most_rows()))
        if last is None:
            return
        self._tell_new(last)
        found = list(last.told.incidents)
        if last.is_part:
            seen = {identify(incident) for incident in found}
            found += [one for key, one in self._told.items() if key not in seen]
            found.sort(key=lambda one: (-_ORDER[one.severity], -one.lost_ns))
        self.verdict = IncidentSummary(
            incidents=tuple(found),
            unknown=tuple(sorted({rule for one in last.told.unknown for rule in one.rules})),
            judged=last.told.judged,
            part_ns=last.told.end_ns - last.told.start_ns if last.is_part else 0,
        )  # fmt: skip

    def iter_series(self) -> Iterator[Series]:
        """Incidents that were told, by rule and severity; one that got worse counts under both."""
        points: list[tuple[Labels, float]] = [
            ((("rule", rule), ("severity", severity.value)), float(n))
            for (rule, severity), n in sorted(self._counts.items())
        ]
        yield Series(
            "ingero.incidents", Kind.SUM, "1", "Incidents found in this trace, by rule and severity.",
            tuple(points), "ingero_incidents_total",
        )  # fmt: skip

    def close(self) -> None:
        """Wait for a look that runs, and look no more."""
        self._pool.shutdown(cancel_futures=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def identify(incident: Incident) -> Identified:
    """What makes an incident the same one."""
    return incident.rule, incident.node, incident.pid, incident.op


def choose_pause_ns(cost_ns: int) -> int:
    """How long to wait after a look that cost so much CPU time."""
    return max(LEAST_PAUSE_NS, round(cost_ns / MOST_SHARE))
