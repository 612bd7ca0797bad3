"""What is known of one stream of one process that serves: its phases, what is usual, what was not."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np

from ingero.detect.inference.baseline import BUCKETS, DurationBaseline
from ingero.detect.inference.phases import PHASE_NAMES, PhaseModel, measure_work
from ingero.detect.inference.steps import STEP
from ingero.model.arrays import FloatArray, IntArray, Records

BOUNDS_NS: Final = (
    1e5, 2.5e5, 5e5, 1e6, 2.5e6, 5e6, 1e7, 2.5e7, 5e7, 1e8, 2.5e8, 5e8, 1e9, 2.5e9, 5e9, 1e10,
)  # fmt: skip
"""Of the histogram of step durations, as the existing agent has them."""
_WINDOW: Final = 512


@dataclass(slots=True)
class PhaseRecord:
    """The steps of one phase.

    Attributes:
        baseline: What is usual.
        counts: Steps per bucket of `BOUNDS_NS`, not cumulative; one more than bounds.
        total_ns: Sum of all durations.
        outliers: Outliers by bucket, in the order of `BUCKETS`.
        work: Work of the newest steps, shape (n, 3).
    """

    baseline: DurationBaseline
    counts: IntArray = field(default_factory=lambda: np.zeros(len(BOUNDS_NS) + 1, np.int64))
    total_ns: int = 0
    outliers: IntArray = field(default_factory=lambda: np.zeros(len(BUCKETS), np.int64))
    work: FloatArray = field(default_factory=lambda: np.zeros((0, 3)))

    def take(self, steps: Records) -> IntArray:
        """Count steps; the bucket of each, shape (n,)."""
        durations = (steps["end_ns"] - steps["start_ns"]).astype(np.float64)
        self.counts += np.bincount(
            np.searchsorted(BOUNDS_NS, durations, side="left"), minlength=len(BOUNDS_NS) + 1
        )
        self.total_ns += int(durations.sum())
        buckets = self.baseline.take(durations)
        self.outliers += np.bincount(buckets, minlength=len(BUCKETS))
        self.work = np.concatenate([self.work, measure_work(steps)[buckets == 0]])[-_WINDOW:]
        return buckets

    @property
    def usual(self) -> tuple[float, FloatArray]:
        """Median duration and median work of usual steps."""
        work = np.median(self.work, axis=0) if len(self.work) else np.zeros(3)
        return self.baseline.median_ns, work


@dataclass(slots=True)
class ServingStream:
    """One stream of one process.

    Args:
        warmup: Steps to see before a phase is named or a step is an outlier.
        ratio: Of the last bucket of outliers.

    Attributes:
        phases: By name.
        last_ns: End of its newest step, Unix time.
    """

    warmup: int
    ratio: float
    last_ns: int = 0
    phases: dict[str, PhaseRecord] = field(default_factory=dict)
    _model: PhaseModel | None = None
    _held: Records = field(default_factory=lambda: np.zeros(0, STEP))

    def take(self, steps: Records, *, is_last: bool = False) -> tuple[Records, IntArray, IntArray]:
        """Take steps in order of time, and judge them; the first ones wait until the warm-up is complete.

        Args:
            steps: Rows of STEP.
            is_last: Whether none follow.

        Returns:
            The steps that were judged, phase and bucket of each, all of shape (n,).
        """
        none = np.zeros(0, np.int64)
        if self._model is None:
            self._held = np.concatenate([self._held, steps])
            if not len(self._held) or (len(self._held) < self.warmup and not is_last):
                return self._held[:0], none, none
            steps, self._held = self._held, self._held[:0]
            self._model = PhaseModel(self.warmup)
        if not len(steps):
            return steps, none, none
        phases = self._model.take(steps)
        buckets = np.zeros(len(steps), np.int64)
        for phase in np.unique(phases).tolist():
            is_it = phases == phase
            buckets[is_it] = self.find(phase).take(steps[is_it])
        self.last_ns = int(steps["end_ns"].max())
        return steps, phases, buckets

    def find(self, phase: int) -> PhaseRecord:
        """What is known of one phase, by its number."""
        name = PHASE_NAMES[phase]
        if name not in self.phases:
            self.phases[name] = PhaseRecord(DurationBaseline(self.warmup, self.ratio))
        return self.phases[name]
