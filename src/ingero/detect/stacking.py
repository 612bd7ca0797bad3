"""Groups of one size side by side in one array: adding some, choosing some, and reading each at a time of its own."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import numpy.typing as npt

from ingero.model.arrays import IntArray

ScalarT = TypeVar("ScalarT", bound=np.generic)


def append_groups(
    values: npt.NDArray[ScalarT], n_groups: int, axis: int = 0, fill: float = 0
) -> npt.NDArray[ScalarT]:
    """The array with so many groups more along an axis, each filled with one value."""
    shape = list(values.shape)
    shape[axis] = n_groups
    return np.concatenate([values, np.full(shape, fill, values.dtype)], axis)


def as_slice(indices: IntArray) -> slice | IntArray:
    """Ascending consecutive indices as a slice, which NumPy reads without a copy; others unchanged."""
    if not indices.size:
        return indices
    first, n = int(indices[0]), indices.size
    if int(indices[-1]) - first == n - 1 and (indices[1:] > indices[:-1]).all():
        return slice(first, first + n)
    return indices


def is_uniform(values: IntArray) -> bool:
    """Whether all are equal; not for an empty array."""
    return bool(values.size) and bool((values == values[0]).all())


def pick_time(values: npt.NDArray[ScalarT], at: IntArray) -> npt.NDArray[ScalarT]:
    """One time per group out of shape (T, …, g, m): shape (…, g, m); may be a view."""
    if is_uniform(at):
        only: npt.NDArray[ScalarT] = values[at[0]]
        return only
    return np.moveaxis(values[at, ..., np.arange(at.size), :], 0, -2)
