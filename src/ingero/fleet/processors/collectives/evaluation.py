"""One evaluation after another: what arrived is judged on a thread of its own, and what came of it is reported."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

from ingero.fleet.component import Host
from ingero.fleet.processors.collectives import telemetry
from ingero.fleet.processors.collectives.conclusions import Conclusion
from ingero.fleet.processors.collectives.hangs import HangTracker
from ingero.fleet.processors.collectives.log_lines import EventLog
from ingero.fleet.processors.collectives.reports import PipelineReports
from ingero.fleet.processors.collectives.state import CollectivesState
from ingero.model.hang import HangReport
from ingero.telemetry.metrics import MeterRegistry
from ingero.units import NS_PER_S

_REST: Final = 4
"""An evaluation is followed by a rest of this many times its own duration, at most `_MAX_REST_NS`."""
_MAX_REST_NS: Final = NS_PER_S
"""Of a large job a round takes seconds: four times as long would be a verdict that comes too late."""


class EvaluationThread:
    """Runs an action on a thread of its own: one at a time, and a fifth of the time while it is short.

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

    def kick(self) -> None:
        """Start the action unless it is still running or rests."""
        if self._running is not None:
            if not self._running.done():
                return
            self._running.result()  # a fault of ours is logged by the host, once
            self._running = None
        if self._clock.mono_ns() >= self._rest_until_ns:
            self._running = self._thread.submit(self._run)

    async def stop(self) -> None:
        """Wait for an action that is running."""
        await asyncio.to_thread(self._thread.shutdown, wait=True, cancel_futures=True)

    def _run(self) -> None:
        began_ns = self._clock.mono_ns()
        self._action()
        took_ns = self._clock.mono_ns() - began_ns
        self._rest_until_ns = began_ns + took_ns + min(_REST * took_ns, _MAX_REST_NS)
        self._record(took_ns / NS_PER_S)


class StateGauges:
    """The service's own gauges about each cluster; those of a cluster that is forgotten are removed."""

    def __init__(self, meter: MeterRegistry) -> None:
        self._workers = meter.gauge(telemetry.VERDICTS)
        self._age = meter.gauge(telemetry.AGE)
        self._missing = meter.gauge(telemetry.MISSING)
        self._late = meter.gauge(telemetry.LATE)
        self._kinds: dict[str, Counter[str]] = {}
        self._hanging: set[str] = set()
        self._catching_up: set[str] = set()

    def show_verdicts(self, conclusions: Mapping[str, Conclusion], now_ns: int) -> None:
        """Set the number of workers by verdict, and the age of the verdicts."""
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
            self._age.set((now_ns - conclusion.judged_ns) / NS_PER_S, cluster_id=cluster_id)

    def show_late(self, late_ns: Mapping[str, int]) -> None:
        """Set how late the evidence is of which nothing is concluded."""
        for cluster_id in self._catching_up - late_ns.keys():
            self._late.remove(cluster_id=cluster_id)
        self._catching_up = set(late_ns)
        for cluster_id, ns in late_ns.items():
            self._late.set(ns / NS_PER_S, cluster_id=cluster_id)

    def show_hangs(self, hangs: Mapping[str, tuple[HangReport, float]]) -> None:
        """Set the number of ranks that others wait for."""
        for cluster_id in self._hanging - hangs.keys():
            self._missing.remove(cluster_id=cluster_id)
        self._hanging = set(hangs)
        for cluster_id, (report, _) in hangs.items():
            self._missing.set(len(report.roots), cluster_id=cluster_id)


class Evaluation:
    """Judges everything that waits, and reports what came of it down the pipelines, as gauges and in the log."""

    def __init__(self, state: CollectivesState, host: Host) -> None:
        self._state = state
        self._clock = host.clock
        self._reports = PipelineReports(state, host)
        self._gauges = StateGauges(host.meter)
        self._log = EventLog(host.clock)
        self._hangs = HangTracker()

    def run(self) -> None:
        """Evaluate once. Any thread, one at a time."""
        state, now_ns = self._state, self._clock.mono_ns()
        fresh = state.engine.judge(now_ns)
        conclusions = state.engine.conclusions()
        self._reports.adopt(conclusions)
        for conclusion in self._reports.send_verdicts(conclusions, fresh, now_ns):
            self._log.write_verdicts(conclusion.changes)
        hangs = {
            cluster_id: found
            for cluster_id, found in state.progress.find_hangs(now_ns).items()
            if not state.engine.is_replaying(cluster_id)
        }
        state.diagnoses.note(conclusions, hangs, now_ns)
        explained = state.diagnoses.pop_fresh()
        self._log.write_diagnoses(explained)
        self._reports.send_diagnoses(explained)
        self._reports.send_due_costs(conclusions, now_ns)
        self._reports.send_gauge_lags(state.gauges.take_lags(now_ns))
        self._gauges.show_verdicts(conclusions, now_ns)
        late_ns = state.engine.find_late_ns()
        self._gauges.show_late(late_ns)
        self._log.write_late(late_ns)
        self._gauges.show_hangs(hangs)
        for changes in self._hangs.find_changes(hangs):
            self._log.write_hangs(changes)
            self._reports.send_hangs(changes)
        self._log.write_caps(state.engine.take_cap_changes(now_ns))
        self._log.flush()

    def finish(self) -> None:
        """Report the costs that are not reported yet."""
        self._reports.send_costs(self._state.engine.conclusions())
