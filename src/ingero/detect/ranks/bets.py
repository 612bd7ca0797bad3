"""The bets of a block of operations: rank, pooled, majority; for workers in alarm those on "fast again" too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from ingero.detect.medians import leave_one_out_median
from ingero.detect.ranks.e_values import POOLED_KAPPAS, RANK_KAPPAS, grid_bet, majority_bet
from ingero.detect.ranks.past_residuals import PastResiduals
from ingero.detect.ranks.settings import ALARM, MIN_PEERS, N_TIERS, EDetectorSettings
from ingero.detect.ranks.wealth import (
    COMBINED,
    DRIFT,
    FAR,
    LEADERS,
    MAJORITY,
    POOLED,
    RANK,
    Bets,
)
from ingero.detect.sorted_rows import count_below, count_level
from ingero.model.arrays import BoolArray, FloatArray, IntArray

_MAX_DRIFT: Final = 2.0
"""A residual moves the change point's sum by at most this many log(1 + δ)."""


@dataclass(frozen=True, slots=True)
class Positions:
    """Where each worker stands among its peers in each operation of a block.

    Attributes:
        residuals: Log of its cost over the median of the other references, shape (T, g, m); NaN where there was
            nothing to compare with.
        slower: How many references are slower than it is without its δ, shape (2 tiers, T · g, m).
        faster: How many are faster, same shape.
        level: How many are level with it, same shape.
        n_grid: Positions in all, its own included, same shape; 1 where there was nothing to compare with.
    """

    residuals: FloatArray
    slower: IntArray
    faster: IntArray
    level: IntArray
    n_grid: IntArray


def find_positions(costs: FloatArray, is_peeled: BoolArray, limits: FloatArray) -> Positions:
    """Compare the workers of each operation.

    Args:
        costs: Shape (T, g, m); NaN is missing.
        is_peeled: Workers that are no reference, shape (g, m).
        limits: δ of each worker, shape (2 tiers, g, m).
    """
    n_t, _, m = costs.shape
    x = np.maximum(costs, 1.0).reshape(-1, m)
    is_here = ~np.isnan(x)
    is_ref = is_here & ~np.tile(is_peeled, (n_t, 1))
    filled = np.where(is_here, x, 0.0)
    shrunk = (filled.reshape(costs.shape) / (1.0 + limits[:, None])).reshape(N_TIERS, -1, m)
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
    slower, faster, level = (
        np.where(can_bet, count, 0) for count in (n_others - below[1:] - level, below[1:], level)
    )
    n_grid = np.broadcast_to(np.where(can_bet, n_others + 1, 1), shrunk.shape)
    return Positions(residuals, slower, faster, level, n_grid)


def pooled_bets(
    past: PastResiduals,
    groups: IntArray,
    residuals: FloatArray,
    log_limits: FloatArray,
    *,
    both_sides: bool,
) -> list[FloatArray]:
    """E-values of residuals, shape (T, g, m), among the other peers' past ones, at limits of shape (n, g, m).

    Returns:
        Against "slow" and, if wanted, "fast"; each of shape (T, n, g, m).
    """
    shape = (residuals.shape[0], len(log_limits), *residuals.shape[1:])
    is_known = np.broadcast_to(~np.isnan(residuals)[:, None], shape)
    queries = np.where(is_known, np.nan_to_num(residuals)[:, None] - log_limits, 0.0)
    counts, n_past = past.count_beyond(groups, queries, both_sides=both_sides)
    n_grid = np.where(is_known, n_past + 1, 1)
    none = np.zeros(shape, np.int64)
    return [grid_bet(np.where(is_known, at, 0), none, n_grid, POOLED_KAPPAS) for at in counts]


def place_bets(
    settings: EDetectorSettings,
    positions: Positions,
    pooled: list[FloatArray],
) -> Bets:
    """All bets of a block but those on sums; those against "fast" where the pooled ones are given for both sides.

    Args:
        settings: Which bets are placed.
        positions: Among peers.
        pooled: As `pooled_bets` returns them at the limits of both tiers; at the far limit too where it is not the
            alarm tier's.
    """
    far, pooled = pooled[0][:, N_TIERS:], [both[:, :N_TIERS] for both in pooled]
    shape = positions.residuals.shape

    def by_time(e_values: FloatArray) -> FloatArray:
        return e_values.reshape(N_TIERS, *shape).swapaxes(0, 1)

    ranked = [
        by_time(grid_bet(count, positions.level, positions.n_grid, RANK_KAPPAS))
        for count in (positions.slower, positions.faster)[: len(pooled)]
    ]
    slow = np.ones((shape[0], len(LEADERS), N_TIERS, *shape[1:]))
    combined = [_combine(settings, *both) for both in zip(ranked, pooled, strict=True)]
    slow[:, COMBINED] = combined[0]
    slow[:, POOLED] = pooled[0]
    if settings.has_far:
        slow[:, FAR] = far if far.size else pooled[0][:, [ALARM]]
    if settings.use_rank:
        slow[:, RANK] = ranked[0]
    if settings.has_majority:
        slow[:, MAJORITY] = by_time(
            majority_bet(positions.slower, positions.level, positions.n_grid)
        )
    np.log(slow[:, :DRIFT], out=slow[:, :DRIFT])
    slow[:, DRIFT] = _drift(positions.residuals, settings.log_slowdowns[:, None, None])
    return Bets(slow, np.log(combined[1])[:, None] if len(combined) > 1 else None)


def _combine(settings: EDetectorSettings, rank: FloatArray, pooled: FloatArray) -> FloatArray:
    """Mean of the bets that are placed; a mean of e-values is an e-value."""
    if settings.use_rank and settings.use_pooled:
        return (rank + pooled) / 2.0
    return rank if settings.use_rank else pooled


def _drift(residuals: FloatArray, limits: FloatArray) -> FloatArray:
    """What each residual adds to the change point's sum, shape (T, 2 tiers, g, m)."""
    bound = _MAX_DRIFT * limits
    return np.nan_to_num(np.clip(residuals[:, None] - limits / 2.0, -bound, bound))
