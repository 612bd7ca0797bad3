"""What a signal source gives the loop, and the source of constants that ``--stub`` uses.

Absent is not zero: a signal that could not be read is None, a read that failed altogether is no `Reading` at all.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final, NamedTuple, Protocol

from ingero.wire.names import DominantSignal


class Signals(NamedTuple):
    """The four signals, in the order of the score's weights.

    Attributes:
        throughput: Kernel launches per second in a reading; the ratio to the node's own baseline in a score, 0..1.
        compute: Share of the window spent in CUDA calls, 0..1.
        memory: Free share of GPU memory, 0..1.
        cpu: Idle share of the host's processors, 0..1.
    """

    throughput: float | None
    compute: float | None
    memory: float | None
    cpu: float | None


SIGNAL_NAMES: Final = (
    DominantSignal.THROUGHPUT,
    DominantSignal.COMPUTE,
    DominantSignal.MEMORY,
    DominantSignal.CPU,
)
"""Wire names in the order of `Signals`."""


class Anomaly(NamedTuple):
    """A signal that was not a number.

    Attributes:
        signal: Its wire name.
        reason: ``NaN`` or ``Inf``.
    """

    signal: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One successful sample of the node.

    Attributes:
        signals: Throughput raw, the others as shares; None where not readable.
        launches: Kernel launches in the source's window; None when the source cannot count them.
        is_pending: The source knows that work is outstanding although nothing is launched: a traced process sits inside
            a call, or its peers are active. False or None lets a node without launches become idle.
        workload: Identity of what runs, such as a job id; a change of it starts calibration again. May be empty.
        wall_ns: When the source read, on the wall clock.
    """

    signals: Signals
    launches: int | None
    wall_ns: int
    is_pending: bool | None = None
    workload: str = ""

    @property
    def is_hung(self) -> bool:
        """Nothing was launched although work is outstanding."""
        return self.launches == 0 and self.is_pending is True


class SignalSource(Protocol):
    """Where readings come from: constants, a script, or the live counters of the node."""

    def read(self, wall_ns: int, mono_ns: int) -> Reading | None:
        """Take one sample; None when it failed. Never blocks for long and does not raise."""
        ...

    @property
    def is_over(self) -> bool:
        """True when there will be nothing more to read and the agent should end."""
        ...


class StubSource:
    """Constants, for trying a deployment without a GPU: 100 launches/s, 0.9 for the rest, 10 launches."""

    __slots__ = ()

    def read(self, wall_ns: int, mono_ns: int) -> Reading | None:  # noqa: ARG002 - the protocol's signature
        """The same healthy node every time."""
        return Reading(signals=Signals(100.0, 0.9, 0.9, 0.9), launches=10, wall_ns=wall_ns)

    @property
    def is_over(self) -> bool:
        """Never."""
        return False


def drop_non_finite(signals: Signals) -> tuple[Signals, tuple[Anomaly, ...]]:
    """Make every NaN or infinity absent, and say which there were."""
    anomalies = tuple(find_anomalies(signals))
    if not anomalies:
        return signals, ()
    kept = (value if value is not None and math.isfinite(value) else None for value in signals)
    return Signals(*kept), anomalies


def find_anomalies(signals: Signals) -> list[Anomaly]:
    """Name each signal that is not a finite number; an absent signal is no anomaly."""
    return [
        Anomaly(name, "NaN" if math.isnan(value) else "Inf")
        for name, value in zip(SIGNAL_NAMES, signals, strict=True)
        if value is not None and not math.isfinite(value)
    ]


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
