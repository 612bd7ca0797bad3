"""The ``nccl`` processor in its pipelines: reads records in pushes, judges on a thread of its own, reports."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from ingero.errors import BadDataError, DeliveryError
from ingero.fleet.component import (
    AdminRoute,
    AdminRoutes,
    ComponentId,
    Hardware,
    HardwareSource,
    Host,
    PushContext,
    Stability,
)
from ingero.fleet.consumer import Batch, Consumer
from ingero.fleet.factory import ProcessorFactory
from ingero.fleet.processors.collectives import telemetry
from ingero.fleet.processors.collectives.config import NcclConfig
from ingero.fleet.processors.collectives.cost_totals import CostTotals
from ingero.fleet.processors.collectives.costs import CostDeltas, build_costs
from ingero.fleet.processors.collectives.engine import Conclusion, DetectionEngine
from ingero.fleet.processors.collectives.gauges import GaugeTracker, date_by_arrival, has_gauges
from ingero.fleet.processors.collectives.hangs import HangChanges, build_hangs
from ingero.fleet.processors.collectives.log_lines import write_caps, write_hangs, write_verdicts
from ingero.fleet.processors.collectives.progress import ProgressTracker, hang_json
from ingero.fleet.processors.collectives.rates import Rates
from ingero.fleet.processors.collectives.verdicts import (
    build_changes,
    build_gauge_lags,
    build_verdicts,
)
from ingero.model.hang import HangReport
from ingero.model.verdicts import judgement_json
from ingero.otlp.codec import Export
from ingero.otlp.names import Signal
from ingero.telemetry.limited import RateLimitedLog
from ingero.units import NS_PER_S
from ingero.wire.collectives import read_collectives
from ingero.wire.progress import read_progress

_log = logging.getLogger("ingero.fleet.processors.nccl")
_KEEPALIVE_NS = 60 * NS_PER_S
_REST = 4
_PAGE_LIMIT = 1000


class CollectivesState:
    """What the processor's instances in several pipelines share.

    Attributes:
        cases: What waits to be judged and what was concluded.
        gauges: Per-event gauges of older agents.
        standings: Where ranks of jobs that stand still stopped.
        bills: What was told of each cluster's costs; the judge thread's.
        totals: What each cluster's waiting has cost since Fleet knows it; likewise.
        following: What comes after the processor, by signal; the first pipeline of each.
        host: Under which service the timers run; a reload brings another.
    """

    def __init__(self, config: NcclConfig, host: Host) -> None:
        self.cases = DetectionEngine(config, host.meter)
        self.gauges = GaugeTracker(config.gauge_window, config.max_gauge_groups)
        self.standings = ProgressTracker(config.idle_timeout)
        self.bills: dict[str, CostDeltas] = {}
        self.totals: dict[str, CostTotals] = {}
        self.following: dict[Signal, Consumer] = {}
        self.host: object = None

    def accepts(self, settings: object) -> bool:
        """Whether it can go on with other settings: prices, caps and timers do not change what was judged."""
        return isinstance(settings, NcclConfig) and self.cases.config.accepts(settings)


class CollectivesProcessor:
    """One pipeline's door."""

    def __init__(
        self, component: ComponentId, config: NcclConfig, signal: Signal, following: Consumer
    ) -> None:
        self._id = component
        self._config = config
        self._signal = signal
        self._following = following
        self._shared: CollectivesState | None = None
        self._host: Host | None = None
        self._rounds: JudgeRounds | None = None

    async def start(self, host: Host) -> None:
        """Join or make the shared state; the first instance under this host also judges."""
        shared = host.shared((str(self._id), "cases"), lambda: CollectivesState(self._config, host))
        self._shared, self._host = shared, host
        if shared.host is not host:
            shared.host = host
            shared.following.clear()
            shared.cases.config = self._config
            self._rounds = JudgeRounds(shared, host)
            host.offer(AdminRoutes, CollectivesPages(shared, host))
            host.every(self._config.judge_interval, self._rounds.kick)
        shared.following.setdefault(self._signal, self._following)

    async def stop(self) -> None:
        """Let a round that is running finish."""
        if self._rounds is not None:
            await self._rounds.stop()

    def consume(self, batch: Batch) -> None:
        """Read what concerns this processor, and pass everything on."""
        shared, host = self._shared, self._host
        assert shared is not None
        assert host is not None
        if batch.signal is Signal.LOGS:
            now_ns = host.clock.mono_ns()
            self._read_standings(batch, shared, now_ns)
            self._read_batches(batch, shared, now_ns)
        elif batch.signal is Signal.METRICS and has_gauges(batch.export):
            shared.gauges.add(batch.export, batch.push.cluster_hint, host.clock.mono_ns())
            dated = date_by_arrival(batch.export, batch.received_wall_ns)
            if dated is not batch.export:
                batch = Batch(batch.signal, dated, batch.received_wall_ns, batch.push)
        self._following.consume(batch)

    @staticmethod
    def _read_standings(batch: Batch, shared: CollectivesState, now_ns: int) -> None:
        read = read_progress(batch.export)
        if read.n_refused:
            shared.cases.refuse["bad_record"](read.n_refused)
            batch.push.n_rejected += read.n_refused
            batch.push.rejected_why = read.first_problem
        if read.standings:
            rank = read.standings[0].rank
            batch.push.cluster_id, batch.push.node_id = rank.cluster_id, rank.node_id
            shared.standings.add(read.standings, now_ns)

    @staticmethod
    def _read_batches(batch: Batch, shared: CollectivesState, now_ns: int) -> None:
        read, cases = read_collectives(batch.export), shared.cases
        push = batch.push
        if read.n_refused:
            cases.refuse["bad_record"](read.n_refused)
            push.n_rejected += read.n_refused
            push.rejected_why = read.first_problem
        if read.runs:
            rank = read.runs[0].rank
            push.cluster_id, push.node_id = rank.cluster_id, rank.node_id
            shared.standings.note_moving(read.runs, now_ns)
            n_refused, why = cases.add(read.runs, now_ns)
            if n_refused:
                push.n_rejected += n_refused
                push.rejected_why = f"collective batches not taken: {why}"


class JudgeRounds:
    """Judges on its own thread, one round at a time, and reports what came of it."""

    def __init__(self, shared: CollectivesState, host: Host) -> None:
        self._shared = shared
        self._host = host
        self._clock = host.clock
        self._rates = Rates(shared.cases.config.rates)
        self._billed_ns = host.clock.mono_ns()
        self._log = RateLimitedLog(_log, host.clock, burst=2)
        self._victims_log = RateLimitedLog(_log, host.clock, burst=2, total_burst=20)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ingero-judge")
        self._running: Future[None] | None = None
        meter = host.meter
        self._record = meter.histogram(telemetry.JUDGE_SECONDS).bound()
        self._lost = meter.counter(telemetry.REPORTS_LOST).bound()
        self._workers = meter.gauge(telemetry.VERDICTS)
        self._age = meter.gauge(telemetry.AGE)
        self._missing = meter.gauge(telemetry.MISSING)
        self._shown_hangs: set[str] = set()
        self._hangs = HangChanges()
        self._count_points = meter.counter(telemetry.GAUGE_POINTS).bound()
        self._n_points, self._n_gauges_refused = shared.gauges.n_points, shared.gauges.n_refused
        self._rest_until_ns = 0
        self._shown: dict[str, Counter[str]] = {}
        self._reported_ns: dict[str, int] = {}

    def kick(self) -> None:
        """Start a round unless one is still running, or rounds would take more than a fifth of the time."""
        is_idle = self._running is None or self._running.done()
        if is_idle and self._clock.mono_ns() >= self._rest_until_ns:
            if self._running is not None:
                self._running.result()  # a fault of ours is logged by the host, once
            self._running = self._thread.submit(self.round)

    async def stop(self) -> None:
        """Wait for a round that is running, then tell what was not billed yet."""
        await asyncio.to_thread(self._thread.shutdown, wait=True, cancel_futures=True)
        self._bill(self._shared.cases.conclusions())

    def round(self) -> None:
        """Judge everything that waits and report it. Any thread, one at a time."""
        began_ns = self._clock.mono_ns()
        shared = self._shared
        fresh = shared.cases.judge(began_ns)
        conclusions = shared.cases.conclusions()
        for cluster_id, conclusion in conclusions.items():
            is_quiet = began_ns - self._reported_ns.get(cluster_id, 0) >= _KEEPALIVE_NS
            if cluster_id in fresh or is_quiet:
                self._reported_ns[cluster_id] = began_ns
                self._report(conclusion)
        if began_ns - self._billed_ns >= shared.cases.config.cost_interval:
            self._billed_ns = began_ns
            self._bill(conclusions)
        for export in build_gauge_lags(
            shared.gauges.take_lags(began_ns), self._clock.wall_ns(), self._find_hardware
        ):
            self._send(Signal.METRICS, export)
        self._count_points(shared.gauges.n_points - self._n_points)
        shared.cases.refuse["gauge_cap"](shared.gauges.n_refused - self._n_gauges_refused)
        self._n_points, self._n_gauges_refused = shared.gauges.n_points, shared.gauges.n_refused
        self._show(conclusions)
        self._show_hangs(began_ns)
        write_caps(self._log, shared.cases.take_cap_changes(began_ns))
        self._log.flush()
        self._victims_log.flush()
        ended_ns = self._clock.mono_ns()
        self._rest_until_ns = ended_ns + _REST * (ended_ns - began_ns)
        self._record((ended_ns - began_ns) / NS_PER_S)

    def _report(self, conclusion: Conclusion) -> None:
        wall_ns = self._clock.wall_ns()
        self._send(Signal.METRICS, build_verdicts(conclusion, wall_ns, self._find_hardware))
        write_verdicts(self._log, self._victims_log, conclusion.changes)
        changes = build_changes(conclusion, wall_ns)
        if changes is not None:
            self._send(Signal.LOGS, changes)

    def _bill(self, conclusions: Mapping[str, Conclusion]) -> None:
        """Tell what waiting has cost since the last time; what could not be told waits for the next."""
        bills, totals = self._shared.bills, self._shared.totals
        for cluster_id in bills.keys() - conclusions.keys():
            del bills[cluster_id]
            totals.pop(cluster_id, None)
        if Signal.LOGS not in self._shared.following:
            return
        wall_ns = self._clock.wall_ns()
        for cluster_id, conclusion in conclusions.items():
            bill = bills.setdefault(cluster_id, CostDeltas())
            charges, settled = bill.find_charges(conclusion, self._find_hardware)
            costs = build_costs(cluster_id, charges, self._rates, wall_ns)
            if self._send(Signal.LOGS, costs):
                bill.settle(conclusion, settled)
                total = totals.setdefault(cluster_id, CostTotals(cluster_id, wall_ns))
                total.add(charges, self._rates)
                self._send(Signal.METRICS, total.build(wall_ns))

    def _find_hardware(self, cluster_id: str, node_id: str) -> Hardware:
        for source in self._host.find(HardwareSource):
            found = source.find_hardware(cluster_id, node_id)
            if found is not None:
                return found
        return Hardware("", "")

    def _send(self, signal: Signal, export: Export) -> bool:
        following = self._shared.following.get(signal)
        if following is None or not export.n_items:
            return True
        try:
            following.consume(Batch(signal, export, self._clock.wall_ns(), PushContext()))
        except DeliveryError:
            self._lost(1)
            return False
        return True

    def _show(self, conclusions: Mapping[str, Conclusion]) -> None:
        now_ns = self._clock.mono_ns()
        for cluster_id in self._shown.keys() - conclusions.keys():
            for kind in self._shown.pop(cluster_id):
                self._workers.remove(cluster_id=cluster_id, verdict=kind)
            self._age.remove(cluster_id=cluster_id)
            self._reported_ns.pop(cluster_id, None)
        for cluster_id, conclusion in conclusions.items():
            kinds = Counter(verdict.kind.value for verdict in conclusion.judgement.verdicts)
            for kind in self._shown.get(cluster_id, Counter()).keys() - kinds.keys():
                self._workers.remove(cluster_id=cluster_id, verdict=kind)
            for kind, n_workers in kinds.items():
                self._workers.set(n_workers, cluster_id=cluster_id, verdict=kind)
            self._shown[cluster_id] = kinds
            age_ns = now_ns - conclusion.judged_ns
            self._age.set(age_ns / NS_PER_S, cluster_id=cluster_id)

    def _show_hangs(self, now_ns: int) -> None:
        standings = self._shared.standings
        clusters = set(standings.clusters())
        for cluster_id in self._shown_hangs - clusters:
            self._missing.remove(cluster_id=cluster_id)
            self._tell_hang(cluster_id, None, 0.0)
        self._shown_hangs = clusters
        for cluster_id in clusters:
            with suppress(KeyError):  # forgotten meanwhile
                report, standing_s = standings.find_hang(cluster_id, now_ns)
                self._missing.set(len(report.roots), cluster_id=cluster_id)
                self._tell_hang(cluster_id, report, standing_s)

    def _tell_hang(self, cluster_id: str, report: HangReport | None, standing_s: float) -> None:
        began, ended = self._hangs.find_changes(cluster_id, report)
        if began or ended:
            write_hangs(self._log, cluster_id, began, ended, standing_s)
            wall_ns = self._clock.wall_ns()
            self._send(Signal.LOGS, build_hangs(cluster_id, began, ended, standing_s, wall_ns))


class CollectivesPages:
    """Verdicts, lags and hangs as JSON."""

    def __init__(self, shared: CollectivesState, host: Host) -> None:
        self._cases = shared.cases
        self._standings = shared.standings
        self._clock = host.clock

    def admin_routes(self) -> Sequence[AdminRoute]:
        """Verdicts of a cluster, lags of a communicator."""
        root = "/api/v1/admin"
        return (
            AdminRoute(
                f"{root}/verdicts",
                "Verdicts of ?cluster_id= (all clusters without it), worst first; ?history=true names also"
                " whose alarm has cleared; ?offset= ?limit=.",
                self._verdicts,
            ),
            AdminRoute(
                f"{root}/collectives",
                "Communicators of ?cluster_id=, or with ?comm= the lag of each of its ranks.",
                self._collectives,
            ),
            AdminRoute(
                f"{root}/hang",
                "Ranks of ?cluster_id= that a job which stands still waits for.",
                self._hang,
            ),
        )

    def _verdicts(self, query: Mapping[str, str]) -> dict[str, Any]:
        conclusions = self._cases.conclusions()
        if "cluster_id" in query:
            conclusions = {query["cluster_id"]: conclusions[query["cluster_id"]]}
        offset, limit = _read_page(query)
        clusters = []
        for conclusion in conclusions.values():
            is_history = query.get("history") == "true"
            page = judgement_json(conclusion.history if is_history else conclusion.judgement)
            page["verdicts"].sort(key=lambda verdict: -float(verdict["evidence"]))
            page["total"] = len(page["verdicts"])
            page["verdicts"] = page["verdicts"][offset : offset + limit]
            page["age_s"] = round((self._clock.mono_ns() - conclusion.judged_ns) / NS_PER_S, 3)
            page["alpha"] = conclusion.alpha
            clusters.append(page)
        return {"clusters": clusters}

    def _hang(self, query: Mapping[str, str]) -> dict[str, Any]:
        cluster_id = query.get("cluster_id", "")
        if not cluster_id:
            raise BadDataError("cluster_id is missing; add ?cluster_id=NAME")
        report, standing_s = self._standings.find_hang(cluster_id, self._clock.mono_ns())
        return hang_json(report, standing_s)

    def _collectives(self, query: Mapping[str, str]) -> dict[str, Any]:
        cluster_id = query.get("cluster_id", "")
        if not cluster_id:
            raise BadDataError("cluster_id is missing; add ?cluster_id=NAME")
        if "comm" not in query:
            comms = self._cases.comms_of(cluster_id)
            offset, limit = _read_page(query)
            return {"total": len(comms), "comms": comms[offset : offset + limit]}
        lags = self._cases.lags_of(cluster_id, query["comm"])
        return {
            "comm": query["comm"],
            "ranks": [
                {
                    "node_id": lag.rank.node_id,
                    "rank": lag.rank.rank if lag.rank.rank >= 0 else None,
                    "comm_rank": lag.comm_rank,
                    "peer_lag_ms": lag.lag_ms,
                    "ops": lag.n_ops,
                    "approximate": lag.is_approximate,
                }
                for lag in lags
            ],
        }


def _read_page(query: Mapping[str, str]) -> tuple[int, int]:
    numbers = []
    for name, default, most in (("offset", "0", 1 << 31), ("limit", "100", _PAGE_LIMIT)):
        text = query.get(name, default)
        if not (text.isascii() and text.isdigit() and len(text) <= 10 and int(text) <= most):
            raise BadDataError(f"{name} is {text[:40]!r}; it must be a number up to {most}")
        numbers.append(int(text))
    return numbers[0], numbers[1]


FACTORY = ProcessorFactory(
    type="nccl",
    config=NcclConfig,
    says="Names the rank that others wait for, who waited, and what it cost, from collective records.",
    signals=frozenset({Signal.METRICS, Signal.LOGS}),
    stability=Stability.BETA,
    metrics=telemetry.METRICS,
    create=CollectivesProcessor,
)
