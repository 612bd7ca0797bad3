"""What sampled rows say of the calls that have none: an estimate from weights, with its limits.

A row's weight is how many calls it stands for. The sum of weight × duration estimates the time in all of them
(Horvitz and Thompson 1952); with one in w rows drawn, the variance of one term is about w (w - 1) d².
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np

from ingero.recording.causal.evidence import EventRows, Evidence, Process
from ingero.recording.causal.intervals import Intervals

_MIN_ROWS: Final = 30
"""Fewer sampled rows than this are no estimate."""
_MIN_ACCOUNTED: Final = 0.90
"""Part of the counted calls that the weights must account for: the rest was left out without a trace in them."""
_SIGMAS: Final = 3.0


@dataclass(frozen=True, slots=True)
class Weighing:
    """How much more there was than the rows show.

    Attributes:
        factor: Estimated time / time in rows; 1 when every call has a row.
        n_each: Calls per row.
        spread: Standard error of `factor`.
        missing_ns: Time in calls without a row, of the whole process and of every reason: what there can be at most.
        is_estimate: Whether the rows are enough for one.
    """

    factor: float
    n_each: float
    spread: float
    missing_ns: int
    is_estimate: bool

    def range_ns(self, lost_ns: int) -> tuple[int, int]:
        """Least and most of the lost time of which the rows show `lost_ns`."""
        most = lost_ns + self.missing_ns
        if not self.is_estimate:
            return lost_ns, most
        least = max(self.factor - _SIGMAS * self.spread, 1.0) * lost_ns
        likely = (self.factor + _SIGMAS * self.spread) * lost_ns
        return round(least), round(min(likely, most))


def weigh(
    evidence: Evidence, process: Process, rows: EventRows, counted: tuple[Intervals, Iterable[int]]
) -> Weighing:
    """What the rows that overlap some spans stand for.

    Args:
        evidence: The recording.
        process: Whose rows.
        rows: The rows that the spans were made of, and others of their kind.
        counted: The time that counts, and every operation (source << 8 | op) that it was found by.
    """
    spans, needed = counted
    whole = evidence.counts.gap(process.node, process.pid, needed)
    if not whole.unstored:
        return Weighing(1.0, 1.0, 0.0, 0, is_estimate=True)
    codes = np.unique(rows.codes).tolist()
    gap = evidence.counts.gap(process.node, process.pid, codes)
    if (
        gap.unstored != whole.unstored
    ):  # of two samples that meet, neither's weights are those of both
        return Weighing(1.0, 1.0, 0.0, whole.missing_ns, is_estimate=False)
    weights = np.maximum(evidence.column("weight", rows), 1).astype(np.float64)
    every = process.rows.where(np.isin(process.rows.codes, codes))
    accounted = float(np.maximum(evidence.column("weight", every), 1).sum()) / max(gap.seen, 1)
    covered = spans.covered_ns(rows.starts, rows.ends).astype(np.float64)
    is_in = covered > 0
    shown = float(covered.sum())
    if accounted < _MIN_ACCOUNTED or is_in.sum() < _MIN_ROWS:
        return Weighing(1.0, 1.0, 0.0, gap.missing_ns, is_estimate=False)
    factor = float((weights * covered).sum()) / shown
    spread = float(np.sqrt((weights * (weights - 1) * covered**2).sum())) / shown
    n_each = float(weights[is_in].mean())
    return Weighing(factor, n_each, spread, gap.missing_ns, is_estimate=True)
