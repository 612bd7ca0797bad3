"""Quantiles out of the kernel's exact latency histograms."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ingero.agent.kernel.abi import HIST_BUCKETS, HIST_FIRST_LOG2, build_bucket_edges_ns


def quantiles_ns(
    histogram: npt.NDArray[np.uint64], quantiles: tuple[float, ...]
) -> npt.NDArray[np.float64]:
    """Durations below which the given shares of all calls lie.

    Inside a bucket the calls are taken as evenly spread, so a result is off by less than a quarter octave.

    Args:
        histogram: Counts, shape (HIST_BUCKETS,).
        quantiles: Shares, 0 to 1.

    Returns:
        Nanoseconds, one per share; NaN where the histogram is empty.
    """
    total = histogram.sum()
    if not total:
        return np.full(len(quantiles), np.nan)
    reached = np.cumsum(histogram, dtype=np.float64)
    wanted = np.asarray(quantiles) * float(total)
    bucket = np.minimum(np.searchsorted(reached, wanted), HIST_BUCKETS - 1)
    inside = 1 - (reached[bucket] - wanted) / np.maximum(histogram[bucket], 1)
    edges = build_bucket_edges_ns()
    lower, upper = edges[bucket], edges[bucket + 1]
    filled: npt.NDArray[np.float64] = lower + (upper - lower) * inside
    return filled


def fold_octaves(histogram: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The histogram by whole powers of two: entry ``k`` counts durations in [2^k, 2^(k+1)) ns.

    What took less than 2^7 ns is one bucket in the kernel and is filed under 2^6.
    """
    octaves = np.zeros(64, np.uint64)
    octaves[HIST_FIRST_LOG2 - 1] = histogram[0]
    powers = HIST_FIRST_LOG2 + (np.arange(1, HIST_BUCKETS) - 1) // 4
    np.add.at(octaves, powers, histogram[1:])
    return octaves
