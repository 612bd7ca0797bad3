"""The peer threshold: a node whose score is under it is grossly worse than its peers now.

Answers one question within one push and resists any minority of wrong nodes. It does not know roles and cannot see a
few per cent: that is the e-detector's work (`ingero.detect.ranks.edetector`).

Per level (the cluster, and each cohort within it), over the scores of active nodes::

    raw       = median − max(k · 1.4826 · MAD, min_margin)
    settled   = EMA(raw), its weight following the time that passed
    threshold = settled clamped to [0.10, 0.99], six decimals, rounded down
    straggler ⇔ score < threshold

The first value of a level is the raw value ``settle_ns`` after it has a quorum, not that of the first few nodes to
report. Where the clamp to 0.10 would lift the threshold to within ``min_margin`` of the median, there is none: equal
scores must not flag.

State goes in and comes out as a value; time is an argument. Recomputing more often changes delay, never the result.

Source: names and defaults of ``k``, ``ema_alpha``, ``statistical_min``, ``coverage_fraction`` and
``ttl_multiplier`` are Ingero Fleet 1.0's documented settings; agents refuse a threshold outside [0.10, 0.99] and
classify with ``score < threshold`` to within 1e-9. ``min_margin``, panic, the wait before the first value and the reset
are ours.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ingero.model.arrays import BoolArray, FloatArray, IntArray
from ingero.units import NS_PER_S

MAD_TO_SIGMA: Final = 1.4826
"""MAD of a normal distribution × this = its standard deviation (1 / Φ⁻¹(3/4))."""
THRESHOLD_FLOOR: Final = 0.10
THRESHOLD_CEILING: Final = 0.99
STRICTNESS: Final = 1e-9
"""A score within this of the threshold is not under it; agents use the same."""
PANIC_FRACTION: Final = 0.5
QUIET_TO_LEAVE_PANIC: Final = 3
NEVER: Final = np.iinfo(np.int64).min
"""In a column of times: did not happen."""


@dataclass(frozen=True, slots=True)
class ThresholdSettings:
    """How the threshold is computed.

    Attributes:
        k: MADs below the median, in standard deviations of a normal tail.
        ema_alpha: Weight of a new raw value after one ``push_interval_ns``.
        min_margin: Least distance of the threshold from the median, in score.
        statistical_min: Fewest active nodes for a threshold of the level's own.
        coverage_fraction: Share of ``max_expected_nodes`` under which coverage is called low; informational.
        max_expected_nodes: Denominator of coverage. The cap on known nodes is the caller's.
        push_interval_ns: Interval at which agents push; the EMA's unit of time.
        ttl_multiplier: A node expires, and a lost quorum forgets its EMA, after this many intervals.
        settle_ns: How long a level must have a quorum before its EMA is seeded: the time in which every node of a
            cluster that has just begun to push reports once. 0 seeds at once.
    """

    k: float = 2.0
    ema_alpha: float = 0.2
    min_margin: float = 0.05
    statistical_min: int = 5
    coverage_fraction: float = 0.80
    max_expected_nodes: int = 10_000
    push_interval_ns: int = 10 * NS_PER_S
    ttl_multiplier: int = 5
    settle_ns: int = 0

    @property
    def ttl_ns(self) -> int:
        """How long a silent node, or a level without quorum, is remembered."""
        return self.push_interval_ns * self.ttl_multiplier


@dataclass(frozen=True, slots=True)
class Scores:
    """The scores of one cluster's active, unexpired nodes at one moment.

    Attributes:
        scores: Shape (n,), each finite and in [0, 1].
        cohort_idx: Shape (n,), index into ``cohorts``.
        cohorts: Cohort names; ``""`` is the cluster-wide bucket and has no threshold of its own. Passing the same tuple
            again saves time.
    """

    scores: FloatArray
    cohort_idx: IntArray
    cohorts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Levels:
    """One row per level: row 0 is the cluster, row 1 + c is cohort c of ``ThresholdState.cohorts``.

    Attributes:
        settled: EMA of the raw values, unclamped; NaN before the first and after a reset.
        settled_at_ns: When ``settled`` last moved; NEVER with NaN.
        quorum_lost_ns: When quorum was lost; NEVER while it holds.
        quorum_since_ns: When quorum was gained; NEVER while there is none.
        median: Of the active scores; NaN when there are none.
        mad: Unscaled; NaN when there are no scores.
        n_active: How many scores.
        n_under: How many of them lie under the threshold that is in force for them, panic or not.
        quorum_met: ``n_active >= statistical_min``; always False for the cohort ``""``.
        thresholds: In force for nodes of this level, clamped and rounded: a cohort without quorum shows the
            cluster's; NaN when there is none.
    """

    settled: FloatArray
    settled_at_ns: IntArray
    quorum_lost_ns: IntArray
    quorum_since_ns: IntArray
    median: FloatArray
    mad: FloatArray
    n_active: IntArray
    n_under: IntArray
    quorum_met: BoolArray
    thresholds: FloatArray


_CARRIED: Final = ("settled", "settled_at_ns", "quorum_lost_ns", "quorum_since_ns")
"""Columns of `Levels` that the next step needs."""


def _empty_levels(n: int) -> Levels:
    nan, never, zero = np.full(n, np.nan), np.full(n, NEVER), np.zeros(n, np.int64)
    return Levels(
        nan, never, never, never, nan, nan, zero, zero, np.zeros(n, bool), nan
    )  # fields are replaced, never written


@dataclass(frozen=True, slots=True)
class ThresholdState:
    """Everything the next step needs and everything a reader wants, for one cluster.

    Attributes:
        cohorts: Names of rows 1… of ``levels``.
        levels: See `Levels`.
        is_straggler: Shape (n,), aligned with the scores of the last step; all False in panic.
        in_panic: More than half of the active nodes fell under their settled threshold: the cluster moved, not a node.
        n_quiet: Quiet recomputes in a row since panic last held.
        coverage_low: Fewer than ``coverage_fraction × max_expected_nodes`` active.
    """

    cohorts: tuple[str, ...] = ()
    levels: Levels = field(default_factory=lambda: _empty_levels(1))
    is_straggler: BoolArray = field(default_factory=lambda: np.zeros(0, bool))
    in_panic: bool = False
    n_quiet: int = 0
    coverage_low: bool = True

    def find_row(self, cohort: str) -> int:
        """Row of ``levels`` that speaks for a cohort: its own, or the cluster's (0) when it is not known."""
        if not cohort:
            return 0
        try:
            return 1 + self.cohorts.index(cohort)
        except ValueError:
            return 0

    def find_threshold(self, cohort: str = "") -> float | None:
        """The threshold in force for a cohort's nodes, or None when there is none."""
        value = float(self.levels.thresholds[self.find_row(cohort)])
        return None if np.isnan(value) else value


def round_down(values: FloatArray) -> FloatArray:
    """Cut to six decimals towards minus infinity; a value that six decimals can spell stays as it is."""
    return np.floor(values * 1e6 + 1e-4) / 1e6


def grouped_median(values: FloatArray, group_idx: IntArray, n_groups: int) -> FloatArray:
    """Median of each group, shape (n_groups,); NaN for a group without members."""
    order = np.lexsort((values, group_idx))
    ordered = values[order]
    counts = np.bincount(group_idx, minlength=n_groups)
    starts = np.cumsum(counts) - counts
    medians = np.full(n_groups, np.nan)
    has = counts > 0
    low = starts[has] + (counts[has] - 1) // 2
    high = starts[has] + counts[has] // 2
    medians[has] = (ordered[low] + ordered[high]) / 2.0
    return medians


def _level_statistics(scores: Scores) -> tuple[FloatArray, FloatArray, IntArray]:
    """Median, MAD and count of the cluster and each cohort, shape (1 + n_cohorts,)."""
    n_cohorts = len(scores.cohorts)
    medians, mads = np.full(1 + n_cohorts, np.nan), np.full(1 + n_cohorts, np.nan)
    counts = np.zeros(1 + n_cohorts, np.int64)
    counts[0] = scores.scores.size
    if not counts[0]:
        return medians, mads, counts
    counts[1:] = np.bincount(scores.cohort_idx, minlength=n_cohorts)
    medians[0] = np.median(scores.scores)
    mads[0] = np.median(np.abs(scores.scores - medians[0]))
    medians[1:] = grouped_median(scores.scores, scores.cohort_idx, n_cohorts)
    deviations = np.abs(scores.scores - medians[1:][scores.cohort_idx])
    mads[1:] = grouped_median(deviations, scores.cohort_idx, n_cohorts)
    return medians, mads, counts


def _carry(state: ThresholdState, cohorts: tuple[str, ...]) -> Levels:
    """The previous levels in the order of the new cohorts; a cohort that left is forgotten."""
    if state.cohorts is cohorts or state.cohorts == cohorts:
        return state.levels
    row_of = {name: 1 + i for i, name in enumerate(state.cohorts)}
    rows = np.array([0] + [row_of.get(name, -1) for name in cohorts], dtype=np.int64)
    blank, old = _empty_levels(rows.size), state.levels
    known = rows >= 0

    def carry(name: str) -> npt.NDArray[Any]:
        column: npt.NDArray[Any] = getattr(blank, name).copy()
        column[known] = getattr(old, name)[rows[known]]
        return column

    return replace(blank, **{name: carry(name) for name in _CARRIED})


def _settle(
    raw: FloatArray, old: Levels, is_moving: BoolArray, now_ns: int, settings: ThresholdSettings
) -> tuple[FloatArray, IntArray]:
    """EMA of the levels that move; the others keep what they had."""
    is_new = np.isnan(old.settled) & is_moving
    since = np.where(is_moving & ~is_new, old.settled_at_ns, now_ns)
    dt = np.maximum(now_ns - since, 0) / settings.push_interval_ns
    weight = 1.0 - (1.0 - settings.ema_alpha) ** dt
    moved = old.settled + weight * (raw - old.settled)
    settled = np.where(is_new, raw, np.where(is_moving, moved, old.settled))
    settled_at = np.where(is_moving, np.maximum(now_ns, old.settled_at_ns), old.settled_at_ns)
    return settled, settled_at


def _hold(
    since_ns: IntArray, is_so: BoolArray, now_ns: int, long_ns: int
) -> tuple[IntArray, BoolArray]:
    """Since when something is so of each level (NEVER while it is not), and where it has been for long enough."""
    since = np.where(since_ns == NEVER, now_ns, since_ns)
    return np.where(is_so, since, NEVER), is_so & (now_ns - since >= long_ns)


def _in_force(
    settled: FloatArray, quorum: BoolArray, medians: FloatArray, settings: ThresholdSettings
) -> FloatArray:
    """The threshold in force for each level's nodes; NaN where there is none."""
    own = np.where(quorum, settled, np.nan)
    usable = np.where(np.isnan(own), own[0], own)
    thresholds = round_down(np.clip(usable, THRESHOLD_FLOOR, THRESHOLD_CEILING))
    is_low = own < THRESHOLD_FLOOR  # and at the floor closer to the median than the margin allows
    thresholds[is_low & (medians - settings.min_margin < THRESHOLD_FLOOR)] = np.nan
    thresholds[np.isnan(own)] = thresholds[0]
    return thresholds


def _is_under(scores: Scores, thresholds: FloatArray) -> BoolArray:
    with np.errstate(invalid="ignore"):  # no threshold: no node is under it
        return np.less(scores.scores, thresholds[1:][scores.cohort_idx] - STRICTNESS)


def step_threshold(
    state: ThresholdState,
    scores: Scores,
    now_ns: int,
    settings: ThresholdSettings,
    *,
    is_complete: bool = False,
) -> ThresholdState:
    """Recompute one cluster's thresholds from the scores of its active nodes.

    Panic is judged against the thresholds that were settled before these scores could move them (against the new ones
    when there were none). While it holds, thresholds do not move and no node is a straggler; three quiet recomputes end
    it.

    Args:
        state: What the previous step returned, or ``ThresholdState()``.
        scores: The active nodes now; see `Scores`.
        now_ns: Monotonic; a step back in time counts as no time.
        settings: See `ThresholdSettings`.
        is_complete: The caller knows that every node has pushed: seed without waiting for ``settle_ns``.

    Returns:
        The new state, its arrays aligned with ``scores``.
    """
    old = _carry(state, scores.cohorts)
    medians, mads, counts = _level_statistics(scores)
    quorum = counts >= settings.statistical_min
    quorum[1:] &= np.fromiter((bool(name) for name in scores.cohorts), bool, len(scores.cohorts))
    lost_ns, is_forgotten = _hold(old.quorum_lost_ns, ~quorum, now_ns, settings.ttl_ns)
    since_ns, is_ripe = _hold(old.quorum_since_ns, quorum, now_ns, settings.settle_ns)
    raw = medians - np.maximum(settings.k * MAD_TO_SIGMA * mads, settings.min_margin)
    is_new = np.isnan(old.settled)
    before = _in_force(np.where(is_new, raw, old.settled), quorum, medians, settings)
    is_loud = int(_is_under(scores, before).sum()) > PANIC_FRACTION * scores.scores.size
    n_quiet = 0 if is_loud else state.n_quiet + 1
    in_panic = is_loud or (state.in_panic and bool(quorum[0]) and n_quiet < QUIET_TO_LEAVE_PANIC)
    is_moving = quorum & np.where(is_new, is_ripe | is_complete, not in_panic)
    settled, settled_at = _settle(raw, old, is_moving, now_ns, settings)
    settled[is_forgotten], settled_at[is_forgotten] = np.nan, NEVER
    thresholds = _in_force(settled, quorum, medians, settings)
    is_under = _is_under(scores, thresholds)
    n_under = np.bincount(scores.cohort_idx + 1, weights=is_under, minlength=counts.size)
    n_under[0] = is_under.sum()
    levels = Levels(
        settled,
        settled_at,
        lost_ns,
        since_ns,
        medians,
        mads,
        counts,
        n_under.astype(np.int64),
        quorum,
        thresholds,
    )
    return ThresholdState(
        cohorts=scores.cohorts,
        levels=levels,
        is_straggler=is_under & (not in_panic),
        in_panic=in_panic,
        n_quiet=n_quiet,
        coverage_low=scores.scores.size < settings.coverage_fraction * settings.max_expected_nodes,
    )
