"""What leaves down the pipelines after an evaluation, and when: verdicts, lags, costs, hangs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

from ingero.fleet.component import Hardware, HardwareSource, Host
from ingero.fleet.processors.collectives.conclusions import Conclusion
from ingero.fleet.processors.collectives.cost_totals import CostTotals
from ingero.fleet.processors.collectives.costs import CostDeltas, build_costs
from ingero.fleet.processors.collectives.cuts import CostCuts
from ingero.fleet.processors.collectives.gauges import GaugeLag
from ingero.fleet.processors.collectives.hangs import HangChanges, build_hangs
from ingero.fleet.processors.collectives.rates import Rates
from ingero.fleet.processors.collectives.reported import (
    describe_changes,
    describe_costs,
    describe_hangs,
)
from ingero.fleet.processors.collectives.state import CollectivesState
from ingero.fleet.processors.collectives.verdicts import (
    build_changes,
    build_diagnoses,
    build_gauge_lags,
    build_verdicts,
)
from ingero.model.diagnosis import Diagnosis
from ingero.model.hang import HangRoot
from ingero.model.verdicts import Verdict
from ingero.otlp.names import Signal
from ingero.units import NS_PER_S

_KEEPALIVE_NS: Final = 60 * NS_PER_S
"""A cluster of which nothing is new is reported again after this long."""


class PipelineReports:
    """Builds and sends reports; one thread at a time."""

    def __init__(self, state: CollectivesState, host: Host) -> None:
        self._state = state
        self._host = host
        self._clock = host.clock
        self._rates = Rates(state.engine.config.rates)
        self._reported_ns: dict[str, int] = {}
        self._costs_ns = host.clock.mono_ns()

    def send_verdicts(
        self, conclusions: Mapping[str, Conclusion], unreported: dict[str, Conclusion], now_ns: int
    ) -> Iterator[Conclusion]:
        """Report what is new, and clusters that were not reported for a while; gives what was reported.

        Args:
            conclusions: The newest of each cluster.
            unreported: What is new; each is taken out before it is sent.
            now_ns: Monotonic time.
        """
        self._reported_ns = {
            cluster_id: ns
            for cluster_id, ns in self._reported_ns.items()
            if cluster_id in conclusions
        }
        for cluster_id in unreported.keys() - conclusions.keys():  # forgotten, or judged elsewhere
            del unreported[cluster_id]
        for cluster_id, conclusion in conclusions.items():
            silent_ns = now_ns - self._reported_ns.get(cluster_id, 0)
            if cluster_id not in unreported and silent_ns >= _KEEPALIVE_NS:
                unreported[cluster_id] = replace(conclusion, changes=())
        wall_ns = self._clock.wall_ns()
        while unreported:
            cluster_id = next(iter(unreported))
            conclusion = unreported.pop(cluster_id)
            self._reported_ns[cluster_id] = now_ns
            verdicts = build_verdicts(conclusion, wall_ns, self._find_hardware)
            self._state.downstream.send(Signal.METRICS, verdicts)
            self._send_changes(conclusion, wall_ns)
            yield conclusion

    def _send_changes(self, conclusion: Conclusion, wall_ns: int) -> None:
        downstream = self._state.downstream
        changes = conclusion.changes
        for some in [(one,) for one in changes] if downstream.has_ledger else [changes]:
            records = build_changes(replace(conclusion, changes=some), wall_ns)
            cluster_id = conclusion.judgement.cluster_id
            downstream.report(cluster_id, describe_changes(some), records)

    def adopt(self, conclusions: Mapping[str, Conclusion]) -> None:
        """Take as reported what costs of clusters that were just taken over were by the cut that was reported last."""
        for cluster_id in self._state.adopted.keys() & conclusions.keys():
            reported_ns = self._state.adopted.pop(cluster_id)
            before, mark_ns = _find_before(
                self._state.engine.cuts[cluster_id], conclusions[cluster_id], reported_ns
            )
            if mark_ns != reported_ns:  # else nobody charged what comes before the first report
                states = describe_costs(mark_ns)
                self._state.downstream.report(cluster_id, states, None)
            deltas = CostDeltas(mark_ns)
            if before is not None:
                deltas.settle(before, deltas.find_deltas(before, self._find_hardware)[1])
            totals = CostTotals(cluster_id, self._clock.wall_ns())
            self._state.costs[cluster_id] = deltas, totals

    def send_diagnoses(self, explained: Sequence[tuple[Verdict | HangRoot, Diagnosis]]) -> None:
        """Report why culprits are slow: the share of each cause. Of a hang the agent's own record goes down."""
        slow = [(named, why) for named, why in explained if isinstance(named, Verdict)]
        for export in build_diagnoses(slow, self._clock.wall_ns()):
            self._state.downstream.send(Signal.METRICS, export)

    def send_gauge_lags(self, lags: Sequence[GaugeLag]) -> None:
        """Report approximate lags."""
        for export in build_gauge_lags(lags, self._clock.wall_ns(), self._find_hardware):
            self._state.downstream.send(Signal.METRICS, export)

    def send_hangs(self, changes: HangChanges) -> None:
        """Report hangs that began or ended."""
        wall_ns, downstream = self._clock.wall_ns(), self._state.downstream
        for one in changes.split() if downstream.has_ledger else (changes,):
            states = describe_hangs(one.began, one.ended)
            downstream.report(one.cluster_id, states, build_hangs(one, wall_ns))

    def send_due_costs(self, conclusions: Mapping[str, Conclusion], now_ns: int) -> None:
        """Report costs once in each ``cost_interval``."""
        if now_ns - self._costs_ns >= self._state.engine.config.cost_interval:
            self._costs_ns = now_ns
            self.send_costs(conclusions)

    def send_costs(self, conclusions: Mapping[str, Conclusion]) -> None:
        """Report what waiting has cost since the last time; what is refused stays for the next."""
        costs, downstream = self._state.costs, self._state.downstream
        for cluster_id in costs.keys() - conclusions.keys():
            del costs[cluster_id]
        if Signal.LOGS not in downstream:
            return
        wall_ns = self._clock.wall_ns()
        for cluster_id, conclusion in conclusions.items():
            if cluster_id not in costs:
                costs[cluster_id] = CostDeltas(), CostTotals(cluster_id, wall_ns)
            deltas, totals = costs[cluster_id]
            cut = conclusion.cut
            if conclusion.is_dated and (cut is None or cut.place_ns <= deltas.mark_ns):
                continue
            at = conclusion if cut is None else conclusion.at(cut)
            grown, settled = deltas.find_deltas(at, self._find_hardware)
            records = build_costs(cluster_id, grown, self._rates, wall_ns)
            if cut is not None and downstream.has_ledger:
                deltas.mark_ns = cut.place_ns
                states = describe_costs(cut.place_ns)
                downstream.report(cluster_id, states, records)
                is_sent = True
            else:
                is_sent = downstream.send(Signal.LOGS, records)
            if is_sent:
                deltas.settle(at, settled)
                totals.add(grown, self._rates)
                downstream.send(Signal.METRICS, totals.build(wall_ns))

    def _find_hardware(self, cluster_id: str, node_id: str) -> Hardware:
        return find_hardware(self._host, cluster_id, node_id)


def _find_before(
    cuts: CostCuts, conclusion: Conclusion, mark_ns: int
) -> tuple[Conclusion | None, int]:
    """What was reported of a cluster's costs when it was taken over, None for nothing, and up to which cut."""
    cut = cuts.find(mark_ns) if mark_ns else None
    cuts.report_from_here()
    if mark_ns and cuts.has_all_since(mark_ns):
        return None, mark_ns
    return (conclusion if cut is None else conclusion.at(cut)), mark_ns or cuts.last_ns


def find_hardware(host: Host, cluster_id: str, node_id: str) -> Hardware:
    """What a node computes with, as its health pushes say; empty where that is not known."""
    for source in host.find(HardwareSource):
        found = source.find_hardware(cluster_id, node_id)
        if found is not None:
            return found
    return Hardware("", "")
