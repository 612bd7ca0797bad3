"""Medians of rows: with gaps, and of all others."""

from __future__ import annotations

import numpy as np

from ingero.detect.sorted_rows import count_below
from ingero.model.arrays import BoolArray, FloatArray, IntArray


def row_medians(values: FloatArray) -> FloatArray:
    """Median along the last axis without NaNs, shape (…,); NaN where there is nothing else."""
    ordered = np.sort(values, axis=-1)
    n = np.count_nonzero(~np.isnan(values), axis=-1)
    low, high = np.maximum(n - 1, 0) // 2, np.minimum(n // 2, values.shape[-1] - 1)
    pair = [np.take_along_axis(ordered, at[..., None], axis=-1)[..., 0] for at in (low, high)]
    return np.where(n > 0, (pair[0] + pair[1]) / 2.0, np.nan)


def leave_one_out_median(
    ordered: FloatArray, n_refs: IntArray, position: IntArray, is_ref: BoolArray
) -> FloatArray:
    """Median of the reference without each worker itself.

    Args:
        ordered: Shape (n_rows, m), ascending, +inf for what is no reference.
        n_refs: References per row, shape (n_rows, 1).
        position: Where each worker stands in its row, shape (n_rows, m).
        is_ref: Whether it is itself a reference, shape (n_rows, m).

    Returns:
        Shape (n_rows, m); NaN where no other reference exists.
    """
    n_others = n_refs - is_ref
    low, high = np.maximum(n_others - 1, 0) // 2, n_others // 2
    low = low + (is_ref & (low >= position))
    high = high + (is_ref & (high >= position))
    last = ordered.shape[1] - 1
    values = np.take_along_axis(ordered, np.minimum(low, last), 1)
    values = (values + np.take_along_axis(ordered, np.minimum(high, last), 1)) / 2.0
    return np.where(n_others > 0, values, np.nan)


def medians_of_others(values: FloatArray) -> FloatArray:
    """Median of all others in the row that are not NaN, shape (n_rows, m); NaN where there is no other."""
    is_here = ~np.isnan(values)
    ordered = np.sort(np.where(is_here, values, np.inf), axis=1)
    place = count_below(
        ordered, np.arange(values.shape[0])[:, None], np.where(is_here, values, 0.0)
    )
    return leave_one_out_median(ordered, is_here.sum(axis=1, keepdims=True), place, is_here)
