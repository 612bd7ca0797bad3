"""Exact latency histograms: four linear steps to an octave, as the kernel counts them, and quantiles out of them."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from ingero.model.arrays import FloatArray, IntArray

HIST_FIRST_LOG2: Final = 7
"""Bucket 0 holds what took less than 2^7 ns."""
HIST_BUCKETS: Final = 126
"""As ``IG_HIST_BUCKETS`` (``bpf/include/ingero/record.h``); the last one also holds what took longer."""
_STEPS: Final = 4


def build_bucket_edges_ns() -> FloatArray:
    """Lower edges of the latency buckets and, last, the upper edge of the last; shape (HIST_BUCKETS + 1,)."""
    steps = np.arange(HIST_BUCKETS) / _STEPS
    octave = np.floor(steps)
    edges = 2.0 ** (HIST_FIRST_LOG2 + octave) * (1 + (steps - octave))
    return np.concatenate(([0.0], edges))


def quantiles_ns(
    histogram: npt.NDArray[np.uint64] | FloatArray, quantiles: tuple[float, ...]
) -> FloatArray:
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
    filled: FloatArray = lower + (upper - lower) * np.clip(inside, 0, 1)
    return filled


def gather_histogram(from_ns: IntArray, to_ns: IntArray, counts: IntArray) -> FloatArray:
    """Counts of stored buckets on the kernel's buckets.

    A recording of an earlier version has whole octaves: their calls are spread evenly over the four steps.

    Args:
        from_ns: Lower edges, inclusive; shape (n,).
        to_ns: Upper edges, exclusive.
        counts: Calls in each.

    Returns:
        Shape (HIST_BUCKETS,); sums to the sum of `counts`.
    """
    edges = build_bucket_edges_ns()
    first = np.searchsorted(edges, from_ns, side="right") - 1
    last = np.searchsorted(edges, to_ns, side="left")
    first = np.minimum(first, HIST_BUCKETS - 1)
    last = np.clip(last, first + 1, HIST_BUCKETS)
    changes = np.zeros(HIST_BUCKETS + 1)
    each = counts / (last - first)
    np.add.at(changes, first, each)
    np.add.at(changes, last, -each)
    gathered: FloatArray = np.round(np.cumsum(changes)[:-1], 6)
    return gathered


def fold_octaves(histogram: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The histogram by whole powers of two: entry ``k`` counts durations in [2^k, 2^(k+1)) ns.

    What took less than 2^7 ns is one bucket in the kernel and is filed under 2^6.
    """
    octaves = np.zeros(64, np.uint64)
    octaves[HIST_FIRST_LOG2 - 1] = histogram[0]
    powers = HIST_FIRST_LOG2 + (np.arange(1, HIST_BUCKETS) - 1) // 4
    np.add.at(octaves, powers, histogram[1:])
    return octaves
