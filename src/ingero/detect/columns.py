"""Columns of integers that grow with the number of things they describe."""

from __future__ import annotations

import numpy as np

from ingero.model.arrays import IntArray


class Columns:
    """Named columns of 64-bit integers.

    Args:
        fill: Name → value of something never seen.

    Attributes:
        n: How many things are described.
    """

    def __init__(self, **fill: int) -> None:
        self._fill = fill
        self._data = {name: np.zeros(0, np.int64) for name in fill}
        self.n = 0

    def __getitem__(self, name: str) -> IntArray:
        return self._data[name][: self.n]

    def grow(self, n: int) -> None:
        """Make room for things up to a number, at twice the room each time; never less than before."""
        self.n = max(n, self.n)
        for name, values in self._data.items():
            if values.size < self.n:
                grown = np.full(max(2 * self.n, 64), self._fill[name])
                grown[: values.size] = values
                self._data[name] = grown
