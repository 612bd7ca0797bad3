"""What was read between two ticks: the state machine and the baseline take the interval, the score single samples."""

from __future__ import annotations

from dataclasses import replace

from ingero.agent.health.signals.reading import Reading, Signals


class Interval:
    """Gathers the readings of one push interval."""

    def __init__(self) -> None:
        self.latest: Reading | None = None
        self._launches: int | None = None
        self._sums = [0.0] * len(Signals._fields)
        self._counts = [0] * len(Signals._fields)

    def add(self, reading: Reading) -> None:
        """Take one reading."""
        self.latest = reading
        if reading.launches is not None:
            self._launches = max(self._launches or 0, reading.launches)

    def accept(self, signals: Signals) -> None:
        """Take a reading's signals for the baseline, because the node is no suspect."""
        for i, value in enumerate(signals):
            if value is not None:
                self._sums[i] += value
                self._counts[i] += 1

    def reading(self) -> Reading | None:
        """The interval as one reading: the latest, with the most launches of any; None when every sample failed."""
        return self.latest and replace(self.latest, launches=self._launches)

    def normal(self) -> Signals | None:
        """The mean of each signal over the accepted readings; None when there was none."""
        if not any(self._counts):
            return None
        pairs = zip(self._sums, self._counts, strict=True)
        return Signals(*(total / n if n else None for total, n in pairs))
