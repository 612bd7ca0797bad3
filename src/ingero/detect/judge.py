"""The Judge: from what ranks report to what is known about each worker. The same in Fleet and in a replay.

Feed it runs as they arrive, call `Judge.settle` now and then, ask for `Judge.judgements`. Time is an argument: the
clock of arrivals, which need not be any rank's. What arrives late by no more than the stated patience changes
nothing: operations are numbered in the order the worker entered them, paired by that number and judged in one
canonical order, so the way runs were cut into pushes and interleaved cannot be seen in the result.

Not thread-safe, no clock, no I/O. Memory is bounded by the settings; what is dropped for it is counted.

Patience. An operation is numbered ``reorder_ns`` after it arrived: until then an earlier one of the same rank may
still come in. A rank that keeps its peers waiting for ``patience_ns`` is left out until it reports again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Final

from ingero.detect.arrivals import Arrivals, JudgeCounts, SeenTimes, WorkerTotals
from ingero.detect.collectives import WaitLedger
from ingero.detect.evidence import RankEvidence
from ingero.detect.facts import Facts, WorkerFacts
from ingero.detect.groups import PeerGroup, iter_by_group, take_complete
from ingero.detect.links import find_links
from ingero.detect.membership import Membership
from ingero.detect.peers import Pairing
from ingero.detect.ranks.settings import EDetectorSettings
from ingero.detect.registry import Registry
from ingero.detect.verdicts import build_judgements
from ingero.model.collectives import CollectiveRun, Worker
from ingero.model.verdicts import Judgement
from ingero.units import NS_PER_S, NS_PER_US

_NS_PER_DAY: Final = 86_400 * NS_PER_S
_MIN_ALPHA: Final = 1e-12
_MAX_ALPHA: Final = 1e-2


@dataclass(frozen=True, slots=True)
class JudgeSettings:
    """How the Judge weighs, waits and bounds itself.

    Attributes:
        detector: See `EDetectorSettings`.
        alarms_per_worker_day: Budget of false alarms in time, in place of the detector's ``alpha`` once it is known
            how often ranks operate.
        min_own_ns: Operations before which the median peer worked less than this are not compared.
        reorder_ns: How long after its arrival an operation may still be preceded by one that arrives later.
        patience_ns: How long peers wait for a rank that does not report.
        stale_ns: How long a rank is named that reports nothing that could be compared.
        max_workers: Workers beyond this are refused and counted.
        max_pending_ops: Operations kept for pairing; beyond it new ones are dropped and counted.
    """

    detector: EDetectorSettings = field(default_factory=EDetectorSettings)
    alarms_per_worker_day: float | None = None
    min_own_ns: int = 100 * NS_PER_US
    reorder_ns: int = 5 * NS_PER_S
    patience_ns: int = 60 * NS_PER_S
    stale_ns: int = 900 * NS_PER_S
    max_workers: int = 20_000
    max_pending_ops: int = 4_000_000


class Judge:
    """Verdicts on every worker of every job that reports to it.

    Args:
        settings: See `JudgeSettings`.

    Attributes:
        counts: What was read and what was lost.
        alpha: Budget per operation and worker as of the last `settle`.
    """

    def __init__(self, settings: JudgeSettings | None = None) -> None:
        self.settings = settings = settings or JudgeSettings()
        self.counts = JudgeCounts()
        self.alpha = settings.detector.alpha
        self._registry = Registry(settings.max_workers, settings.reorder_ns)
        self._arrivals = Arrivals(settings.reorder_ns, settings.max_pending_ops, self.counts)
        self._totals = WorkerTotals()
        self._seen = SeenTimes(settings.stale_ns // 3)
        self._pairing = Pairing()
        self._ledger = WaitLedger(settings.patience_ns)
        self._evidence = RankEvidence(settings.detector, settings.min_own_ns)
        self._membership = Membership(
            self._registry, self._evidence, settings.patience_ns, self.counts
        )

    def observe(self, runs: Sequence[CollectiveRun], now_ns: int, late_ns: int = 0) -> None:
        """Add what arrived.

        Args:
            runs: From any ranks, in any order; a repeated operation is dropped and counted.
            now_ns: On the clock of arrivals; it must not step back.
            late_ns: How long it had waited for somebody to take it.
        """
        for run in runs:
            worker = self._registry.add_worker(run.rank)
            if worker is None:
                self.counts.refused_workers += 1
                continue
            self._seen.note(worker, now_ns)
            if self._arrivals.has_room(run.ops.size):
                last_ns = self._registry.find_last(worker, run)
                entry_ns = self._arrivals.clocks.take(worker, run.ops["entry_ns"], now_ns, last_ns)
                self._arrivals.clocks.note_lag(worker, entry_ns, now_ns - late_ns)
                view = self._registry.add_view(worker, run, entry_ns, now_ns)
                self._arrivals.add(run, entry_ns, worker, view, now_ns)
        n_workers, n_views = len(self._registry.ranks), len(self._registry.view_comms)
        self._arrivals.grow(n_workers, n_views)
        self._pairing.grow(n_workers, n_views)
        for part in (self._totals, self._ledger, self._evidence):
            part.grow(n_workers)

    def settle(self, now_ns: int, *, final: bool = False) -> None:
        """Judge what can be judged.

        Args:
            now_ns: On the clock of arrivals.
            final: Nothing more will come: judge everything that is here.
        """
        n_ranks = self._registry.n_ranks
        ops = self._arrivals.take_ready(n_ranks, now_ns, final=final)
        if ops.size:
            self.counts.enqueue_ops += int(ops["is_enqueue"].sum())
            self._totals.add(ops)
            self._ledger.add(ops)
            self._set_budget()
        self._ledger.settle(now_ns, n_ranks, final=final)
        for worker, comm, rows in iter_by_group(self._pairing.number(ops, n_ranks, final=final)):
            self._membership.join(worker, comm, rows, now_ns)
        for groups in self._membership.list_by_depth():
            self._compare(groups, now_ns, final=final)

    def _set_budget(self) -> None:
        """Let the budget in time, if there is one, be that of an operation at the rate of all of them so far."""
        budget, ops_per_ns = self.settings.alarms_per_worker_day, self._totals.find_rate()
        if budget is not None and ops_per_ns > 0.0:
            alpha = budget / (ops_per_ns * _NS_PER_DAY)
            self.alpha = min(max(alpha, _MIN_ALPHA), _MAX_ALPHA)
            self._evidence.set_budget(self.alpha)

    def _compare(self, groups: Sequence[PeerGroup], now_ns: int, *, final: bool) -> None:
        """Judge what is complete within groups none of which a worker moved to from another of them."""
        segments, patience_ns = self._pairing.segments(), self.settings.patience_ns
        links = find_links(self._registry, self._pairing.slots())
        paired = []
        for group in groups:
            if self._membership.settle(group, now_ns, final=final):
                taken = take_complete(group, segments, now_ns, patience_ns, final=final)
                if taken is not None:
                    paired.append((group, taken))
                    self._evidence.replicas.note_links(group.members, taken, links)
        self._evidence.observe(paired)
        for group, _ in paired:
            for worker in group.members:
                self._seen.note_compared(worker, self._evidence.of_worker(worker).n_ops)

    def find_silent(self, before_ns: int) -> set[tuple[str, Worker]]:
        """Workers that reported nothing since then, on the clock of arrivals, with their cluster."""
        ranks = self._registry.ranks
        silent = (ranks[at] for at in self._seen.find_silent(before_ns).tolist())
        return {(rank.cluster_id, rank.worker) for rank in silent}

    @property
    def n_workers(self) -> int:
        """Those that are known, at most ``max_workers``; none is ever forgotten."""
        return len(self._registry.ranks)

    def judgements(self, *, with_history: bool = False) -> list[Judgement]:
        """The verdicts as of the last `settle`, one judgement per job, in a canonical order.

        Args:
            with_history: Name workers whose alarm has cleared since, or whom their peers went on without, too; for
                reports on a whole recording, and for what waiting cost in all.
        """
        totals, waits = self._totals, self._ledger.wait_ns
        links = find_links(self._registry, self._pairing.slots())
        workers = [
            WorkerFacts(
                rank=rank,
                group=self._membership.find_group(at),
                own_ns=int(totals["own_ns"][at]),
                wait_ns=int(waits[at]),
                n_ops=int(totals["n_ops"][at]),
                n_enqueue=int(totals["n_enqueue"][at]),
                span_ns=max(int(totals["last_ns"][at] - totals["first_ns"][at]), 0),
                last_ns=int(totals["last_ns"][at]),
                seen_ns=(int(self._seen["first_ns"][at]), int(self._seen["last_ns"][at])),
                is_stale=self._seen.find_uncompared_ns(at) >= self.settings.stale_ns,
                links=links.by_slot.get(at, {}),
            )
            for at, rank in enumerate(self._registry.ranks)
        ]
        facts = Facts(
            workers=workers,
            registry=self._registry,
            evidence=self._evidence,
            ledger=self._ledger,
            settings=self.settings.detector,
            reorder_ns=self.settings.reorder_ns,
            patience_ns=self.settings.patience_ns,
            stage_links=links.between_stages,
            clocks=self._arrivals.clocks,
        )
        counts = asdict(self.counts) | {
            "unpaired_ops": self._pairing.n_unpaired,
            "matched_ops": self._ledger.n_matched,
            "incomplete_ops": self._ledger.n_incomplete,
            "alone_ops": self._ledger.n_alone,
            "pending_ops": self._arrivals.n_pending,
        }
        return build_judgements(facts, counts, with_history=with_history)
