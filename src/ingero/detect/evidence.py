"""Between paired operations and the e-detector: which pairs count, when an episode began, what it added up to.

Sums are integers of nanoseconds, so that cutting the same operations differently changes no bit of them.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from ingero.detect.episodes import NOTHING, AlarmEpisode, OnsetState, Took, remember_episode
from ingero.detect.groups import PairedOps, PeerGroup
from ingero.detect.medians import row_medians
from ingero.detect.member_readings import MemberReading, summarize
from ingero.detect.peers import BEFORE_FIRST
from ingero.detect.ranks.alarms import Crossing
from ingero.detect.ranks.edetector import EDetector
from ingero.detect.ranks.settings import MIN_PEERS, N_TIERS, EDetectorSettings
from ingero.detect.replicas import ReplicaTimes
from ingero.detect.slack import LimitInterval, count_excess, find_slack, note_intervals
from ingero.detect.usual_work import UsualWork
from ingero.model.arrays import FloatArray, IntArray
from ingero.model.verdicts import Slowdown

SPREAD_WORTH_NAMING: Final = 0.10
"""An operation whose slowest peer exceeds the median by this share counts as spread out."""
_REFERENCE_SEGMENTS: Final = 16
_RECENT_SEGMENTS: Final = 8
_WARM_UP_SEGMENTS: Final = 2
_MAX_SEGMENT_KINDS: Final = 8


@dataclass(slots=True)
class WorkerEvidence:
    """What has been compared of one worker.

    Attributes:
        n_ops: Compared operations.
        took: What they add up to.
        limits: What they do as far as their peers' CPU limits go, lately.
        last_ns: Entry of the last of them, on the worker's clock.
        n_slowest: Spread-out operations of the group that it is in now in which it was the slowest.
        compared_among: Workers in the group that it was compared in last, where that of now is too small; else 0.
        current: Episode that is open, per tier.
        past: Episodes that cleared, oldest first; see `remember_episode`.
        onset: Per tier.
        sums_onset: Likewise, by the sums bet.
    """

    n_ops: int = 0
    took: Took = NOTHING
    limits: LimitInterval = field(default_factory=LimitInterval)
    last_ns: int = 0
    n_slowest: int = 0
    compared_among: int = 0
    current: list[AlarmEpisode | None] = field(default_factory=lambda: [None] * N_TIERS)
    past: list[AlarmEpisode] = field(default_factory=list)
    onset: list[OnsetState] = field(default_factory=lambda: [OnsetState()] * N_TIERS)
    sums_onset: list[OnsetState] = field(default_factory=lambda: [OnsetState()] * N_TIERS)

    def list_cut(self) -> list[AlarmEpisode]:
        """What is open, as if it had ended with the last comparison: until the present group has enough members."""
        cut = []
        for episode in self.current:
            if episode is not None:
                ended = episode.end(self.last_ns, BEFORE_FIRST, self.took)
                onset = replace(episode.onset, segment=BEFORE_FIRST)
                cut.append(replace(ended, onset=onset, cut_among=self.compared_among))
        return cut


@dataclass(slots=True)
class _SelfHistory:
    """Total work of segments of one kind, first ones and latest ones."""

    n_seen: int = 0
    reference: list[int] = field(default_factory=list)
    recent: deque[int] = field(default_factory=lambda: deque(maxlen=_RECENT_SEGMENTS))

    def add(self, total_ns: int) -> None:
        """Count a segment that is over."""
        self.n_seen += 1
        if self.n_seen <= _WARM_UP_SEGMENTS:
            return
        if len(self.reference) < _REFERENCE_SEGMENTS:
            self.reference.append(total_ns)
        else:
            self.recent.append(total_ns)

    def ratio(self) -> float:
        """Latest work over first work; NaN before there is enough of both."""
        if len(self.recent) < _RECENT_SEGMENTS:
            return float("nan")
        return float(np.median(self.recent) / np.median(self.reference))


@dataclass(slots=True)
class GroupEvidence:
    """What has been compared within one peer group.

    Attributes:
        detector: The detector that holds it; None below three members.
        row: Its index there.
        members: Workers that it was added with, in the order of the detector's columns.
        n_ops: Compared operations.
        n_spread: Those whose slowest peer stood out.
        typical_ns: Σ of the median peers' own time.
        spread_ns: Σ of what the slowest peer took beyond the median.
        usual: How much work its operations usually have before them.
    """

    detector: EDetector | None
    row: int
    members: tuple[int, ...] = ()
    n_ops: int = 0
    n_spread: int = 0
    typical_ns: int = 0
    spread_ns: int = 0
    usual: UsualWork = field(default_factory=UsualWork)
    _segment: int = -2
    _segment_ns: int = 0
    _segment_ops: int = 0
    _history: dict[int, _SelfHistory] = field(default_factory=dict)

    def count_segments(self, segment: IntArray, typical_ns: IntArray) -> None:
        """Add compared operations to their segments' totals; a segment is over when the next begins."""
        for number in np.unique(segment).tolist():
            of_it = segment == number
            if number != self._segment:
                self._close_segment()
                self._segment = number
            self._segment_ns += int(typical_ns[of_it].sum())
            self._segment_ops += int(of_it.sum())

    def _close_segment(self) -> None:
        kind = self._segment_ops
        if kind and (kind in self._history or len(self._history) < _MAX_SEGMENT_KINDS):
            self._history.setdefault(kind, _SelfHistory()).add(self._segment_ns)
        self._segment_ns = self._segment_ops = 0

    def against_own_past(self) -> float:
        """Latest work over first work of the segments that weigh most; NaN before there is enough of both."""
        ratios = [
            (history.reference[0], history.ratio())
            for history in self._history.values()
            if history.reference and not np.isnan(history.ratio())
        ]
        return max(ratios)[1] if ratios else float("nan")


@dataclass(frozen=True, slots=True)
class _Kept:
    """Operations of one group that count.

    Attributes:
        costs: Own times, NaN where missing, shape (T, m).
        typical_ns: Median of each operation, shape (T,).
        ops: The same operations.
    """

    costs: FloatArray
    typical_ns: IntArray
    ops: PairedOps


@dataclass(frozen=True, slots=True)
class _Summed:
    """Each worker's sums before each operation, one after the other as in `Took`, shape (5, T, m)."""

    sums: IntArray
    ops: PairedOps

    def before(self, at: int, column: int) -> Took:
        """One worker's before one operation."""
        return Took(*self.sums[:, at, column].tolist())


class RankEvidence:
    """Evidence on every worker, group by group.

    Args:
        settings: See `EDetectorSettings`.
        min_own_ns: Operations before which the median peer worked less than this are not compared.

    Attributes:
        replicas: What the workers of one replica share.
    """

    def __init__(self, settings: EDetectorSettings, min_own_ns: int) -> None:
        self._settings = settings
        self._min_own_ns = min_own_ns
        self._detectors: dict[int, EDetector] = {}
        self._groups: dict[int, GroupEvidence] = {}
        self._workers: list[WorkerEvidence] = []
        self._homes: dict[int, PeerGroup] = {}
        self.replicas = ReplicaTimes()

    def grow(self, n_workers: int) -> None:
        """Make room for workers that were registered."""
        while len(self._workers) < n_workers:
            self._workers.append(WorkerEvidence())
        self.replicas.grow(n_workers)

    def set_budget(self, alpha: float) -> None:
        """Let so many false alarms per operation and worker be allowed from now on."""
        self._settings = replace(self._settings, alpha=alpha)
        for detector in self._detectors.values():
            detector.settings = self._settings

    def add_group(self, group: PeerGroup) -> None:
        """Add a group, or its members after one joined it; workers in alarm stay so until evidence clears them."""
        size = len(group.members)
        known = self._groups.get(id(group))
        if known is not None:
            if len(known.members) == size:
                return
            for member in known.members:
                if self._homes.get(member) is group:
                    self._keep_peaks(known, member)
        detector, row = None, -1
        if size >= MIN_PEERS:
            detector = self._detectors.get(size)
            if detector is None:
                detector = self._detectors[size] = EDetector(size, self._settings)
            row = int(detector.add_groups(1)[0])
        if known is None:
            self._groups[id(group)] = GroupEvidence(detector, row, tuple(group.members))
        else:
            known.detector, known.row, known.members = detector, row, tuple(group.members)
        for member in group.members:
            if self._homes.get(member, group).depth <= group.depth:
                self.settle_in(group, member)

    def settle_in(self, group: PeerGroup, member: int) -> None:
        """Compare a worker in this group from now on; what it is in alarm for stands until these peers clear it.

        Among too few peers to be compared with it is as it was, until there are more.
        """
        found, worker = self._groups[id(group)], self._workers[member]
        home = self._homes.get(member)
        if home is not None and home is not group:
            before = self._groups[id(home)]
            self._keep_peaks(before, member)
            if before.detector is not None:
                worker.compared_among = len(before.members)
            self.replicas.forget(member)
            worker.n_slowest = 0
        self._homes[member] = group
        if found.detector is None:
            return
        worker.compared_among = 0
        for tier, episode in enumerate(worker.current):
            column = group.members.index(member)
            found.detector.hold_alarm(
                found.row,
                column,
                tier,
                is_alarm=episode is not None,
                by_sums=episode is not None and episode.by_sums,
            )
            if episode is not None:
                worker.current[tier] = replace(
                    episode, since_op=0, onset=replace(episode.onset, segment=BEFORE_FIRST)
                )

    def _keep_peaks(self, found: GroupEvidence, member: int) -> None:
        """Note the wealth of a worker's alarms, which its next group does not know."""
        worker = self._workers[member]
        for tier, episode in enumerate(worker.current):
            if episode is not None and found.detector is not None:
                column = found.members.index(member)
                peak = found.detector.find_peak(found.row, column, tier, by_sums=episode.by_sums)
                worker.current[tier] = replace(episode, log_peak=max(episode.log_peak, peak))

    def home_of(self, worker: int) -> PeerGroup | None:
        """The group that a worker is compared in, the newest that it joined; None before the first."""
        return self._homes.get(worker)

    def of_group(self, group: PeerGroup) -> GroupEvidence | None:
        """What was compared within a group; None before it opened."""
        return self._groups.get(id(group))

    def of_worker(self, worker: int) -> WorkerEvidence:
        """What was compared of a worker."""
        return self._workers[worker]

    def read_members(self, group: PeerGroup) -> MemberReading:
        """What all members of a group that opened show now; read at once, it costs what the group is large."""
        found, members = self._groups[id(group)], group.members
        columns = {worker: column for column, worker in enumerate(members)}
        if found.detector is None:
            return MemberReading(columns, np.zeros((2, len(members))), [None] * len(members))
        now = found.detector.log_evidence(np.array([found.row]))[:, 0]
        return MemberReading(
            columns,
            np.maximum(now / math.log(10.0), 0.0),
            summarize(found.detector.slowdowns_of_all(found.row)),
        )

    def still_stands(self, group: PeerGroup, episode: AlarmEpisode) -> bool:
        """Whether an episode's evidence suffices with what is known now; an open one is retracted by itself."""
        found = self._groups[id(group)]
        if episode.cleared_ns is None or found.detector is None:
            return True
        return found.detector.is_still_enough(
            found.row, episode.tier, episode.log_peak, by_sums=episode.by_sums
        )

    def slowdown(self, group: PeerGroup, worker: int, since_op: int) -> Slowdown | None:
        """A member's slowdown since an operation; None without a detector or operations."""
        found = self._groups[id(group)]
        if found.detector is None:
            return None
        ratios = found.detector.slowdowns(found.row, group.members.index(worker), since_op)
        return summarize(ratios[:, None])[0] if ratios.size else None

    def observe(self, paired: Sequence[tuple[PeerGroup, PairedOps]]) -> None:
        """Compare operations that correspond, all groups of one size at once."""
        by_size: dict[int, list[tuple[PeerGroup, _Kept]]] = {}
        for group, ops in paired:
            kept = self._keep(group, ops)
            if kept is None:
                continue
            if self._groups[id(group)].detector is not None:
                by_size.setdefault(len(group.members), []).append((group, kept))
            else:
                with np.errstate(invalid="ignore", divide="ignore"):
                    self._sum_up(group, kept, np.log(kept.costs / kept.typical_ns[:, None]))
        for size, parts in by_size.items():
            self._bet(self._detectors[size], parts)

    def _keep(self, group: PeerGroup, ops: PairedOps) -> _Kept | None:
        """Keep the operations that several peers spent enough work before, and sum up the group."""
        costs = np.where(ops.own_ns >= 0, ops.own_ns, np.nan).astype(np.float64)
        n_here = (ops.own_ns >= 0).sum(axis=1)
        medians = row_medians(costs)
        evidence = self._groups[id(group)]
        least_ns = np.maximum(evidence.usual.find_least(medians), self._min_own_ns)
        with np.errstate(invalid="ignore"):
            counts = (n_here >= min(MIN_PEERS, len(group.members))) & (medians >= least_ns)
        if not counts.any():
            return None
        typical = np.round(medians[counts]).astype(np.int64)
        kept = _Kept(costs[counts], typical, ops.where(counts))
        evidence.count_segments(kept.ops.segment, typical)
        self.replicas.add(group.members, kept.costs, kept.ops.segment)
        own = kept.ops.own_ns
        beyond = own.max(axis=1) - typical
        is_spread = beyond >= SPREAD_WORTH_NAMING * typical
        evidence.n_ops += int(typical.size)
        evidence.n_spread += int(is_spread.sum())
        evidence.typical_ns += int(typical.sum())
        evidence.spread_ns += int(beyond.sum())
        slowest = np.bincount(own[is_spread].argmax(axis=1), minlength=own.shape[1])
        for column, worker in enumerate(group.members):
            if self._homes[worker] is group:
                self._workers[worker].n_slowest += int(slowest[column])
        return kept

    def _sum_up(self, group: PeerGroup, kept: _Kept, residuals: FloatArray) -> _Summed:
        """Add a block to its workers' sums; residuals as `EDetector.observe` returns them."""
        is_known = ~np.isnan(residuals)
        ratio = np.exp(np.where(is_known, residuals, 0.0))
        own = np.where(is_known, kept.ops.own_ns, 0)
        excess = np.round(own * (1.0 - 1.0 / ratio)).astype(np.int64)
        n_ops = np.count_nonzero(is_known, axis=0)
        last_ns = np.where(is_known, kept.ops.entry_ns, 0).max(axis=0)
        workers = [self._workers[member] for member in group.members]
        slack = find_slack(kept.ops, own, is_known, [worker.last_ns for worker in workers])
        limits = [worker.limits for worker in workers]
        counted, began = count_excess(kept.ops, excess, is_known, slack, limits)
        carried = np.array([worker.took for worker in workers], np.int64).T
        parts = np.stack([own, excess, slack.slack_ns, slack.span_ns, counted])
        before = np.cumsum(parts, axis=1) - parts + carried[:, None]
        note_intervals(before, began, limits)
        sums = (parts.sum(axis=1) + carried).T.tolist()
        for column, worker in enumerate(workers):
            worker.took = Took._make(sums[column])
            worker.n_ops += int(n_ops[column])
            worker.last_ns = max(worker.last_ns, int(last_ns[column]))
        return _Summed(before, kept.ops)

    def _bet(self, detector: EDetector, parts: list[tuple[PeerGroup, _Kept]]) -> None:
        rows = np.array([self._groups[id(group)].row for group, _ in parts], np.int64)
        n_ops = np.array([kept.costs.shape[0] for _, kept in parts], np.int64)
        costs = np.full((int(n_ops.max()), rows.size, detector.n_peers), np.nan)
        for at, (_, kept) in enumerate(parts):
            costs[: n_ops[at], at] = kept.costs
        before = detector.n_ops[rows].copy()
        crossings, residuals = detector.observe(rows, costs, n_ops)
        summed = [
            self._sum_up(group, kept, residuals[: n_ops[at], at])
            for at, (group, kept) in enumerate(parts)
        ]
        of_row = {int(row): at for at, row in enumerate(rows)}
        for crossing in crossings:
            at = of_row[crossing.group]
            self._cross(parts[at][0], summed[at], crossing, int(before[at]))
        for at, (group, _) in enumerate(parts):
            self._remember_onsets(detector, int(rows[at]), group, summed[at], int(before[at]))

    def _remember_onsets(
        self, detector: EDetector, row: int, group: PeerGroup, compared: _Summed, first_op: int
    ) -> None:
        """Note where the runs that began in this block began, for an alarm in a later one."""
        for of_sums in (False, True):
            for tier, column, op in detector.onsets_since(row, first_op, of_sums=of_sums):
                member = group.members[column]
                if self._homes[member] is group:
                    worker = self._workers[member]
                    onsets = worker.sums_onset if of_sums else worker.onset
                    onsets[tier] = _onset_at(compared, op, first_op, column)

    def _cross(
        self, group: PeerGroup, compared: _Summed, crossing: Crossing, first_op: int
    ) -> None:
        member = group.members[crossing.worker]
        worker = self._workers[member]
        if self._homes[member] is not group:
            return  # it moved on, and what it is now is for its new peers to say
        if crossing.is_retracted:
            worker.current[crossing.tier] = None
            return
        column, at = crossing.worker, crossing.op - first_op
        entry_ns = int(compared.ops.entry_ns[at, column])
        if not crossing.is_alarm:
            episode = worker.current[crossing.tier]
            assert episode is not None
            segment, until = int(compared.ops.segment[at]), compared.before(at, column)
            ended = episode.end(entry_ns, segment, until)
            log_peak = max(episode.log_peak, crossing.log_peak)
            remember_episode(worker.past, replace(ended, log_peak=log_peak))
            worker.current[crossing.tier] = None
            return
        onset = (
            _onset_at(compared, crossing.onset_op, first_op, column)
            if crossing.onset_op >= first_op
            else (worker.sums_onset if crossing.by_sums else worker.onset)[crossing.tier]
        )
        worker.current[crossing.tier] = AlarmEpisode(
            tier=crossing.tier,
            onset=onset,
            onset_op=crossing.onset_op,
            since_op=crossing.onset_op,
            detected_ns=entry_ns,
            n_ops_to_detect=crossing.op - crossing.onset_op + 1,
            is_pooled=crossing.is_pooled,
            by_sums=crossing.by_sums,
            log10_evidence=crossing.log10_evidence,
        )


def _onset_at(compared: _Summed, op: int, first_op: int, column: int) -> OnsetState:
    at = op - first_op
    return OnsetState(
        view=int(compared.ops.view[at, column]),
        seq=int(compared.ops.seq[at, column]),
        entry_ns=int(compared.ops.entry_ns[at, column]),
        segment=int(compared.ops.segment[at]),
        before=compared.before(at, column),
    )
