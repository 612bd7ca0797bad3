"""What the members of a peer group show at one time: the evidence against each, and its slowdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from ingero.model.arrays import FloatArray
from ingero.model.verdicts import Slowdown

_QUARTILES: Final = (0.25, 0.5, 0.75)


@dataclass(frozen=True, slots=True)
class MemberReading:
    """What the members of a group show.

    Attributes:
        columns: Worker → column.
        log10_evidence: Against each, shape (2 tiers, m), not negative.
        slowdowns: By column, over the operations that the window holds; None where it holds none.
    """

    columns: Mapping[int, int]
    log10_evidence: FloatArray
    slowdowns: Sequence[Slowdown | None]

    def read_evidence(self, worker: int, tier: int) -> float:
        """Against a worker; 0 for one that came late and is no member yet."""
        column = self.columns.get(worker)
        return 0.0 if column is None else float(self.log10_evidence[tier, column])

    def read_slowdown(self, worker: int) -> Slowdown | None:
        """Of a worker; None for one that is no member yet, too."""
        column = self.columns.get(worker)
        return None if column is None else self.slowdowns[column]


def summarize(ratios: FloatArray) -> list[Slowdown | None]:
    """Quartiles of each column of ratios, shape (T, m), without what is missing (NaN)."""
    is_known = ~np.isnan(ratios)
    found: list[Slowdown | None] = [None] * ratios.shape[1]
    is_whole = is_known.all(axis=0) & (ratios.shape[0] > 0)
    if is_whole.any():
        whole = np.quantile(ratios[:, is_whole], _QUARTILES, axis=0)
        for column, (low, median, high) in zip(
            np.flatnonzero(is_whole).tolist(), whole.T.tolist(), strict=True
        ):
            found[column] = Slowdown(median=median, low=low, high=high)
    for column in np.flatnonzero(~is_whole & is_known.any(axis=0)).tolist():
        low, median, high = np.quantile(ratios[is_known[:, column], column], _QUARTILES).tolist()
        found[column] = Slowdown(median=median, low=low, high=high)
    return found
