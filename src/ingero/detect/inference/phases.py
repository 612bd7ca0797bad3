"""Prefill and decode: the steps of one server distinguished by how much work each of them is.

Assumed: a request is one prefill and then several decode steps, so most steps are decode steps, and a prefill step is
more work and takes longer. More work is twice the median of the decode steps in launches, in bytes copied in, or in
the mean size of the grids. Nothing is assumed about how much a decode step is: with CUDA graphs it is one launch, and
without them hundreds.

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
        is_known: Whether both phases were seen; it stays so.
    """

    warmup: int
    is_known: bool = False
    _work: FloatArray = field(default_factory=lambda: np.zeros((0, _N_FEATURES)))
    _durations: FloatArray = field(default_factory=lambda: np.zeros(0))

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
        if not self.is_known:
            self._remember(work, durations)
            self._detect_phases()
            if not self.is_known:
                return np.full(len(work), UNKNOWN)
        phases = self._classify(work, durations)
        is_decode = phases == DECODE
        self._remember(work[is_decode], durations[is_decode])
        return phases

    def _remember(self, work: FloatArray, durations: FloatArray) -> None:
        self._work = np.concatenate([self._work, work])[-WINDOW:]
        self._durations = np.concatenate([self._durations, durations])[-WINDOW:]

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
        self._work, self._durations = self._work[~is_heavy], self._durations[~is_heavy]

    def _classify(self, work: FloatArray, durations: FloatArray) -> IntArray:
        is_heavy = find_heavier(work, np.median(self._work, axis=0))
        is_long = durations >= LONGER * np.median(self._durations)
        return np.where(is_heavy & is_long, PREFILL, DECODE)
