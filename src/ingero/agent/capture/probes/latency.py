"""The kernel's exact latency histograms by whole powers of two, as metrics show them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ingero.model.latency import HIST_BUCKETS, HIST_FIRST_LOG2


def fold_octaves(histogram: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The histogram by whole powers of two: entry ``k`` counts durations in [2^k, 2^(k+1)) ns.

    What took less than 2^7 ns is one bucket in the kernel and is filed under 2^6.
    """
    octaves = np.zeros(64, np.uint64)
    octaves[HIST_FIRST_LOG2 - 1] = histogram[0]
    powers = HIST_FIRST_LOG2 + (np.arange(1, HIST_BUCKETS) - 1) // 4
    np.add.at(octaves, powers, histogram[1:])
    return octaves
