"""One evaluation after another: what arrived is judged on a thread of its own, and what came of it is reported."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Final

from ingero.faults import FaultPlace, find_place
from ingero.fleet.component import Host
from ingero.fleet.processors.collectives import telemetry
from ingero.fleet.processors.collectives.conclusions import Conclusion
from ingero.fleet.processors.collectives.hangs import HangChanges
from ingero.fleet.processors.collectives.log_lines import EventLog
from ingero.fleet.processors.collectives.progress import CAP
from ingero.fleet.processors.collectives.reports import PipelineReports
from ingero.fleet.processors.collectives.state import CollectivesState
from ingero.model.diagnosis import Diagnosis
from ingero.model.hang import HangReport, HangRoot
from ingero.model.verdicts import Verdict
from ingero.telemetry.clock import Clock
from ingero.telemetry.limited import RateLimitedLog
from ingero.telemetry.metrics import MeterRegistry
from ingero.units import NS_PER_S

_REST: Final = 4
"""An evaluation is followed by a rest of this many times its own duration, at most `_MAX_REST_NS`."""
_MAX_REST_NS: Final = NS_PER_S
"""Of a large job a round takes seconds: four times as long would be a verdict that comes too late."""
_MAX_TRACED: Final = 64
"""Places in the code whose first fault is logged with its traceback."""
_log: Final = logging.getLogger("ingero.fleet.processors.nccl")


class EvaluationThread:
    """Runs an action on a thread of its own: one at a time, and a fifth of the time while it is short.

    What the action raises is logged and counted, and the action runs again.

    Args:
        action: What to run.
        host: Gives clock and meter.
    """

    def __init__(self, action: Callable[[], None], host: Host) -> None:
        self._action = action
        self._clock = host.clock
        self._record = host.meter.histogram(telemetry.JUDGE_SECONDS).bound()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ingero-judge")
        self._running: Future[None] | None = None
        self._rest_until_ns = 0
        self._count_fault = host.meter.counter(telemetry.JUDGE_FAULTS).bound()
        self._lines = RateLimitedLog(_log, host.clock)
        self._traced: set[FaultPlace] = set()

    def kick(self) -> None:
        """Start the action unless it is still running or rests."""
        if self._running is not None and not self._running.done():
            return
        if self._clock.mono_ns() >= self._rest_until_ns:
            self._running = self._thread.submit(self._run)

    async def stop(self) -> None:
        """Wait for an action that is running."""
        await asyncio.to_thread(self._thread.shutdown, wait=True, cancel_futures=True)

    def _run(self) -> None:
        began_ns = self._clock.mono_ns()
        try:
            self._action()
        except Exception as error:  # noqa: BLE001 - one round's defect must not end judging
            self._note_fault(error)
        took_ns = self._clock.mono_ns() - began_ns
        self._rest_until_ns = began_ns + took_ns + min(_REST * took_ns, _MAX_REST_NS)
        self._record(took_ns / NS_PER_S)
        self._lines.flush()

    def _note_fault(self, error: Exception) -> None:
        """Count a fault and log it: the first of each place with its traceback, the others with a limit."""
        self._count_fault(1)
        place = find_place(error)
        if place not in self._traced and len(self._traced) < _MAX_TRACED:
            self._traced.add(place)
            _log.error("a round of judging failed; the next one runs", exc_info=error)
            return
        self._lines.write(
            place, logging.ERROR, "a round of judging failed again",
            error=repr(error), file=place.file, line=place.line,
        )  # fmt: skip


class StateGauges:
    """The service's own gauges about each cluster; those of a cluster that is forgotten are removed."""

    def __init__(self, meter: MeterRegistry, clock: Clock) -> None:
        self._clock = clock
        self._workers = meter.gauge(telemetry.VERDICTS)
        self._age = meter.gauge(telemetry.AGE)
        self._missing = meter.gauge(telemetry.MISSING)
        self._deadlocked = meter.gauge(telemetry.DEADLOCKED)
        self._late = meter.gauge(telemetry.LATE)
        self._kinds: dict[str, Counter[str]] = {}
        self._hanging: set[str] = set()
        self._catching_up: set[str] = set()

    def show_verdicts(self, conclusions: Mapping[str, Conclusion]) -> None:
        """Set the number of workers by verdict, and since when the verdicts grow older."""
        for cluster_id in self._kinds.keys() - conclusions.keys():
            for kind in self._kinds.pop(cluster_id):
                self._workers.remove(cluster_id=cluster_id, verdict=kind)
            self._age.remove(cluster_id=cluster_id)
        for cluster_id, conclusion in conclusions.items():
            kinds = Counter(verdict.kind.value for verdict in conclusion.judgement.verdicts)
            for kind in self._kinds.get(cluster_id, Counter()).keys() - kinds.keys():
                self._workers.remove(cluster_id=cluster_id, verdict=kind)
            for kind, n_workers in kinds.items():
                self._workers.set(n_workers, cluster_id=cluster_id, verdict=kind)
            self._kinds[cluster_id] = kinds
            # Asked for at each scrape: a round that does not end sets nothing.
            read_age = partial(self._read_age_s, conclusion.judged_ns)
            self._age.watch(read_age, cluster_id=cluster_id)

    def forget_ages(self) -> None:
        """Nothing is judged any more, so that the verdicts have no age that matters."""
        for cluster_id in self._kinds:
            self._age.remove(cluster_id=cluster_id)

    def _read_age_s(self, judged_ns: int) -> float:
        return (self._clock.mono_ns() - judged_ns) / NS_PER_S

    def show_late(self, late_ns: Mapping[str, int]) -> None:
        """Set how late the evidence is of which nothing is concluded."""
        for cluster_id in self._catching_up - late_ns.keys():
            self._late.remove(cluster_id=cluster_id)
        self._catching_up = set(late_ns)
        for cluster_id, ns in late_ns.items():
            self._late.set(ns / NS_PER_S, cluster_id=cluster_id)

    def show_hangs(self, hangs: Mapping[str, tuple[HangReport, float]]) -> None:
        """Set the number of ranks that others wait for, and of those that wait for each other."""
        for cluster_id in self._hanging - hangs.keys():
            self._missing.remove(cluster_id=cluster_id)
            self._deadlocked.remove(cluster_id=cluster_id)
        self._hanging = set(hangs)
        for cluster_id, (report, _) in hangs.items():
            self._missing.set(len(report.roots), cluster_id=cluster_id)
            n_deadlocked = sum(map(len, report.deadlocks))
            self._deadlocked.set(n_deadlocked, cluster_id=cluster_id)


class Evaluation:
    """Judges everything that waits, and reports what came of it down the pipelines, as gauges and in the log.

    What is to be reported is kept until its turn: a fault costs the report at which it arises, and no other.
    """

    def __init__(self, state: CollectivesState, host: Host) -> None:
        self._state = state
        self._clock = host.clock
        self._reports = PipelineReports(state, host)
        self._gauges = StateGauges(host.meter, host.clock)
        self._log = EventLog(host.clock)
        self._count_refused = host.meter.counter(telemetry.REFUSED).bound(reason=CAP)
        self._unreported: dict[str, Conclusion] = {}
        self._explained: deque[tuple[Verdict | HangRoot, Diagnosis]] = deque()
        self._hang_changes: deque[HangChanges] = deque()

    def run(self) -> None:
        """Evaluate once. Any thread, one at a time."""
        now_ns, engine = self._clock.mono_ns(), self._state.engine
        before, fresh = engine.conclusions(), dict[str, Conclusion]()
        try:
            fresh = engine.judge(now_ns)
        finally:  # a fault at one cluster keeps back nothing of the others
            self._note_fresh(before, fresh)
            self._report(now_ns)

    def _note_fresh(self, before: Mapping[str, Conclusion], fresh: Collection[str]) -> None:
        """What this round concluded is to be reported, with what changed in a round that was not."""
        for cluster_id, conclusion in self._state.engine.conclusions().items():
            has_changed = conclusion.changes and conclusion is not before.get(cluster_id)
            if cluster_id in fresh or has_changed:
                kept = self._unreported.get(cluster_id)
                changes = (*(kept.changes if kept else ()), *conclusion.changes)
                # Its place among the others stays: after a fault those behind it come first.
                self._unreported[cluster_id] = replace(conclusion, changes=changes)

    def _report(self, now_ns: int) -> None:
        state, conclusions = self._state, self._state.engine.conclusions()
        self._reports.adopt(conclusions)
        for conclusion in self._reports.send_verdicts(conclusions, self._unreported, now_ns):
            self._log.write_verdicts(conclusion.changes)
        hangs = {
            cluster_id: found
            for cluster_id, found in state.progress.find_hangs(now_ns).items()
            if not state.engine.is_replaying(cluster_id)
        }
        state.diagnoses.note(conclusions, hangs, now_ns)
        self._explained.extend(state.diagnoses.pop_fresh())
        while self._explained:
            explained = [self._explained.popleft()]
            self._log.write_diagnoses(explained)
            self._reports.send_diagnoses(explained)
        self._reports.send_due_costs(conclusions, now_ns)
        self._reports.send_gauge_lags(state.gauges.take_lags(now_ns))
        self._gauges.show_verdicts(conclusions)
        late_ns = state.engine.find_late_ns()
        self._gauges.show_late(late_ns)
        self._log.write_late(late_ns)
        self._gauges.show_hangs(hangs)
        self._hang_changes.extend(state.hangs.find_changes(hangs, now_ns))
        while self._hang_changes:
            changes = self._hang_changes.popleft()
            self._log.write_hangs(changes)
            self._reports.send_hangs(changes)
        self._log.write_deadlocks(hangs)
        self._count_refused(state.progress.take_refused())
        self._log.write_caps(state.engine.take_cap_changes(now_ns))
        self._log.write_caps(state.progress.take_cap_changes(now_ns))
        self._log.flush()

    def finish(self) -> None:
        """No round follows: report the costs that are not reported yet."""
        self._gauges.forget_ages()
        self._reports.send_costs(self._state.engine.conclusions())
