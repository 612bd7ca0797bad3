"""The e-detector: is a worker persistently slower than its role peers, however slightly?

For each paired operation every peer has a cost (its own compute time). Against "worker i is at most δ slower than its
peers" bets are placed, and each wealth process runs as ``S ← max(S, 1) · e``; a mean of the processes of 1/α is an
alarm, which one of n processes reaches with n/α. If a worker is like its peers, the mean run to a false alarm is at
least 1/α operations (Shin, Ramdas and Rinaldo 2023, "E-detectors: a nonparametric framework for sequential change
detection").

- *Rank bet*: its place among its peers in this operation. Needs only that peers are exchangeable up to δ.
- *Pooled bet*: its residual among the other peers' residuals of the last operations. Uses the size of the gap; needs
  residuals that are stable within that window.

A worker in alarm at the alarm tier leaves the reference of the others until it clears (peeling); otherwise a second
slow worker in the group is never first and never found.

One process is the mean of both, one the rank bet alone, which grows steadily where the gap is small. Three more are:

- *Majority bet*: it stands in the upper half of its peers. Two slow workers of a group of four hide from both bets
  above, each behind the other; each of them is in the upper half every time. Needs no more than the rank bet.
- *Far bet*: its residual is beyond those that shared causes bring about. A pooled bet at a limit of its own.
- *Sums bet*: the mean of the rank and pooled bets on the sums of eight operations (`ingero.detect.ranks.sums`). A
  worker that is slow in one operation of ten loses with the bets above in the nine others what it wins in that one. An
  alarm that it alone raised clears only once its wealth has lost again what makes an alarm: in most operations such a
  worker is as fast as its peers.

All bets count operations as new evidence, yet a heavy batch is heavy twice, and a heavy step for hundreds of
operations. Where causes that operations share reach beyond δ, wealth counts with its τ-th root, τ being the effective
block length (`ingero.detect.ranks.autocorrelation`). The far bet is against "at most as slow as such causes make the
typical worker", so its wealth counts operation by operation; it starts anew when that turns out to be more. An alarm
whose evidence no longer suffices once τ is known to be longer is retracted.

δ is what the settings say; the notice tier's may be raised to the persistent bias of a worker's peers
(`ingero.detect.ranks.persistence`), always before the operations that are judged by it.

The onset is the last time before the alarm at which the sum of (residual − half of log(1 + δ)) left 0: Page's estimate
of the change point.

State is stacked: peer groups of one size, advanced in blocks. How operations are cut into blocks changes nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ingero.detect.ranks.alarms import Alarms, Crossing
from ingero.detect.ranks.autocorrelation import residuals_among_all
from ingero.detect.ranks.bets import find_positions, place_bets, pooled_bets
from ingero.detect.ranks.past_residuals import PastResiduals
from ingero.detect.ranks.persistence import Persistence
from ingero.detect.ranks.settings import ALARM, N_TIERS, EDetectorSettings
from ingero.detect.ranks.sums import SpanBets, SpanSums
from ingero.detect.ranks.wealth import (
    DRIFT,
    FAR,
    MAJORITY,
    POOLED,
    RANK,
    SUMS,
    Bets,
    Growth,
    Wealth,
    count_spans,
    greatest,
)
from ingero.detect.stacking import append_groups, as_slice, is_uniform, pick_time
from ingero.model.arrays import BoolArray, FloatArray, IntArray


@dataclass(frozen=True, slots=True)
class _SumsAlarms:
    """Alarms that the sums bet alone raised, after each operation of a block; shapes (T, 2 tiers, g, m).

    Attributes:
        peak: Greatest wealth of the sums bet since the alarm.
        lasts: Which cannot clear yet, because that wealth has not lost what makes an alarm.
    """

    peak: FloatArray
    lasts: BoolArray


class EDetector:
    """Evidence for a stack of peer groups of equal size.

    Args:
        n_peers: Workers per group; shorter groups pad with workers that are always missing.
        settings: See `EDetectorSettings`.

    Attributes:
        settings: See `EDetectorSettings`. Its ``alpha`` alone may be another later.
        n_ops: Operations seen per group, shape (G,).
        wealth: What betting against each worker has grown to; see `log_evidence`.
        alarms: Which workers are in alarm, and since when.
        persistence: Effective block lengths, and each worker's δ.
    """

    def __init__(self, n_peers: int, settings: EDetectorSettings) -> None:
        self.settings = settings
        self.n_peers = n_peers
        self.n_ops: IntArray = np.zeros(0, np.int64)
        self.wealth = Wealth(n_peers, settings.log_weights)
        self.alarms = Alarms(n_peers)
        self.persistence = Persistence(n_peers, settings)
        window = settings.window_for(n_peers)
        self._past = PastResiduals(n_peers, window)
        self._sums = SpanSums(n_peers, window) if settings.has_sums else None

    def add_groups(self, n_groups: int) -> IntArray:
        """Add groups without history; returns their indices."""
        first = self.n_ops.size
        self.n_ops = append_groups(self.n_ops, n_groups)
        for part in (self.wealth, self.alarms, self.persistence, self._past):
            part.add_groups(n_groups)
        if self._sums is not None:
            self._sums.add_groups(n_groups)
        return np.arange(first, first + n_groups)

    def hold_alarm(
        self, group: int, worker: int, tier: int, *, is_alarm: bool, by_sums: bool = False
    ) -> None:
        """Set whether a worker is in alarm, also by its former peers; only evidence that it is fast again clears it."""
        self.alarms.in_alarm[tier, group, worker] = is_alarm
        self.alarms.by_sums[tier, group, worker] = by_sums
        self.wealth.fast[:, tier, group, worker] = 0.0
        sums = self.wealth.slow[SUMS, tier, group, worker : worker + 1]
        if by_sums:  # what makes an alarm has to be lost, beside new peers too
            n_spans = count_spans(self.persistence.block_length[tier, group])
            np.maximum(sums, self.settings.log_threshold * n_spans, out=sums)
        self.wealth.sums_peak[tier, group, worker] = sums[0]

    def is_still_enough(
        self, group: int, tier: int, log_peak: float, *, by_sums: bool = False
    ) -> bool:
        """Whether an alarm's greatest wealth would suffice at the effective block length that is known now."""
        length = float(self.persistence.block_length[tier, group])
        evidence = self.wealth.log_evidence_of(np.array(log_peak), length, by_sums=by_sums)
        return bool(evidence >= self.settings.log_threshold)

    def find_peak(self, group: int, worker: int, tier: int, *, by_sums: bool) -> float:
        """Natural log of the greatest wealth in the alarm that a worker is in, as in `Crossing.log_peak`."""
        peaks = self.wealth.sums_peak if by_sums else self.wealth.peak
        return float(peaks[tier, group, worker])

    def log_evidence(self, groups: IntArray) -> FloatArray:
        """Natural log of the evidence now, shape (2 tiers, g, m): an alarm is log(1/α)."""
        return self._evidence(self.wealth.slow[:, :, groups], groups)

    def _evidence(self, wealth: FloatArray, groups: IntArray) -> FloatArray:
        """Wealth, rows on the axis before (2 tiers, g, m), as evidence."""
        length = self.persistence.block_length[:, as_slice(groups), None]
        return self.wealth.log_evidence(wealth, length)

    def slowdowns(self, group: int, worker: int, since_op: int) -> FloatArray:
        """Ratio x / median of the others for each operation since then that the window still holds; oldest first."""
        ratios: FloatArray = np.exp(
            self._past.read(group, worker, since_op, int(self.n_ops[group]))
        )
        return ratios

    def slowdowns_of_all(self, group: int) -> FloatArray:
        """The same for every worker of a group, shape (T, m), NaN where one is missing."""
        ratios: FloatArray = np.exp(self._past.read_all(group, int(self.n_ops[group])))
        return ratios

    def observe(
        self, groups: IntArray, costs: FloatArray, n_ops: IntArray
    ) -> tuple[list[Crossing], FloatArray]:
        """Add operations to some groups.

        Args:
            groups: Indices of distinct groups, shape (g,).
            costs: Cost of each operation, group and worker, shape (T, g, m); NaN is missing.
            n_ops: How many leading operations each group really has, shape (g,), each ≤ T.

        Returns:
            The workers that entered or left alarm, in the order of operations within each group; and every residual,
            log of x over the median of the other references, shape of ``costs``, NaN where there was nothing to
            compare with.
        """
        crossings: list[Crossing] = []
        residuals = np.full(costs.shape, np.nan)
        done = np.zeros(groups.size, np.int64)
        while (left := np.flatnonzero(done < n_ops)).size:
            chosen = groups[left]
            crossings += self._renew(chosen)
            room = self._ops_to_sort(chosen)
            length = np.minimum(n_ops[left] - done[left], room)
            offset = np.arange(int(length.max()))[:, None]
            if left.size == groups.size and is_uniform(done) and is_uniform(length):
                block = costs[done[0] : done[0] + length[0]]
            else:
                row = np.minimum(done[left] + offset, costs.shape[0] - 1)
                block = np.where((offset < length)[:, :, None], costs[row, left], np.nan)
            taken, found = self._advance(chosen, block, length, crossings)
            op, row = np.nonzero(offset < taken)
            residuals[done[left[row]] + op, left[row]] = found[op, row]
            done[left] += taken
        return crossings, residuals

    def _ops_to_sort(self, groups: IntArray) -> IntArray:
        """How many operations may still use the order of what was seen as it is, shape (g,)."""
        n_ops = self.n_ops[groups]
        room = self._past.ops_to_sort(groups, n_ops)
        if self._sums is None:
            return room
        return np.minimum(room, self._sums.ops_to_sort(groups, n_ops))

    def _renew(self, groups: IntArray) -> list[Crossing]:
        """Sort what was seen of the groups that are due; returns alarms that this retracts."""
        n_ops = self.n_ops[groups]
        due = groups[self._past.ops_to_sort(groups, n_ops) <= 0]
        lost: list[Crossing] = []
        if due.size:
            stale = self.persistence.find_due(due, self.n_ops[due])
            if stale.size:
                reach = self._past.typical_reach(stale)
                is_farther = self.persistence.estimate(stale, self.n_ops[stale], reach)
                self.wealth.slow[FAR, :, stale[is_farther]] = 0.0
                lost = self._retract(stale)
            self._past.sort(due, self.n_ops[due], self._peeled(due))
        if self._sums is not None:
            due = groups[self._sums.ops_to_sort(groups, n_ops) <= 0]
            if due.size:
                self._sums.sort(due, self.n_ops[due], self._peeled(due))
        return lost

    def _retract(self, due: IntArray) -> list[Crossing]:
        """End alarms that rest on operations which turned out to share causes."""
        alarms, length = self.alarms, self.persistence.block_length[:, due, None]
        is_longer = length > alarms.block_length[:, due]
        is_weak = self.log_evidence(due) < self.settings.log_threshold
        lost: list[Crossing] = []
        for tier, g, worker in np.argwhere(alarms.in_alarm[:, due] & is_longer & is_weak).tolist():
            group = int(due[g])
            self.hold_alarm(group, worker, tier, is_alarm=False)
            op, onset = int(self.n_ops[group]) - 1, int(alarms.onset_op[tier, group, worker])
            lost.append(Crossing(group, worker, tier, op, onset, is_alarm=False, is_retracted=True))
        return lost

    def _peeled(self, groups: IntArray) -> BoolArray:
        """Workers that are no reference, shape (g, m)."""
        in_alarm = self.alarms.in_alarm[ALARM, as_slice(groups)]
        return np.asarray(in_alarm & self.settings.use_peeling)

    def _place_bets(
        self, groups: IntArray, costs: FloatArray
    ) -> tuple[Bets, SpanBets | None, FloatArray]:
        """Bets of a block, those on sums among them and beside them, and residuals, shape (T, g, m)."""
        here, both_sides = as_slice(groups), bool(self.alarms.in_alarm[:, as_slice(groups)].any())
        is_peeled, limits = self._peeled(groups), self.persistence.limits[:, here]
        positions = find_positions(costs, is_peeled, limits)
        residuals = positions.residuals
        if self.settings.use_pooled:
            log_limits = self.persistence.log_limits[:, here]
            far = self.persistence.log_far[here]
            if self.settings.has_far and (far != self.settings.log_slowdowns[ALARM]).any():
                of_workers = np.broadcast_to(far[:, None], log_limits.shape[1:])
                log_limits = np.concatenate([log_limits, of_workers[None]])
            pooled = pooled_bets(self._past, groups, residuals, log_limits, both_sides=both_sides)
        else:
            ones = np.ones((residuals.shape[0], N_TIERS, *residuals.shape[1:]))
            pooled = [ones] * (1 + both_sides)
        bets = place_bets(self.settings, positions, pooled)
        if self._sums is None:
            return bets, None, residuals
        n_ops = self.n_ops[groups]
        on_sums = self._sums.place_bets(groups, n_ops, costs, residuals, is_peeled, limits)
        on_sums.add_to(bets.slow[:, SUMS])
        return bets, on_sums, residuals

    def _advance(
        self, groups: IntArray, costs: FloatArray, length: IntArray, crossings: list[Crossing]
    ) -> tuple[IntArray, FloatArray]:
        """Advance by a block up to each group's first crossing; returns operations per group, and the residuals."""
        bets, on_sums, residuals = self._place_bets(groups, costs)
        here, need = as_slice(groups), self.settings.log_threshold
        was = self.alarms.in_alarm[:, here].copy()
        growth = self.wealth.grow(here, bets, was)
        is_crossing = ~was & (self._evidence(growth.slow, groups) >= need)
        of_sums = self._follow_sums(growth, groups)
        if growth.fast is not None:
            block_length = self.persistence.block_length[:, here, None]
            is_over = was & (growth.fast[:, 0] >= need * block_length)
            is_crossing |= is_over if of_sums is None else is_over & ~of_sums.lasts
        is_any, taken = bool(is_crossing.any()), length
        if is_any:
            happens = is_crossing.any(axis=(1, 3))
            first = np.where(happens.any(axis=0), happens.argmax(axis=0), length - 1)
            taken = np.minimum(first, length - 1) + 1
        before, at = self.n_ops[groups], taken - 1  # the last operation of each group's block
        self._past.store(groups, before, residuals, taken)
        self._note_means(groups, costs, residuals, taken)
        self.wealth.store(here, growth, at, was, self.persistence.block_length[:, here, None])
        if on_sums is not None and self._sums is not None:
            self._sums.store(groups, before, on_sums, taken)
        if of_sums is not None:
            self.wealth.sums_peak[:, here] = pick_time(of_sums.peak, at)
        starts = pick_time(growth.starts, at)
        for kept, start in zip((self.alarms.onset_op, self.alarms.sums_op), starts, strict=True):
            kept[:, here] = np.where((start < 0) | was, kept[:, here], before[:, None] + start)
        self.n_ops[here] += taken
        if is_any and (crossed := pick_time(is_crossing, at)).any():
            self._cross(groups, crossed, crossings)
        return taken, residuals

    def _follow_sums(self, growth: Growth, groups: IntArray) -> _SumsAlarms | None:
        """What becomes of alarms that the sums bet alone raised; None where there are none."""
        here = as_slice(groups)
        by_sums = self.alarms.by_sums[:, here]
        if not by_sums.any():
            return None
        now = growth.slow[:, SUMS]
        peak = np.maximum(np.maximum.accumulate(now, axis=0), self.wealth.sums_peak[:, here])
        lost = self.settings.log_threshold * count_spans(
            self.persistence.block_length[:, here, None]
        )
        return _SumsAlarms(peak, by_sums & (now > np.maximum(peak - lost, 0.0)))

    def _note_means(
        self, groups: IntArray, costs: FloatArray, residuals: FloatArray, taken: IntArray
    ) -> None:
        """Keep residuals against all peers: a smaller reference would count as a change."""
        if self._peeled(groups).any():
            residuals = residuals_among_all(costs)
        self.persistence.means.add(groups, residuals, taken)

    def _cross(self, groups: IntArray, here: BoolArray, crossings: list[Crossing]) -> None:
        """Change the state of workers that crossed at the operation just stored, and sort what this changes."""
        alarms, wealth, block_length = self.alarms, self.wealth, self.persistence.block_length
        for tier, g, worker in np.argwhere(here).tolist():
            group = int(groups[g])
            is_alarm = not alarms.in_alarm[tier, group, worker]
            slow = wealth.slow[:, tier, group, worker]
            length = block_length[tier, group]
            best_other = wealth.log_evidence_of(greatest(slow[:, None, None, None], length), length)
            by_sums = is_alarm and bool(best_other < self.settings.log_threshold)
            was_by_sums = bool(alarms.by_sums[tier, group, worker])
            peaks = wealth.sums_peak if was_by_sums else wealth.peak
            began = alarms.sums_op if by_sums else alarms.onset_op
            log_s = (
                self.log_evidence(groups[[g]])[tier, 0, worker]
                if is_alarm
                else wealth.fast[0, tier, group, worker] / block_length[tier, group]
            )
            crossings.append(
                Crossing(
                    group=group,
                    worker=worker,
                    tier=tier,
                    op=int(self.n_ops[group]) - 1,
                    onset_op=int(began[tier, group, worker]),
                    is_alarm=is_alarm,
                    log10_evidence=float(log_s) / math.log(10.0),
                    is_pooled=by_sums or bool(slow[POOLED] > max(slow[RANK], slow[MAJORITY])),
                    by_sums=by_sums,
                    log_peak=float(slow[SUMS] if by_sums else peaks[tier, group, worker]),
                )
            )
            self.hold_alarm(group, worker, tier, is_alarm=is_alarm, by_sums=by_sums)
            alarms.block_length[tier, group, worker] = block_length[tier, group]
            if not is_alarm:
                slow[:] = 0.0
        changed = groups[here.any(axis=(0, 2))]
        n_ops, is_peeled = self.n_ops[changed], self._peeled(changed)
        self._past.sort(changed, n_ops, is_peeled)
        if self._sums is not None:
            self._sums.sort(changed, n_ops, is_peeled)

    def onsets_since(
        self, group: int, op: int, *, of_sums: bool = False
    ) -> list[tuple[int, int, int]]:
        """Tier, worker and ordinal of each run of slowness that began at an operation or later and has not ended."""
        alarms = self.alarms
        began = (alarms.sums_op if of_sums else alarms.onset_op)[:, group]
        wealth = self.wealth.slow[SUMS if of_sums else DRIFT, :, group]
        at = np.argwhere((began >= op) & (wealth > 0.0)).tolist()
        return [(tier, worker, int(began[tier, worker])) for tier, worker in at]
