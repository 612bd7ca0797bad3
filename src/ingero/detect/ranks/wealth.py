"""Wealth processes: what betting against "at most δ slower" has grown to, and whether that is evidence enough.

Wealth runs as ``S ← max(S, 1) · e`` (the e-detector of Shin, Ramdas and Rinaldo 2023), in natural logs. Where
operations share causes, wealth counts with its τ-th root, τ being the effective block length: by Hölder's inequality
the product of τ such roots has mean at most 1 however the operations of a block depend on each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from ingero.detect.ranks.settings import N_TIERS, SPAN_OPS
from ingero.detect.stacking import append_groups, pick_time
from ingero.model.arrays import BoolArray, FloatArray, IntArray

COMBINED: Final = 0
RANK: Final = 1
MAJORITY: Final = 2
FAR: Final = 3
SUMS: Final = 4
POOLED: Final = 5
DRIFT: Final = 6
LEADERS: Final = (COMBINED, RANK, MAJORITY, FAR, SUMS, COMBINED, DRIFT)
"""Rows of wealth, the five processes that raise alarms first: the row by whose value each row starts anew."""
DATED: Final = (DRIFT, SUMS)
"""Rows whose current runs' beginnings are kept: where a slowdown began, and by the sums bet."""


@dataclass(frozen=True, slots=True)
class Bets:
    """Log e-values of a block.

    Attributes:
        slow: Against "at most δ slower": a row for each of ``LEADERS``, shape (T, 7, 2 tiers, g, m); 0 where there
            was nothing to bet on. The last holds residuals less half of log(1 + δ).
        fast: Combined against "at least δ slower", shape (T, 1, 2 tiers, g, m); None while no worker is in alarm.
    """

    slow: FloatArray
    fast: FloatArray | None


@dataclass(frozen=True, slots=True)
class Growth:
    """Wealth after each operation of a block.

    Attributes:
        slow: Shape of `Bets.slow`.
        fast: Shape of `Bets.fast`; None while no worker is in alarm.
        starts: Index at which each of ``DATED`` last left 0, shape (T, 2, 2 tiers, g, m); −1 before the block.
    """

    slow: FloatArray
    fast: FloatArray | None
    starts: IntArray


def accumulate(
    before: FloatArray,
    log_e: FloatArray,
    leaders: tuple[int, ...] = (0,),
    dated: tuple[int, ...] = (0,),
) -> tuple[FloatArray, IntArray]:
    """Run ``S ← max(S, 1) · e`` over a block in log space.

    Args:
        before: Shape (r, …): values before the block.
        log_e: Shape (T, r, …).
        leaders: For each row the one whose run it follows: it starts anew whenever that one does.
        dated: Rows whose runs are dated.

    Returns:
        Values after each operation, shape (T, r, …), and the index at which the current run above 1 of each dated row
        began, shape (T, d, …), −1 when it began before the block. The same operations give the same bits however they
        are cut.
    """
    values = np.empty_like(log_e)
    starts = np.empty((log_e.shape[0], len(dated), *log_e.shape[2:]), np.int64)
    last, start = before, np.full(starts.shape[1:], -1)
    rows, of_dated = list(leaders), list(dated)
    for t, gains in enumerate(log_e):
        is_running = last > 0.0
        last = np.add(last * is_running[rows], gains, out=values[t])
        start = np.where(is_running[of_dated], start, t)
        starts[t] = start
    return values, starts


class Wealth:
    """Wealth of stacked peer groups.

    Args:
        n_peers: Workers per group.
        log_weights: As `EDetectorSettings.log_weights`: a process that has the share w of the budget reaches 1/α at
            1/(w α).

    Attributes:
        slow: Natural logs, shape (7, 2 tiers, G, m), rows as ``LEADERS``: of the rank and pooled bets together, of the
            rank bet, of the majority bet, of the far bet, of the sums bet; of the pooled bet in the run of the first;
            and the change point's sum.
        fast: Natural log of what betting on "fast again" has grown to since the alarm, shape (1, 2 tiers, G, m).
        peak: Greatest of the processes but the sums bet's while in alarm, else their value now, shape (2 tiers, G, m).
        sums_peak: Greatest of the sums bet's wealth in alarms that it alone raised, same shape.
    """

    def __init__(self, n_peers: int, log_weights: FloatArray) -> None:
        shape = (N_TIERS, 0, n_peers)
        self._log_weight, self._log_sums_weight = log_weights.tolist()
        self.slow: FloatArray = np.zeros((len(LEADERS), *shape))
        self.fast: FloatArray = np.zeros((1, *shape))
        self.peak: FloatArray = np.zeros(shape)
        self.sums_peak: FloatArray = np.zeros(shape)

    def add_groups(self, n_groups: int) -> None:
        """Add groups without history."""
        self.slow = append_groups(self.slow, n_groups, 2)
        self.fast = append_groups(self.fast, n_groups, 2)
        self.peak = append_groups(self.peak, n_groups, 1)
        self.sums_peak = append_groups(self.sums_peak, n_groups, 1)

    def log_evidence(self, wealth: FloatArray, block_length: FloatArray) -> FloatArray:
        """Natural log of the evidence that wealth is, rows on the axis before (2 tiers, g, m)."""
        others = self.log_evidence_of(greatest(wealth, block_length), block_length)
        sums = self.log_evidence_of(wealth[..., SUMS, :, :, :], block_length, by_sums=True)
        return np.maximum(others, sums)

    def log_evidence_of(
        self, best: FloatArray, block_length: FloatArray | float, *, by_sums: bool = False
    ) -> FloatArray:
        """Natural log of the evidence that one process's wealth is, at an effective block length."""
        if by_sums:
            return np.asarray(best / count_spans(block_length) + self._log_sums_weight)
        return np.asarray(best / block_length + self._log_weight)

    def grow(self, here: slice | IntArray, bets: Bets, was_in_alarm: BoolArray) -> Growth:
        """Wealth of some groups after each operation of a block; `store` keeps it."""
        slow, starts = accumulate(self.slow[:, :, here], bets.slow, LEADERS, DATED)
        if bets.fast is None:
            return Growth(slow, None, starts)
        gains = np.where(was_in_alarm, bets.fast, 0.0)
        return Growth(slow, accumulate(self.fast[:, :, here], gains)[0], starts)

    def store(
        self,
        here: slice | IntArray,
        growth: Growth,
        at: IntArray,
        was_in_alarm: BoolArray,
        block_length: FloatArray,
    ) -> None:
        """Keep the wealth that each group had after one operation of the block, ``at`` of shape (g,)."""
        self.slow[:, :, here] = pick_time(growth.slow, at)
        if growth.fast is not None:
            self.fast[:, :, here] = pick_time(growth.fast, at)
        best = greatest(growth.slow, block_length)
        now = pick_time(best, at)
        if was_in_alarm.any():
            highest = pick_time(np.maximum.accumulate(best, axis=0), at)
            now = np.where(was_in_alarm, np.maximum(self.peak[:, here], highest), now)
        self.peak[:, here] = now


def count_spans(block_length: FloatArray | float) -> FloatArray:
    """How many spans one after another count as one, at an effective block length in operations.

    Of two spans side by side only the operations near their border share causes that last for less than a span.
    """
    return np.asarray(1.0 + (np.asarray(block_length) - 1.0) / SPAN_OPS)


def greatest(wealth: FloatArray, block_length: FloatArray) -> FloatArray:
    """The greatest of the processes but the sums bet's; rows stand on the axis before (2 tiers, g, m).

    The far bet's counts as if it were one of the others, which lose the root: operation by operation.
    """
    near = wealth[..., :FAR, :, :, :].max(axis=-4)
    return np.asarray(np.maximum(near, wealth[..., FAR, :, :, :] * block_length))
