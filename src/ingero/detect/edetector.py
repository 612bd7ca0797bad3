"""The e-detector: is a worker persistently slower than its role peers, however slightly?

For each paired operation every peer has a cost (its own compute time). Against "worker i is at most δ slower than its
peers" bets are placed, and each purse's winnings accumulate as ``S ← max(S, 1) · e``; a mean of the purses of 1/α is an
alarm, which one of n purses reaches with n/α. If a worker is like its peers, the mean run to a false alarm is at
least 1/α operations (Shin, Ramdas and Rinaldo 2023, "E-detectors: a nonparametric framework for sequential change detection").

- *Rank bet*: its place among its peers in this operation. Needs only that peers are exchangeable up to δ.
- *Pooled bet*: its residual among the other peers' residuals of the last operations. Uses the size of the gap; needs
  residuals that are stable within that window.

A worker in alarm at the alarm tier leaves the reference of the others until it clears (peeling); otherwise a second
slow worker in the group is never first and never found.

One purse holds the mean of both, one the rank bet alone, which wins steadily where the gap is small. The third holds another:

- *Majority bet*: it stands in the upper half of its peers. Two slow workers of a group of four hide from both bets above,
  each behind the other; each of them is in the upper half every time. Needs no more than the rank bet.

All bets count operations as new evidence, yet a heavy batch is heavy twice, and a heavy step for hundreds of operations.
Where what lasts in the peers' residuals reaches beyond δ, winnings count with their τ-th root, τ being how many operations share
one cause (`ingero.detect.dependence`): by Hölder's inequality the product of τ such roots has mean at most 1 however they
depend on each other. An alarm whose evidence no longer suffices once τ is known to be longer is retracted.

δ is what the settings say; the notice tier's may be raised to what a worker's peers differ by for good
(`ingero.detect.lasting`), always before the operations that are judged by it.

The onset is the last time before the alarm at which the sum of (residual − half of log(1 + δ)) left 0: Page's estimate of
the change point.

State is a bank of peer groups of one size, advanced in blocks. How operations are cut into blocks changes
nothing: the pool of residuals is renewed on a schedule that counts operations.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np

from ingero.detect.bets import (
    POOLED_KAPPAS,
    RANK_KAPPAS,
    SortedRows,
    count_below,
    count_level,
    grid_bet,
    majority_bet,
)
from ingero.detect.dependence import Dependence, residuals_among_all, typical_reach
from ingero.detect.lasting import limits_from_peers
from ingero.detect.rows import accumulate, as_slice, is_uniform, leave_one_out_median, pick_time
from ingero.detect.tiers import ALARM, MIN_PEERS, N_TIERS, NOTICE, Crossing, EDetectorSettings
from ingero.model.arrays import BoolArray, FloatArray, IntArray

_RENEW_EVERY: Final = 32
_WEIGH_EVERY: Final = 256
_WIDE_QUANTILE: Final = 0.9
_WIDE_AFTER: Final = 8
"""Residuals of a worker before its spread is judged."""


COMBINED: Final = 0
RANK: Final = 1
MAJORITY: Final = 2
_N_PURSES: Final = 3
POOLED: Final = 3
DRIFT: Final = 4
_LEADERS: Final = (COMBINED, RANK, MAJORITY, COMBINED, DRIFT)
"""Rows of winnings, the purses first: whose value decides when each starts anew."""
_MAX_DRIFT: Final = 2.0
"""A residual moves the change point's sum by at most this many log(1 + δ)."""


@dataclass(frozen=True, slots=True)
class _Bets:
    """Log e-values of a block.

    Attributes:
        slow: Against "at most δ slower": a row for each of ``_LEADERS``, shape (T, 5, 2 tiers, g, m); 0 where there
            was nothing to bet on. The last holds residuals less half of log(1 + δ).
        fast: Combined against "at least δ slower", shape (T, 1, 2 tiers, g, m); None while nobody is in alarm.
    """

    slow: FloatArray
    fast: FloatArray | None


_STATE: Final = (
    ("n_ops", 0, 0),
    ("log_won", 2, 0.0),
    ("_dependent_at_alarm", 1, 1.0),
    ("in_alarm", 1, False),
    ("onset_op", 1, 0),
    ("_log_clear", 2, 0.0),
    ("_renewed_at", 0, 0),
    ("_weighed_at", 0, 0),
    ("_log_peak", 1, 0.0),
    ("_residuals", 1, np.nan),
    ("_n_own", 0, 0),
    ("_n_pooled", 0, 0),
    ("dependent", 1, 1.0),
    ("limits", 1, 0.0),
    ("_log_limits", 1, 0.0),
)
"""Arrays of the bank: name, axis of the groups, value for a group without history."""


class EDetector:
    """Evidence for a bank of peer groups of equal size.

    Args:
        n_peers: Workers per group; shorter groups pad with workers that are always missing.
        settings: See `EDetectorSettings`.

    Attributes:
        log_won: Natural logs of what was won, shape (5, 2 tiers, G, m): by rank and pooled bets together, by the
            rank bet, by the majority bet; by the pooled bet in the run of the first; and the change point's sum.
            See `log_evidence`.
        limits: δ of each worker now, shape (2 tiers, G, m).
        dependent: τ, how many operations count as one, shape (2 tiers, G).
        in_alarm: Shape (2 tiers, G, m).
        onset_op: Ordinal at which the change point's sum last left 0, shape (2 tiers, G, m); fixed while in alarm.
        n_ops: Operations seen per group, shape (G,).
    """

    def __init__(self, n_peers: int, settings: EDetectorSettings) -> None:
        self.settings = settings
        self.n_peers = n_peers
        self.window = settings.window_for(n_peers)
        shape = (N_TIERS, 0, n_peers)
        self.n_ops: IntArray = np.zeros(0, np.int64)
        self.log_won: FloatArray = np.zeros((len(_LEADERS), *shape))
        self.dependent: FloatArray = np.ones((N_TIERS, 0))
        self._dependent_at_alarm: FloatArray = np.ones(shape)
        self.limits: FloatArray = np.zeros(shape)
        self._log_limits: FloatArray = np.zeros(shape)
        self._dependence = Dependence(n_peers)
        self.in_alarm: BoolArray = np.zeros(shape, bool)
        self.onset_op: IntArray = np.zeros(shape, np.int64)
        self._log_clear: FloatArray = np.zeros((1, *shape))
        self._renewed_at: IntArray = np.zeros(0, np.int64)
        self._weighed_at: IntArray = np.zeros(0, np.int64)
        self._log_peak: FloatArray = np.zeros(shape)
        self._residuals = np.full((self.window, 0, n_peers), np.nan, np.float32)
        self._n_own: IntArray = np.zeros((0, n_peers), np.int64)
        self._own = SortedRows(self.window)  # a row for each worker, group by group
        self._pool = SortedRows(n_peers * self.window)
        self._n_pooled: IntArray = np.zeros((0, n_peers), np.int64)

    def add_groups(self, n_groups: int) -> IntArray:
        """Add groups without history; returns their indices."""
        first = self.n_ops.size
        for name, axis, fill in _STATE:
            values = getattr(self, name)
            shape = list(values.shape)
            shape[axis] = n_groups
            setattr(self, name, np.concatenate([values, np.full(shape, fill, values.dtype)], axis))
        self._own.add(n_groups * self.n_peers)
        self._pool.add(n_groups)
        self._dependence.add_groups(n_groups)
        self.limits[:, first:] = self.settings.slowdowns[:, None, None]
        self._log_limits[:, first:] = np.log1p(self.settings.slowdowns)[:, None, None]
        return np.arange(first, first + n_groups)

    def hold_alarm(self, group: int, worker: int, tier: int, *, is_alarm: bool) -> None:
        """Take over from other peers whether a worker is in alarm: only evidence that it is fast again clears it."""
        self.in_alarm[tier, group, worker] = is_alarm
        self._log_clear[:, tier, group, worker] = 0.0

    def is_still_enough(self, group: int, tier: int, log_peak: float) -> bool:
        """Whether what an alarm had won at its height would suffice with what is known of dependence now."""
        need = math.log(1.0 / self.settings.alpha)
        return log_peak / float(self.dependent[tier, group]) - self._log_purses >= need

    def log_evidence(self, groups: IntArray) -> FloatArray:
        """Natural log of the evidence now, shape (2 tiers, g, m): an alarm is log(1/α)."""
        return self._evidence(self.log_won[:, :, groups], groups)

    def _evidence(self, won: FloatArray, groups: IntArray) -> FloatArray:
        """Winnings, rows on the axis before (2 tiers, g, m), as evidence."""
        best = won[..., :_N_PURSES, :, :, :].max(axis=-4)
        return np.asarray(best / self.dependent[:, as_slice(groups), None] - self._log_purses)

    @property
    def _log_purses(self) -> float:
        """Log of how many different purses there are."""
        has_both = self.settings.use_rank and self.settings.use_pooled
        return math.log(1 + has_both + self._has_majority)

    @property
    def _has_majority(self) -> bool:
        return self.settings.use_majority and self.settings.use_rank

    def slowdowns(self, group: int, worker: int, since_op: int) -> FloatArray:
        """Ratio x / median of the others for each operation since then that the window still holds; oldest first."""
        n = int(self.n_ops[group])
        ops = np.arange(max(since_op, n - self.window, 0), n)
        values = self._residuals[ops % self.window, group, worker].astype(np.float64)
        ratios: FloatArray = np.exp(values[~np.isnan(values)])
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
            Who entered or left alarm, in the order of operations within each group; and every residual, log of x over
            the median of the other references, shape of ``costs``, NaN where there was nothing to compare with.
        """
        crossings: list[Crossing] = []
        residuals = np.full(costs.shape, np.nan)
        done = np.zeros(groups.size, np.int64)
        while (left := np.flatnonzero(done < n_ops)).size:
            chosen = groups[left]
            crossings += self._renew(chosen)
            length = np.minimum(n_ops[left] - done[left], self._ops_to_renewal(chosen))
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

    def _ops_to_renewal(self, groups: IntArray) -> IntArray:
        """How many operations may still use the pool as it is, at least 1."""
        gap = np.clip(self._renewed_at[groups] // 8, 1, min(_RENEW_EVERY, self.window))
        return self._renewed_at[groups] + gap - self.n_ops[groups]

    def _renew(self, groups: IntArray) -> list[Crossing]:
        """Sort the residual windows of the groups whose pool is due; returns alarms that this retracts."""
        due = groups[self._ops_to_renewal(groups) <= 0]
        if not due.size:
            return []
        since = self.n_ops[due] - self._weighed_at[due]
        stale = due[since >= np.clip(self._weighed_at[due] // 4, 1, _WEIGH_EVERY)]
        lost: list[Crossing] = []
        if stale.size:
            self._judge_dependence(stale)
            lost = self._retract(stale)
        self._renew_now(due)
        return lost

    def _renew_now(self, due: IntArray) -> None:
        own = np.ascontiguousarray(self._residuals[:, as_slice(due)].transpose(1, 2, 0))
        own.sort(axis=2)
        own[self._peeled(due)] = np.nan
        is_missing = np.isnan(own)  # at each row's end
        own[is_missing] = np.inf
        n_own = self.window - np.count_nonzero(is_missing, axis=2)
        self._own.put(as_slice(self._own_rows(due).ravel()), own.reshape(-1, self.window))
        self._pool.put(as_slice(due), np.sort(own.reshape(due.size, -1), axis=1))
        self._n_own[due] = n_own
        self._n_pooled[due] = n_own.sum(axis=1, keepdims=True) - n_own
        self._renewed_at[due] = self.n_ops[due]

    def _own_rows(self, groups: IntArray) -> IntArray:
        """Rows of each group's workers in the sorted windows, shape (g, m)."""
        return groups[:, None] * np.int64(self.n_peers) + np.arange(self.n_peers)

    def _judge_dependence(self, due: IntArray) -> None:
        """How many operations count as one: more where what lasts reaches beyond δ."""
        limits = np.log1p(self.settings.slowdowns)
        length = self._dependence.count_as_one(due, self._typical_reach(due), limits)
        at_least = np.where(length > 0, np.maximum(length, self.settings.dependent_ops), 1.0)
        self.dependent[:, due] = at_least
        self._weighed_at[due] = self.n_ops[due]
        if self.settings.notice_spread:
            levels, bounds = self._dependence.levels(due), self.settings.slowdowns
            raised = limits_from_peers(
                levels, self.settings.notice_spread, bounds[NOTICE], max(bounds)
            )
            self.limits[NOTICE, due] = raised
            self._log_limits[NOTICE, due] = np.log1p(raised)

    def _typical_reach(self, due: IntArray) -> FloatArray:
        """A high quantile of the typical worker's residuals, shape (g,); −inf before there are enough."""
        n_own = self._n_own[due]
        at = np.maximum((n_own * _WIDE_QUANTILE).astype(np.int64) - 1, 0)
        reach = self._own.entries[self._own_rows(due), at]
        return typical_reach(reach.astype(np.float64), n_own >= _WIDE_AFTER)

    def _retract(self, due: IntArray) -> list[Crossing]:
        """End alarms that rest on operations which turned out to share causes."""
        need = math.log(1.0 / self.settings.alpha)
        is_longer = self.dependent[:, due, None] > self._dependent_at_alarm[:, due]
        is_lost = self.in_alarm[:, due] & is_longer & (self.log_evidence(due) < need)
        lost: list[Crossing] = []
        for tier, g, worker in np.argwhere(is_lost).tolist():
            group = int(due[g])
            self.in_alarm[tier, group, worker] = False
            self._log_clear[:, tier, group, worker] = 0.0
            op, onset = int(self.n_ops[group]) - 1, int(self.onset_op[tier, group, worker])
            lost.append(Crossing(group, worker, tier, op, onset, is_alarm=False, is_retracted=True))
        return lost

    def _peeled(self, groups: IntArray) -> BoolArray:
        """Workers that are no reference, shape (g, m)."""
        return np.asarray(self.in_alarm[ALARM, as_slice(groups)] & self.settings.use_peeling)

    def _place_bets(self, groups: IntArray, costs: FloatArray) -> tuple[_Bets, FloatArray]:
        """Bets of a block and the residuals it leaves behind, shape (T, g, m)."""
        n_t, _, m = costs.shape
        x = np.maximum(costs, 1.0).reshape(-1, m)
        is_here = ~np.isnan(x)
        is_ref = is_here & ~np.tile(self._peeled(groups), (n_t, 1))
        filled = np.where(is_here, x, 0.0)
        bars = 1.0 + self.limits[:, None, as_slice(groups)]
        shrunk = (filled.reshape(costs.shape) / bars).reshape(N_TIERS, -1, m)
        ordered = np.sort(np.where(is_ref, x, np.inf), axis=1)
        row = np.arange(x.shape[0])[:, None]
        below = count_below(ordered, row, np.stack([filled, *shrunk]))
        n_refs = is_ref.sum(axis=1, keepdims=True)
        median = leave_one_out_median(ordered, n_refs, below[0], is_ref)
        n_others = n_refs - is_ref
        can_bet = is_here & (n_others + 1 >= MIN_PEERS)
        with np.errstate(invalid="ignore", divide="ignore"):
            residuals = np.where(can_bet, np.log(x / median), np.nan).reshape(costs.shape)
        level = count_level(ordered, row, shrunk, below[1:]) - (is_ref & (filled == shrunk))
        above = n_others - below[1:] - level
        n_grid = np.broadcast_to(np.where(can_bet, n_others + 1, 1), shrunk.shape)
        sides = [
            grid_bet(np.where(can_bet, count, 0), np.where(can_bet, level, 0), n_grid, RANK_KAPPAS)
            for count in (above, below[1:])[: self._n_sides(groups)]
        ]
        pooled = self._pooled_bets(groups, residuals)
        by_time = [e.reshape(N_TIERS, *costs.shape).swapaxes(0, 1) for e in sides]
        slow = np.ones((n_t, len(_LEADERS), N_TIERS, *costs.shape[1:]))
        slow[:, COMBINED] = self._combine(by_time[0], pooled[0])
        slow[:, POOLED] = pooled[0]
        if self.settings.use_rank:
            slow[:, RANK] = by_time[0]
        if self._has_majority:
            half = majority_bet(np.where(can_bet, above, 0), np.where(can_bet, level, 0), n_grid)
            slow[:, MAJORITY] = half.reshape(N_TIERS, *costs.shape).swapaxes(0, 1)
        np.log(slow[:, :DRIFT], out=slow[:, :DRIFT])
        slow[:, DRIFT] = self._drift(residuals)
        if len(by_time) == 1:
            return _Bets(slow, None), residuals
        return _Bets(slow, np.log(self._combine(by_time[1], pooled[1]))[:, None]), residuals

    def _drift(self, residuals: FloatArray) -> FloatArray:
        """What each residual adds to the change point's sum, shape (T, 2 tiers, g, m)."""
        limits = np.log1p(self.settings.slowdowns)[:, None, None]
        moved = np.clip(
            residuals[:, None] - limits / 2.0, -_MAX_DRIFT * limits, _MAX_DRIFT * limits
        )
        return np.nan_to_num(moved)

    def _n_sides(self, groups: IntArray) -> int:
        """Whether bets on "fast" are needed (2) or only those on "slow" (1)."""
        return 2 if self.in_alarm[:, as_slice(groups)].any() else 1

    def _combine(self, rank: FloatArray, pooled: FloatArray) -> FloatArray:
        """Mean of the bets that are placed; a mean of e-values is an e-value."""
        if self.settings.use_rank and self.settings.use_pooled:
            return (rank + pooled) / 2.0
        return rank if self.settings.use_rank else pooled

    def _pooled_bets(self, groups: IntArray, residuals: FloatArray) -> list[FloatArray]:
        """E-values of a residual among the other peers' past ones, shape (T, 2 tiers, g, m): slow, and fast if needed."""
        n_t, n_g, m = residuals.shape
        shape = (n_t, N_TIERS, n_g, m)
        n_sides = self._n_sides(groups)
        if not self.settings.use_pooled:
            return [np.ones(shape)] * n_sides
        is_known = np.broadcast_to(~np.isnan(residuals)[:, None], shape)
        shift = self._log_limits[:, as_slice(groups)]
        queries = np.where(is_known, np.nan_to_num(residuals)[:, None] - shift, 0.0)
        pool_row, own_row = groups[:, None], self._own_rows(groups)
        in_pool = self._pool.count_below(pool_row, queries)
        in_own = self._own.count_below(own_row, queries)
        n_pooled = np.broadcast_to(self._n_pooled[groups], shape)
        n_grid = np.where(is_known, n_pooled + 1, 1)
        none = np.zeros(shape, np.int64)
        positions = [n_pooled - in_pool + in_own]
        if n_sides == 2:
            level = self._pool.count_level(pool_row, queries, in_pool)
            level -= self._own.count_level(own_row, queries, in_own)
            positions.append(in_pool - in_own + level)
        return [
            grid_bet(np.where(is_known, at, 0), none, n_grid, POOLED_KAPPAS) for at in positions
        ]

    def _advance(
        self, groups: IntArray, costs: FloatArray, length: IntArray, crossings: list[Crossing]
    ) -> tuple[IntArray, FloatArray]:
        """Take a block up to each group's first crossing; returns operations taken per group, and the residuals."""
        bets, residuals = self._place_bets(groups, costs)
        here = as_slice(groups)
        values, starts = accumulate(self.log_won[:, :, here], bets.slow, _LEADERS)
        was = self.in_alarm[:, here].copy()
        need = math.log(1.0 / self.settings.alpha)
        is_crossing = ~was & (self._evidence(values, groups) >= need)
        clear = None
        if bets.fast is not None:
            gains = np.where(was, bets.fast, 0.0)
            clear, _ = accumulate(self._log_clear[:, :, here], gains)
            is_crossing |= was & (clear[:, 0] >= need * self.dependent[:, here, None])
        is_any, taken = bool(is_crossing.any()), length
        if is_any:
            happens = is_crossing.any(axis=(1, 3))
            first = np.where(happens.any(axis=0), happens.argmax(axis=0), length - 1)
            taken = np.minimum(first, length - 1) + 1
        self._store_residuals(groups, residuals, taken)
        self._note_dependence(groups, costs, residuals, taken)
        # One index per group: its last operation of this block.
        at = taken - 1
        self.log_won[:, :, here] = pick_time(values, at)
        if clear is not None:
            self._log_clear[:, :, here] = pick_time(clear, at)
        self._note_peak(groups, values, at)
        start = pick_time(starts, at)
        began = self.n_ops[groups][:, None] + start
        self.onset_op[:, here] = np.where((start < 0) | was, self.onset_op[:, here], began)
        self.n_ops[here] += taken
        if is_any and (crossed := pick_time(is_crossing, at)).any():
            self._cross(groups, crossed, crossings)
        return taken, residuals

    def _note_peak(self, groups: IntArray, values: FloatArray, at: IntArray) -> None:
        """Keep the most that each worker in alarm has won; the others' is what they have."""
        here = as_slice(groups)
        was = self.in_alarm[:, here]
        best = values[:, :_N_PURSES].max(axis=1)
        now = pick_time(best, at)
        if was.any():
            highest = pick_time(np.maximum.accumulate(best, axis=0), at)
            now = np.where(was, np.maximum(self._log_peak[:, here], highest), now)
        self._log_peak[:, here] = now

    def _store_residuals(self, groups: IntArray, residuals: FloatArray, taken: IntArray) -> None:
        n_ops, here = self.n_ops[groups], as_slice(groups)
        if isinstance(here, slice) and is_uniform(n_ops) and is_uniform(taken):
            n = int(taken[0])
            self._residuals[(n_ops[0] + np.arange(n)) % self.window, here] = residuals[:n]
            return
        offset, row = np.nonzero(np.arange(int(taken.max()))[:, None] < taken)
        slots = (n_ops[row] + offset) % self.window
        self._residuals[slots, groups[row]] = residuals[offset, row]

    def _note_dependence(
        self, groups: IntArray, costs: FloatArray, residuals: FloatArray, taken: IntArray
    ) -> None:
        """Keep residuals for `Dependence`: against all peers, since a shrunken reference would look like a change."""
        if self._peeled(groups).any():
            residuals = residuals_among_all(costs)
        for offset in range(int(taken.max())):
            rows = np.flatnonzero(offset < taken)
            self._dependence.add(groups[rows], residuals[offset, rows])

    def _cross(self, groups: IntArray, here: BoolArray, crossings: list[Crossing]) -> None:
        """Flip the state of who crossed at the operation just stored, and renew the pools that this changes."""
        for tier, g, worker in np.argwhere(here).tolist():
            group = int(groups[g])
            is_alarm = not self.in_alarm[tier, group, worker]
            won = self.log_won[:, tier, group, worker]
            log_s = (
                self._evidence(self.log_won[:, :, [group]], groups[[g]])[tier, 0, worker]
                if is_alarm
                else self._log_clear[0, tier, group, worker] / self.dependent[tier, group]
            )
            crossings.append(
                Crossing(
                    group=group,
                    worker=worker,
                    tier=tier,
                    op=int(self.n_ops[group]) - 1,
                    onset_op=int(self.onset_op[tier, group, worker]),
                    is_alarm=is_alarm,
                    log10_evidence=float(log_s) / math.log(10.0),
                    is_pooled=bool(won[POOLED] > max(won[RANK], won[MAJORITY])),
                    log_peak=float(self._log_peak[tier, group, worker]),
                )
            )
            self.in_alarm[tier, group, worker] = is_alarm
            self._dependent_at_alarm[tier, group, worker] = self.dependent[tier, group]
            self._log_clear[:, tier, group, worker] = 0.0
            if not is_alarm:
                self.log_won[:, tier, group, worker] = 0.0
        changed = groups[here.any(axis=(0, 2))]
        self._renew_now(changed)
