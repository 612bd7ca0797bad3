"""Prefill and decode: the steps of one server distinguished by how much work each of them is.

Assumed: a request is one prefill and then several decode steps, so most steps are decode steps, and a prefill step is
more work and takes longer. More work is twice the median of the decode steps in launches, in bytes copied in, or in
the mean size of the grids. Nothing is assumed about how much a decode step is: with CUDA graphs it is one launch, and
without them hundreds.

When most of the newest steps count as prefill, the assumption says that decode steps have become more work, as they do
when many requests come at once: what they are is learned again from these.

A server whose steps are all alike has no phase that can be recognised: its steps are `UNKNOWN`. A step that carries
both (a chunk of a prompt beside the tokens of others) counts as prefill when it takes as long as one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np

from ingero.model.arrays import BoolArray, FloatArray, IntArray, Records

UNKNOWN, PREFILL, DECODE = 0, 1, 2
PHASE_NAMES: Final = ("unknown", "prefill", "decode")
WINDOW: Final = 512
"""Newest steps that a server is judged by."""
MAX_PREFILL_SHARE: Final = 0.4
MORE_OCTAVES: Final = 1.0
LONGER: Final = 1.5
_N_FEATURES: Final = 3


def measure_work(steps: Records) -> FloatArray:
    """Octaves of launches, bytes in and mean grid, shape (n, 3), from rows of STEP."""
    return np.stack(
        [
            np.log2(1.0 + steps["n_launches"]),
            np.log2(1.0 + steps["input_bytes"]),
            np.log2(1.0 + steps["blocks"]),
        ],
        axis=1,
    )


def find_heavier(work: FloatArray, reference: FloatArray) -> BoolArray:
    """Which steps are more work than the reference, shape (n,).

    Args:
        work: From `measure_work`.
        reference: Medians of the decode steps, shape (3,).
    """
    is_more: BoolArray = work >= reference + MORE_OCTAVES
    return np.asarray(is_more.any(axis=1), bool)


@dataclass(slots=True)
class PhaseModel:
    """Learns what a decode step of one server is.

    Args:
        warmup: Steps to see before any phase is named.

    Attributes:
        is_known: Whether both phases were seen, since what decode is was learned last.
    """

    warmup: int
    is_known: bool = False
    _work: FloatArray = field(default_factory=lambda: np.zeros((0, _N_FEATURES)))
    _durations: FloatArray = field(default_factory=lambda: np.zeros(0))
    _phases: IntArray = field(default_factory=lambda: np.zeros(0, np.int64))

    def take(self, steps: Records) -> IntArray:
        """Phases of new steps, shape (n,); rows of STEP in order of time."""
        work = measure_work(steps)
        durations = (steps["end_ns"] - steps["start_ns"]).astype(np.float64)
        phases = np.full(len(steps), UNKNOWN)
        n_seen = 0
        while n_seen < len(steps):
            # In parts, so that it does not matter where batches end.
            part = slice(n_seen, n_seen + self.warmup)
            phases[part] = self._take_part(work[part], durations[part])
            n_seen += self.warmup
        return phases

    def _take_part(self, work: FloatArray, durations: FloatArray) -> IntArray:
        if self.is_known:
            phases = self._classify(work, durations, self._phases == DECODE)
        else:
            phases = np.full(len(work), UNKNOWN)
        self._work = np.concatenate([self._work, work])[-WINDOW:]
        self._durations = np.concatenate([self._durations, durations])[-WINDOW:]
        self._phases = np.concatenate([self._phases, phases])[-WINDOW:]
        if not self.is_known:
            self._detect_phases()
        if self._is_mostly_prefill():
            self._learn_again()
        return self._phases[-len(work) :]

    def _is_mostly_prefill(self) -> bool:
        is_prefill = self._phases[-self.warmup :] == PREFILL
        return bool(is_prefill.sum() > (1 - MAX_PREFILL_SHARE) * self.warmup)

    def _learn_again(self) -> None:
        self.is_known = False
        newest = slice(-self.warmup, None)
        self._work, self._durations = self._work[newest], self._durations[newest]
        self._phases = np.full(len(self._durations), UNKNOWN)
        self._detect_phases()

    def _detect_phases(self) -> None:
        """Know the phases once a minority of steps is more work and takes longer, also after steps that are less.

        A start is often more work than what follows, and never comes back.
        """
        if len(self._durations) < self.warmup:
            return
        is_heavy = find_heavier(self._work, np.median(self._work, axis=0))
        is_again = is_heavy[int(np.argmin(is_heavy)) :].any()
        if not is_again or is_heavy.sum() > MAX_PREFILL_SHARE * len(is_heavy):
            return
        typical = np.median(self._durations[~is_heavy])
        if np.median(self._durations[is_heavy]) < LONGER * typical:
            return
        self.is_known = True
        self._phases = self._classify(self._work, self._durations, ~is_heavy)

    def _classify(
        self, work: FloatArray, durations: FloatArray, is_reference: BoolArray
    ) -> IntArray:
        """Phases of steps by the median of those that are remembered as decode steps."""
        is_heavy = find_heavier(work, np.median(self._work[is_reference], axis=0))
        is_long = durations >= LONGER * np.median(self._durations[is_reference])
        return np.where(is_heavy & is_long, PREFILL, DECODE)
