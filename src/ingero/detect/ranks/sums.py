"""The sums bet: what the operations of a worker take together, eight at a time, among its peers.

A worker that is slow now and then, or a little slow among peers whose operations vary much, is like them in most
operations, and costs everybody what the sum of its operations is beyond the sum of theirs. Operations are taken in
spans of ``SPAN_OPS``, one after another. Of each span a worker has a ratio: its own times over the medians of the
others, both summed. If the worker is like its peers these ratios are exchangeable as single operations are, so that
the rank bet and the pooled bet on them are fair, and their mean is.

Spans are counted from a group's first operation, so how operations are cut into blocks changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from ingero.detect.ranks.bets import find_positions, pooled_bets
from ingero.detect.ranks.e_values import RANK_KAPPAS, grid_bet
from ingero.detect.ranks.past_residuals import PastResiduals
from ingero.detect.ranks.settings import MIN_WINDOW, N_TIERS, SPAN_OPS
from ingero.detect.stacking import append_groups, as_slice, pick_time
from ingero.model.arrays import BoolArray, FloatArray, IntArray

_MIN_KNOWN: Final = SPAN_OPS // 2
"""Operations of a span in which a worker could be compared; with fewer it has no ratio."""
_SCALE: Final = 1e6
"""Ratios are compared as costs are, of which less than 1 counts as 1."""
_OWN, _PEERS, _KNOWN = range(3)


@dataclass(frozen=True, slots=True)
class SpanBets:
    """Bets on the spans that end in a block of operations.

    Attributes:
        totals: Own times, the others' medians and how many operations have both, since the last span ended, after each
            operation: shape (T, 3, g, m).
        ends: Index of the operations at which a span ends, shape (J, g), ascending.
        is_end: Which of them are in the block, same shape.
        residuals: Log of each ratio over the median of the others' ratios, shape (J, g, m); NaN where unknown.
        log_e: Log e-values against "at most δ slower", shape (J, 2 tiers, g, m).
    """

    totals: FloatArray
    ends: IntArray
    is_end: BoolArray
    residuals: FloatArray
    log_e: FloatArray

    def add_to(self, gains: FloatArray) -> None:
        """Put the bets where their spans end into one row of the block's gains, shape (T, 2 tiers, g, m)."""
        span, row = np.nonzero(self.is_end)
        gains[self.ends[span, row], :, row] = self.log_e[span, :, row]


class SpanSums:
    """Sums of stacked peer groups.

    Args:
        n_peers: Workers per group.
        window_ops: Operations whose spans the pooled bet compares with.
    """

    def __init__(self, n_peers: int, window_ops: int) -> None:
        self._totals: FloatArray = np.zeros((3, 0, n_peers))
        self._past = PastResiduals(n_peers, max(window_ops // SPAN_OPS, MIN_WINDOW))

    def add_groups(self, n_groups: int) -> None:
        """Add groups without history."""
        self._totals = append_groups(self._totals, n_groups, 1)
        self._past.add_groups(n_groups)

    def ops_to_sort(self, groups: IntArray, n_ops: IntArray) -> IntArray:
        """How many operations may still use the past spans' order as it is, shape (g,), when so many were seen."""
        n_spans = n_ops // SPAN_OPS
        return (n_spans + self._past.ops_to_sort(groups, n_spans)) * SPAN_OPS - n_ops

    def sort(self, groups: IntArray, n_ops: IntArray, is_peeled: BoolArray) -> None:
        """Sort the past spans of some groups; peeled workers, a mask of shape (g, m), are no reference."""
        self._past.sort(groups, n_ops // SPAN_OPS, is_peeled)

    def place_bets(
        self,
        groups: IntArray,
        n_ops: IntArray,
        costs: FloatArray,
        residuals: FloatArray,
        is_peeled: BoolArray,
        limits: FloatArray,
    ) -> SpanBets:
        """Bets on the spans that end in a block; `store` keeps what was taken of it.

        Args:
            groups: Indices of distinct groups, shape (g,).
            n_ops: Operations before the block, shape (g,).
            costs: Shape (T, g, m); NaN is missing.
            residuals: Log of each over the median of the other references, same shape; NaN where unknown.
            is_peeled: Workers that are no reference, shape (g, m).
            limits: δ of each worker, shape (2 tiers, g, m).
        """
        totals = self._add_up(groups, n_ops, costs, residuals)
        n_t = costs.shape[0]
        first = SPAN_OPS - 1 - n_ops % SPAN_OPS
        ends = first + SPAN_OPS * np.arange(-(-(n_t - int(first.min())) // SPAN_OPS))[:, None]
        is_end = ends < n_t
        if not ends.size:
            residuals = np.empty((0, *is_peeled.shape))
            return SpanBets(totals, ends, is_end, residuals, np.empty((0, *limits.shape)))
        at = totals[np.minimum(ends, n_t - 1), :, np.arange(groups.size)].transpose(2, 0, 1, 3)
        is_known = is_end[:, :, None] & (at[_KNOWN] >= _MIN_KNOWN)
        with np.errstate(invalid="ignore", divide="ignore"):
            ratios = np.where(is_known, at[_OWN] / at[_PEERS] * _SCALE, np.nan)
        positions = find_positions(ratios, is_peeled, limits)
        (pooled,) = pooled_bets(
            self._past, groups, positions.residuals, np.log1p(limits), both_sides=False
        )
        ranked = grid_bet(positions.slower, positions.level, positions.n_grid, RANK_KAPPAS)
        ranked = ranked.reshape(N_TIERS, *ratios.shape).swapaxes(0, 1)
        log_e = np.log((ranked + pooled) / 2.0)
        return SpanBets(totals, ends, is_end, positions.residuals, log_e)

    def _add_up(
        self, groups: IntArray, n_ops: IntArray, costs: FloatArray, residuals: FloatArray
    ) -> FloatArray:
        """Totals after each operation, one after another, so that they have the same bits however they are cut."""
        is_known = ~np.isnan(residuals)
        own = np.where(is_known, np.maximum(costs, 1.0), 0.0)
        parts = np.stack([own, own / np.exp(np.where(is_known, residuals, 0.0)), is_known], axis=1)
        goes_on = (n_ops + np.arange(costs.shape[0])[:, None]) % SPAN_OPS != 0
        last = self._totals[:, as_slice(groups)]
        for part, is_on in zip(parts, goes_on, strict=True):
            last = np.add(part, last * is_on[:, None], out=part)
        return parts

    def store(self, groups: IntArray, n_ops: IntArray, bets: SpanBets, taken: IntArray) -> None:
        """Keep each group's leading ``taken`` operations of a block, after the first ``n_ops``."""
        self._totals[:, as_slice(groups)] = pick_time(bets.totals, taken - 1)
        n_ended = np.count_nonzero(bets.ends < taken, axis=0)
        if n_ended.any():
            self._past.store(groups, n_ops // SPAN_OPS, bets.residuals, n_ended)
