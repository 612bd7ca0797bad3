"""How many ordinary calls become records: fewer when records are lost or too many, more again when it is quiet."""

from __future__ import annotations

from typing import Final

FACTOR: Final = 4
MAX_KEEP_ONE_IN: Final = 1024
QUIET_ROUNDS: Final = 6
FULL: Final = 0.5
BUDGET: Final = 1000
"""Records per round that are worth their CPU: counts and quantiles are exact without any of them."""


class SamplingControl:
    """Decides ``keep_one_in`` from what was lost: once a round, or sooner when a round has too many records already.

    Counts and histograms are exact at any setting; only how many examples are kept changes.

    Args:
        fixed: The user's choice; 0 adapts.
    """

    def __init__(self, fixed: int = 0) -> None:
        self.keep_one_in = fixed or 1
        self._is_fixed = fixed > 0
        self._n_quiet = 0

    def update(self, n_lost: int, fill: float, n_records: int = 0) -> int:
        """One round.

        Args:
            n_lost: Records that did not fit since the last round.
            fill: The fullest ring, 0 to 1.
            n_records: Records written since the last round.

        Returns:
            The new setting.
        """
        if self._is_fixed:
            return self.keep_one_in
        if n_lost or fill > FULL or n_records > BUDGET:
            self._n_quiet = 0
            self.keep_one_in = min(self.keep_one_in * FACTOR, MAX_KEEP_ONE_IN)
        elif n_records * FACTOR <= BUDGET:
            self._n_quiet += 1
            if self._n_quiet >= QUIET_ROUNDS:
                self._n_quiet = 0
                self.keep_one_in = max(self.keep_one_in // FACTOR, 1)
        return self.keep_one_in
