"""The e-detector: is a worker persistently slower than its role peers, however slightly?

For each paired operation every peer has a cost (its own compute time). Against "worker i is at most δ slower than its
peers" two bets are placed and averaged, and winnings accumulate as ``S ← max(S, 1) · e``; ``S ≥ 1/α`` is an alarm. If a
worker is like its peers, the mean run to a false alarm is at least 1/α operations (Shin, Ramdas and Rinaldo 2023,
"E-detectors: a nonparametric framework for sequential change detection").

- *Rank bet*: its place among its peers in this operation. Needs only that peers are exchangeable up to δ.
- *Pooled bet*: its residual among the other peers' residuals of the last operations. Uses the size of the gap; needs
  residuals that are stable within that window.

A worker in alarm at the alarm tier leaves the reference of the others until it clears (peeling); otherwise a second
slow worker in the group is never first and never found.

Both bets count operations as new evidence, yet a heavy batch is heavy twice: forward and backward. Where the peers'
residuals are wide enough for such a batch to pass for a slowdown of δ, each bet counts with its square root: by
Cauchy–Schwarz, √e₁·√e₂ has mean at most 1 however the two depend on each other.

State is a bank of peer groups of one size, advanced in blocks. How operations are cut into blocks changes
nothing: the pool of residuals is renewed on a schedule that counts operations.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt

from ingero.detect.bets import (
    POOLED_KAPPAS,
    RANK_KAPPAS,
    count_below,
    count_level,
    grid_bet,
    padded_width,
)

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
ScalarT = TypeVar("ScalarT", bound=np.generic)

ALARM: Final = 0
NOTICE: Final = 1
N_TIERS: Final = 2
MIN_PEERS: Final = 3
"""Fewest comparable workers, the judged one included."""
_POOL_TARGET: Final = 4096
_MIN_WINDOW: Final = 4
_RENEW_EVERY: Final = 32
_WIDE_QUANTILE: Final = 0.9
_WIDE_AFTER: Final = 8
"""Residuals of a worker before its spread is judged."""


@dataclass(frozen=True, slots=True)
class EDetectorSettings:
    """What is worth naming, and how rarely to be wrong.

    Attributes:
        alpha: Budget: at most this many false alarms per operation and worker.
        alarm_slowdown: Slowdown that makes a culprit; 0.10 is 10 %.
        notice_slowdown: Slowdown that makes a drag.
        window_ops: Operations whose residuals the pooled bet looks back on. Groups so large that this would exceed
            about 4096 residuals look back on fewer.
        use_rank: Place the rank bet.
        use_pooled: Place the pooled bet.
        use_peeling: Take workers in alarm out of the reference.
        dependent_ops: How many operations may share one cause where residuals are wider than δ.
    """

    alpha: float = 1e-6
    alarm_slowdown: float = 0.10
    notice_slowdown: float = 0.03
    window_ops: int = 200
    use_rank: bool = True
    use_pooled: bool = True
    use_peeling: bool = True
    dependent_ops: int = 2

    @property
    def slowdowns(self) -> FloatArray:
        """δ of each tier, in the order ALARM, NOTICE."""
        return np.array([self.alarm_slowdown, self.notice_slowdown])

    def window_for(self, n_peers: int) -> int:
        """Operations in the residual window of a group of this size."""
        return min(self.window_ops, max(_MIN_WINDOW, _POOL_TARGET // n_peers))


@dataclass(frozen=True, slots=True)
class Crossing:
    """A worker entered or left alarm.

    Attributes:
        group: Index of the peer group in the bank.
        worker: Index of the worker in its group.
        tier: ALARM or NOTICE.
        op: Ordinal of the operation within the group at which it happened, from 0.
        onset_op: Ordinal at which the excursion began.
        is_alarm: True for entering, False for clearing.
        log10_evidence: Of S when entering, of the reversed test when clearing.
        is_pooled: The pooled bet had won more than the rank bet since onset.
    """

    group: int
    worker: int
    tier: int
    op: int
    onset_op: int
    is_alarm: bool
    log10_evidence: float
    is_pooled: bool


COMBINED: Final = 0
RANK: Final = 1
POOLED: Final = 2


@dataclass(frozen=True, slots=True)
class _Bets:
    """Log e-values of a block.

    Attributes:
        slow: Against "at most δ slower": combined, rank and pooled, shape (T, 3, 2 tiers, g, m); 0 where there was
            nothing to bet on.
        fast: Combined against "at least δ slower", shape (T, 1, 2 tiers, g, m); None while nobody is in alarm.
    """

    slow: FloatArray
    fast: FloatArray | None


def accumulate(before: FloatArray, log_e: FloatArray) -> tuple[FloatArray, IntArray]:
    """Run ``S ← max(S, 1) · e`` over a block in log space.

    Rows beside the first are sums over the same run: they start anew whenever S does.

    Args:
        before: Shape (r, …): log S before the block, then the companions' sums.
        log_e: Shape (T, r, …).

    Returns:
        Values after each operation, shape (T, r, …), and the index at which the current run above 1 began, shape
        (T, …), −1 when it began before the block. The same operations give the same bits however they are cut.
    """
    values = np.empty_like(log_e)
    starts = np.empty((log_e.shape[0], *log_e.shape[2:]), np.int64)
    last, start = before, np.full(log_e.shape[2:], -1)
    for t, gains in enumerate(log_e):
        is_running = last[0] > 0.0
        last = np.add(last * is_running, gains, out=values[t])
        start = np.where(is_running, start, t)
        starts[t] = start
    return values, starts


def _pick(values: npt.NDArray[ScalarT], at: IntArray) -> npt.NDArray[ScalarT]:
    """One time per group out of shape (T, …, g, m): shape (…, g, m)."""
    if values.shape[0] == 1:
        only: npt.NDArray[ScalarT] = values[0]
        return only
    return np.moveaxis(values[at, ..., np.arange(at.size), :], 0, -2)


def leave_one_out_median(
    ordered: FloatArray, n_refs: IntArray, position: IntArray, is_ref: BoolArray
) -> FloatArray:
    """Median of the reference without each worker itself.

    Args:
        ordered: Shape (n_rows, m), ascending, +inf for what is no reference.
        n_refs: References per row, shape (n_rows, 1).
        position: Where each worker stands in its row, shape (n_rows, m).
        is_ref: Whether it is itself a reference, shape (n_rows, m).

    Returns:
        Shape (n_rows, m); NaN where no other reference exists.
    """
    n_others = n_refs - is_ref
    low, high = np.maximum(n_others - 1, 0) // 2, n_others // 2
    low = low + (is_ref & (low >= position))
    high = high + (is_ref & (high >= position))
    last = ordered.shape[1] - 1
    values = np.take_along_axis(ordered, np.minimum(low, last), 1)
    values = (values + np.take_along_axis(ordered, np.minimum(high, last), 1)) / 2.0
    return np.where(n_others > 0, values, np.nan)


_STATE: Final = (
    ("n_ops", 0, 0),
    ("log_won", 2, 0.0),
    ("in_alarm", 1, False),
    ("onset_op", 1, 0),
    ("_log_clear", 2, 0.0),
    ("_renewed_at", 0, 0),
    ("_residuals", 0, np.nan),
    ("_own_ordered", 0, np.inf),
    ("_pool_ordered", 0, np.inf),
    ("_n_pooled", 0, 0),
    ("_weight", 1, 1.0),
)
"""Arrays of the bank: name, axis of the groups, value for a group without history."""


class EDetector:
    """Evidence for a bank of peer groups of equal size.

    Args:
        n_peers: Workers per group; shorter groups pad with workers that are always missing.
        settings: See `EDetectorSettings`.

    Attributes:
        log_won: Natural log of S, and what each bet alone won in the same run, shape (3, 2 tiers, G, m).
        in_alarm: Shape (2 tiers, G, m).
        onset_op: Ordinal at which the current run above 1 began, shape (2 tiers, G, m); fixed while in alarm.
        n_ops: Operations seen per group, shape (G,).
    """

    def __init__(self, n_peers: int, settings: EDetectorSettings) -> None:
        self.settings = settings
        self.n_peers = n_peers
        self.window = settings.window_for(n_peers)
        shape = (N_TIERS, 0, n_peers)
        self.n_ops: IntArray = np.zeros(0, np.int64)
        self.log_won: FloatArray = np.zeros((3, *shape))
        self.in_alarm: BoolArray = np.zeros(shape, bool)
        self.onset_op: IntArray = np.zeros(shape, np.int64)
        self._log_clear: FloatArray = np.zeros((1, *shape))
        self._renewed_at: IntArray = np.zeros(0, np.int64)
        self._residuals = np.full((0, n_peers, self.window), np.nan, np.float32)
        self._own_ordered = np.full((0, n_peers, padded_width(self.window)), np.inf, np.float32)
        self._pool_ordered = np.full((0, padded_width(n_peers * self.window)), np.inf, np.float32)
        self._n_pooled: IntArray = np.zeros((0, n_peers), np.int64)
        self._weight: FloatArray = np.ones((N_TIERS, 0))

    def add_groups(self, n_groups: int) -> IntArray:
        """Add groups without history; returns their indices."""
        first = self.n_ops.size
        for name, axis, fill in _STATE:
            values = getattr(self, name)
            shape = list(values.shape)
            shape[axis] = n_groups
            setattr(self, name, np.concatenate([values, np.full(shape, fill, values.dtype)], axis))
        return np.arange(first, first + n_groups)

    def slowdowns(self, group: int, worker: int, since_op: int) -> FloatArray:
        """Ratio x / median of the others for each operation since then that the window still holds; oldest first."""
        n = int(self.n_ops[group])
        ops = np.arange(max(since_op, n - self.window, 0), n)
        values = self._residuals[group, worker, ops % self.window].astype(np.float64)
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
            self._renew(chosen)
            length = np.minimum(n_ops[left] - done[left], self._ops_to_renewal(chosen))
            offset = np.arange(int(length.max()))[:, None]
            row = np.minimum(done[left] + offset, costs.shape[0] - 1)
            block = np.where((offset < length)[:, :, None], costs[row, left], np.nan)
            taken, found = self._advance(chosen, block, length, crossings)
            is_taken = offset < taken
            residuals[
                (done[left] + offset)[is_taken], np.broadcast_to(left, is_taken.shape)[is_taken]
            ] = found[is_taken]
            done[left] += taken
        return crossings, residuals

    def _ops_to_renewal(self, groups: IntArray) -> IntArray:
        """How many operations may still use the pool as it is, at least 1."""
        gap = np.clip(self._renewed_at[groups] // 8, 1, min(_RENEW_EVERY, self.window))
        return self._renewed_at[groups] + gap - self.n_ops[groups]

    def _renew(self, groups: IntArray) -> None:
        """Sort the residual windows of the groups whose pool is due."""
        due = groups[self._ops_to_renewal(groups) <= 0]
        self._renew_now(due)

    def _renew_now(self, due: IntArray) -> None:
        if not due.size:
            return
        own = self._residuals[due].copy()
        own[self._peeled(due)] = np.nan
        own = np.sort(np.where(np.isnan(own), np.float32(np.inf), own), axis=2)
        n_own = np.isfinite(own).sum(axis=2)
        self._own_ordered[due, :, : self.window] = own
        pool = np.sort(own.reshape(due.size, -1), axis=1)
        self._pool_ordered[due, : pool.shape[1]] = pool
        self._n_pooled[due] = n_own.sum(axis=1, keepdims=True) - n_own
        self._weigh(due, own, n_own)
        self._renewed_at[due] = self.n_ops[due]

    def _weigh(self, due: IntArray, own: npt.NDArray[np.float32], n_own: IntArray) -> None:
        """Decide how much an operation counts for: less where the typical worker's residuals reach beyond δ.

        The lower median over workers, so that a slow minority does not make its group look wide.
        """
        at = np.maximum((n_own * _WIDE_QUANTILE).astype(np.int64) - 1, 0)
        reach = np.take_along_axis(own, at[:, :, None], axis=2)[:, :, 0]
        is_known = n_own >= _WIDE_AFTER
        ordered = np.sort(np.where(is_known, reach, np.inf), axis=1)
        middle = np.maximum(is_known.sum(axis=1) - 1, 0) // 2
        typical = ordered[np.arange(due.size), middle]
        limits = np.log1p(self.settings.slowdowns)[:, None]
        is_wide = np.isfinite(typical) & (typical > limits)
        self._weight[:, due] = np.where(is_wide, 1.0 / self.settings.dependent_ops, 1.0)

    def _peeled(self, groups: IntArray) -> BoolArray:
        """Workers that are no reference, shape (g, m)."""
        if not self.settings.use_peeling:
            return np.zeros((groups.size, self.n_peers), bool)
        peeled: BoolArray = self.in_alarm[ALARM, groups]
        return peeled

    def _place_bets(self, groups: IntArray, costs: FloatArray) -> tuple[_Bets, FloatArray]:
        """Bets of a block and the residuals it leaves behind, shape (T, g, m)."""
        n_t, _, m = costs.shape
        x = np.maximum(costs, 1.0).reshape(-1, m)
        is_here = ~np.isnan(x)
        is_ref = is_here & ~np.tile(self._peeled(groups), (n_t, 1))
        filled = np.where(is_here, x, 0.0)
        shrunk = filled / (1.0 + self.settings.slowdowns[:, None, None])
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
        slow = np.stack([self._combine(by_time[0], pooled[0]), by_time[0], pooled[0]], axis=1)
        if len(by_time) == 1:
            return _Bets(np.log(slow), None), residuals
        return _Bets(np.log(slow), np.log(self._combine(by_time[1], pooled[1]))[:, None]), residuals

    def _n_sides(self, groups: IntArray) -> int:
        """Whether bets on "fast" are needed (2) or only those on "slow" (1)."""
        return 2 if self.in_alarm[:, groups].any() else 1

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
        shift = np.log1p(self.settings.slowdowns)[:, None, None]
        queries = np.where(is_known, np.nan_to_num(residuals)[:, None] - shift, 0.0)
        pool, own = self._pool_ordered, self._own_ordered.reshape(-1, self._own_ordered.shape[2])
        pool_row, own_row = groups[:, None], groups[:, None] * m + np.arange(m)
        below = count_below(pool, pool_row, queries) - count_below(own, own_row, queries)
        n_pooled = np.broadcast_to(self._n_pooled[groups], shape)
        n_grid = np.where(is_known, n_pooled + 1, 1)
        none = np.zeros(shape, np.int64)
        positions = [n_pooled - below]
        if n_sides == 2:
            level = count_level(pool, pool_row, queries, count_below(pool, pool_row, queries))
            positions.append(below + level)
        return [
            grid_bet(np.where(is_known, at, 0), none, n_grid, POOLED_KAPPAS) for at in positions
        ]

    def _advance(
        self, groups: IntArray, costs: FloatArray, length: IntArray, crossings: list[Crossing]
    ) -> tuple[IntArray, FloatArray]:
        """Take a block up to each group's first crossing; returns operations taken per group, and the residuals."""
        bets, residuals = self._place_bets(groups, costs)
        weight = self._weight[:, groups, None]
        values, starts = accumulate(self.log_won[:, :, groups], bets.slow * weight)
        was = self.in_alarm[:, groups]
        need = math.log(1.0 / self.settings.alpha)
        is_crossing = ~was & (values[:, COMBINED] >= need)
        clear = None
        if bets.fast is not None:
            clear, _ = accumulate(
                self._log_clear[:, :, groups], np.where(was, bets.fast * weight, 0.0)
            )
            is_crossing |= was & (clear[:, 0] >= need)
        happens = is_crossing.any(axis=(1, 3))
        first = np.where(happens.any(axis=0), happens.argmax(axis=0), length - 1)
        taken = np.minimum(first, length - 1) + 1
        self._store_residuals(groups, residuals, taken)
        # One index per group: its last operation of this block.
        at = taken - 1
        self.log_won[:, :, groups] = _pick(values, at)
        if clear is not None:
            self._log_clear[:, :, groups] = _pick(clear, at)
        start = _pick(starts, at)
        began = self.n_ops[groups][:, None] + start
        self.onset_op[:, groups] = np.where((start < 0) | was, self.onset_op[:, groups], began)
        here = _pick(is_crossing, at)
        self.n_ops[groups] += taken
        if here.any():
            self._cross(groups, here, crossings)
        return taken, residuals

    def _store_residuals(self, groups: IntArray, residuals: FloatArray, taken: IntArray) -> None:
        for offset in range(int(taken.max())):
            rows = np.flatnonzero(offset < taken)
            slot = (self.n_ops[groups[rows]] + offset) % self.window
            self._residuals[groups[rows], :, slot] = residuals[offset, rows]

    def _cross(self, groups: IntArray, here: BoolArray, crossings: list[Crossing]) -> None:
        """Flip the state of who crossed at the operation just stored, and renew the pools that this changes."""
        for tier, g, worker in np.argwhere(here).tolist():
            group = int(groups[g])
            is_alarm = not self.in_alarm[tier, group, worker]
            won = self.log_won[:, tier, group, worker]
            log_s = won[COMBINED] if is_alarm else self._log_clear[0, tier, group, worker]
            crossings.append(
                Crossing(
                    group=group,
                    worker=worker,
                    tier=tier,
                    op=int(self.n_ops[group]) - 1,
                    onset_op=int(self.onset_op[tier, group, worker]),
                    is_alarm=is_alarm,
                    log10_evidence=float(log_s) / math.log(10.0),
                    is_pooled=bool(won[POOLED] > won[RANK]),
                )
            )
            self.in_alarm[tier, group, worker] = is_alarm
            self._log_clear[:, tier, group, worker] = 0.0
            if not is_alarm:
                self.log_won[:, tier, group, worker] = 0.0
        changed = groups[here.any(axis=(0, 2))]
        self._renew_now(changed)
